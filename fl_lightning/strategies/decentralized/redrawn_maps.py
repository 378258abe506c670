"""Our own restriction maps, which are drawn again for every exchange.

Sheaf-FMTL learns a map for each edge, stores it at both ends and sends two messages a round. The effect of maps on the
models is that of the sheaf Laplacian (``restriction_maps.py``), however they are chosen. These maps are random rows,
the same at both ends of an edge and different in every exchange, drawn from a key: averaged over exchanges, P^T P is
gamma times the identity, so that this is dFedU with gamma times its pull and gamma times its bits, however small gamma
is; nothing is stored, and only one message is sent. (Sending random projections of gradients or models is known as
sketching.)

Shape legend: as in restriction_maps; N length of the transform.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.kernels.hartley import RandomRows
from fl_lightning.kernels.randomness import generator
from fl_lightning.strategies.decentralized.restriction_maps import RestrictionMaps, check_keys, check_seed


class RedrawnMaps(RestrictionMaps):
    """Shared random maps that are drawn again for every exchange: rows of a randomized Hartley transform.

    The edges of a client have different rows, as long as there are enough, so that the largest
    eigenvalue of the sheaf Laplacian is about 2 and α λ may be as large as 1; at 1/2 neighbors meet halfway.

    Args:
        sizes: Number of values in each client's model.
        adjacency_CC: Which clients are neighbors.
        num_compared: Compare only the first ``num_compared`` values of each model, and take γ as a share of these; None
            for all, which requires equal sizes. ``SheafFMTL`` orders the values that all nets have first; in nets that
            differ only in width, these are as many as the narrowest net has.

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
        num_compared: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            sizes,
            adjacency_CC,
            projection_fraction=projection_fraction,
            most_compared=num_compared,
            seed=seed,
            dtype=dtype,
            device=device,
        )
        if num_compared is None and len(set(self.sizes)) > 1:
            raise ValueError(
                f"RedrawnMaps without num_compared are for models of equal sizes, these have {sorted(set(self.sizes))} "
                f"numbers: set strategy.maps.num_compared, to {min(self.sizes)} at most"
            )
        self.num_compared = self.sizes[0] if num_compared is None else num_compared
        if not 1 <= self.num_compared <= min(self.sizes):
            raise ValueError(
                f"num_compared is {num_compared}: give at least 1 and at most {min(self.sizes)}, which the smallest "
                "model has"
            )
        self._place_M = self._shared_places()
        self.num_exchanges = 0
        self._redraw()

    def _redraw(self) -> None:
        self._rows = RandomRows(
            self.num_message_numbers,
            self.num_compared,
            functools.partial(generator, self.seed, "redrawn maps", self.num_exchanges),
            dtype=self.dtype,
            device=self.device,
            place_R=self._place_M,
        )

    def advance(self, models: Sequence[Tensor], members_C: Tensor) -> None:
        """Draw the next maps."""
        self.num_exchanges += 1
        self._redraw()

    @property
    def num_stored_numbers(self) -> int:
        """Only the signs and rows of one exchange."""
        return self._rows.num_stored_numbers

    def project(self, models: Sequence[Tensor]) -> Tensor:
        """One transform of all models together."""
        model_CN = self._rows.transform(torch.stack([model_D[: self.num_compared] for model_D in models]))
        return model_CN[self._source_M, self._rows.row_R] * self._rows.scale_R

    def pull_back(self, residual_M: Tensor) -> list[Tensor]:
        """One transform of all clients together."""
        spread_CN = torch.zeros(len(self.sizes), self._rows.length, dtype=self.dtype, device=self.device)
        place_M = self._source_M * self._rows.length + self._rows.row_R
        spread_CN.view(-1).index_add_(0, place_M, residual_M * self._rows.scale_R)
        pulled_CD = self._rows.transform_back(spread_CN)
        return [
            torch.nn.functional.pad(pulled_D, (0, size - self.num_compared))
            for pulled_D, size in zip(pulled_CD, self.sizes, strict=True)
        ]

    def matrix(self, client: int) -> Tensor:
        """Rows of the transform."""
        mine_M = self._source_M == client
        map_DN = self._rows.transform(torch.eye(self.num_compared, dtype=self.dtype, device=self.device))
        map_RD = (map_DN[:, self._rows.row_R[mine_M]] * self._rows.scale_R[mine_M]).T
        return torch.nn.functional.pad(map_RD, (0, self.sizes[client] - self.num_compared))

    def state_dict(self) -> dict[str, Tensor]:
        """How often the maps were drawn, and from which seed."""
        return {"seed": torch.tensor(self.seed), "num_exchanges": torch.tensor(self.num_exchanges)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Draw the same maps.

        Raises:
            ValueError: The state belongs to another seed.
        """
        check_keys(state, self.state_dict())
        check_seed(int(state["seed"]), self.seed)
        self.num_exchanges = int(state["num_exchanges"])
        self._redraw()

    def _row_squares(self) -> Tensor:
        return torch.ones(self.num_message_numbers, dtype=self.dtype, device=self.device)
