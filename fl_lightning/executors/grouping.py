"""Groups of clients that are computed together, of similar sizes so that padding wastes little, and their batches."""

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable

import torch

from fl_lightning.batches.base import Batch, Collator


class Groups:
    """Clients by group, the largest first; a group ends where padding or its size would exceed their bounds.

    Args:
        collator: Makes batches of clients.
        clients: All clients.
        max_padding: Largest share of padding in a group, in [0, 1).
        limit: How many clients of the size of the given one may be in a group.

    Attributes:
        groups: The clients of each group; those with the same number of steps are neighbors, as they step together.
    """

    def __init__(
        self, collator: Collator, clients: Iterable[int], max_padding: float, limit: Callable[[int], int]
    ) -> None:
        self.collator = collator
        members = list(clients)
        size = {client: collator.size(client) for client in members}
        members.sort(key=lambda c: (-size[c], c))
        groups: list[list[int]] = []
        limits: dict[int, int] = {}  # by the size of a group's largest client
        for client in members:
            largest = size[groups[-1][0]] if groups else 0
            if not groups or size[client] < (1 - max_padding) * largest or len(groups[-1]) == limits[largest]:
                groups.append([])
                if size[client] not in limits:
                    limits[size[client]] = limit(client)
            groups[-1].append(client)
        self.groups = [tuple(sorted(group, key=lambda c: (collator.steps_per_epoch(c), c))) for group in groups]
        self._first = [0, *itertools.accumulate(map(len, self.groups))]  # of each group, in the order of all clients
        self._place = array("q", [-1]) * (max(members, default=-1) + 1)  # of each client in that order; -1 for others
        for place, client in enumerate(itertools.chain.from_iterable(self.groups)):
            self._place[client] = place
        self._batches: dict[int, Batch] = {}
        self._part: tuple[tuple[int, ...], Batch] | None = None

    def order(self, clients: Iterable[int]) -> list[int]:
        """Sort clients by group, so that those of a group are adjacent."""
        return sorted(clients, key=self._place.__getitem__)

    def split(self, clients: Iterable[int]) -> list[tuple[int, ...]]:
        """The given clients that belong to this process, by group."""
        mine = self.order(client for client in set(clients) if client < len(self._place) and self._place[client] >= 0)
        return [tuple(members) for _, members in itertools.groupby(mine, key=self._group)]

    def _group(self, client: int) -> int:
        """The number of a client's group."""
        return bisect.bisect_right(self._first, self._place[client]) - 1

    def batch(self, clients: tuple[int, ...]) -> Batch:
        """The batch of clients of one group.

        Batches of whole groups are cached, and of parts of groups only the last. A batch of a few clients of a large
        group is made separately, unless that of the group exists already.
        """
        if self._part is not None and self._part[0] == clients:
            return self._part[1]
        number = self._group(clients[0])
        group = self.groups[number]
        if number not in self._batches and 2 * len(clients) < len(group):
            self._part = clients, self.collator(clients)
            return self._part[1]
        if number not in self._batches:
            self._batches[number] = self.collator(group)
        if clients == group:
            return self._batches[number]
        whole = self._batches[number]
        rows = torch.tensor([self._place[client] - self._first[number] for client in clients], device=whole.key.device)
        self._part = clients, whole.select(rows)
        return self._part[1]
