"""FedAMP and HeurFedAMP: every client follows a server model of its own, mixed from those of similar clients.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
Algorithm 1. With θ_i the model that client i sent, of N clients that did, and d_ij = ‖θ_i - θ_j‖²,

    server   u_i = Σ_j ξ_ij θ_j,  ξ_ij = κ / (N - 1) exp(-d_ij / σ) for j ≠ i, ξ_ii what is missing to one
    client   θ_i ≈ argmin_x f_i(x) + μ/2 ‖x - u_i‖²

In the paper's letters κ = α_k (N - 1) / σ, at most 1 so that u_i is a convex mixture, and μ = λ / α_k. d grows with the
number of parameters, and a fixed σ then leaves every client alone: by default σ is the median of d. HeurFedAMP (its
section 5) is ``attention: cosine``: ξ_ii is fixed, and the rest is shared out by softmax(τ cos(θ_i, θ_j)).

Departures: the local solver starts at u_i, or (``start: own``) at θ_i, which the paper does not say; the mixture is
over the clients that respond; α_k does not decay.

Leaves the client: its model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.mixing.model_table import ModelTable
from fl_lightning.strategies.objectives import Proximal


@dataclass(kw_only=True, eq=False)
class FedAMP(ModelTable):
    """Personal models that attract similar ones.

    Args:
        attention: By ``distance`` of the models (FedAMP), or by their ``cosine`` (HeurFedAMP).
        collaboration: κ, the others' share of u_i if all models are equal, in (0, 1]; for ``distance``.
        bandwidth: σ, positive; None for the median of the squared distances; for ``distance``.
        self_weight: ξ_ii, in [0, 1]; for ``cosine``.
        temperature: τ, at least 0; for ``cosine``.
        proximal_weight: μ, at least 0.
        start: Where a client begins a round: at the model it ``received``, u_i, or at its ``own``.
    """

    attention: Literal["distance", "cosine"] = "distance"
    collaboration: float = 0.5
    bandwidth: float | None = None
    self_weight: float = 0.3
    temperature: float = 10.0
    proximal_weight: float = 0.1
    start: Literal["received", "own"] = "received"

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "proximal_weight", "temperature")
        if not 0 < self.collaboration <= 1:
            raise ValueError(f"strategy.collaboration must be in (0, 1], got {self.collaboration}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"strategy.bandwidth must be positive, or null for the median, got {self.bandwidth}")
        self.require_within(0, 1, "self_weight")

    def weights(self, models: Mapping[str, Tensor], examples_C: Tensor) -> Tensor:
        """ξ, (C, C)."""
        models_CP = flatten(models).double()
        others_CC = ~torch.eye(len(models_CP), dtype=torch.bool, device=models_CP.device)
        if len(models_CP) == 1:
            return torch.ones_like(others_CC, dtype=torch.float64)
        if self.attention == "cosine":
            score_CC = self.temperature * cosine_similarity(models_CP, models_CP)
            share_CC = (1 - self.self_weight) * score_CC.masked_fill(~others_CC, -torch.inf).softmax(dim=1)
        else:
            share_CC = self.collaboration / (len(models_CP) - 1) * self.closeness(models_CP, others_CC) * others_CC
        return share_CC + torch.diag(1 - share_CC.sum(dim=1))

    def closeness(self, models_CP: Tensor, others_CC: Tensor) -> Tensor:
        """Exp(-d / σ), (C, C); 1 where all models are the same."""
        centered_CP = models_CP - models_CP.mean(dim=0)
        gram_CC = centered_CP @ centered_CP.T
        square_C = gram_CC.diagonal()
        distance_CC = (square_C[:, None] + square_C - 2 * gram_CC).clamp(min=0)
        sigma = float(distance_CC[others_CC].median()) if self.bandwidth is None else self.bandwidth
        return (-distance_CC / sigma).exp() if sigma > 0 else torch.ones_like(distance_CC)

    def received(self, name: str, rows: slice | Tensor) -> Tensor:
        """The model at which a client began: u_i, or its own."""
        return super().received(name, rows) if self.start == "received" else self.last[name][rows]

    def penalty(self) -> Proximal | None:
        """μ/2 ‖x - u_i‖²."""
        return Proximal(self.proximal_weight, center=self.clouds) if self.proximal_weight else None

    def clouds(self, context: Context) -> Parameters:
        """The client's model at the server, u_i."""
        return {name: context.received.get(f"cloud/{name}", context.anchor[name]) for name in self.shared}

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """u_i; as further tensors to clients that begin at their own model."""
        payload = self.mixed_models(clients)
        if self.start == "received" or not set(clients) <= set(self.federation.training_clients):
            return payload
        clouds = {f"cloud/{name}": model for name, model in payload.parameters.items()}
        return dataclasses.replace(payload, parameters={}, extras=clouds)
