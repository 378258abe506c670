"""The mixing family: each client's model is a weighted mean of the clients' models."""

from fl_lightning.strategies.mixing.aggregation import (
    Aggregation,
    CoordinateMedian,
    Krum,
    NormClipping,
    TrimmedMean,
)
from fl_lightning.strategies.mixing.base import Mixing, example_weights

__all__ = ["Aggregation", "CoordinateMedian", "Krum", "Mixing", "NormClipping", "TrimmedMean", "example_weights"]
