"""What every kind of simulated heterogeneity has: a strength, a share of clients, and draws by key.

Each kind is applied after partition and split, in the order of ``data.heterogeneity``, and sees the data as the kinds
before it have left them. What is drawn depends on the seed of the data, the kind, how many of its kind come before it,
and the index of the client alone: a client that is chosen for a small share is chosen for every larger one, and what
changes at a small strength changes at every larger one. Clients that are not chosen keep their data to the bit.
"""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from fl_lightning.batches.client_data import ClientData
from fl_lightning.counts import Counted
from fl_lightning.data.allocation import Allocation
from fl_lightning.data.partition.record import canonical_json
from fl_lightning.data.settings import check_number
from fl_lightning.kernels.randomness import generator
from fl_lightning.tasks import Task

AnyClient = TypeVar("AnyClient", bound=ClientData)


class Heterogeneity(Counted, ABC):
    """Changes the data of some clients.

    Args:
        clients: Share of the clients, rounded to the nearest number, whose data change, in [0, 1].

    Raises:
        ValueError: It is out of range.
    """

    #: Whether it changes the edges of graphs.
    changes_edges: ClassVar[bool] = False

    def __init__(self, clients: float = 1.0) -> None:
        check_number(f"{type(self).__name__}.clients", clients, most=1)
        self.clients = clients

    def __str__(self) -> str:
        """The kind with its settings, except for the share of clients."""
        settings = ", ".join(f"{name} {value}" for name, value in vars(self).items() if name != "clients")
        return f"{type(self).__name__} ({settings})" if settings else type(self).__name__

    def identity(self) -> dict[str, Any]:
        """Everything that the change depends on besides the data and the seed, as JSON-ready values."""
        return {"kind": type(self).__name__, **vars(self)}

    def why_not(self, task: Task) -> str:
        """Why it does not apply to a task, and the remedy, as the rest of a sentence; empty if it does."""
        return ""

    @abstractmethod
    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """The data of a client that is chosen, changed.

        Args:
            client: The data.
            draw: Of the client's own draws.
            num_outputs: Classes of the federation, if the task has any.

        Raises:
            ValueError: The change is not possible on these data.
        """


class Graded(Heterogeneity):
    """Changes the data of some clients, more or less strongly.

    Args:
        strength: How much, as each kind defines.
        clients: Share of the clients, rounded to the nearest number, whose data change, in [0, 1].

    Raises:
        ValueError: A setting is out of range.
    """

    #: The largest strength.
    most: ClassVar[float] = 1.0

    def __init__(self, strength: float, clients: float = 1.0) -> None:
        check_number(f"{type(self).__name__}.strength", strength, most=self.most)
        super().__init__(clients)
        self.strength = strength


def check_heterogeneity(kinds: Any) -> tuple[Heterogeneity, ...]:
    """Refuse what is no list of kinds.

    Raises:
        ValueError: It is not.
    """
    kinds = [] if kinds is None else kinds
    strangers = [kind for kind in kinds if not isinstance(kind, Heterogeneity)] if isinstance(kinds, list) else [kinds]
    if strangers:
        raise ValueError(
            f"data.heterogeneity holds {strangers[0]!r:.60}: give a list of kinds, such as [FeatureNoise(strength=0.5)]"
        )
    return tuple(kinds)


def with_heterogeneity(kinds: Sequence[Heterogeneity], allocation: Allocation, seed: int) -> Allocation:
    """What clients hold after each kind has changed some of them.

    Args:
        kinds: In the order in which they are applied.
        allocation: As the source has allocated it.
        seed: Of the data module.

    Returns:
        The allocation with the changed clients, a hash that the kinds are part of, and a list of who was changed; the
        same if there are no kinds.

    Raises:
        ValueError: A kind does not apply to the task or to the data of a client, or no client has a training example
            left.
    """
    if not kinds:
        return allocation
    clients, simulated, seen = list(allocation.clients), list[tuple[str, tuple[str, ...]]](), Counter[str]()
    for kind in kinds:
        name = type(kind).__name__
        if why := kind.why_not(allocation.task):
            raise ValueError(f"data.heterogeneity: {name} {why}")
        path = (seed, "heterogeneity", name, seen[name])
        seen[name] += 1
        order = torch.randperm(len(clients), generator=generator(*path)).tolist()
        chosen = sorted(order[: round(len(clients) * kind.clients)])
        for index in chosen:
            try:
                clients[index] = kind.changed(clients[index], generator(*path, index), allocation.num_outputs)
            except ValueError as error:
                raise ValueError(f"data.heterogeneity: {name} of {clients[index].name}: {error}") from error
        simulated.append((str(kind), tuple(clients[index].name for index in chosen)))
    if not any(client.num_examples for client in clients):
        raise ValueError(
            "data.heterogeneity leaves no client a training example: lower UnlabeledClients.clients, so that some keep "
            "their labels"
        )
    identity = canonical_json([kind.identity() for kind in kinds])
    return dataclasses.replace(
        allocation,
        clients=tuple(clients),
        partition_hash=hashlib.sha256(f"{allocation.partition_hash}{identity}".encode()).hexdigest(),
        simulated=tuple(simulated),
    )
