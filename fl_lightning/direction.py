"""Whether more or less of a metric is better, as declared by a client's class and stored in the records of runs."""

from collections.abc import Mapping
from typing import Literal

Direction = Literal["max", "min"]

#: The directions of this package's metrics, which are also the only metrics of records without stored directions.
KNOWN: Mapping[str, Direction] = {
    "acc": "max",
    "f1": "max",
    "auroc": "max",
    "balanced_accuracy": "max",
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


def direction_of(name: str, directions: Mapping[str, Direction] = KNOWN) -> Direction | None:
    """Whether ``max`` or ``min`` of a metric is best; None if unknown.

    Args:
        name: The metric's name, with or without prefixes: ``mse``, ``val/mse``, ``gen/test/mse_worst``.
        directions: Directions of metrics by bare name.

    Example:
        >>> direction_of("gen/val/mse"), direction_of("test/acc_worst"), direction_of("val/regret")
        ('min', 'max', None)
        >>> direction_of("val/regret", {"regret": "min"})
        'min'
    """
    bare = name.rpartition("/")[2]
    for suffix in ("", *_SUFFIXES):
        if bare.removesuffix(suffix) in directions:
            return directions[bare.removesuffix(suffix)]
    return None
