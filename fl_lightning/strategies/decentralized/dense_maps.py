"""Restriction maps that are stored element by element.

Shape legend: as in restriction_maps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.kernels.randomness import generator
from fl_lightning.memory import require
from fl_lightning.renamed import refuse_former_names
from fl_lightning.strategies.decentralized.map_initialization import GaussianInitialization, MapInitialization
from fl_lightning.strategies.decentralized.restriction_maps import RestrictionMaps, check_keys


@refuse_former_names
class DenseMaps(RestrictionMaps):
    """Maps stored element by element, those of one client as one matrix (R, D).

    A product or an update is then one matrix-vector product or rank-one update per client, at memory bandwidth. With
    products batched over all edges, an iteration took longer on a CPU, both for models of 100 and of 10,000 values.

    Args:
        initialization: Draws each map.
        shared_initialization: Whether both ends of an edge start from the same map, so that they begin by comparing the
            same things; only for models of equal sizes. The paper draws both.

    The other arguments are those of :class:`RestrictionMaps`.

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
        initialization: MapInitialization | None = None,
        shared_initialization: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            sizes, adjacency_CC, projection_fraction=projection_fraction, seed=seed, dtype=dtype, device=device
        )
        initialization = initialization or GaussianInitialization()
        if shared_initialization:
            self._require_equal_sizes()
        self._maps = [
            torch.empty(num_rows, size, dtype=dtype)  # drawn on the CPU, in place: they can be large
            for num_rows, size in zip(self.num_rows_C, self.sizes, strict=True)
        ]
        first_C = [0] * len(self.sizes)
        for (i, j), num_rows in zip(self.edge_index_2E.T.tolist(), self.num_rows_E, strict=True):
            random = generator(seed, "restriction_map", *(sorted((i, j)) if shared_initialization else (i, j)))
            rows = slice(first_C[i], first_C[i] + num_rows)
            initialization.fill(self._maps[i][rows], random)
            first_C[i] += num_rows
        self._maps = [map_.to(device) for map_ in self._maps]

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
        """The number of elements of all maps."""
        return sum(map_RD.numel() for map_RD in self._maps)

    def project(self, models: Sequence[Tensor]) -> Tensor:
        """One matrix-vector product per client."""
        return torch.cat([map_RD @ model_D for map_RD, model_D in zip(self._maps, models, strict=True)])

    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """One transposed matrix-vector product per client."""
        residuals = torch.split(residual_M, self.num_rows_C)
        return [residual_R @ map_RD for residual_R, map_RD in zip(residuals, self._maps, strict=True)]

    @torch.no_grad()
    def update(self, residual_M: Tensor, models: Sequence[Tensor], step: float) -> None:
        """One rank-one update per client, in place."""
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
        """Copy the maps from the state."""
        check_keys(state, self.state_dict())
        for client, map_RD in enumerate(self._maps):
            result = state[str(client)]
            if result.shape != map_RD.shape:
                raise ValueError(
                    f"the maps of client {client} have shape {tuple(result.shape)} in the state and "
                    f"{tuple(map_RD.shape)} here: sizes, graph or projection_fraction differ"
                )
            map_RD.copy_(result)

    def _row_squares(self) -> Tensor:
        return torch.cat([torch.linalg.vector_norm(map_RD, dim=1).square() for map_RD in self._maps])
