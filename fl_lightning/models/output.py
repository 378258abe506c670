"""What every client's net returns, whatever its task."""

from typing import Any, NamedTuple

from torch import Tensor


class NetOutput(NamedTuple):
    """Predictions, and the representation from which they are computed.

    Shapes:
        logits: (N, num_outputs), class scores, or predicted values in a regression.
        embedding: (N, hidden), the last layer before the read-out (of a GCN: before its activation).
    """

    logits: Tensor
    embedding: Tensor


def as_output(result: Any) -> NetOutput:
    """A net's result as ``NetOutput``; logits alone also serve as the embedding."""
    if isinstance(result, NetOutput):
        return result
    return NetOutput(result, result) if isinstance(result, Tensor) else NetOutput(result[0], result[1])
