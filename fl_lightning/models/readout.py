"""From the nodes of graphs to the graphs: sum, mean, maximum, or a mean weighted by attention."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch, Pooling
from fl_lightning.kernels.linear import Linear
from fl_lightning.models.gcn import ConvolutionStack
from fl_lightning.models.output import NetOutput

#: How a net pools; ``attention`` has parameters.
ReadoutKind = Literal["sum", "mean", "max", "attention"]


class Readout(nn.Module):
    """Pool what nodes have. Where nodes are the examples, nothing is pooled.

    With attention, the weight of a node is the softmax, over the nodes of its graph, of a linear score of it.

    Args:
        in_channels: Width of what is pooled.
        pooling: How.

    Raises:
        ValueError: There is no such pooling.

    Source of the attention: Li, Tarlow, Brockschmidt, Zemel: "Gated Graph Sequence Neural Networks", ICLR 2016, eq. 7.
    """

    def __init__(self, in_channels: int, pooling: ReadoutKind) -> None:
        super().__init__()
        if pooling not in get_args(ReadoutKind):
            raise ValueError(f"pooling must be one of {', '.join(get_args(ReadoutKind))}, got {pooling!r}")
        self.pooling = pooling
        self.score = Linear(in_channels, 1, bias=False) if pooling == "attention" else None

    def forward(self, value_ND: Tensor, batch: GraphBatch) -> Tensor:
        """Pool, (N, D) to (G, D)."""
        if self.score is None:
            how: Pooling = self.pooling  # type: ignore[assignment]
            return batch.pool(value_ND, how)
        score_N1 = self.score(value_ND)
        most_N1 = batch.spread(batch.pool(score_N1.detach(), "max"))
        apart_N1 = (score_N1 - most_N1).masked_fill(~batch.node_mask.unsqueeze(-1), -torch.inf)
        weight_N1 = apart_N1.exp()
        total_G1 = batch.pool(weight_N1, "sum")
        return batch.pool(weight_N1 * value_ND, "sum") / total_G1.clamp(min=1e-30)


class PooledStack(ConvolutionStack):
    """Convolutions whose last output is pooled before a linear head reads it: ``convs.*``, ``readout.*``, ``head.*``.

    Subclasses make the readout and the head.
    """

    #: Its outputs are of graphs, where these are the examples.
    pools = True
    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    readout: Readout
    head: Linear

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all examples of one client."""
        embedding_ND, h_ND = self.encode(batch)
        return NetOutput(self.head(self.readout(h_ND, batch)), self.readout(embedding_ND, batch))
