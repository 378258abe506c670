"""What every client's net returns, whatever its task."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch

#: The logit of an output that a client does not have: its probability is 0.
NOT_THERE = -1e4


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


def own_outputs(output: NetOutput, batch: Batch) -> NetOutput:
    """The output without what is not the client's own: such logits are :data:`NOT_THERE` (``Batch.num_outputs``)."""
    if batch.num_outputs is None:
        return output
    place_K = torch.arange(output.logits.shape[-1], device=output.logits.device)
    has_1K = place_K < batch.num_outputs[..., None, None]
    return NetOutput(torch.where(has_1K, output.logits, NOT_THERE), output.embedding)
