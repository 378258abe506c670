"""FedDyn: each client's objective gets a linear term that gives all clients their minimum at the same model.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021, Algorithm 1. With ĝ_i = 0 and h = 0 at first, θ as sent, N training clients, S those that respond:

    client   θ_i ≈ argmin_x f_i(x) - <ĝ_i, x> + α/2 ‖x - θ‖²
    server   ĝ_i <- ĝ_i - α (θ_i - θ)  for i in S;    h <- h - (α/N) Σ_{i in S} (θ_i - θ)
             θ <- (1/|S|) Σ_{i in S} θ_i - h / α

θ is an extrapolation and not a model to use: the mean of the θ_i is evaluated; the θ that is sent is ``sent/...``. ĝ_i
estimates a gradient only as far as the clients solve their problem: too few steps make h grow (``server/dual_norm``).
α = 0 is not FedAvg. The authors' code has α in inverse proportion to a client's size, and a part of it in the weight
decay; the paper has neither, and here there is none.

The ĝ_i are kept by the server, which sends them with θ, so that a client whose update is lost cannot have an outdated
one (in the paper the clients keep them, which halves the download). Leaves the client: its model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.round.client import Penalty
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.mixing.base import Mixing, equal_weights, one_model


@dataclass(kw_only=True, eq=False)
class FedDyn(Mixing):
    """One global model, by dynamically regularized local objectives.

    Args:
        regularization: α, positive.
    """

    regularization: float = 0.01

    server_state = ("sent", "h", "duals")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if not self.regularization > 0:
            raise ValueError(f"strategy.regularization must be positive (0 is not FedAvg), got {self.regularization}")

    def setup(self, federation: Federation) -> None:
        """Start with ĝ_i = 0 and h = 0."""
        super().setup(federation)
        self.sent = {name: model.clone() for name, model in self.models.items()}
        self.h = {name: torch.zeros_like(model[0]) for name, model in self.models.items()}
        self.duals = {name: h.new_zeros(federation.num_clients, *h.shape) for name, h in self.h.items()}

    def received(self, name: str, rows: slice | Tensor) -> Tensor:
        """θ as sent, not the mean."""
        return self.sent[name]

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """Equal shares, (1, C)."""
        return equal_weights(upload)[None]

    def penalty(self) -> Penalty:
        """What is added to the local loss."""
        return self.dynamic

    def dynamic(self, parameters: Parameters, context: Context) -> Tensor:
        """α/2 ‖x - θ‖² - <ĝ, x>; without ĝ for unseen clients."""
        terms = []
        for name in self.shared:
            x = parameters[name]
            terms.append(0.5 * self.regularization * (x - context.anchor[name]).square().sum())
            if f"dual/{name}" in context.received:
                terms.append(-(context.received[f"dual/{name}"] * x).sum())
        return torch.stack(terms).sum()

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """θ, and each client's ĝ_i; the mean model to unseen clients."""
        if not set(clients) <= set(self.federation.training_clients):
            return self.mixed_models(clients)
        duals = {f"dual/{name}": dual[list(clients)] for name, dual in self.duals.items()}
        return dataclasses.replace(self.sent_model(clients), extras=duals)

    def sent_model(self, clients: Sequence[int]) -> Payload:
        """θ."""
        return one_model(self.sent, clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average, and move ĝ_i, h and θ."""
        super().aggregate(stage, upload)
        if not upload.clients:
            return
        rows, num_clients = list(upload.clients), len(self.federation.training_clients)
        for name, mean in self.models.items():
            self.duals[name][rows] -= self.regularization * (upload.parameters[name] - self.sent[name])
            share = len(rows) / num_clients  # the mean may be robust
            self.h[name] = self.h[name] - self.regularization * share * (mean - self.sent[name])[0]
            self.sent[name] = mean - self.h[name] / self.regularization

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The mean model is the result; ``sent/...`` is θ, ``trained/...`` are the clients' own models."""
        return {**super().evaluations(clients), "sent/": Evaluation(payload=self.sent_model(clients))}

    def metrics(self) -> Mapping[str, float]:
        """‖h‖, which goes to 0 as the clients come to agree."""
        return {"server/dual_norm": float(flatten({name: h[None] for name, h in self.h.items()}).norm())}
