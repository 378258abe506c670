"""The columns of the tidy table that are metrics: whether less of one is better, and in which unit it is shown."""

import pandas as pd

from fl_lightning.direction import direction_of

#: Ends of the names of spreads over clients, and of shares of successful attacks: less of both is better.
_SPREAD, _ATTACK = "_std", ("_asr", "/asr")


def counts_errors(rows: pd.DataFrame, metric: str = "test") -> bool:
    """Whether a metric of these rows is an error: less is better, and it is shown × 10⁻³.

    A column of a further metric, such as ``test/ece`` or ``test_asr``, has the metric's name; every other one is of the
    metric that the runs monitored.

    Args:
        rows: Of the tidy table, with one monitored metric.
        metric: A column.
    """
    if "/" in metric:
        return direction_of(metric.removesuffix(_SPREAD)) == "min"
    if metric.endswith((*_ATTACK, "_acc")):
        return False
    return bool(rows["is_error"].dropna().iloc[0])


def sign_of(rows: pd.DataFrame, metric: str = "test") -> float:
    """1 where more of a metric of these rows is better, -1 where less is: errors, spreads, successes of attacks."""
    is_less_better = metric.endswith((_SPREAD, *_ATTACK)) or counts_errors(rows, metric)
    return -1.0 if is_less_better else 1.0


def has_best(metric: str) -> bool:
    """Whether a table marks the best value of a metric: of spreads it does not, since a bad method's may be small."""
    return not metric.endswith(_SPREAD)


def scale_of(*, is_error: bool) -> float:
    """Factor to the displayed unit: percent, or 10⁻³ of an error."""
    return 1000.0 if is_error else 100.0


def scale_in(rows: pd.DataFrame, metric: str = "test") -> float:
    """Factor to the displayed unit of a metric of these rows."""
    return scale_of(is_error=counts_errors(rows, metric))


def unit_of(rows: pd.DataFrame, metric: str = "test") -> str:
    """That unit in words."""
    return "× 10⁻³" if counts_errors(rows, metric) else "in percent"
