"""Restriction maps of large models, P = P^0 - (what was learned), neither part stored element by element.

After k steps of eq. (19) of Sheaf-FMTL (``restriction_maps.py``) the maps of client i are
P_i = P_i^0 - sum_t s_t r_i^t (theta_i^t)^T, all its neighbors' rows stacked. The models theta_i^t are the same for all
its maps, so they are kept once and each row has one coefficient for each of them. When there are too many, the sum is
replaced by its best approximation of lower rank, and the norm of what was dropped is added up.

P^0 is rows of a randomized Hartley transform (``kernels/hartley.py``) instead of a Gaussian matrix. It costs one
transform a client for all neighbors together, who get disjoint rows while there are: stacked, these are orthonormal or
nearly so, and P_i^T P_i has no eigenvalue much above 1. The Gaussian start of :class:`DenseMaps` has the same norm and
(1 + sqrt(R / D))^2.

Shape legend: as in restriction_maps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.kernels.hartley import RandomRows
from fl_lightning.kernels.low_rank_sum import LowRankSum
from fl_lightning.kernels.randomness import generator
from fl_lightning.renamed import refuse_former_names
from fl_lightning.strategies.decentralized.restriction_maps import RestrictionMaps, check_keys, check_seed


@refuse_former_names
class ImplicitMaps(RestrictionMaps):
    """Maps whose initialization is a fast transform and whose learned part has low rank; see the module docstring.

    Memory is about 5/4 ``max_rank`` models per client, whatever the projection fraction, and a step takes no longer
    than writing the model to memory, except that the directions are compressed every max_rank / 4 steps. The maps are
    exact for the first 5/4 ``max_rank`` steps; after that, :meth:`truncation_errors` bounds the error. Dense maps need
    less memory if a client has fewer rows R than that, and less time if it has fewer than about 150.

    Args:
        max_rank: Number of learned directions that are kept for each client's maps, at least 1.
        tolerance: Share of the learned part that may be dropped at a time although there is space, in [0, 1).
        shared_initialization: Whether both ends of an edge start from the same rows, as for ``DenseMaps``. The edges of
            a client have different rows, as long as there are enough.

    The other arguments are those of :class:`~fl_lightning.strategies.decentralized.restriction_maps.RestrictionMaps`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float = 0.01,
        max_rank: int = 32,
        tolerance: float = 1e-6,
        shared_initialization: bool = False,
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
        indices: Sequence[Tensor | None] = [None] * len(shapes)
        if shared_initialization:
            self._require_equal_sizes()
            indices = torch.split(self._shared_places(), self.num_rows_C)

        def start(client: int) -> RandomRows:
            def draw(name: str) -> torch.Generator:
                return generator(seed, 0 if shared_initialization else client, f"restriction_map_{name}")

            return RandomRows(*shapes[client], draw, dtype=dtype, device=self.device, place_R=indices[client])

        self._starts = [start(client) for client in range(len(shapes))]
        self._learned = [
            LowRankSum(num_rows, size, max_rank=max_rank, tolerance=tolerance, dtype=dtype, device=self.device)
            for num_rows, size in shapes
        ]

    @property
    def num_stored_numbers(self) -> int:
        """Signs, rows and scales of the initialization; basis and coefficients of the learned part."""
        start_numbers = sum(start.num_stored_numbers for start in self._starts)
        return start_numbers + sum(learned.num_stored_numbers for learned in self._learned)

    @property
    def ranks(self) -> list[int]:
        """How many directions of its models each client currently keeps."""
        return [learned.num_used for learned in self._learned]

    def truncation_errors(self) -> Tensor:
        """Return a bound on the error of each client's maps as a share of what they have learned, float64 (C,).

        It is the sum of the Frobenius norms of everything that was ever dropped, over the norm of the learned part; 0
        if nothing was dropped. It compares with the exact maps for the same residuals and models.
        """
        return torch.tensor([learned.dropped_share for learned in self._learned], dtype=torch.float64)

    def project(self, models: Sequence[Tensor]) -> Tensor:
        """One transform per client and one product with the learned part."""
        parts = zip(self._starts, self._learned, models, strict=True)
        return torch.cat([start.times(model_D) - learned.times(model_D) for start, learned, model_D in parts])

    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """One transform per client and one product with the learned part."""
        parts = zip(self._starts, self._learned, torch.split(residual_M, self.num_rows_C), strict=True)
        return [start.transposed_times(r_R) - learned.transposed_times(r_R) for start, learned, r_R in parts]

    @torch.no_grad()
    def update(self, residual_M: Tensor, models: Sequence[Tensor], step: float) -> None:
        """Record model and residuals of every client that disagrees with a neighbor."""
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
        """Copies of the learned part, and the seed, from which the initialization is drawn again."""
        learned = self._learned
        return {
            "seed": torch.tensor(self.seed),
            "num_orthonormal": torch.tensor([part.num_orthonormal for part in learned]),
            "dropped": torch.tensor([part.dropped for part in learned], dtype=torch.float64),
            **{f"basis.{client}": part.basis_BD.clone() for client, part in enumerate(learned)},
            **{f"coefficient.{client}": part.coefficient_BR.clone() for client, part in enumerate(learned)},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the learned part.

        Raises:
            ValueError: The state belongs to another seed, or has other shapes.
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
