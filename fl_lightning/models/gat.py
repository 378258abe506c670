"""The graph attention network, for nodes and for whole graphs.

Veličković, Cucurull, Casanova, Romero, Liò, Bengio: "Graph Attention Networks", ICLR 2018, eq. 3 and 5. With z = W h,
in each head and over the neighbors u of v and v itself,

    h'_v = Σ_u α_vu z_u + b,   α_vu = softmax over u of LeakyReLU(a_to · z_v + a_from · z_u)

and the heads' outputs are put side by side.

Shape legend: N nodes of one client, E edges, G graphs (where nodes are the examples, the nodes), H heads, D width, P
its part of each head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.edge_products import edge_maxima, edge_products, edge_sums
from fl_lightning.kernels.incidence import as_often
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.models.gcn import layer_widths
from fl_lightning.models.readout import PooledStack, Readout, ReadoutKind

#: Slope of the LeakyReLU below 0.
SLOPE = 0.2


def check_heads(hidden_channels: int, num_heads: int) -> None:
    """Refuse a width that the heads cannot share.

    Raises:
        ValueError: It is not a multiple of their number.
    """
    if hidden_channels % num_heads:
        raise ValueError(
            f"hidden_channels={hidden_channels} is impossible: set it to a multiple of num_heads={num_heads}"
        )


class GATConvolution(nn.Module):
    """One convolution of :class:`GAT`.

    Args:
        in_channels: Width of the input.
        out_channels: D, a multiple of ``num_heads``.
        num_heads: H.
    """

    def __init__(self, in_channels: int, out_channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_channels, out_channels)))
        shape = (num_heads, out_channels // num_heads)
        self.attention_to = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.attention_from = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x_NF: Tensor | None, batch: GraphBatch) -> Tensor:
        """Convolve ``x_NF``, or the batch's own features where it is None."""
        z_ND = batch.transform(self.weight) if x_NF is None else x_NF @ self.weight
        z_NHP = z_ND.view(*z_ND.shape[:-1], self.num_heads, -1)
        to_HN, from_HN = (
            (z_NHP * attention.unsqueeze(-3)).sum(dim=-1).movedim(-1, 0)
            for attention in (self.attention_to, self.attention_from)
        )
        weight_HE, own_HN = self._weights(to_HN, from_HN, batch)
        weight_HE = as_often(batch.edge_operator, weight_HE, owner=batch.node_mask)
        z_HNP = z_NHP.movedim(-2, 0)
        total_HN1 = edge_sums(batch.edges, weight_HE, torch.ones_like(z_HNP[..., :1]), owner=batch.node_mask)
        sum_HNP = edge_sums(batch.edges, weight_HE, z_HNP, owner=batch.node_mask)
        own_HN1 = own_HN.unsqueeze(-1)
        mean_HNP = (sum_HNP + own_HN1 * z_HNP) / (total_HN1 + own_HN1)
        result: Tensor = mean_HNP.movedim(0, -2).flatten(-2) + self.bias.unsqueeze(-2)
        return result

    def _weights(self, to_HN: Tensor, from_HN: Tensor, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Exponentials of the scores of the edges and of every node with itself, over the greatest of a node's."""
        one_HN = torch.ones_like(to_HN)
        ends = torch.stack([to_HN, one_HN], dim=-1), torch.stack([one_HN, from_HN], dim=-1)
        score_HE = F.leaky_relu(edge_products(batch.edges, *ends, owner=batch.node_mask), SLOPE)
        own_HN = F.leaky_relu(to_HN + from_HN, SLOPE)
        most_HN = edge_maxima(batch.edges, score_HE, owner=batch.node_mask).maximum(own_HN.detach())
        bounds = most_HN.unsqueeze(-1), one_HN.unsqueeze(-1)
        bound_HE = edge_products(batch.edges, *bounds, owner=batch.node_mask)
        return (score_HE - bound_HE).exp(), (own_HN - most_HN).exp()


class GAT(PooledStack):
    """Attention convolutions, each followed by ReLU and dropout (``convs.*``), a readout, a linear head (``head.*``).

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        hidden_channels: Width of every convolution, a multiple of ``num_heads``.
        num_layers: Number of convolutions.
        num_heads: Of each convolution.
        dropout: Drop probability after each convolution, in [0, 1). (Attention itself has none.)
        pooling: ``sum``, ``mean``, ``max`` or ``attention`` over the nodes of a graph.

    Shapes:
        logits ``(G, out_channels)``; embedding ``(G, hidden_channels)``, of the last convolution, pooled.

    Raises:
        ValueError: A width or a number is below 1, or the width no such multiple.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.5,
        pooling: ReadoutKind = "mean",
    ) -> None:
        check_widths(hidden_channels=hidden_channels, num_layers=num_layers, num_heads=num_heads)
        check_heads(hidden_channels, num_heads)
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        super().__init__((GATConvolution(*pair, num_heads) for pair in widths), dropout=check_dropout(dropout))
        self.readout = Readout(hidden_channels, pooling)
        self.head = Linear(hidden_channels, out_channels)
