"""Differences between paired runs or clients: their mean, its interval, and how often either is better."""

import math
from typing import Any

import numpy as np
from scipy import stats

from fl_lightning.report.folder import Recorded

#: Differences that are smaller in relation to the values are none.
TIE = 1e-9


def gap(value: float, other: float) -> float:
    """A value minus another; 0 where they differ by no more than rounding errors.

    Example:
        >>> gap(0.75, 0.5), gap(0.1 + 0.2, 0.3)
        (0.25, 0.0)
    """
    return 0.0 if math.isclose(value, other, rel_tol=TIE) else value - other


def half_width(values: np.ndarray[Any, Any]) -> float:
    """Half of the 95 % interval (Student's t) of the mean of independent values; nan of fewer than two."""
    total = len(values)
    if total < 2:
        return math.nan
    return float(stats.t.ppf(0.975, total - 1)) * float(values.std(ddof=1)) / math.sqrt(total)


def client_gaps(first: Recorded, second: Recorded) -> list[float]:
    """A run's values minus another's, of the clients that both have."""
    local, other = first.reported_values, second.reported_values
    return [gap(local[name], other[name]) for name in local if name in other]


def columns_of(what: str) -> list[str]:
    """Names of what :func:`summary` returns, where so many pairs are of ``what``."""
    return [what, "mean", "std", "low", "high", "better", "worse"]


def summary(gaps: np.ndarray[Any, Any], what: str, *, less_is_better: bool) -> dict[str, float]:
    """Of the finite ones: how many, mean, standard deviation, 95 % interval (Student's t), better and worse."""
    gaps = gaps[np.isfinite(gaps)]
    total = len(gaps)
    mean = float(gaps.mean()) if total else math.nan
    spread = float(gaps.std(ddof=1)) if total > 1 else math.nan
    half = half_width(gaps)
    sign = -1 if less_is_better else 1
    better, worse = int((sign * gaps > 0).sum()), int((sign * gaps < 0).sum())
    return dict(zip(columns_of(what), (total, mean, spread, mean - half, mean + half, better, worse), strict=True))
