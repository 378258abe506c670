"""SFL: a known graph of clients smooths their models into personal ones, whose mean is the global one.

Chen, Long, Wu, Zhou, Jiang: "Personalized Federated Learning With a Graph", IJCAI 2022, Algorithm 1. With v_i what
client i sent last, Â the client relation graph with self-loops and rows that sum to one, over the N training clients:

    client   v_i ≈ argmin_x f_i(x) + λ/2 ‖x - w‖² + λ/2 ‖x - u_i‖², from w (``start: global``) or from u_i
    server   u_i <- ρ (Â^L V)_i + (1 - ρ) v_i,  of all clients, also those that were not asked;    w <- (1/N) Σ_i u_i

Departures: in the authors' code both terms are built from detached tensors, so they have no gradient and u_i never
enters training; here they have the paper's. Three hops a round (their default) make all clients alike on small graphs;
here it is two. The graph is the data's; the learned one (SFL*) is left out: what is released of it links the clients
whose models are furthest apart, by a learner that is drawn anew in every round, and cannot be what the paper means.

Leaves the client: its model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.base import Mixing
from fl_lightning.strategies.objectives import Proximal, Sum


@dataclass(kw_only=True, eq=False)
class SFL(Mixing):
    """Personal models from smoothing over a graph of clients.

    Args:
        num_hops: L, at least 0.
        proximal_weight: λ, at least 0.
        smoothing: ρ, in [0, 1].
        start: Where clients begin a round: at the ``global`` model, or at their ``personal`` one.
    """

    num_hops: int = 2
    proximal_weight: float = 0.01
    smoothing: float = 1.0
    start: Literal["global", "personal"] = "global"
    aggregation: Aggregation | None = field(default=None, init=False)
    masked_averaging: bool = field(default=False, init=False)

    server_state = ("last",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "num_hops", "proximal_weight")
        self.require_within(0, 1, "smoothing")

    def setup(self, federation: Federation) -> None:
        """Start every client from the common initial parameters.

        Raises:
            ValueError: There is no client relation graph.
        """
        super().setup(federation)
        if federation.relation_CC is None:
            raise ValueError("SFL needs a client relation graph, and the data have none: set data.relation_graph")
        self.relation_CC = federation.relation_CC.double()
        self.training_T = torch.tensor(federation.training_clients, device=federation.device)
        looped_TT = self.relation_CC[self.training_T][:, self.training_T]
        looped_TT = looped_TT + torch.eye(len(looped_TT), dtype=torch.float64, device=federation.device)
        self.hops_TT: Tensor = torch.linalg.matrix_power(looped_TT / looped_TT.sum(dim=1, keepdim=True), self.num_hops)
        self.last = {
            name: model.expand(federation.num_clients, *model.shape[1:]).clone() for name, model in self.models.items()
        }
        self.smooth()

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """Â^L over the training clients, whichever of them respond, (T, T)."""
        return self.hops_TT

    def smooth(self) -> None:
        """u_i of the training clients."""
        self.personalized_models = {name: table.clone() for name, table in self.last.items()}
        for name, table in self.last.items():
            v = table[self.training_T]
            u = torch.tensordot(self.hops_TT.to(v), v, dims=1)
            self.personalized_models[name][self.training_T] = v.lerp(u, self.smoothing)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Store what was sent, smooth all clients' models, and average them."""
        if not upload.clients:
            return
        for name, tensor in upload.parameters.items():
            self.last[name][list(upload.clients)] = tensor
        self.smooth()
        for name, table in self.personalized_models.items():
            self.models[name] = table[self.training_T].mean(dim=0, keepdim=True)

    def personal_models(self, clients: Sequence[int]) -> Payload:
        """u_i; for an unseen client the mean of what its neighbors sent last, or of all if it has none."""
        models = {name: table[list(clients)] for name, table in self.personalized_models.items()}
        for row, client in enumerate(clients):
            if client in self.federation.training_clients:
                continue
            weight_T = self.relation_CC[client][self.training_T]
            weight_T = weight_T if weight_T.any() else torch.ones_like(weight_T)
            for name, table in self.last.items():
                v = table[self.training_T]
                models[name][row] = torch.tensordot((weight_T / weight_T.sum()).to(v), v, dims=1)
        return Payload(clients=tuple(clients), parameters=models)

    def penalty(self) -> Sum | None:
        """λ/2 (‖x - start‖² + ‖x - other‖²), w being one of them and u_i the other."""
        if not self.proximal_weight:
            return None
        start, other = Proximal(self.proximal_weight, self.shared), Proximal(self.proximal_weight, center=self.other)
        return Sum((start, other))

    def other(self, context: Context) -> Parameters:
        """The model that the client does not start from."""
        return {name: context.received[f"other/{name}"] for name in self.shared}

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Both models, w and u_i."""
        start, other = self.mixed_models(clients), self.personal_models(clients)
        if self.start == "personal":
            start, other = other, start
        others = {f"other/{name}": model for name, model in other.parameters.items()} if self.proximal_weight else {}
        return dataclasses.replace(start, extras=others)

    def model_for(self, clients: Sequence[int]) -> Payload:
        """u_i; clients keep their personal parameters."""
        return self.personal_models(clients)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The personal models are the result; ``trained/...`` are the clients' own, ``global/...`` is w."""
        return {**super().evaluations(clients), "global/": Evaluation(payload=self.mixed_models(clients))}

    def matrices(self) -> Mapping[str, Tensor]:
        """Â^L."""
        return {"mixing": self.hops_TT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the personal models follow from it."""
        super().load_state_dict(state)
        self.smooth()
