"""FedIIH's client: a net whose hidden width is split into factors, between which each edge is shared out.

Yu, Chen, Tong, Gu, Gong: "Modeling Inter-Intra Heterogeneity for Graph Federated Learning", AAAI 2025; the layers are
those of Ma, Cui, Kuang, Wang, Zhu: "Disentangled Graph Convolutional Networks", ICML 2019.

Shape legend: N nodes of one client, F features, E edges in both
directions, K factors, D width of a factor.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches import GraphBatch
from fl_lightning.kernels.edge_products import edge_products, edge_sums
from fl_lightning.kernels.incidence import as_often
from fl_lightning.kernels.linear import check_dropout, check_widths
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.gin import FeatureMap
from fl_lightning.models.output import NetOutput

#: Shorter vectors have no direction.
SHORTEST = 1e-6


class DisentangledGCN(nn.Module):
    """Factors (``factors.<k>.*``), routing layers without parameters, and a read-out of each (``heads.<k>``, ``bias``).

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: D, width of every factor.
        num_factors: K.
        num_layers: The linear maps and the read-out among them; all others route, at least one.
        num_iterations: Of the routing in each layer, at least 1.
        dropout: Drop probability after each layer but the read-out, in [0, 1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_factors: int = 2,
        num_layers: int = 4,
        num_iterations: int = 6,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        check_widths(hidden_channels=hidden_channels, num_factors=num_factors)
        check_widths(num_layers=num_layers, num_iterations=num_iterations)
        self.num_iterations, self.dropout = num_iterations, check_dropout(dropout)
        self.num_routing = max(num_layers - 2, 1)
        self.num_latent = 2 if num_layers > 2 else 1
        self.factors = nn.ModuleList(FeatureMap(in_channels, hidden_channels) for _ in range(num_factors))
        heads = nn.init.xavier_uniform_(torch.empty(num_factors * hidden_channels, out_channels))
        self.heads = nn.ParameterList(nn.Parameter(head.clone()) for head in torch.split(heads, hidden_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and the last routing layer's output (N, K * D)."""
        h_KND = self._activated(torch.stack([factor(batch) for factor in self.factors]), batch, 0)
        for layer in range(self.num_routing):
            h_KND = self._activated(route(h_KND, batch, self.num_iterations), batch, 1 + layer)
        logits_NC = torch.stack([h_ND @ head for h_ND, head in zip(h_KND, self.heads, strict=True)]).sum(dim=0)
        return NetOutput(logits_NC + self.bias, h_KND.transpose(0, 1).flatten(1))

    def latents(self, embedding_NE: Tensor, batch: GraphBatch) -> Tensor:
        """Means of the factors' latent distributions, which more routing layers make of the output; (K, N, D)."""
        h_KND = self._split(embedding_NE)
        for _ in range(self.num_latent):
            h_KND = F.leaky_relu(route(h_KND, batch, self.num_iterations))
        return h_KND

    def _activated(self, h_KND: Tensor, batch: GraphBatch, layer: int) -> Tensor:
        h_KND = F.leaky_relu(h_KND)
        if not self.training or not self.dropout:
            return h_KND
        return self._split(dropout(h_KND.transpose(0, 1).flatten(1), batch.key + layer, self.dropout))

    def _split(self, wide_NE: Tensor) -> Tensor:
        return wide_NE.view(len(wide_NE), len(self.factors), -1).transpose(0, 1)


def route(h_KND: Tensor, batch: GraphBatch, num_iterations: int) -> Tensor:
    """Share each node's neighbors out between the factors, (K, N, D).

    With z = h / ‖h‖ and c_v = z_v in the beginning: p_k = softmax_k(⟨z_uk, c_vk⟩), c_vk <- z_vk + Σ_u p_k z_uk over
    the neighbors u of v, divided by its length.
    """
    z_KND = unit(h_KND)
    center_KND, edges, owner = z_KND, batch.edges, batch.node_mask
    for _ in range(num_iterations):
        share_KE = edge_products(edges, center_KND, z_KND, owner=owner).softmax(dim=0)
        share_KE = as_often(batch.edge_operator, share_KE, owner=owner)
        center_KND = unit(z_KND + edge_sums(edges, share_KE, z_KND, owner=owner))
    return center_KND


def unit(h_KND: Tensor) -> Tensor:
    """Vectors of length one; zero, and without gradient, where all of a factor was dropped."""
    square_KN1 = h_KND.square().sum(dim=-1, keepdim=True)
    long_KN1 = square_KN1 > SHORTEST**2
    return h_KND * torch.where(long_KN1, torch.where(long_KN1, square_KN1, 1.0).rsqrt(), 0.0)
