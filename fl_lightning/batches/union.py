"""Batches for scoring every client's model on the examples of all clients, without copying them for each client."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.batches.base import Batch, Collator, single


@dataclass(frozen=True, kw_only=True)
class UnionBatch(Batch):
    """A batch whose parts are, one after another, the data of all clients; its own tensors are those of the first part.

    Attributes:
        sources: Makes the parts, with a client dimension.
    """

    sources: Callable[[], Iterator[Batch]]

    def parts(self) -> Iterator[Batch]:  # type: ignore[override]
        """The pieces."""
        for source in self.sources():
            yield from (source if self.key.dim() else single(source)).parts()


class UnionCollator(Collator):
    """Gives each client the data of every member in turn: the client with index c those of c, c + 1, and so on.

    Args:
        collator: Makes the batches.
        members: The clients whose data form the union.
    """

    def __init__(self, collator: Collator, members: Sequence[int]) -> None:
        self.collator = collator
        self.members = tuple(members)
        self.device, self.dtype = collator.device, collator.dtype

    def size(self, client: int) -> int:
        """Examples of all members."""
        return sum(self.collator.size(member) for member in self.members)

    def client_data(self, client: int) -> Any:
        """The client's own data."""
        return self.collator.client_data(client)

    def set_client_data(self, client: int, client_data: Any) -> None:
        """Replace the client's data."""
        self.collator.set_client_data(client, client_data)

    def __call__(self, clients: Sequence[int]) -> UnionBatch:
        """The batch of some clients."""
        index = {client: number for number, client in enumerate(self.members)}
        starts = [index.get(client, 0) for client in clients]

        def sources() -> Iterator[Batch]:
            for shift in range(len(self.members)):
                yield self.collator([self.members[(start + shift) % len(self.members)] for start in starts])

        first = next(sources())
        local = {name: getattr(first, name) for name in Batch.__dataclass_fields__}
        return UnionBatch(**local, sources=sources)
