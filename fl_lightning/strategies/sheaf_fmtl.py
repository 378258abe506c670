"""Sheaf-FMTL: decentralised multi-task learning whose clients, of any sizes, agree in learned projections only.

Ben Issaid, Vepakomma, Bennis: "Tackling Feature and Sample Heterogeneity in Decentralized Multi-Task Learning: A
Sheaf-Theoretic Approach", TMLR 2025, Algorithm 1. Each client i has a restriction map P_ij of shape (d_ij, d_i) for
each neighbour j (``models/restriction_maps.py``, ``models/implicit_maps.py``); Ψ = Σ f_i(θ_i) + λ/2 Σ_edges
‖P_ij θ_i - P_ji θ_j‖² is descended in turn in the models and in the maps:

    everyone sends m_ij = P_ij θ_i;         θ_i <- θ_i - α (∇f_i(θ_i) + λ Σ_j P_ij^T (m_ij - m_ji))     (eq. 18)
    everyone sends m_ij with the new θ_i;   P_ij <- P_ij - η λ (m_ij - m_ji) θ_i^T                       (eq. 19)

Everyone reads messages of the same round (Jacobi). Departures: maps start scaled by 1/√d_i (see the maps' file); with
more than one local step the neighbours' pull is taken once, at the models the round began with. The opening message of
a round follows from the closing one of the round before (``RestrictionMaps.messages_after_update``): with
``derive_opening`` it is not sent, which halves the bits and changes nothing else; this is ours, not the paper's.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.models.restriction_maps import DenseMaps, RestrictionMaps
from fl_lightning.payload import Payload
from fl_lightning.stage import Stage
from fl_lightning.strategies.base import Federation, server_dtype
from fl_lightning.strategies.decentralised import Decentralised
from fl_lightning.topology import Topology

_log = logging.getLogger(__name__)


class SheafFMTL(Decentralised):
    """Local steps, a pull towards agreement with the neighbours, and a step on the maps.

    α is the clients' learning rate; their optimiser should be SGD.

    Args:
        topology: Builds the graph of the clients; None takes the data's client relation graph.
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        regularization: λ; 0 is Local.
        map_step_size: η; 0 keeps the maps as they start.
        projection_fraction: γ in d_ij = floor(γ min(d_i, d_j)), in (0, 1].
        maps: Builds the maps from the models' sizes and the adjacency: ``DenseMaps``, or ``ImplicitMaps`` where dense
            ones would not fit.
        derive_opening: Compute the first message of a round from the round before in place of sending it.
    """

    takes_architectures = True

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        num_epochs: int = 1,
        reset_optimizer: bool = False,
        regularization: float = 0.001,
        map_step_size: float = 0.01,
        projection_fraction: float = 0.01,
        maps: Callable[..., RestrictionMaps] = DenseMaps,
        derive_opening: bool = False,
    ) -> None:
        super().__init__(topology=topology, num_epochs=num_epochs, reset_optimizer=reset_optimizer)
        for name, value in {"regularization": regularization, "map_step_size": map_step_size}.items():
            if value < 0:
                raise ValueError(f"strategy.{name} must not be negative, got {value}")
        self.regularization = regularization
        self.map_step_size = map_step_size
        self.projection_fraction = projection_fraction
        self.build_maps = maps
        self.derive_opening = derive_opening

    def setup(self, federation: Federation) -> None:
        """Draw the maps, and check both steps against what they descend."""
        super().setup(federation)
        self.maps = self.build_maps(
            self.sizes,
            self.adjacency_CC,
            projection_fraction=self.projection_fraction,
            seed=federation.seed,
            dtype=server_dtype(self.models_CP.dtype),
            device=federation.device,
        )
        self.pull = federation.learning_rate * self.regularization
        self.coupling = 0.0
        self.in_step_CC = torch.zeros_like(self.adjacency_CC)
        if self.regularization:
            self._check_steps(federation.learning_rate)

    def _check_steps(self, learning_rate: float) -> None:
        curvature = self.maps.largest_curvature()
        product = self.pull * curvature
        _log.info("alpha * lambda * largest eigenvalue of the sheaf Laplacian = %.3g (must be below 2)", product)
        if product >= 2:
            warnings.warn(
                f"the pull of the neighbours diverges: learning rate {learning_rate:g} x strategy.regularization "
                f"{self.regularization:g} x the sheaf Laplacian's largest eigenvalue {curvature:.3g} is {product:.3g}, "
                "which must be below 2; lower either, or start the maps smaller",
                stacklevel=3,
            )
        self.warned_of_maps = False
        self._check_map_step(self._models())

    def _check_map_step(self, models: list[Tensor]) -> None:
        product = self.map_step_size * self.regularization * self.maps.largest_map_curvature(models)
        if product >= 2 and not self.warned_of_maps:
            self.warned_of_maps = True
            warnings.warn(
                f"the maps diverge: strategy.map_step_size {self.map_step_size:g} x strategy.regularization "
                f"{self.regularization:g} x the largest sum of two neighbours' squared norms is {product:.3g}, which "
                "must be below 2; lower strategy.map_step_size",
                stacklevel=3,
            )

    def _models(self) -> list[Tensor]:
        """Each client's parameters without padding, (d_i,)."""
        return [row_P[:size].to(self.maps.dtype) for row_P, size in zip(self.models_CP, self.sizes, strict=True)]

    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """Eqs. 18 and 19 among the clients that answered; absent ones neither move nor are heard."""
        if not self.regularization:
            return trained_CP
        present_C = torch.zeros(len(self.adjacency_CC), dtype=torch.bool, device=clients.device)
        present_C[clients] = True
        pulls = self.maps.pull_back(self.maps.residual(self.maps.project(self._models()), present_C))
        pull_CP = torch.nn.utils.rnn.pad_sequence(pulls, batch_first=True)[clients]
        new_CP = trained_CP - self.pull * pull_CP.to(trained_CP)

        self.models_CP[clients] = new_CP
        models = self._models()
        residual_M = self.maps.residual(self.maps.project(models), present_C)
        self.coupling = 0.25 * self.regularization * float(residual_M.square().sum())  # each edge is there twice
        if self.map_step_size:
            self._check_map_step(models)
            self.maps.update(residual_M, models, self.map_step_size * self.regularization)
        both_CC = present_C[:, None] & present_C[None, :]
        self.in_step_CC = self.adjacency_CC & (both_CC | (self.in_step_CC & ~present_C[:, None] & ~present_C[None, :]))
        return new_CP

    def peer_bytes(self, stage: Stage, upload: Payload) -> int:
        """Two messages of d_ij numbers along each directed edge, or one and a squared norm where the first is derived.

        Called before the messages are combined: an opening message can be derived by those who heard the last changes.
        """
        if not upload.clients or not self.regularization:
            return 0
        clients = torch.tensor(upload.clients, device=self.federation.device)
        length_CC = self.maps.num_rows_CC.to(clients.device)[clients][:, clients]
        derived_CC = self.in_step_CC[clients][:, clients] & self.derive_opening
        numbers = int(torch.where(derived_CC, length_CC + 1, 2 * length_CC)[length_CC > 0].sum())
        return numbers * self.models_CP.element_size()

    def metrics(self) -> Mapping[str, float]:
        """λ/2 Σ_edges ‖P_ij θ_i - P_ji θ_j‖² before the last step on the maps: Ψ without the local losses."""
        return {"server/coupling": self.coupling}

    def matrices(self) -> Mapping[str, Tensor]:
        """The topology, and the Frobenius norms of the maps, among the training clients."""
        members = torch.tensor(self.federation.training_clients, device=self.federation.device)
        return {**super().matrices(), "map_norms": self.maps.norms()[members][:, members]}

    def state_dict(self) -> dict[str, Any]:
        """Models, topology, maps, and who heard whose last changes."""
        own = {"maps": self.maps.state_dict(), "coupling": self.coupling, "in_step": self.in_step_CC}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        self.maps.load_state_dict(state["maps"])
        self.coupling = state["coupling"]
        self.in_step_CC = state["in_step"].to(self.federation.device)
