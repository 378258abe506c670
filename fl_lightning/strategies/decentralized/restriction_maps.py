"""Restriction maps between vectors of different lengths along the edges of a graph, learned by gradient steps.

Ben Issaid, Vepakomma, Bennis: "Tackling Feature and Sample Heterogeneity in Decentralized Multi-Task Learning: A
Sheaf-Theoretic Approach" (Sheaf-FMTL), Section 3.4: the projections P_ij theta_i and the sum over neighbors of
eq. (18), the step of eq. (19), and the sheaf Laplacian L of eq. (8), for which eq. (18) descends 1/2 theta^T L theta.
This file has what all kinds of maps have in common; each kind has a file of its own. Departure: d_ij is at least 1.

Two things follow from eq. (19) at fixed models. With step s it multiplies every residual m_ij - m_ji by
1 - s (|theta_i|^2 + |theta_j|^2), both ends being updated at once, so s must stay below 2 / (|theta_i|^2 +
|theta_j|^2). The paper's condition s < 2 / |theta|^2, with theta the models of all clients together, implies this. And
the messages afterward follow from those before without a product (:meth:`RestrictionMaps.messages_after_update`), nor
need they be sent again: of its neighbor's update a client lacks one number, the squared norm of the neighbor's model.

Shape legend: C clients, E directed edges (i, j) sorted by i and then j, M numbers in all messages of one exchange. Of
one client: D numbers of its model (d_i), R rows of its stacked maps (the sum of d_ij over its neighbors j).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.kernels.randomness import generator
from fl_lightning.memory import require
from fl_lightning.relations.edges import edge_colors, opposite_pairs
from fl_lightning.strategies.decentralized.map_initialization import (
    GaussianInitialization,
    IdentityInitialization,
    MapInitialization,
    OrthogonalInitialization,
    UniformInitialization,
)

#: Configurations name the initializations by this module.
__all__ = [
    "GaussianInitialization",
    "IdentityInitialization",
    "MapInitialization",
    "OrthogonalInitialization",
    "RestrictionMaps",
    "UniformInitialization",
]


class RestrictionMaps(ABC):
    """One linear map P_ij of shape (d_ij, d_i) for every directed edge, with d_ij = floor(fraction * min(d_i, d_j)).

    Models are sequences of one vector (D,) per client. Messages and residuals are one flat vector (M,) of all clients'
    values, sorted by sender and then by receiver; ``num_rows_E`` divides it into edges and ``num_rows_C`` into
    clients.

    Args:
        sizes: Number of values in each client's model.
        adjacency_CC: Which clients are neighbors: boolean, symmetric, without self loops.
        projection_fraction: γ, in (0, 1]; every map has at least one row.
        most_compared: Count at most this many values of a model.
        seed: Seed of the initial maps. Draws depend only on the index of the client or the pair.
        dtype: float32 or float64, for the maps and the models.
        device: Device of the maps.

    Attributes:
        num_rows_E: d_ij of each directed edge.
        num_rows_C: R of each client.
        num_rows_CC: d_ij as a matrix, 0 where there is no edge.
        extra_numbers_C: Number of values that each client sends in the coming exchange in addition to its messages,
            int64.

    Raises:
        ValueError: A setting is out of range, sizes and adjacency do not fit each other, or the maps do not fit into
            memory.
    """

    #: Whether eq. (19) changes the maps; otherwise ``map_step_size`` must be 0.
    learns: ClassVar[bool] = True
    #: Whether the maps of one exchange compare everything on which clients should agree, so that rows can be counted.
    is_complete: ClassVar[bool] = True
    #: Whether there is nothing to send yet.
    is_silent: bool = False

    def __init__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float = 0.01,
        most_compared: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        adjacency_CC = adjacency_CC.bool().cpu()
        if adjacency_CC.shape != (len(sizes), len(sizes)):
            raise ValueError(f"adjacency of shape {tuple(adjacency_CC.shape)} does not fit {len(sizes)} clients")
        if not torch.equal(adjacency_CC, adjacency_CC.T) or adjacency_CC.diagonal().any():
            raise ValueError("restriction maps need a symmetric adjacency without self loops")
        if not 0 < projection_fraction <= 1:
            raise ValueError(f"projection_fraction must be in (0, 1], got {projection_fraction}")
        if min(sizes, default=1) < 1 or dtype not in (torch.float32, torch.float64):
            raise ValueError(f"sizes must be at least 1 and dtype float32 or float64, got {list(sizes)} and {dtype}")
        self.sizes = tuple(sizes)
        self.seed = seed
        self.dtype = dtype
        self.device = torch.device(device)
        self.edge_index_2E = adjacency_CC.nonzero().T
        source_E, target_E = self.edge_index_2E
        size_C = torch.tensor(self.sizes if most_compared is None else [min(d, most_compared) for d in self.sizes])
        smaller_E = torch.minimum(size_C[source_E], size_C[target_E]).double()
        # 0.29 * 100 is below 29 by rounding
        rows_E = (projection_fraction * smaller_E + 1e-9).floor().long().clamp_min(1)
        self.num_rows_CC = torch.zeros(adjacency_CC.shape, dtype=torch.long).index_put((source_E, target_E), rows_E)
        self.num_rows_E: list[int] = rows_E.tolist()
        self.num_rows_C: list[int] = self.num_rows_CC.sum(dim=1).tolist()
        self.extra_numbers_C = torch.zeros(len(self.sizes), dtype=torch.long)
        self._require_memory()
        first_E = rows_E.cumsum(0) - rows_E
        shift_E = first_E[opposite_pairs(self.edge_index_2E, len(self.sizes))] - first_E
        self._opposite_M = (torch.arange(self.num_message_numbers) + shift_E.repeat_interleave(rows_E)).to(self.device)
        self._source_M = source_E.repeat_interleave(rows_E).to(self.device)
        self._target_M = target_E.repeat_interleave(rows_E).to(self.device)

    def _require_memory(self) -> None:
        """Refuse maps that do not fit into memory; here, three indices for each value of a message."""
        require(
            3 * 8 * self.num_message_numbers,
            f"the messages of {len(self.num_rows_E):,} directed edges",
            "lower strategy.projection_fraction, or choose a topology with fewer edges",
            self.device,
        )

    def _require_equal_sizes(self) -> None:
        if len(set(self.sizes)) > 1:
            raise ValueError(
                f"shared_initialization is for models of equal sizes, these have "
                f"{sorted(set(self.sizes))} numbers: leave it out"
            )

    def _shared_places(self) -> Tensor:
        """Row indices that are the same at both ends of an edge, but different at other edges of its ends, (M,)."""
        longest = max(self.num_rows_E, default=0)
        first_E = longest * edge_colors(self.edge_index_2E, len(self.sizes))
        indices = [torch.arange(rows) + first for rows, first in zip(self.num_rows_E, first_E, strict=True)]
        return torch.cat(indices) if indices else first_E

    @property
    def num_message_numbers(self) -> int:
        """M: how many values are sent when every client projects its model for each of its neighbors."""
        return sum(self.num_rows_E)

    @property
    @abstractmethod
    def num_stored_numbers(self) -> int:
        """How many values the maps store in memory."""

    @abstractmethod
    def project(self, models: Sequence[Tensor]) -> Tensor:
        """Return the messages m_ij = P_ij theta_i, (M,)."""

    @abstractmethod
    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """Return the sum over neighbors of P_ij^T r_ij for every client, (D,) each: L theta for r = residual."""

    def update(self, residual_M: Tensor, models: Sequence[Tensor], step: float) -> None:
        """Take the gradient step P_ij <- P_ij - step r_ij theta_i^T of eq. (19), where step is eta lambda.

        It is never called if ``learns`` is false.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update: set learns to False, or implement it")

    def advance(self, models: Sequence[Tensor], members_C: Tensor) -> None:
        """End an exchange; maps that change without learning do so here.

        Args:
            models: The clients' models after the exchange.
            members_C: Clients that are not held out of training, boolean.
        """
        return

    @abstractmethod
    def matrix(self, client: int) -> Tensor:
        """Return the maps of a client stacked in the order of its neighbors, (R, D), for inspection and tests."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the maps as tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned for the same sizes, graph and fraction."""

    @abstractmethod
    def _row_squares(self) -> Tensor:
        """Squared norm of every row of every map, (M,)."""

    def residual(self, message_M: Tensor, present_C: Tensor | None = None) -> Tensor:
        """Return the disagreements r_ij = m_ij - m_ji, (M,).

        Args:
            message_M: The result of :meth:`project`.
            present_C: Clients that take part, boolean; edges with an absent end get 0, so that neither model nor map
                moves along them. None for all clients.
        """
        residual_M = message_M - message_M[self._opposite_M]
        if present_C is None:
            return residual_M
        present_C = present_C.to(self.device)
        return residual_M * (present_C[self._source_M] & present_C[self._target_M])

    def messages_after_update(
        self, message_M: Tensor, residual_M: Tensor, models: Sequence[Tensor], step: float
    ) -> Tensor:
        """Return the messages of the updated maps for the same models, m_ij - step |theta_i|^2 r_ij, (M,).

        They are the opening messages of the next iteration, if ``message_M`` are the messages that :meth:`update` used.
        They ignore the error of truncated maps.
        """
        square_C = torch.stack([model.square().sum() for model in models])
        return message_M - step * square_C[self._source_M] * residual_M

    def norms(self) -> Tensor:
        """Return the Frobenius norms of all maps, (C, C), 0 where there is no edge."""
        norm_E = [row_squares.sum().sqrt() for row_squares in torch.split(self._row_squares(), self.num_rows_E)]
        norms_CC = torch.zeros(self.num_rows_CC.shape, dtype=self.dtype, device=self.device)
        if norm_E:
            norms_CC[tuple(self.edge_index_2E.to(self.device))] = torch.stack(norm_E)
        return norms_CC

    def largest_curvature(self, tolerance: float = 0.02) -> float:
        """The largest eigenvalue of the sheaf Laplacian L (ARPACK's Lanczos, by products with it).

        The gradient step of eq. (18), taken by all clients at once, diverges if alpha lambda times this eigenvalue
        reaches 2.

        Args:
            tolerance: Relative error. A product with L reads every map, so two hundredths are what a warning needs.
        """
        from scipy.sparse.linalg import LinearOperator, eigsh

        def product(vector: np.ndarray) -> np.ndarray:
            vector_D = torch.from_numpy(vector.ravel()).to(self.device)
            pulled = self.pull_back(self.residual(self.project(torch.split(vector_D, list(self.sizes)))))
            return torch.cat(pulled).cpu().numpy()

        random, size = generator(self.seed, "restriction_map_curvature"), sum(self.sizes)
        start_D = torch.randn(size, generator=random, dtype=self.dtype).numpy()
        if not product(start_D).any():  # no edges
            return 0.0
        laplacian = LinearOperator((size, size), matvec=product, dtype=start_D.dtype)
        # a few vectors at a time: each is as long as all clients' models together
        (result,) = eigsh(
            laplacian, 1, which="LA", v0=start_D, ncv=min(size, 8), tol=tolerance, return_eigenvectors=False
        )
        return float(result)

    def rows_against_needed(self, members_C: Tensor) -> tuple[int, int]:
        """Return how many values the edges among some clients compare, and how many are needed for agreement.

        N models of d values agree if N - 1 edges that form a tree compare all d values; with fewer than (N - 1) d
        comparisons they may disagree. Models of unequal sizes can compare the values of the smaller one.

        Args:
            members_C: The clients, boolean.
        """
        import networkx as nx

        members_C = members_C.cpu()
        rows_CC = self.num_rows_CC[members_C][:, members_C]
        size_C = torch.tensor(self.sizes)[members_C]
        smaller_CC = torch.minimum(size_C[:, None], size_C) * (rows_CC > 0)
        tree = nx.minimum_spanning_tree(nx.from_numpy_array(smaller_CC.numpy()))
        return int(rows_CC.sum()) // 2, int(tree.size(weight="weight"))

    def largest_map_curvature(self, models: Sequence[Tensor]) -> float:
        """Return the largest |theta_i|^2 + |theta_j|^2 of an edge: map steps of 2 over it or more diverge."""
        square_C = torch.stack([model.detach().square().sum() for model in models]).cpu()
        source_E, target_E = self.edge_index_2E
        return float((square_C[source_E] + square_C[target_E]).max()) if len(source_E) else 0.0


def check_keys(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names the keys in which a state differs from the expected one."""
    if state.keys() != expected.keys():
        raise ValueError(f"the state of the maps differs in the keys {sorted(state.keys() ^ expected.keys())}")


def check_seed(seed: int, expected: int) -> None:
    """Raise a ValueError if a state belongs to maps drawn from another seed."""
    if seed != expected:
        raise ValueError(f"the state belongs to maps of seed {seed}, these start from seed {expected}")
