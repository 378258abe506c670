"""A store of what lives on from one round to the next, by client; nothing for clients that never took part."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.executors.storage import Allocate, in_memory
from fl_lightning.round.payload import pad_examples

#: Initial capacity of a store in rows.
FIRST_ROWS = 16


class ClientStore:
    """Rows of named tensors by client. Its capacity doubles as needed.

    Args:
        allocate: Makes the tensors, in memory or on disk.
        max_clients: Largest number of clients.
        ragged: Names of tensors with a row for every example, (clients, examples, ...), padded with zeros.
    """

    def __init__(
        self, allocate: Allocate = in_memory, max_clients: int | None = None, ragged: Collection[str] = ()
    ) -> None:
        self.allocate = allocate
        self.max_clients = max_clients
        self.ragged = frozenset(ragged)
        self.clear()

    def __contains__(self, client: object) -> bool:
        """Whether there is a row for the client."""
        return client in self.row_of

    def __len__(self) -> int:
        """The number of clients with a row."""
        return len(self.row_of)

    @property
    def clients(self) -> list[int]:
        """Clients with a row, ascending."""
        return sorted(self.row_of)

    def clear(self) -> None:
        """Delete all rows."""
        self.row_of: dict[int, int] = {}
        self.tensors: dict[str, Tensor] = {}

    def put(self, clients: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Store rows of clients, replacing what was stored under these names, (clients, *shape)."""
        if not clients or not tensors:
            return
        for client in clients:
            self.row_of.setdefault(client, len(self.row_of))
        rows = self._rows(clients)
        for name, tensor in tensors.items():
            storage = self._storage(name, tensor)
            value = pad_examples(tensor, storage.shape[1]) if name in self.ragged else tensor
            storage.index_copy_(0, rows.to(storage.device), value.to(storage))

    def get(self, clients: Sequence[int], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Rows of clients, (clients, *shape) by name; zero if a client was stored without the name.

        Args:
            clients: The clients.
            names: The names, as far as they exist; None for all.

        Raises:
            KeyError: There is no row for one of the clients.
        """
        rows = self._rows(clients)
        return {
            name: storage.index_select(0, rows.to(storage.device))
            for name, storage in self.tensors.items()
            if names is None or name in names
        }

    def num_bytes(self) -> int:
        """Bytes of the stored rows, without unused capacity."""
        return sum(storage[: len(self)].nbytes for storage in self.tensors.values())

    def _rows(self, clients: Sequence[int]) -> Tensor:
        return torch.tensor([self.row_of[client] for client in clients], dtype=torch.int64)

    def _storage(self, name: str, like: Tensor) -> Tensor:
        """The tensor of a name, with a row for every client and as many examples as ``like``."""
        old = self.tensors.get(name)
        shape = list(like.shape[1:])
        if old is not None and name in self.ragged:
            shape[0] = max(shape[0], old.shape[1])
        num_rows = 0 if old is None else len(old)
        if num_rows >= len(self) and old is not None and list(old.shape[1:]) == shape:
            return old
        if num_rows < len(self):
            num_rows = max(FIRST_ROWS, len(self), 2 * num_rows)
            num_rows = num_rows if self.max_clients is None else min(num_rows, self.max_clients)
        new = self.allocate((num_rows, *shape), like.dtype, like.device)
        if old is not None:
            target = new[: len(old), : old.shape[1]] if name in self.ragged else new[: len(old)]
            target.copy_(old)
        self.tensors[name] = new
        return new
