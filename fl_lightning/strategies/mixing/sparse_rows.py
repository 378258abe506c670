"""A table with a row for each of very many clients, most of which are zero and take no memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: Initial capacity in rows; it doubles as needed.
_FIRST_ROWS = 256


class SparseRows:
    """Rows of clients, zero until they are set, and their running sum.

    Shape legend: R rows that were set, K clients.

    Args:
        like: A row, *shape.

    Attributes:
        row_of: The place of each client's row.
        total: The sum of all rows, float64, *shape; each change is added, so that no pass over the rows is needed.
    """

    def __init__(self, like: Tensor) -> None:
        self.row_of: dict[int, int] = {}
        self._rows = like.new_zeros(_FIRST_ROWS, *like.shape)
        self.total = torch.zeros_like(like, dtype=torch.float64)

    def __getitem__(self, clients: Sequence[int]) -> Tensor:
        """The rows of clients, (K, *shape)."""
        result = self._rows.new_zeros(len(clients), *self._rows.shape[1:])
        known = [index for index, client in enumerate(clients) if client in self.row_of]
        result[known] = self._rows[[self.row_of[clients[index]] for index in known]]
        return result

    def __setitem__(self, clients: Sequence[int], values: Tensor) -> None:
        """Set the rows of clients, (K, *shape)."""
        self.total += (values.double() - self[clients].double()).sum(dim=0)
        for client in clients:
            self.row_of.setdefault(client, len(self.row_of))
        if len(self.row_of) > len(self._rows):
            grown = self._rows.new_zeros(max(2 * len(self._rows), len(self.row_of)), *self._rows.shape[1:])
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[[self.row_of[client] for client in clients]] = values

    def sum(self, dim: int = 0) -> Tensor:
        """The sum over all clients, *shape."""
        assert dim == 0, "over the clients alone"
        return self.total.to(self._rows)

    def state_dict(self) -> dict[str, Any]:
        """The rows that were set."""
        clients = torch.tensor(list(self.row_of), dtype=torch.int64)
        return {"clients": clients, "rows": self._rows[: len(clients)].clone(), "total": self.total.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.row_of = {client: row for row, client in enumerate(state["clients"].tolist())}
        self._rows = state["rows"].to(self._rows)
        self.total = state["total"].to(self.total)
