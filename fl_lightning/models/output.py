"""What every client's net returns, whatever its task."""

from typing import Any, NamedTuple

from torch import Tensor


class NetOutput(NamedTuple):
    """Predictions and the representation they are read from.

    Shapes:
        logits: (N, num_outputs), class scores, or predicted values in a regression.
        embedding: (N, hidden), the last layer before the read-out (of a GCN: before its activation).
    """

    logits: Tensor
    embedding: Tensor


def as_output(result: Any) -> NetOutput:
    """What a net returned; logits that are alone are the embedding as well."""
    if isinstance(result, NetOutput):
        return result
    return NetOutput(result, result) if isinstance(result, Tensor) else NetOutput(result[0], result[1])
