"""Restriction maps of large models, P = P^0 - (what was learned), neither part stored element by element.

After k steps of eq. (19) of Sheaf-FMTL (``restriction_maps.py``) the maps of client i are
P_i = P_i^0 - sum_t s_t r_i^t (theta_i^t)^T, all its neighbours' rows stacked. The models theta_i^t are the same for all
its maps, so they are kept once and each row has one coefficient for each of them. When there are too many, the sum is
replaced by its best approximation of lower rank, and the norm of what was dropped is added up.

P^0 is a randomised trigonometric transform instead of a Gaussian matrix: random signs, Hartley transform, random rows
(Ailon and Chazelle, "The fast Johnson-Lindenstrauss transform and approximate nearest neighbors", SIAM J. Computing
2009; Tropp, "Improved analysis of the subsampled randomized Hadamard transform", Advances in Adaptive Data Analysis
2011, with another flat orthogonal matrix). The rows get random signs too: the first column would be constant without.
It costs one transform a client for all neighbours together, who get disjoint rows while there are: stacked, these are
orthonormal or nearly so, and P_i^T P_i has no eigenvalue much above 1. The Gaussian start of
:class:`DenseMaps` has the same norm and (1 + sqrt(R / D))^2. The Hartley matrix,
(cos + sin)(2 pi k n / N) / sqrt(N), exists for every N, where Hadamard's needs a power of two; it is symmetric, its own
inverse, and one real FFT.

Shape legend: as in restriction_maps; N length of the transform, K directions kept, Q newer ones, B rows in use.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.kernels.randomness import generator
from fl_lightning.strategies.decentralised.restriction_maps import RestrictionMaps, check_keys, check_seed


def hartley(x: Tensor) -> Tensor:
    """Orthonormal Hartley transform over the last axis: symmetric, and its own inverse.

    Example:
        >>> hartley(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if x.numel() == 0:  # MKL refuses it
        return x
    length = x.shape[-1]
    spectrum = torch.fft.rfft(x, norm="ortho")
    mirrored = (spectrum.real + spectrum.imag)[..., 1 : (length + 1) // 2].flip(-1)
    return torch.cat([spectrum.real - spectrum.imag, mirrored], dim=-1)


class RandomRows:
    """Random rows of unit length of a randomised Hartley transform, as a matrix (R, D) that is never built.

    The transform is a little longer than D where that is faster (an FFT of prime length takes five times as long as
    one of the next product of 2, 3 and 5), and its rows are cut to D numbers and brought back to length 1. Rows come
    back only when all N have been drawn, so the largest eigenvalue of P^T P is about ceil(R / N).

    Args:
        num_rows: R.
        num_columns: D.
        key: What signs and rows are drawn from: a seed and an index.
        place_R: Which of the drawn rows these are, where matrices of one key share some; the first ones if None.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        key: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        place_R: Tensor | None = None,
    ) -> None:
        from scipy.fft import next_fast_len

        length = int(next_fast_len(num_columns, real=True))
        sign_D = random_signs(num_columns, generator(*key, "restriction_map_columns"))
        order_N = torch.randperm(length, generator=generator(*key, "restriction_map_rows"))
        self.in_order = place_R is None
        place_R = torch.arange(num_rows) if place_R is None else place_R
        sign_R = random_signs(int(place_R.max()) + 1 if num_rows else 0, generator(*key, "restriction_map_signs"))[
            place_R
        ]
        row_R = order_N[place_R % length]
        self.num_columns = num_columns
        self.length = length
        self.sign_D = sign_D.to(device=device, dtype=dtype)
        self.row_R = row_R.to(device)
        self.scale_R = (sign_R * row_squares(num_columns, length)[row_R].rsqrt()).to(device=device, dtype=dtype)

    @property
    def num_stored_numbers(self) -> int:
        """Signs, rows and scales."""
        return self.num_columns + 2 * len(self.row_R)

    def times(self, x: Tensor) -> Tensor:
        """P x, shape (..., D) to (..., R)."""
        padded = torch.nn.functional.pad(x * self.sign_D, (0, self.length - self.num_columns))
        rows: Tensor = hartley(padded)[..., self.row_R] * self.scale_R
        return rows

    def transposed_times(self, y: Tensor) -> Tensor:
        """P^T y, shape (..., R) to (..., D)."""
        y = y * self.scale_R
        if not self.in_order:
            spread = y.new_zeros(*y.shape[:-1], self.length).index_add(-1, self.row_R, y)
            return hartley(spread)[..., : self.num_columns] * self.sign_D
        if y.shape[-1] > self.length:  # rows that occur more than once are added up, in a fixed order
            y = torch.nn.functional.pad(y, (0, -y.shape[-1] % self.length))
            y = y.reshape(*y.shape[:-1], -1, self.length).sum(dim=-2)
        spread = y.new_zeros(*y.shape[:-1], self.length)
        spread = spread.index_copy(-1, self.row_R[: y.shape[-1]], y)
        return hartley(spread)[..., : self.num_columns] * self.sign_D


class LowRankSum:
    """A sum of outer products u v^T of shape (R, D), kept at a bounded rank.

    New terms are stored as they come. When ``max_rank`` and a quarter more are in use, all are brought to an
    orthonormal basis of the v, and the singular directions of least weight are dropped (Eckart and Young): the sum is
    exact up to then, and within ``dropped`` of the exact one, in the Frobenius norm, ever after.

    Args:
        num_rows: R.
        num_columns: D.
        max_rank: Directions kept, at least 1.
        tolerance: Directions are dropped also while the norm of all that are dropped at a time is at most this share
            of the norm of the sum: models that move slowly span few directions.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        *,
        max_rank: int,
        tolerance: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rank = max_rank
        self.tolerance = tolerance
        self.capacity = max_rank + max(1, max_rank // 4)
        self.dropped = 0.0
        self.num_orthonormal = 0
        self.num_used = 0
        self._basis = torch.empty(self.capacity, num_columns, dtype=dtype, device=device)
        self._coefficient = torch.empty(self.capacity, num_rows, dtype=dtype, device=device)

    @property
    def basis_BD(self) -> Tensor:
        """Rows that span the v: orthonormal ones, then the newest v as they came."""
        return self._basis[: self.num_used]

    @property
    def coefficient_BR(self) -> Tensor:
        """Their coefficients: the sum is coefficient^T basis."""
        return self._coefficient[: self.num_used]

    @property
    def num_stored_numbers(self) -> int:
        """Basis and coefficients, with the rows not in use yet."""
        return self._basis.numel() + self._coefficient.numel()

    def add(self, u_R: Tensor, v_D: Tensor) -> None:
        """Add u v^T."""
        if self.num_used == self.capacity:
            self._compress()
        self._basis[self.num_used] = v_D
        self._coefficient[self.num_used] = u_R
        self.num_used += 1

    def times(self, x_D: Tensor) -> Tensor:
        """The sum times x, (R,)."""
        return (self.basis_BD @ x_D) @ self.coefficient_BR

    def transposed_times(self, y_R: Tensor) -> Tensor:
        """The sum transposed times y, (D,)."""
        return (self.coefficient_BR @ y_R) @ self.basis_BD

    def row_squares(self) -> Tensor:
        """Squared lengths of the rows of the sum, (R,)."""
        gram_BB = self.basis_BD @ self.basis_BD.T
        return (self.coefficient_BR * (gram_BB @ self.coefficient_BR)).sum(dim=0)

    def load(self, basis_BD: Tensor, coefficient_BR: Tensor, *, num_orthonormal: int, dropped: float) -> None:
        """Restore a sum of the same shape and bounds."""
        self.num_used = len(basis_BD)
        self.basis_BD.copy_(basis_BD)
        self.coefficient_BR.copy_(coefficient_BR)
        self.num_orthonormal, self.dropped = num_orthonormal, dropped

    def _compress(self) -> None:
        """Keep the best approximation of at most ``max_rank``, with an orthonormal basis."""
        num_old = self.num_orthonormal
        old_KD, new_QD = self.basis_BD[:num_old], self.basis_BD[num_old:]
        old_KR, new_QR = self.coefficient_BR[:num_old], self.coefficient_BR[num_old:]
        for _ in range(2 if num_old else 1):  # orthogonal to the old ones at the second pass
            overlap_QK = new_QD @ old_KD.T
            columns_DQ, triangle_QQ = torch.linalg.qr((new_QD - overlap_QK @ old_KD).T)
            old_KR += overlap_QK.T @ new_QR
            new_QD, new_QR = columns_DQ.T, triangle_QQ @ new_QR
        self.num_used = num_old + len(new_QD)  # fewer where there are more v than columns
        self.basis_BD[num_old:] = new_QD
        self.coefficient_BR[num_old:] = new_QR
        # the right singular vectors of coefficient^T are those of its triangular factor
        triangle = torch.linalg.qr(self.coefficient_BR.T, mode="r").R
        _, weight_B, direction_BB = torch.linalg.svd(triangle, full_matrices=False)
        tail_B = weight_B.double().square().flip(0).cumsum(0).flip(0).sqrt()  # norm of this and all later directions
        needed = int((tail_B > self.tolerance * tail_B[0]).sum())
        kept = min(needed, self.max_rank)
        if kept < len(tail_B):
            self.dropped += float(tail_B[kept])
        basis_KD, coefficient_KR = direction_BB[:kept] @ self.basis_BD, direction_BB[:kept] @ self.coefficient_BR
        self.num_used = self.num_orthonormal = kept
        self.basis_BD.copy_(basis_KD)
        self.coefficient_BR.copy_(coefficient_KR)


class ImplicitMaps(RestrictionMaps):
    """Maps whose start is a fast transform and whose learned part has low rank; see the head of this file.

    Memory is about 5/4 ``max_rank`` models a client, whatever the projection fraction, and a step takes no more than
    writing down the model, save that every max_rank / 4 steps the directions are sorted anew. The maps are exact
    while there have been no more than 5/4 ``max_rank`` steps; then :meth:`truncation_errors` tells. Dense maps take
    less memory where the rows R of a client are fewer than that, and less time where they are fewer than some 150.

    Args:
        max_rank: Directions kept of what each client's maps have learned, at least 1.
        tolerance: Share of what was learned that may be dropped at a time even though there is room, in [0, 1).
        shared_start: Both ends of an edge start from the same rows, as for ``DenseMaps``. The edges of a client have
            different ones, as long as there are enough.

    The others are those of :class:`~fl_lightning.strategies.decentralised.restriction_maps.RestrictionMaps`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float = 0.01,
        max_rank: int = 32,
        tolerance: float = 1e-6,
        shared_start: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            sizes, adjacency_CC, projection_fraction=projection_fraction, seed=seed, dtype=dtype, device=device
        )
        if max_rank < 1 or not 0 <= tolerance < 1:
            raise ValueError(f"max_rank must be at least 1 and tolerance in [0, 1), got {max_rank} and {tolerance}")
        shapes = list(zip(self.num_rows_C, self.sizes, strict=True))
        places: Sequence[Tensor | None] = [None] * len(shapes)
        if shared_start:
            self._require_equal_sizes()
            places = torch.split(shared_places(self.edge_index_2E, len(shapes), self.num_rows_E), self.num_rows_C)
        self._starts = [
            RandomRows(
                num_rows,
                size,
                (seed, 0 if shared_start else client),
                dtype=dtype,
                device=self.device,
                place_R=places[client],
            )
            for client, (num_rows, size) in enumerate(shapes)
        ]
        self._learned = [
            LowRankSum(num_rows, size, max_rank=max_rank, tolerance=tolerance, dtype=dtype, device=self.device)
            for num_rows, size in shapes
        ]

    @property
    def num_stored_numbers(self) -> int:
        """Signs, rows and scales of the start; basis and coefficients of what was learned."""
        start_numbers = sum(start.num_stored_numbers for start in self._starts)
        return start_numbers + sum(learned.num_stored_numbers for learned in self._learned)

    @property
    def ranks(self) -> list[int]:
        """How many directions of its models each client keeps now."""
        return [learned.num_used for learned in self._learned]

    def truncation_errors(self) -> Tensor:
        """Return a bound on the error of each client's maps as a share of what they have learned, float64 (C,).

        It is the sum of the Frobenius norms of all that was ever dropped, over the norm of the learned part; 0 where
        nothing was. The exact maps meant are those of the same residuals and models.
        """
        return torch.tensor([_share(learned) for learned in self._learned], dtype=torch.float64)

    def project(self, models: Sequence[Tensor]) -> Tensor:
        """One transform a client and one product with what was learned."""
        parts = zip(self._starts, self._learned, models, strict=True)
        return torch.cat([start.times(model_D) - learned.times(model_D) for start, learned, model_D in parts])

    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """One transform a client and one product with what was learned."""
        parts = zip(self._starts, self._learned, torch.split(residual_M, self.num_rows_C), strict=True)
        return [start.transposed_times(r_R) - learned.transposed_times(r_R) for start, learned, r_R in parts]

    @torch.no_grad()
    def update(self, residual_M: Tensor, models: Sequence[Tensor], step: float) -> None:
        """Note model and residuals of every client that disagrees with a neighbour."""
        for learned, residual_R, model_D in zip(
            self._learned, torch.split(residual_M, self.num_rows_C), models, strict=True
        ):
            if step and residual_R.any():
                learned.add(step * residual_R, model_D)

    def matrix(self, client: int) -> Tensor:
        """The client's maps element by element."""
        learned = self._learned[client]
        identity_RR = torch.eye(self.num_rows_C[client], dtype=self.dtype, device=self.device)
        return self._starts[client].transposed_times(identity_RR) - learned.coefficient_BR.T @ learned.basis_BD

    def state_dict(self) -> dict[str, Tensor]:
        """What was learned, in copies, and the seed; the start is drawn again from the seed."""
        learned = self._learned
        return {
            "seed": torch.tensor(self.seed),
            "num_orthonormal": torch.tensor([part.num_orthonormal for part in learned]),
            "dropped": torch.tensor([part.dropped for part in learned], dtype=torch.float64),
            **{f"basis.{client}": part.basis_BD.clone() for client, part in enumerate(learned)},
            **{f"coefficient.{client}": part.coefficient_BR.clone() for client, part in enumerate(learned)},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what was learned.

        Raises:
            ValueError: The state is of another seed, or has other shapes.
        """
        check_keys(state, self.state_dict())
        check_seed(int(state["seed"]), self.seed)
        for client, part in enumerate(self._learned):
            basis_BD, coefficient_BR = state[f"basis.{client}"], state[f"coefficient.{client}"]
            expected = (self.sizes[client], self.num_rows_C[client])
            if (basis_BD.shape[1], coefficient_BR.shape[1]) != expected or len(basis_BD) > part.capacity:
                raise ValueError(
                    f"what the maps of client {client} have learned has shapes {tuple(basis_BD.shape)} and "
                    f"{tuple(coefficient_BR.shape)} in the state, and here {expected[0]} and {expected[1]} columns "
                    f"and at most {part.capacity} rows: sizes, graph, projection_fraction or max_rank differ"
                )
            num_orthonormal, dropped = int(state["num_orthonormal"][client]), float(state["dropped"][client])
            part.load(basis_BD, coefficient_BR, num_orthonormal=num_orthonormal, dropped=dropped)

    def _row_squares(self) -> Tensor:
        return torch.cat(
            [
                1 - 2 * (start.times(learned.basis_BD) * learned.coefficient_BR).sum(dim=0) + learned.row_squares()
                for start, learned in zip(self._starts, self._learned, strict=True)
            ]
        )


def shared_places(edge_index_2E: Tensor, num_clients: int, num_rows_E: Sequence[int]) -> Tensor:
    """The same rows at both ends of an edge, and others at the other edges of its ends, (M,).

    Args:
        edge_index_2E: Directed edges, sorted.
        num_clients: C.
        num_rows_E: Rows of each.
    """
    block: dict[tuple[int, int], int] = {}
    taken: list[set[int]] = [set() for _ in range(num_clients)]
    edges = edge_index_2E.T.tolist()
    for i, j in edges:
        if i < j:
            free = next(number for number in itertools.count() if number not in taken[i] | taken[j])
            block[i, j] = block[j, i] = free
            taken[i].add(free)
            taken[j].add(free)
    longest = max(num_rows_E, default=0)
    places = [torch.arange(rows) + block[i, j] * longest for (i, j), rows in zip(edges, num_rows_E, strict=True)]
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.long)


def row_squares(num_columns: int, length: int) -> Tensor:
    """Squared length of every row of the Hartley matrix of that length, cut to so many columns, float64 (N,)."""
    # that of row k is the sum over n < D of 1 + sin(2 pi (2 k) n / N), over N
    sine_N = -torch.fft.fft(torch.ones(num_columns, dtype=torch.float64), n=length).imag
    square_N: Tensor = (num_columns + sine_N[2 * torch.arange(length) % length]) / length
    return square_N


def random_signs(count: int, random: torch.Generator) -> Tensor:
    """Independent signs, float64 (count,)."""
    return torch.randint(2, (count,), generator=random).double() * 2 - 1


def _share(learned: LowRankSum) -> float:
    if learned.dropped == 0:
        return 0.0
    norm = math.sqrt(float(learned.row_squares().sum()))
    return learned.dropped / norm if norm > 0 else math.inf
