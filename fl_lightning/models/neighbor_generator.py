"""NeighGen: predicts how many neighbors each node has lost, and their features.

Zhang, Yang, Li, Sun, Yiu: "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS 2021, section 3.2.
With A without loops on the nodes that are not hidden, d their neighbors and M = (D + 1)^-1 (A + I), row by row:

    z = ReLU(M drop(ReLU(M X W1)) W2);   number ñ = ReLU(w z + b);   features x̃_1..x̃_S = tanh(MLP(z + ξ)), ξ ~ N(0, I)

and a classifier of the same form as the encoder, on the graph to which each node v has [ñ_v] ≤ S new nodes, ñ_v made
whole. These have one neighbor, so that the classifier is computed without building the graph: what they send and
receive are rows of v.

Shape legend: N nodes, F features, S slots for new neighbors of a node, K classes, D width.
"""

import itertools
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import check_dropout, check_widths
from fl_lightning.kernels.randomness import dropout, random_normal, subkey
from fl_lightning.models.output import NetOutput

Rounding: TypeAlias = Literal["nearest", "down"]


class Generated(NamedTuple):
    """NeighGen's predictions for a client's nodes.

    Shapes:
        num_lost: ñ, how many neighbors each node has lost, (N,).
        features: x̃, (N, S, F).
        used: Which slots have a new neighbor, boolean (N, S).
        logits: Logits of the classifier on the completed graph, (N, K).
    """

    num_lost: Tensor
    features: Tensor
    used: Tensor
    logits: Tensor


class NeighborGenerator(nn.Module):
    """NeighGen with the classifier that trains it: ``encoder.*``, ``counter.*``, ``features.*``, ``classifier.*``.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Widths of the encoder's two convolutions; the first also applies to the classifier.
        generator_channels: Widths of the two hidden layers that generate features.
        num_slots: Largest number of new neighbors of a node.
        dropout: Drop probability, in [0, 1).
        rounding: How ñ becomes a whole number: to the nearest one, or down.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: tuple[int, int] = (32, 128),
        generator_channels: tuple[int, int] = (256, 2048),
        num_slots: int = 5,
        dropout: float = 0.5,
        rounding: Rounding = "nearest",
    ) -> None:
        super().__init__()
        if rounding not in ("nearest", "down"):
            raise ValueError(f"rounding must be 'nearest' or 'down', got {rounding!r}")
        self.rounding = rounding
        first, latent = hidden_channels
        wide, wider = generator_channels
        check_widths(first=first, latent=latent, wide=wide, wider=wider, num_slots=num_slots)
        self.num_slots, self.dropout = num_slots, check_dropout(dropout)
        self.encoder = nn.ParameterList(_glorot(in_channels, first, latent))
        self.classifier = nn.ParameterList(_glorot(in_channels, first, out_channels))
        self.counter = nn.Linear(latent, 1)
        nn.init.ones_(self.counter.bias)  # below zero for all nodes, it would never learn
        self.features = nn.ModuleList([nn.Linear(latent, wide), nn.Linear(wide, wider)])
        self.features.append(nn.Linear(wider, num_slots * in_channels))

    def forward(self, batch: GraphBatch, kept_N: Tensor, key: Tensor, *, drops: bool) -> Generated:
        """Run on the nodes that are kept.

        Args:
            batch: One client's graph.
            kept_N: Nodes that are not hidden, boolean.
            key: Random key of noise and dropout.
            drops: Whether to apply dropout, whatever the mode of the module.
        """
        kept_N1 = kept_N[:, None].to(batch.dtype)

        def received(value_ND: Tensor) -> Tensor:
            return kept_N1 * batch.sum_neighbors(kept_N1 * value_ND)

        def dropped(value: Tensor, index: int) -> Tensor:
            flat = value.flatten(0, -2)
            return dropout(flat, subkey(key, "drop", index), self.dropout).view_as(value) if drops else value

        degree_N1 = received(torch.ones_like(kept_N1))
        h_ND = batch.transform(self.encoder[0])
        h_ND = dropped(((received(h_ND) + h_ND) / (degree_N1 + 1)).relu(), 0) @ self.encoder[1]
        z_ND = ((received(h_ND) + h_ND) / (degree_N1 + 1)).relu()
        count_N = self.counter(z_ND)[:, 0].relu()
        whole_N = count_N.detach().round() if self.rounding == "nearest" else count_N.detach().floor()
        used_NS = torch.arange(self.num_slots, device=key.device) < whole_N[:, None]
        used_NS = used_NS & (kept_N & batch.node_mask)[:, None]
        noise_ND = random_normal(subkey(key, "noise"), *z_ND.shape[-2:]).to(z_ND)
        wide_ND = self.features[1](self.features[0](z_ND + noise_ND).relu()).relu()
        new_NSF = self.features[2](dropped(wide_ND, 1)).tanh().unflatten(1, (self.num_slots, -1))

        used_NS1 = used_NS[..., None].to(h_ND)
        total_N1 = degree_N1 + 1 + used_NS1.sum(dim=1)
        own_ND, new_NSD = batch.transform(self.classifier[0]), new_NSF @ self.classifier[0]
        hidden_ND = ((received(own_ND) + own_ND + (used_NS1 * new_NSD).sum(dim=1)) / total_N1).relu()
        hidden_NSD = ((new_NSD + own_ND[:, None]) / 2).relu()
        own_ND, new_NSD = (
            dropped(hidden_ND, 2) @ self.classifier[1],
            dropped(hidden_NSD, 3) @ self.classifier[1],
        )
        logits_NK = (received(own_ND) + own_ND + (used_NS1 * new_NSD).sum(dim=1)) / total_N1
        return Generated(count_N, new_NSF, used_NS, logits_NK)


class NeighborGenerationNet(nn.Module):
    """A classifier (``net.*``) and the generator that completes the graphs it is trained on (``generator.*``).

    Args:
        net: The classifier.
        generator: The generator.
    """

    def __init__(self, net: nn.Module, generator: NeighborGenerator) -> None:
        super().__init__()
        self.net = net
        self.generator = generator
        self.takes_stacks: bool = getattr(net, "takes_stacks", False)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Run the classifier."""
        output: NetOutput = self.net(batch)
        return output


def _glorot(*widths: int) -> list[nn.Parameter]:
    weights = [torch.empty(*pair) for pair in itertools.pairwise(widths)]
    return [nn.Parameter(nn.init.xavier_uniform_(weight)) for weight in weights]
