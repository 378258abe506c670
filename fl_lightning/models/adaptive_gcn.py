"""AdaFGL's client: a GCN that the federation trains, and two modules that a client trains on the GCN's predictions.

Li, Wu, Zhang, Sun, Li, Wang: "AdaFGL: A New Paradigm for Federated Node Classification with Topology Heterogeneity",
ICDE 2024.

Shape legend: N nodes of one client, F features, D hidden, K classes.
"""

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches import GraphBatch
from fl_lightning.kernels.linear import Linear
from fl_lightning.kernels.randomness import dropout, subkey
from fl_lightning.models.gcn import GCN

#: Powers of the corrected adjacency by which features are propagated, including 0.
NUM_HOPS = 4


class HopMLP(nn.Module):
    """A perceptron on [X, ÃX, Ã²X, ...] that never stores these: Σ_h Ã^h (X W_h) is computed from the inside.

    Each hidden layer is followed by PReLU and dropout.

    Args:
        num_features: F.
        widths: Widths of the hidden layers and of the output.
        num_hops: Powers of Ã, from 0 on.
        dropout: Drop probability after each hidden layer.
    """

    def __init__(self, num_features: int, widths: Sequence[int], *, num_hops: int, dropout: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(num_hops, num_features, widths[0]))
        nn.init.xavier_uniform_(self.weights.view(-1, widths[0]))
        self.bias = nn.Parameter(torch.zeros(widths[0]))
        self.layers = nn.ModuleList(Linear(*pair) for pair in itertools.pairwise(widths))
        self.slopes = nn.Parameter(torch.full((len(self.layers),), 0.25))
        self.dropout = dropout

    def forward(self, batch: GraphBatch, propagation_NN: Tensor, part: str) -> Tensor:
        """Logits of all nodes, (N, K); ``part`` names the draws of dropout."""
        h_ND = batch.transform(self.weights[-1])
        for weight_FD in reversed(self.weights[:-1].unbind()):
            h_ND = propagation_NN @ h_ND + batch.transform(weight_FD)
        h_ND = h_ND + self.bias
        for number, layer in enumerate(self.layers):
            h_ND = prelu(h_ND, self.slopes[number])
            if self.training:
                h_ND = dropout(h_ND, subkey(batch.key, part, number), self.dropout)
            h_ND = layer(h_ND)
        return h_ND


class Heterophilous(nn.Module):
    """Three perceptrons: on X, on the propagated X, and one whose outputs pass messages of both signs.

    Args:
        num_features: F.
        hidden_channels: D.
        num_classes: K.
        dropout: Drop probability after each hidden layer.
    """

    def __init__(self, num_features: int, hidden_channels: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        widths = (hidden_channels, hidden_channels, num_classes)
        self.features = HopMLP(num_features, widths, num_hops=1, dropout=dropout)
        self.propagated = HopMLP(num_features, widths, num_hops=NUM_HOPS, dropout=dropout)
        self.messages = HopMLP(num_features, widths, num_hops=NUM_HOPS, dropout=dropout)
        self.slope = nn.Parameter(torch.tensor(0.25))

    def forward(
        self, batch: GraphBatch, propagation_NN: Tensor, likeness_NN: Tensor, share: float, *, below_mean: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of each of the three, (N, K)."""
        e_NK = self.messages(batch, propagation_NN, "messages")
        relation_NN = relation(e_NK, likeness_NN, batch.node_mask, share, below_mean=below_mean)
        attracted_NK = (prelu(relation_NN, self.slope) @ e_NK).softmax(dim=1)
        repelled_NK = (prelu(-relation_NN, self.slope) @ e_NK).softmax(dim=1)
        return (
            self.features(batch, propagation_NN, "features"),
            self.propagated(batch, propagation_NN, "propagated"),
            0.5 * (attracted_NK - repelled_NK + e_NK),
        )


class AdaptiveGCN(GCN):
    """A GCN (``convs.*``, ``head.*``), which predicts, and modules ``homophilous.*`` and ``heterophilous.*``.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every hidden layer.
        num_layers: Number of convolutions.
        dropout: Drop probability after each hidden layer, in [0, 1).
    """

    #: Sub-nets whose gradients are clipped separately.
    models: ClassVar[tuple[str, ...]] = ("homophilous", "heterophilous")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(
            in_channels, out_channels, hidden_channels=hidden_channels, num_layers=num_layers, dropout=dropout
        )
        self.homophilous = HopMLP(in_channels, (hidden_channels, out_channels), num_hops=NUM_HOPS, dropout=dropout)
        self.heterophilous = Heterophilous(in_channels, hidden_channels, out_channels, dropout=dropout)


def prelu(value: Tensor, slope: Tensor) -> Tensor:
    """PReLU with one slope."""
    return torch.where(value > 0, value, slope * value)


def likeness(probability_NK: Tensor, real_N: Tensor, threshold: float) -> Tensor:
    """R: 1 where the rows of two different nodes have a cosine above the threshold, (N, N)."""
    unit_NK = F.normalize(probability_NK, dim=1)
    return ((unit_NK @ unit_NK.T > threshold) & _pairs(real_N)).to(probability_NK)


def corrected_propagation(batch: GraphBatch, likeness_NN: Tensor, share: float) -> Tensor:
    """Ã, the normalized α A + (1 - α) R with loops; dense, (N, N)."""
    eye_NN = torch.eye(len(batch.y), dtype=likeness_NN.dtype, device=likeness_NN.device)
    links_NN = share * batch.sum_neighbors(eye_NN) + (1 - share) * likeness_NN + eye_NN
    scale_N = links_NN.sum(dim=1).rsqrt()
    return scale_N[:, None] * links_NN * scale_N


def relation(e_NK: Tensor, likeness_NN: Tensor, real_N: Tensor, share: float, *, below_mean: str) -> Tensor:
    """Q' + I with Q = β R + (1 - β) cos(softmax E) off the diagonal and μ its mean, (N, N).

    Q' = (Q - μ) / (max Q - μ) above μ; below -Q / μ (``ratio``) or (Q - μ) / μ (``distance``).
    """
    unit_NK = F.normalize(e_NK.softmax(dim=1), dim=1)
    q_NN = torch.where(_pairs(real_N), share * likeness_NN + (1 - share) * (unit_NK @ unit_NK.T), 0.0)
    mean = (q_NN.sum() / real_N.sum().square()).clamp(min=1e-12)
    above_NN = (q_NN - mean) / (q_NN.amax() - mean).clamp(min=1e-12)
    below_NN = -q_NN / mean if below_mean == "ratio" else (q_NN - mean) / mean
    real_NN = real_N[:, None] & real_N
    eye_NN = torch.eye(len(real_N), dtype=q_NN.dtype, device=q_NN.device)
    return torch.where(real_NN, torch.where(q_NN > mean, above_NN, below_NN), 0.0) + eye_NN


def _pairs(real_N: Tensor) -> Tensor:
    """Pairs of different real nodes."""
    same_NN = torch.eye(len(real_N), dtype=torch.bool, device=real_N.device)
    return real_N[:, None] & real_N & ~same_NN
