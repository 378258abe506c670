"""Whether more or less of a metric is better: a client's class says it of its metrics, records of runs keep it."""

from collections.abc import Mapping
from typing import Literal

Direction = Literal["max", "min"]

#: Of the metrics of this package; records that were written before directions were kept have no others.
KNOWN: Mapping[str, Direction] = {
    "acc": "max",
    "f1": "max",
    "auroc": "max",
    "balanced_accuracy": "max",
    "average_precision": "max",
    "loss": "min",
    "mse": "min",
}

#: What a mean over clients and the worst client's value have behind the metric's name, and share its direction.
_SUFFIXES = ("_weighted", "_worst")


def direction_of(name: str, directions: Mapping[str, Direction] = KNOWN) -> Direction | None:
    """Whether ``max`` or ``min`` of a metric is best; None where nothing says so.

    Args:
        name: With or without prefixes: ``mse``, ``val/mse``, ``gen/test/mse_worst``.
        directions: Those of the metrics by bare name.

    Example:
        >>> direction_of("gen/val/mse"), direction_of("test/acc_worst"), direction_of("val/mae")
        ('min', 'max', None)
        >>> direction_of("val/mae", {"mae": "min"})
        'min'
    """
    bare = name.rpartition("/")[2]
    for suffix in ("", *_SUFFIXES):
        if bare.removesuffix(suffix) in directions:
            return directions[bare.removesuffix(suffix)]
    return None
