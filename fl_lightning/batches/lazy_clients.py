"""Clients whose data are made when they are needed: a federation of millions of which nothing is kept."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from fl_lightning.batches.client_data import ClientData


class NumberedNames(Sequence[str]):
    """Numbered names that sort as the clients do, without storing them.

    Args:
        kind: What a client is called.
        num_clients: Number of clients.

    Example:
        >>> NumberedNames("phone", 1000)[7], len(NumberedNames("phone", 1000))
        ('phone-007', 1000)
    """

    def __init__(self, kind: str, num_clients: int) -> None:
        self.kind, self.num_clients = kind, num_clients
        self.width = max(2, len(str(num_clients - 1)))

    def __len__(self) -> int:
        """Clients."""
        return self.num_clients

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        """The name of a client, or those of some."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(self.num_clients)[index])
        return f"{self.kind}-{range(self.num_clients)[index]:0{self.width}d}"


class LazyClients(Sequence[ClientData]):
    """The clients of a federation, each of which is made whenever it is asked for.

    Args:
        make: Makes a client's data from its index, always the same.
        names: Of the clients.
        sizes: Number of examples of each client.
        num_examples: Number of labeled training examples of each client.

    Attributes:
        names: See above.
        sizes: See above.
        num_examples: See above.
    """

    def __init__(
        self,
        make: Callable[[int], ClientData],
        *,
        names: Sequence[str],
        sizes: Sequence[int],
        num_examples: Sequence[int],
    ) -> None:
        self._make = make
        self.names = names
        self.sizes = sizes if isinstance(sizes, array) else array("q", sizes)
        self.num_examples = num_examples if isinstance(num_examples, array) else array("q", num_examples)
        self._replaced: dict[int, ClientData] = {}

    def __len__(self) -> int:
        """Clients."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[ClientData]:
        """One client after another."""
        return (self[client] for client in range(len(self)))

    @overload
    def __getitem__(self, client: int) -> ClientData: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[ClientData]: ...
    def __getitem__(self, client: int | slice) -> ClientData | Sequence[ClientData]:
        """The data of a client, or those of some."""
        if isinstance(client, slice):
            return [self[index] for index in range(len(self))[client]]
        index = range(len(self))[client]
        return self._replaced[index] if index in self._replaced else self._make(index)

    def replaced(self, client: int, data: ClientData) -> "LazyClients":
        """The clients with the data of one replaced."""
        result = LazyClients(self._make, names=self.names, sizes=self.sizes[:], num_examples=self.num_examples[:])
        result._replaced = {**self._replaced, client: data}
        result.sizes[client], result.num_examples[client] = data.size, data.num_examples
        return result

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a registry knows of the clients: names, sizes and costs."""
        return {"names": self.names, "sizes": self.sizes, "cost": self.sizes}


def size_of(clients: Sequence[Any], client: int) -> int:
    """Number of examples of a client, without making its data."""
    return int(clients.sizes[client] if isinstance(clients, LazyClients) else clients[client].size)


def num_examples_of(clients: Sequence[Any], client: int) -> int:
    """Number of labeled training examples of a client, without making its data."""
    return int(clients.num_examples[client] if isinstance(clients, LazyClients) else clients[client].num_examples)
