"""What is known of a federation before anyone is heard: who takes part in it, and what a server starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.round.client import ClientModule
from fl_lightning.tasks import Task


@dataclass(frozen=True, kw_only=True)
class UserNames:
    """What the user calls a client's nodes or examples (N), and the classes.

    Attributes:
        number_N: The number that each has in what the source loads, int64.
        names: The name of each; None where they have none.
        class_names: What the classes are called, in their order; None where that is not known.
    """

    number_N: Tensor
    names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ClientRegistry:
    """Who is in a federation: all that is known of clients without looking at what they hold.

    Attributes:
        names: Each client's own name, in the order of their indices.
        sizes: Examples of each client.
        cost: What each client costs, relative to the others.
        task: What is learned, and of what.
        num_features: Width of the inputs, or the shape of one example; alike in all clients.
        num_outputs: Classes or labels of the whole federation, or numbers of a target.
        relation_CC: Client relation graph: float32, non-negative, symmetric, zero diagonal, (C, C); None if the data
            have none.
        groups: Each client's group, where the partition draws several clients from one part of a graph; else empty.
        is_directed: Whether edges of any client's graph may go in one direction only.
        has_edge_weights: Whether the edges of the clients' graphs have weights.
        num_edge_attributes: Attributes of an edge; 0 where edges have none. Alike in all clients.
        partition_hash: SHA-256 (hex) of data, partition and split.
        layout: What a collator decides over all clients (``sparse_features`` of graphs), so that batches made where
            only some of them are at hand are the same.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    cost: tuple[int, ...]
    task: Task
    num_features: int | tuple[int, ...]
    num_outputs: int
    relation_CC: Tensor | None = None
    groups: tuple[int, ...] = ()
    is_directed: bool = False
    has_edge_weights: bool = False
    num_edge_attributes: int = 0
    partition_hash: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        clients: Sequence[ClientData],
        *,
        task: Task,
        num_outputs: int,
        relation_CC: Tensor | None = None,
        groups: tuple[int, ...] = (),
        partition_hash: str = "",
    ) -> "ClientRegistry":
        """The registry of clients whose data are at hand; the other arguments are those of the class."""
        return ClientRegistry(
            names=tuple(client.name for client in clients),
            sizes=tuple(client.size for client in clients),
            cost=tuple(client.cost for client in clients),
            task=task,
            num_features=clients[0].num_features,
            num_outputs=num_outputs,
            relation_CC=relation_CC,
            groups=groups,
            **common_edges({client.name: client.edge_facts for client in clients}),
            partition_hash=partition_hash,
            layout=task.layout_of(clients),
        )

    def __len__(self) -> int:
        """Clients."""
        return len(self.names)


def common_edges(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a registry says of all clients' edges, from what is said of each by name.

    Raises:
        ValueError: The edges of some clients carry what those of others do not.
    """
    clients = [each for each in facts.values() if each]
    if not clients:
        return {}
    for fact in ("has_edge_weights", "num_edge_attributes"):
        if len({each[fact] for each in clients}) > 1:
            values = {name: each[fact] for name, each in facts.items()}
            raise ValueError(f"the clients' {fact} must be alike: {values}")
    return {**clients[0], "is_directed": any(each["is_directed"] for each in clients)}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What a server knows before it hears from anyone.

    Attributes:
        num_clients: All clients, those held out of training included; indices run from 0.
        training_clients: Those that take part in the rounds.
        num_features: Width of the inputs, or the shape of one example.
        num_outputs: Classes, labels, or numbers of a target; 0 where a server need not know.
        parameters: One client's initial parameters by name, common to all of the first architecture.
        learning_rate: Of the clients' optimizer.
        plain_sgd: Whether a client's step is its gradient times the learning rate: SGD without momentum, nothing
            clipped, no constraint.
        architectures: The same for every architecture; empty stands for the one of ``parameters``.
        architecture_of: Index of each client's architecture; empty stands for "given out in turn".
        seed: Root of every random key.
        device: Where the server computes.
        relation_CC: Client relation graph over all clients: float32, non-negative, symmetric, zero diagonal, (C, C);
            None if the data have none.
        groups: Each client's true group, for controls that no real server could be; empty where none are known.
        client_names: Each client's own name. Server draws that belong to a client are keyed by it, for indices depend
            on the order of the clients; empty stands for the indices.
        client: The client module with its net built, for what the server computes with clients' nets itself.
    """

    num_clients: int
    training_clients: tuple[int, ...]
    num_features: int | tuple[int, ...]
    parameters: Mapping[str, Tensor]
    seed: int
    device: torch.device
    num_outputs: int = 0
    relation_CC: Tensor | None = None
    groups: tuple[int, ...] = ()
    learning_rate: float = 0.01
    plain_sgd: bool = False
    architectures: tuple[Mapping[str, Tensor], ...] = ()
    architecture_of: tuple[int, ...] = ()
    client_names: tuple[str, ...] = ()
    client: ClientModule | None = None

    def __post_init__(self) -> None:
        """Fill in what an empty value stands for."""
        architectures = self.architectures or (self.parameters,)
        object.__setattr__(self, "architectures", architectures)
        if not self.architecture_of:
            object.__setattr__(self, "architecture_of", in_turn(self.num_clients, len(architectures)))

    @property
    def head_names(self) -> tuple[str, ...]:
        """Parameters of the last layer of the clients' net, where the net says which they are (``net.head_names``)."""
        return () if self.client is None else tuple(getattr(self.client.net, "head_names", ()))

    @property
    def embedding_channels(self) -> int | None:
        """Width of the clients' embeddings, where their net says it (``net.embedding_channels``)."""
        return None if self.client is None else getattr(self.client.net, "embedding_channels", None)

    def keys(self, clients: Sequence[int], *path: int | str) -> Tensor:
        """A random key for each client that follows from its name, whatever the order of the clients, int64 (C,)."""
        names = self.client_names or tuple(map(str, range(self.num_clients)))
        result = [derive_key(self.seed, *path, names[client]) for client in clients]
        return torch.tensor(result, dtype=torch.int64, device=self.device)


def in_turn(num_clients: int, num_architectures: int) -> tuple[int, ...]:
    """Which architecture each client has, where they are given out in turn.

    Example:
        >>> in_turn(5, 2)
        (0, 1, 0, 1, 0)
    """
    return tuple(client % num_architectures for client in range(num_clients))
