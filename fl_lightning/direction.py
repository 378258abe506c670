"""Whether more or less of a metric is better, as declared by a client's class and stored in the records of runs."""

import re
from collections.abc import Container, Mapping
from typing import Literal

Direction = Literal["max", "min"]

#: The directions of this package's metrics, which are also the only metrics of records without stored directions.
KNOWN: Mapping[str, Direction] = {
    "acc": "max",
    "f1": "max",
    "auroc": "max",
    "balanced_accuracy": "max",
    "recall": "max",
    "ece": "min",
    "average_precision": "max",
    "hits@10": "max",
    "hits@50": "max",
    "mrr": "max",
    "loss": "min",
    "mse": "min",
    "mae": "min",
    "rmse": "min",
    "r2": "max",
}

#: Suffixes of metric names that keep the direction of the metric.
_SUFFIXES = ("_weighted", "_worst")


def group_of(name: str) -> tuple[str, str, str] | None:
    """The metric, the kind and the name of the group of examples that it is of; None if it is of all.

    Example:
        >>> group_of("test/recall_class_3"), group_of("val/acc_degree_16+"), group_of("val/acc")
        (('test/recall', 'class', '3'), ('val/acc', 'degree', '16+'), None)
    """
    match = re.fullmatch(r"(.+)_(class|degree)_([^_/]+)", name)
    return None if match is None else (match[1], match[2], match[3])


def metric_of(name: str, known: Container[str] | None = None) -> str:
    """The metric of which a name is the weighted mean or the worst value over clients.

    Args:
        name: Such as ``val/acc_worst``.
        known: Names of metrics; another is not taken for one. None to go by the name alone.

    Example:
        >>> metric_of("val/acc_worst"), metric_of("val/acc_weighted"), metric_of("val/acc")
        ('val/acc', 'val/acc', 'val/acc')
    """
    result = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
    return result if known is None or result in known else name


def metric_on_test(monitor: str) -> str:
    """The test metric of the same clients or model as a monitored one.

    Example:
        >>> metric_on_test("val/acc"), metric_on_test("benign/val/acc")
        ('test/acc', 'benign/test/acc')
    """
    return monitor.replace("val/", "test/")


def direction_of(name: str, directions: Mapping[str, Direction] = KNOWN) -> Direction | None:
    """Whether ``max`` or ``min`` of a metric is best; None if unknown.

    Args:
        name: The metric's name, with or without prefixes: ``mse``, ``val/mse``, ``gen/test/mse_worst``.
        directions: Directions of metrics by bare name.

    Example:
        >>> direction_of("gen/val/mse"), direction_of("test/recall_class_3_worst"), direction_of("val/regret")
        ('min', 'max', None)
        >>> direction_of("val/regret", {"regret": "min"})
        'min'
    """
    whole = name.rpartition("/")[2]
    for suffix in ("", *_SUFFIXES):
        bare = whole.removesuffix(suffix)
        for known in (bare, *(group_of(bare) or ())[:1]):
            if known in directions:
                return directions[known]
    return None
