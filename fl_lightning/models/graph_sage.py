"""GraphSAGE with the mean aggregator, on all neighbors of a node.

Hamilton, Ying, Leskovec: "Inductive Representation Learning on Large Graphs", NeurIPS 2017, Algorithm 1: with d_v
neighbors u of node v, h'_v = W_self h_v + W_neighbors (1/d_v) Σ_u h_u + b. The paper samples neighbors for every
batch; here a client's graph is trained full-batch, with all neighbors.
"""

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear
from fl_lightning.models.gcn import layer_widths
from fl_lightning.models.readout import PooledStack, Readout, ReadoutKind


class SAGEConvolution(nn.Module):
    """One convolution of :class:`GraphSAGE`.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.neighbor_weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.xavier_uniform_(self.weight)
        nn.init.xavier_uniform_(self.neighbor_weight)

    def forward(self, x_NF: Tensor | None, batch: GraphBatch) -> Tensor:
        """Convolve ``x_NF``, or the batch's own features where it is None."""
        weights = (self.weight, self.neighbor_weight)
        own_ND, sent_ND = (batch.transform(w) if x_NF is None else x_NF @ w for w in weights)
        share_N1 = batch.degree.clamp(min=1).to(own_ND.dtype).reciprocal().unsqueeze(-1)
        return own_ND + share_N1 * batch.sum_neighbors(sent_ND) + self.bias.unsqueeze(-2)


class GraphSAGE(PooledStack):
    """GraphSAGE convolutions, each followed by ReLU and dropout (``convs.*``), then a linear head (``head.*``).

    For whole graphs, what the head reads is pooled before it.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
        pooling: ``sum``, ``mean``, ``max`` or ``attention`` over the nodes of a graph, where graphs are the examples.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
        pooling: ReadoutKind = "mean",
    ) -> None:
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        super().__init__((SAGEConvolution(*pair) for pair in widths), dropout=dropout)
        self.readout = Readout(hidden_channels, pooling)
        self.head = Linear(hidden_channels, out_channels)
