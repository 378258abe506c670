"""Sheaf-FMTL: decentralized multi-task learning whose clients, of any sizes, agree in learned projections only.

Ben Issaid, Vepakomma, Bennis: "Tackling Feature and Sample Heterogeneity in Decentralized Multi-Task Learning: A
Sheaf-Theoretic Approach", TMLR 2025, Algorithm 1. Each client i has a restriction map P_ij of shape (d_ij, d_i) for
each neighbor j (``restriction_maps.py``, ``dense_maps.py``); Ψ = Σ f_i(θ_i) + λ/2 Σ_edges
‖P_ij θ_i - P_ji θ_j‖² is descended in turn in the models and in the maps:

    everyone sends m_ij = P_ij θ_i;         θ_i <- θ_i - α (∇f_i(θ_i) + λ Σ_j P_ij^T (m_ij - m_ji))     (eq. 18)
    everyone sends m_ij with the new θ_i;   P_ij <- P_ij - η λ (m_ij - m_ji) θ_i^T                       (eq. 19)

Everyone reads messages of the same round (Jacobi). Departures: maps start scaled by 1/√d_i (``map_initialization.py``);
with more than one local step the neighbors' pull is taken once, at the models the round began with; maps that never
learn (η = 0) need no second message. The opening message of a round follows from the closing one of the round before
(``RestrictionMaps.messages_after_update``): with ``derive_opening`` it is not sent, which halves the bits and changes
nothing else; this is ours, not the paper's.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.kernels.common_parameters import common_first
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.decentralized.base import ALONE, Decentralized, warn_if_weak
from fl_lightning.strategies.decentralized.dense_maps import DenseMaps
from fl_lightning.strategies.decentralized.restriction_maps import RestrictionMaps

_log = logging.getLogger(__name__)


class MapsFactory(Protocol):
    """Builds restriction maps; all other settings of the class are the user's."""

    def __call__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RestrictionMaps:
        """Build maps between models of the given sizes along the given edges."""
        ...


@dataclass(kw_only=True, eq=False)
class SheafFMTL(Decentralized):
    """Local steps, a pull toward agreement with the neighbors, and a step on the maps.

    α is the clients' learning rate. Their optimizer should be SGD; another one changes the local steps alone.

    Args:
        regularization: λ; 0 is Local. (The paper's 0.001 hardly couples the clients if rows of maps have norm 1.)
        map_step_size: η; 0 keeps the initial maps. Maps that learn fast learn to ignore the neighbors.
        projection_fraction: γ in d_ij = floor(γ min(d_i, d_j)), in (0, 1].
        maps: Builds the maps: ``DenseMaps``, or ``ImplicitMaps`` if dense maps would not fit into memory. Our own are
            ``RedrawnMaps`` and ``PrincipalMaps``, which do not learn and need η = 0.
        derive_opening: Compute the first message of a round from the previous round instead of sending it. (With
            truncated ``ImplicitMaps`` this neglects their error.)
    """

    regularization: float = 1.0
    map_step_size: float = 0.001
    projection_fraction: float = 0.1
    maps: MapsFactory = DenseMaps
    derive_opening: bool = False

    takes_architectures = True
    server_state = ("restriction_maps", "coupling", "up_to_date_CC")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "regularization", "map_step_size")

    def setup(self, federation: Federation) -> None:
        """Draw the maps, and check both step sizes against the curvature.

        The maps order the clients by name, so that what is drawn for a client does not depend on its index, and in each
        model the values that all nets have come first.
        """
        super().setup(federation)
        indices = common_first(federation.architectures)
        self.positions = [indices[kind] for kind in federation.architecture_of]
        self.order = list(range(federation.num_clients))
        if federation.client_names:
            self.order.sort(key=federation.client_names.__getitem__)
        self.rank_C = torch.tensor(self.order, device=federation.device).argsort()
        self.members_C = self._present(self.members)
        self.restriction_maps = self.maps(
            [self.sizes[client] for client in self.order],
            self.adjacency_CC[self.order][:, self.order],
            projection_fraction=self.projection_fraction,
            seed=federation.seed,
            dtype=server_dtype(self.models_CP.dtype),
            device=federation.device,
        )
        self.pull = federation.learning_rate * self.regularization
        self.coupling = 0.0
        #: Neighbors that know each other's last updates, so that their opening messages can be derived.
        self.up_to_date_CC = torch.zeros_like(self.adjacency_CC)
        self.warned_of_maps = False
        if self.map_step_size and not self.restriction_maps.learns:
            raise ValueError(
                f"strategy.map_step_size is {self.map_step_size:g}, but {type(self.restriction_maps).__name__} do not "
                "learn by eq. 19: set it to 0"
            )
        if self.regularization:
            self._check_rows()
            self._check_model_step(federation.learning_rate)
            self._check_map_step(self._models())

    def _check_rows(self) -> None:
        """Warn of maps with too few rows to enforce agreement."""
        rows, needed = self.restriction_maps.rows_against_needed(self.members_C)
        if self.restriction_maps.is_complete and rows < needed:
            edges = int(self.neighbors(self.members).sum()) // 2
            warnings.warn(
                f"the maps cannot make the clients agree: {edges} edges with strategy.projection_fraction "
                f"{self.projection_fraction:g} compare {rows:,} numbers, and agreement of {len(self.members)} clients "
                f"takes {needed:,}; raise strategy.projection_fraction to "
                f"{min(1.0, self.projection_fraction * needed / rows):.2g}, or choose a denser strategy.topology",
                stacklevel=3,
            )

    def _check_model_step(self, learning_rate: float) -> None:
        curvature = self.restriction_maps.largest_curvature()
        product = self.pull * curvature
        _log.info("alpha * lambda * largest eigenvalue of the sheaf Laplacian = %.3g (must be below 2)", product)
        factors = (
            f"learning rate {learning_rate:g} x strategy.regularization {self.regularization:g} x the sheaf "
            f"Laplacian's largest eigenvalue {curvature:.3g}"
        )
        if product >= 2:
            warnings.warn(
                f"the pull of the neighbors diverges: {factors} is {product:.3g}, which must be below 2; lower "
                "either, or start the maps smaller",
                stacklevel=3,
            )
        elif product > 0:
            warn_if_weak(product, factors, self.exchange_every)

    def _check_map_step(self, models: Sequence[Tensor]) -> None:
        product = self.map_step_size * self.regularization * self.restriction_maps.largest_map_curvature(models)
        if product >= 2 and not self.warned_of_maps:
            self.warned_of_maps = True
            warnings.warn(
                f"the maps diverge: strategy.map_step_size {self.map_step_size:g} x strategy.regularization "
                f"{self.regularization:g} x the largest sum of two neighbors' squared norms is {product:.3g}, which "
                "must be below 2; lower strategy.map_step_size",
                stacklevel=3,
            )

    def _models(self) -> list[Tensor]:
        """Each client's parameters without padding, (d_i,), in the order of the maps."""
        return [self.models_CP[client, self.positions[client]].to(self.restriction_maps.dtype) for client in self.order]

    def _present(self, clients: Tensor) -> Tensor:
        """True for the given clients, in the maps' order, (C,)."""
        return torch.zeros_like(self.adjacency_CC[0]).index_fill(0, self.rank_C[clients], True)

    def training(self, round_idx: int) -> Stage:
        """Local training; the pull has the clients' learning rate of the round."""
        self.pull = self.federation.learning_rate_in(round_idx) * self.regularization
        return super().training(round_idx)

    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """Eq. 18 among the clients that responded; absent ones are left out."""
        if not self.regularization or self.restriction_maps.is_silent:
            return trained_CP
        message_M = self.restriction_maps.project(self._models())
        pulls = self.restriction_maps.pull_back(self.restriction_maps.residual(message_M, self._present(clients)))
        new_CP = trained_CP.clone()
        for row_P, client in zip(new_CP, clients.tolist(), strict=True):
            row_P[self.positions[client]] -= self.pull * pulls[int(self.rank_C[client])]
        return new_CP

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Eq. 18, then eq. 19 with the new models along the edges both of whose ends responded."""
        super().aggregate(stage, upload)
        if not upload.clients or not self.regularization:
            return
        if stage.name == ALONE:
            self.up_to_date_CC = torch.zeros_like(self.up_to_date_CC)
            return
        present_C = self._present(torch.tensor(upload.clients, device=self.federation.device))
        models = self._models()
        message_M = self.restriction_maps.project(models)
        if self.map_step_size:
            self._check_map_step(models)
            step = self.map_step_size * self.regularization
            residual_M = self.restriction_maps.residual(message_M, present_C)
            self.restriction_maps.update(residual_M, models, step)
            message_M = self.restriction_maps.messages_after_update(message_M, residual_M, models, step)
        residual_M = self.restriction_maps.residual(message_M, self.members_C)
        self.coupling = 0.25 * self.regularization * float(residual_M.square().sum())  # each edge counts twice
        present_C = present_C[self.rank_C]
        same_CC = present_C[:, None] == present_C
        self.up_to_date_CC = self.adjacency_CC & same_CC & (present_C | self.up_to_date_CC)
        self.restriction_maps.advance(models, self.members_C)

    def sent_numbers(self, clients: Tensor) -> Tensor:
        """Two messages of d_ij values to each neighbor, or one and a squared norm if the first is derived.

        Neighbors that know each other's last updates can derive it.
        """
        if not self.regularization:
            return torch.zeros_like(clients)
        rank_C = self.rank_C[clients].to(self.restriction_maps.num_rows_CC.device)
        length_CC = self.restriction_maps.num_rows_CC[rank_C][:, rank_C] * (not self.restriction_maps.is_silent)
        numbers_C = length_CC.sum(dim=1) + self.restriction_maps.extra_numbers_C[rank_C]
        if self.map_step_size:
            derived_CC = (self.up_to_date_CC[clients][:, clients] & self.derive_opening).to(length_CC.device)
            numbers_C += torch.where(derived_CC, 1, length_CC).sum(dim=1)
        return numbers_C

    def metrics(self) -> Mapping[str, float]:
        """λ/2 Σ_edges ‖P_ij θ_i - P_ji θ_j‖² among the training clients: Ψ without the local losses."""
        return {"server/coupling": self.coupling}

    def matrices(self) -> Mapping[str, Tensor]:
        """The topology, and the Frobenius norms of the maps (row i has ‖P_ij‖), among the training clients."""
        rank = self.rank_C[self.members]
        return {**super().matrices(), "map_norms": self.restriction_maps.norms()[rank][:, rank]}
