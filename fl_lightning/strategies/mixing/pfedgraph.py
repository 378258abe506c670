"""pFedGraph: the collaboration graph is inferred in every round, by a small quadratic program for each client.

Ye, Ni, Wu, Chen, Wang: "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023, eqs. 5-7. With
p_j the shares of the training examples, d_ij = -cos(θ_i - θ⁰, θ_j - θ⁰) the models' displacement from where all began,

    server   W_i = argmin over the simplex of Σ_j W_ij d_ij + α Σ_j (W_ij - p_j)²,    θ̄_i = Σ_j W_ij θ_j
    client   θ_i ≈ argmin_x f_i(x) - λ Σ_j W_ij cos(x, θ_j), from x = θ̄_i

W_i is the projection of p - d_i / 2α onto the simplex, which needs no solver. The term of the clients is -λ <c_i, x> /
‖x‖ with c_i = Σ_j W_ij θ_j / ‖θ_j‖, which the server sends; ``penalty: mixed`` is -λ cos(x, θ̄_i) instead, without
further traffic. A client has it from its second participation on.

Departure: the authors' code adds λ cos, which drives clients away from each other; here the sign is the paper's.

Leaves the client: its model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.client import Penalty
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.mixing.model_table import ModelTable


def project_to_simplex(points_CN: Tensor) -> Tensor:
    """The nearest point of the probability simplex to each row.

    Example:
        >>> project_to_simplex(torch.tensor([[0.5, 0.5], [2.0, 0.0], [0.4, 0.4]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    sorted_CN = points_CN.sort(dim=1, descending=True).values
    excess_CN = sorted_CN.cumsum(dim=1) - 1
    rank_N = torch.arange(1, points_CN.shape[1] + 1, device=points_CN.device)
    support_C1 = (sorted_CN * rank_N > excess_CN).sum(dim=1, keepdim=True)
    return (points_CN - excess_CN.gather(1, support_C1 - 1) / support_C1).clamp(min=0)


@dataclass(kw_only=True, eq=False)
class PFedGraph(ModelTable):
    """Models mixed by an inferred graph of collaboration.

    Args:
        size_weight: α, positive: a large one mixes by size, a small one lets clients work alone.
        alignment_weight: λ, at least 0.
        penalty_of: The clients' term: by the ``cosine`` with each model, or with the ``mixed`` one.
        compared: Shell-style patterns of the parameters from which d is computed.
        snap: Cosines above it count as 1, as in the authors' code; None for none.
    """

    size_weight: float = 0.8
    alignment_weight: float = 0.01
    penalty_of: Literal["cosine", "mixed"] = "cosine"
    compared: Sequence[str] = ("*",)
    snap: float | None = 0.9

    server_state = ("directions",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "alignment_weight")
        self.require_positive("size_weight")

    def setup(self, federation: Federation) -> None:
        """Start from the common initial parameters, without directions."""
        super().setup(federation)
        self.compared_names = self.select(self.shared, self.compared)
        self.directions = {name: torch.zeros_like(m) for name, m in self.models.items() if self.sends_directions}

    @property
    def sends_directions(self) -> bool:
        """Whether clients need c_i."""
        return self.penalty_of == "cosine" and self.alignment_weight > 0

    def weights(self, models: Mapping[str, Tensor], examples_C: Tensor) -> Tensor:
        """W, (C, C)."""
        start = self.federation.parameters
        moved_CP = flatten({name: models[name] - start[name] for name in self.compared_names}).double()
        cosine_CC = cosine_similarity(moved_CP, moved_CP)
        if self.snap is not None:
            cosine_CC = torch.where(cosine_CC > self.snap, 1.0, cosine_CC)
        examples_C = examples_C.double() if examples_C.any() else torch.ones_like(examples_C, dtype=torch.float64)
        return project_to_simplex(examples_C / examples_C.sum() + cosine_CC / (2 * self.size_weight))

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Mix, and compute the directions toward which the clients are pulled."""
        super().aggregate(stage, upload)
        if not upload.clients or not self.sends_directions:
            return
        rows = list(upload.clients)
        length_C = flatten(upload.parameters).double().norm(dim=1).clamp(min=1e-12)
        mixing_CC = self.mixing_CC[rows][:, rows] / length_C
        for name, tensor in upload.parameters.items():
            self.directions[name][rows] = torch.tensordot(mixing_CC.to(tensor), tensor, dims=1)

    def penalty(self) -> Penalty | None:
        """The clients' term."""
        if not self.alignment_weight:
            return None
        return self.directed if self.penalty_of == "cosine" else self.aligned

    def directed(self, parameters: Parameters, context: Context) -> Tensor:
        """-λ <c, x> / ‖x‖."""
        directions = {name: context.received[f"direction/{name}"] for name in self.shared}
        length = _product(parameters, parameters, self.shared).sqrt()
        return -self.alignment_weight * _product(parameters, directions, self.shared) / length

    def aligned(self, parameters: Parameters, context: Context) -> Tensor:
        """-λ cos(x, θ̄), for clients that have taken part before."""
        length = _product(parameters, parameters, self.shared) * _product(context.anchor, context.anchor, self.shared)
        cosine = _product(parameters, context.anchor, self.shared) / length.sqrt()
        return -self.alignment_weight * context.received["has_taken_part"] * cosine

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The mixed model, and what the clients' term needs."""
        payload = self.mixed_models(clients)
        extras = {f"direction/{name}": table[list(clients)] for name, table in self.directions.items()}
        if self.alignment_weight and not self.sends_directions:
            extras["has_taken_part"] = self.known_C[list(clients)]
        return dataclasses.replace(payload, extras=extras)


def _product(left: Parameters, right: Parameters, names: Sequence[str]) -> Tensor:
    """The inner product over all the named parameters."""
    return torch.stack([(left[name] * right[name]).sum() for name in names]).sum()
