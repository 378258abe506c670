"""Panacea: pFedHN whose embeddings are mixed along a given client relation graph, and reconstruct it.

Lin, Lan, He, Li: "Graph-Relational Federated Learning: Enhanced Personalization and Robustness". Algorithm 1; eq. 3
the server's objective, eq. 4 its distance to the trained models, eq. 5 the graph generator, section III.C the mean
aggregation of the GNN.

Departures. Line 12 of Algorithm 1 prints ψ - α ∇θ^T Δθ with Δθ = θ̃ - θ, which would move away from the trained models;
this descends eq. 4, as ``base.py`` does. Its K_s steps go toward fixed θ̃, where the algorithm
repeats Δθ. The average of eq. 4 is over the clients that responded in the round, which estimates that over all. Weights
of the relation graph enter the GNN's mean; the generator reconstructs only whether two clients are related, and pairs
u = v are left out, for ẑ_u^T ẑ_u cannot become negative. (The base's sum instead of eq. 4's average would weigh the
reconstruction down by the number of updates.) The remaining ones are those of ``pfedhn.py``.

Shape legend: C clients asked for, M members of the graph, T training clients, D channels, S sampled pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import generator
from fl_lightning.strategies.hypernetwork.pfedhn import PFedHN, hidden_layer, pick_rows


def mean_aggregation(relation_MM: Tensor) -> Tensor:
    """Ĝ: each client's mean over itself, with weight 1, and its neighbors, with the weights of their relations.

    Example:
        >>> mean_aggregation(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0], [0.0, 2.0, 0.0]]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.2500, 0.2500, 0.5000],
                [0.0000, 0.6667, 0.3333]])
    """
    weight_MM = relation_MM + torch.eye(len(relation_MM)).to(relation_MM)
    return weight_MM / weight_MM.sum(dim=1, keepdim=True)


def reconstruction_loss(z_TD: Tensor, relation_TT: Tensor, pairs_2S: Tensor | None = None) -> Tensor:
    """L_d of eq. 5: mean binary cross entropy of σ(ẑ_u^T ẑ_v) against whether u and v are related, scalar.

    Args:
        z_TD: ẑ, one row per client.
        relation_TT: Relation graph; every weight above 0 counts as related.
        pairs_2S: The pairs (u, v), u != v, (2, S); all of them if None.
    """
    if pairs_2S is None:
        loss_TT = F.binary_cross_entropy_with_logits(z_TD @ z_TD.T, (relation_TT > 0).to(z_TD), reduction="none")
        return loss_TT.triu(1).sum() / (len(z_TD) * (len(z_TD) - 1) / 2)
    u_S, v_S = pairs_2S
    logit_S = (z_TD.index_select(0, u_S) * z_TD.index_select(0, v_S)).sum(dim=1)
    return F.binary_cross_entropy_with_logits(logit_S, (relation_TT[u_S, v_S] > 0).to(z_TD))


@dataclass(kw_only=True, eq=False)
class Panacea(PFedHN):
    """Personalized models from embeddings that depend on the neighbors.

    Panacea-GN is ``relation_weight: 0``, Panacea-MLP ``encoder: mlp``. The encoder has one layer or more.
    During training only relations among training clients are used; unseen clients are onboarded with all their
    relations.

    Args:
        encoder: ``gnn``, or ``mlp`` for an encoder that does not use the graph.
        relation_weight: λ_d of the graph generator, at least 0; with 0 there is none.
        num_pairs: Pairs of training clients drawn for each evaluation of L_d; None for all pairs.
    """

    num_epochs: int = 1
    encoder: Literal["gnn", "mlp"] = "gnn"
    relation_weight: float = 0.1
    num_pairs: int | None = None

    server_state = ("relation_loss",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_encoder_layers")
        self.require_at_least(0, "relation_weight")
        if self.num_pairs is not None and (self.num_pairs < 1 or not self.relation_weight):
            raise ValueError(
                f"strategy.num_pairs is {self.num_pairs} and strategy.relation_weight {self.relation_weight}: the "
                "first must be at least 1, and null where the second is 0, which leaves no pairs to draw"
            )

    def setup(self, federation: Federation) -> None:
        """Take the relation graph, then create the server's modules."""
        if federation.relation_CC is None:
            raise ValueError(
                f"{type(self).__name__} needs a client relation graph and these data have none: set "
                "data.relation_graph, or use PFedHN, which is this strategy without a graph"
            )
        if self.relation_weight and len(federation.training_clients) < 2:
            raise ValueError("strategy.relation_weight needs pairs of training clients, but there is only one: set 0")
        super().setup(federation)
        self.relation_CC = federation.relation_CC.to(federation.device, self.dtype)
        self.relation_TT = self._relation(federation.training_clients)
        self.mixing_TT = mean_aggregation(self.relation_TT)
        self.relation_loss: float | Tensor = 0.0

    def build_generator(self, num_outputs: int) -> nn.ModuleDict:
        """E, M and, for a weight above 0, the MLP of the graph generator."""
        modules = super().build_generator(num_outputs)
        if self.relation_weight:
            last = nn.Linear(self.hidden_channels, self.hidden_channels)
            with torch.no_grad():
                last.weight.mul_(0.1)  # inner products of so many channels would start far out on the sigmoid
            self.graph_generator = nn.Sequential(hidden_layer(*last.weight.shape), nn.ReLU(), last)
            modules["graph_generator"] = self.graph_generator
        return modules

    def encode(self, clients: Sequence[int]) -> Tensor:
        """z: rows of the given clients of h <- ReLU(Ĝ h W + b) over all of the graph, (C, D).

        Ĝ's rows sum to one, so that it may as well act after the bias. In training, z of all is kept for L_d.
        """
        members, mixing_MM = list(self.federation.training_clients), self.mixing_TT
        if not set(members).issuperset(clients):
            members += [client for client in range(self.federation.num_clients) if client not in set(members)]
            mixing_MM = mean_aggregation(self._relation(members))
        z_MD = self.client_embeddings(members)
        for layer in self.encoder_layers:
            z_MD = layer(z_MD)
            z_MD = (mixing_MM @ z_MD if self.encoder == "gnn" else z_MD).relu()
        if self.relation_weight and z_MD.requires_grad:
            self._z_TD = z_MD
        return pick_rows(z_MD, members, clients)

    def extra_losses(self) -> Sequence[Tensor]:
        """λ_d L_d over all training clients, whichever took part."""
        if not self.relation_weight:
            return ()
        z_TD = self.graph_generator(self._z_TD)
        del self._z_TD
        loss = reconstruction_loss(z_TD, self.relation_TT, self._draw_pairs(len(z_TD)))
        self.relation_loss = loss.detach()
        return (self.relation_weight * loss,)

    def _draw_pairs(self, num_clients: int) -> Tensor | None:
        """Pairs u != v, uniform over all ordered ones and keyed by the server step, (2, S)."""
        if self.num_pairs is None:
            return None
        rng = generator(self.federation.seed, "pairs", self.num_steps)
        u_S = torch.randint(num_clients, (self.num_pairs,), generator=rng)
        v_S = (u_S + torch.randint(1, num_clients, (self.num_pairs,), generator=rng)) % num_clients
        return torch.stack([u_S, v_S]).to(self.federation.device)

    def _relation(self, members: Sequence[int]) -> Tensor:
        return self.relation_CC[list(members)][:, list(members)]

    def metrics(self) -> Mapping[str, float]:
        """Mean norm of the clients' updates, and L_d at the last server step."""
        loss = {"server/relation_loss": float(self.relation_loss)} if self.relation_weight else {}
        return {**super().metrics(), **loss}

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of z, and the relation graph."""
        return {**super().matrices(), "relation": self.relation_TT}
