"""Restriction maps between vectors of different lengths along the edges of a graph, learned by gradient steps.

Ben Issaid, Vepakomma, Bennis: "Tackling Feature and Sample Heterogeneity in Decentralized Multi-Task Learning: A
Sheaf-Theoretic Approach" (Sheaf-FMTL), Section 3.4: the projections P_ij theta_i and the sum over neighbours of
eq. (18), the step of eq. (19), and the sheaf Laplacian L of eq. (8), for which eq. (18) descends 1/2 theta^T L theta.
Departures: d_ij is at least 1, and the standard normal start is scaled by 1/sqrt(d_i), since with variance 1 the
eigenvalues of L grow with the models and steps in theta diverge.

Two things follow from eq. (19) at fixed models. With step s it multiplies every residual m_ij - m_ji by
1 - s (|theta_i|^2 + |theta_j|^2), both ends being updated at once, so s must stay below 2 / (|theta_i|^2 +
|theta_j|^2); the paper's condition 2 / |theta|^2 is twice that. And the messages afterwards follow from those before
without a product (:meth:`RestrictionMaps.messages_after_update`), nor need they be sent again: of its neighbour's
update a client lacks one number, the squared norm of the neighbour's model.

Shape legend: C clients, E directed edges (i, j) sorted by i and then j, M numbers in all messages of one exchange. Of
one client: D numbers of its model (d_i), R rows of its stacked maps (the sum of d_ij over its neighbours j).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.kernels.randomness import generator
from fl_lightning.relations.edges import opposite_pairs
from fl_lightning.run.memory import require


class MapStart(ABC):
    """Draws one map before anything is learned; never zero, which eq. (19) would never leave."""

    @abstractmethod
    def __call__(self, shape: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return a map of shape (d_ij, d_i) on the CPU."""


@dataclass(frozen=True, kw_only=True)
class GaussianStart(MapStart):
    """Independent normal elements.

    Args:
        deviation: Their standard deviation, above 0; None takes 1/sqrt(d_i), which makes rows about 1 long. The paper
            uses 1, and 0.01 and 0.1 in its Table 6.
    """

    deviation: float | None = None

    def __post_init__(self) -> None:
        if self.deviation is not None:
            _require_positive("deviation", self.deviation)

    def __call__(self, shape: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw the map."""
        deviation = 1 / math.sqrt(shape[1]) if self.deviation is None else self.deviation
        return torch.randn(shape, generator=random, dtype=dtype).mul_(deviation)


@dataclass(frozen=True, kw_only=True)
class UniformStart(MapStart):
    """Independent elements, uniform in [-bound, bound].

    Args:
        bound: Above 0. The paper's Table 6 has 0.01, 0.1 and 1.
    """

    bound: float = 0.01

    def __post_init__(self) -> None:
        _require_positive("bound", self.bound)

    def __call__(self, shape: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw the map."""
        return torch.rand(shape, generator=random, dtype=dtype).mul_(2 * self.bound).sub_(self.bound)


@dataclass(frozen=True, kw_only=True)
class OrthogonalStart(MapStart):
    """Orthonormal rows, P P^T = I, uniform among such maps."""

    def __call__(self, shape: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw the map."""
        columns, triangle = torch.linalg.qr(torch.randn(shape[1], shape[0], generator=random, dtype=dtype))
        rows: Tensor = (columns * triangle.diagonal().sign()).T
        return rows


@dataclass(frozen=True, kw_only=True)
class IdentityStart(MapStart):
    """The first rows of the identity, scaled, with or without noise.

    With ``scale = sqrt(a)``, no noise and a projection fraction of 1 the residuals are those of dFedU with weight a;
    with ``noise = 0.01`` it is the paper's "Identity + Noise".

    Args:
        scale: Above 0.
        noise: Standard deviation of normal noise on every element, at least 0.
    """

    scale: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("scale", self.scale)
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be a number of at least 0, got {self.noise}")

    def __call__(self, shape: tuple[int, int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw the map."""
        map_ = torch.randn(shape, generator=random, dtype=dtype).mul_(self.noise)
        map_.diagonal().add_(self.scale)
        return map_


class RestrictionMaps(ABC):
    """One linear map P_ij of shape (d_ij, d_i) for every directed edge, with d_ij = floor(fraction * min(d_i, d_j)).

    Models are sequences of one vector (D,) a client. Messages and residuals are one flat vector (M,) of all clients'
    numbers, sorted by sender and then by receiver; ``num_rows_E`` divides it into edges and ``num_rows_C`` into
    clients.

    Args:
        sizes: Numbers in each client's model.
        adjacency_CC: Who is joined to whom: boolean, symmetric, without self loops.
        projection_fraction: In (0, 1]; at least one row is kept of every map.
        seed: Of the starting maps. What is drawn hangs on the client's or the pair's index alone.
        dtype: float32 or float64, of the maps and of the models they meet.
        device: Of the maps.

    Attributes:
        num_rows_E: d_ij of each directed edge.
        num_rows_C: R of each client.
        num_rows_CC: d_ij as a matrix, 0 where there is no edge.
        extra_numbers_C: Numbers that each client sends in the coming exchange beside its messages, int64.

    Raises:
        ValueError: A setting is out of range, sizes and adjacency do not fit each other, or the maps do not fit into
            memory.
    """

    #: Whether eq. (19) changes them; the others need ``map_step_size: 0``.
    learns: ClassVar[bool] = True
    #: Whether the maps of one exchange compare all that the clients shall agree in, so that their rows can be counted.
    is_complete: ClassVar[bool] = True
    #: Whether there is nothing to send yet.
    is_silent: bool = False

    def __init__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float = 0.01,
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
        size_C = torch.tensor(self.sizes)
        smaller_E = torch.minimum(size_C[source_E], size_C[target_E]).double()
        # 0.29 * 100 is a rounding below 29
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
        """Refuse maps that do not fit; here what every kind has, three index numbers for each of a message."""
        require(
            3 * 8 * self.num_message_numbers,
            f"the messages of {len(self.num_rows_E):,} directed edges",
            "lower strategy.projection_fraction, or choose a topology with fewer edges",
            self.device,
        )

    def _require_equal_sizes(self) -> None:
        if len(set(self.sizes)) > 1:
            raise ValueError(
                f"shared_start is for models of equal sizes, these have {sorted(set(self.sizes))} numbers: leave it out"
            )

    @property
    def num_message_numbers(self) -> int:
        """M: how many numbers travel when every client projects its model for each of its neighbours."""
        return sum(self.num_rows_E)

    @property
    @abstractmethod
    def num_stored_numbers(self) -> int:
        """How many numbers the maps take in memory."""

    @abstractmethod
    def project(self, models: Sequence[Tensor]) -> Tensor:
        """Return the messages m_ij = P_ij theta_i, (M,)."""

    @abstractmethod
    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """Return the sum over neighbours of P_ij^T r_ij for every client, (D,) each: L theta for r = residual."""

    def update(self, residual_M: Tensor, models: Sequence[Tensor], step: float) -> None:
        """Take the gradient step P_ij <- P_ij - step r_ij theta_i^T of eq. (19), where step is eta lambda.

        Never called where ``learns`` is false.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update: set learns to False, or write it")

    def advance(self, models: Sequence[Tensor], members_C: Tensor) -> None:
        """End an exchange: maps that change by themselves do it here.

        Args:
            models: What the clients have after it.
            members_C: Clients that are not held out of training, boolean.
        """
        return

    @abstractmethod
    def matrix(self, client: int) -> Tensor:
        """Return the maps of a client stacked in the order of its neighbours, (R, D): to read and to test."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return what the maps have become, as tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned for the same sizes, graph and fraction."""

    @abstractmethod
    def _row_squares(self) -> Tensor:
        """Squared length of every row of every map, (M,)."""

    def residual(self, message_M: Tensor, present_C: Tensor | None = None) -> Tensor:
        """Return the disagreements r_ij = m_ij - m_ji, (M,).

        Args:
            message_M: What :meth:`project` returned.
            present_C: Clients that take part, boolean; edges with an absent end get 0, so that neither model nor map
                moves along them. None: everyone.
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

        They are those that open the next iteration, if ``message_M`` are the messages that :meth:`update` used. Where
        maps are truncated they miss that error.
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

    def largest_curvature(self, num_steps: int = 16) -> float:
        """Estimate the largest eigenvalue of the sheaf Laplacian L, rather from above.

        The gradient step of eq. (18), taken by everyone at once, diverges along L alone if alpha lambda times it
        reaches 2. Lanczos from a random vector, plus the residuals of the Ritz pairs (Zhou and Li, "Bounding the
        spectrum of large Hermitian matrices", Linear Algebra and its Applications 2011): not a proof, but 16 steps came
        within -0.1 and +7 % on random graphs.

        Args:
            num_steps: Products with L.
        """
        random = generator(self.seed, "restriction_map_curvature")
        vector_D = torch.randn(sum(self.sizes), generator=random, dtype=self.dtype).to(self.device)
        vector_D /= vector_D.norm()
        previous_D = torch.zeros_like(vector_D)
        diagonal: list[float] = []
        beside: list[float] = [0.0]
        while len(diagonal) < num_steps:
            image_D = torch.cat(self.pull_back(self.residual(self.project(torch.split(vector_D, list(self.sizes))))))
            image_D -= beside[-1] * previous_D
            diagonal.append(float(image_D @ vector_D))
            image_D -= diagonal[-1] * vector_D
            beside.append(float(image_D.norm()))
            if beside[-1] == 0:
                break
            previous_D, vector_D = vector_D, image_D / beside[-1]
        lower = torch.tensor(beside[1:-1], dtype=torch.float64).diag(-1) if len(diagonal) > 1 else 0.0
        tridiagonal = torch.tensor(diagonal, dtype=torch.float64).diag() + lower
        ritz, vectors = torch.linalg.eigh(tridiagonal)  # reads the lower triangle
        return float((ritz + beside[-1] * vectors[-1].abs()).max())

    def rows_against_needed(self, members_C: Tensor) -> tuple[int, int]:
        """Return how many numbers the edges among some clients compare, and how many make these agree.

        N models of d numbers agree if N - 1 edges that form a tree compare all d, and with fewer than (N - 1) d
        comparisons they need not. Models of unequal sizes can compare what the smaller of two has.

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


class DenseMaps(RestrictionMaps):
    """Maps stored element by element, those of one client as one matrix (R, D).

    A product or an update is then one matrix-vector product or rank-one update a client, at the speed of memory.
    An iteration with products batched over all edges took longer on a CPU, for 100 numbers a model as for 10,000.

    Args:
        start: Draws each map.
        shared_start: Both ends of an edge start from the same map, so that they begin by comparing the same things;
            only for models of equal sizes. The paper draws both.

    The others are those of :class:`RestrictionMaps`.

    Example:
        >>> path_CC = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
        >>> maps = DenseMaps([4, 6, 2], path_CC, projection_fraction=0.5)
        >>> maps.num_rows_E
        [2, 2, 1, 1]
        >>> message_M = maps.project([torch.ones(4), torch.ones(6), torch.ones(2)])
        >>> [pulled_D.shape for pulled_D in maps.pull_back(maps.residual(message_M))]
        [torch.Size([4]), torch.Size([6]), torch.Size([2])]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float = 0.01,
        start: MapStart | None = None,
        shared_start: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            sizes, adjacency_CC, projection_fraction=projection_fraction, seed=seed, dtype=dtype, device=device
        )
        start = start or GaussianStart()
        if shared_start:
            self._require_equal_sizes()
        self._maps = [
            torch.empty(num_rows, size, dtype=dtype, device=device)
            for num_rows, size in zip(self.num_rows_C, self.sizes, strict=True)
        ]
        first_C = [0] * len(self.sizes)
        for (i, j), num_rows in zip(self.edge_index_2E.T.tolist(), self.num_rows_E, strict=True):
            random = generator(seed, "restriction_map", *(sorted((i, j)) if shared_start else (i, j)))
            rows = slice(first_C[i], first_C[i] + num_rows)
            self._maps[i][rows] = start((num_rows, self.sizes[i]), random, dtype)
            first_C[i] += num_rows

    def _require_memory(self) -> None:
        numbers = sum(rows * size for rows, size in zip(self.num_rows_C, self.sizes, strict=True))
        require(
            numbers * self.dtype.itemsize,
            f"the dense restriction maps of {len(self.sizes)} clients ({numbers:,} numbers)",
            "set strategy.maps to ImplicitMaps, or lower strategy.projection_fraction",
            self.device,
        )
        super()._require_memory()

    @property
    def num_stored_numbers(self) -> int:
        """The elements of all maps."""
        return sum(map_RD.numel() for map_RD in self._maps)

    def project(self, models: Sequence[Tensor]) -> Tensor:
        """One matrix-vector product a client."""
        return torch.cat([map_RD @ model_D for map_RD, model_D in zip(self._maps, models, strict=True)])

    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """One transposed matrix-vector product a client."""
        residuals = torch.split(residual_M, self.num_rows_C)
        return [residual_R @ map_RD for residual_R, map_RD in zip(residuals, self._maps, strict=True)]

    @torch.no_grad()
    def update(self, residual_M: Tensor, models: Sequence[Tensor], step: float) -> None:
        """One rank-one update a client, in place."""
        for map_RD, residual_R, model_D in zip(
            self._maps, torch.split(residual_M, self.num_rows_C), models, strict=True
        ):
            map_RD.addr_(residual_R, model_D, alpha=-step)

    def matrix(self, client: int) -> Tensor:
        """The client's maps themselves."""
        return self._maps[client]

    def state_dict(self) -> dict[str, Tensor]:
        """Each client's stacked maps under its index, not copied."""
        return {str(client): map_RD for client, map_RD in enumerate(self._maps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the maps in."""
        check_keys(state, self.state_dict())
        for client, map_RD in enumerate(self._maps):
            found = state[str(client)]
            if found.shape != map_RD.shape:
                raise ValueError(
                    f"the maps of client {client} have shape {tuple(found.shape)} in the state and "
                    f"{tuple(map_RD.shape)} here: sizes, graph or projection_fraction differ"
                )
            map_RD.copy_(found)

    def _row_squares(self) -> Tensor:
        return torch.cat([torch.linalg.vector_norm(map_RD, dim=1).square() for map_RD in self._maps])


def check_keys(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names the keys by which a state differs from the expected one."""
    if state.keys() != expected.keys():
        raise ValueError(f"the state of the maps differs in the keys {sorted(state.keys() ^ expected.keys())}")


def check_seed(found: int, expected: int) -> None:
    """Raise a ValueError if a state is of maps drawn from another seed."""
    if found != expected:
        raise ValueError(f"the state belongs to maps of seed {found}, these start from seed {expected}")


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, got {value}: maps that start from zero never learn")
