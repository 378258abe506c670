"""Our own restriction map, one for all edges, for models of equal sizes: the directions in which clients differ most.

Sheaf-FMTL learns a map for each edge. Here the clients train alone for some rounds; the principal directions of the
differences between their models are then the map of every edge for the rest of the run. It does not learn, and one
message per round suffices. What lies outside these directions stays personal, as in the paper what lies in the kernel
of the maps.

Shape legend: as in restriction_maps; R rows of the map.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.strategies.decentralized.restriction_maps import RestrictionMaps, check_keys


class PrincipalMaps(RestrictionMaps):
    """One map for all edges: the directions in which the clients' models differ most after some rounds alone.

    In the next exchange, the models are sent along a tree to one client, which returns the first d_ij right singular
    vectors of the centered models; both are counted. Until then, there is no pull.

    Args:
        sizes: Number of values in each client's model; all equal.
        adjacency_CC: Which clients are neighbors.
        projection_fraction: γ; the number of rows must be less than the number of clients.
        num_alone: Number of exchanges before the map is computed, at least 1.

    The other arguments are those of :class:`~fl_lightning.strategies.decentralized.restriction_maps.RestrictionMaps`.
    """

    learns = False
    is_complete = False

    def __init__(
        self,
        sizes: Sequence[int],
        adjacency_CC: Tensor,
        *,
        projection_fraction: float = 0.01,
        num_alone: int = 10,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            sizes, adjacency_CC, projection_fraction=projection_fraction, seed=seed, dtype=dtype, device=device
        )
        self._require_equal_sizes()
        num_rows = max(self.num_rows_E, default=1)
        if num_alone < 1 or num_rows > len(self.sizes) - 1:
            raise ValueError(
                f"PrincipalMaps have num_alone {num_alone}, which must be at least 1, and strategy.projection_fraction "
                f"{projection_fraction:g} gives {num_rows} rows, of which {len(self.sizes)} clients have at most "
                f"{len(self.sizes) - 1}: set it to {(len(self.sizes) - 0.5) / self.sizes[0]:.2g} or less"
            )
        self.num_alone = num_alone
        self.num_exchanges = 0
        self.is_silent = True
        self.map_RD = torch.zeros(num_rows, self.sizes[0], dtype=dtype, device=self.device)
        self.degree_C = (self.num_rows_CC > 0).sum(dim=1).tolist()
        self._count_gathering()

    def _count_gathering(self) -> None:
        """Count the values that are communicated when the map is computed: models up a tree, and the map down.

        They are added to ``extra_numbers_C``.
        """
        import networkx as nx

        self.extra_numbers_C = torch.zeros(len(self.sizes), dtype=torch.long)
        if self.num_exchanges != self.num_alone - 1:
            return
        tree = nx.bfs_tree(nx.from_numpy_array((self.num_rows_CC > 0).numpy()), 0)
        for client in tree:
            above = len(nx.descendants(tree, client)) + 1 if client else 0
            self.extra_numbers_C[client] = above * self.sizes[0] + tree.out_degree(client) * self.map_RD.numel()

    def advance(self, models: Sequence[Tensor], members_C: Tensor) -> None:
        """Compute the map when it is due."""
        self.num_exchanges += 1
        if self.num_exchanges == self.num_alone:
            model_CD = torch.stack(list(models))[members_C.to(self.device)]
            _, _, directions_CD = torch.linalg.svd(model_CD - model_CD.mean(dim=0), full_matrices=False)
            self.map_RD[: len(directions_CD)] = directions_CD[: len(self.map_RD)]
            self.is_silent = False
        self._count_gathering()

    @property
    def num_stored_numbers(self) -> int:
        """The size of the map, stored by every client."""
        return self.map_RD.numel() * len(self.sizes)

    def project(self, models: Sequence[Tensor]) -> Tensor:
        """The same message to every neighbor."""
        degree_C = torch.tensor(self.degree_C, device=self.device)
        return (torch.stack(list(models)) @ self.map_RD.T).repeat_interleave(degree_C, dim=0).flatten()

    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """The map's transpose times the sum over neighbors."""
        residuals = torch.split(residual_M.view(-1, len(self.map_RD)), self.degree_C)
        return list(torch.stack([residual.sum(dim=0) for residual in residuals]) @ self.map_RD)

    def largest_curvature(self, tolerance: float = 0.0) -> float:
        """The largest eigenvalue of the graph's Laplacian, exact, which applies once the map is computed."""
        adjacency_CC = (self.num_rows_CC > 0).double()
        return float(torch.linalg.eigvalsh(torch.diag(adjacency_CC.sum(dim=1)) - adjacency_CC)[-1])

    def matrix(self, client: int) -> Tensor:
        """The map, once for each neighbor."""
        return self.map_RD.repeat(self.degree_C[client], 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The map, and the number of exchanges so far."""
        return {"map": self.map_RD, "num_exchanges": torch.tensor(self.num_exchanges)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`."""
        check_keys(state, self.state_dict())
        self.map_RD.copy_(state["map"])
        self.num_exchanges = int(state["num_exchanges"])
        self.is_silent = self.num_exchanges < self.num_alone
        self._count_gathering()

    def _row_squares(self) -> Tensor:
        return self.map_RD.square().sum(dim=1).repeat(len(self.num_rows_E))
