"""What is known of a federation before training: the client registry, and what the server starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.lazy_clients import LazyClients
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.models.batch_norm import statistics_of
from fl_lightning.round.client import ClientModule
from fl_lightning.round.lr_schedule import LRSchedule
from fl_lightning.tasks import Task


@dataclass(frozen=True, kw_only=True)
class UserNames:
    """The user's names of a client's nodes or examples (N), and of the classes.

    Attributes:
        number_N: The index of each in the data that the source loads, int64; of pairs of nodes both, (N, 2).
        names: The name of each; None if they have no names.
        class_names: The names of the classes, in order; None if they are unknown.
    """

    number_N: Tensor
    names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ClientRegistry:
    """The clients of a federation: everything that is known of them without looking at their data.

    Attributes:
        names: Each client's own name, in the order of their indices.
        sizes: Number of examples of each client.
        cost: Computational cost of each client, relative to the others.
        task: What is predicted, and on what.
        num_features: Width of the inputs, or the shape of one example; the same for all clients.
        num_outputs: Number of classes or labels in the whole federation, or of values in a target.
        relation_CC: Client relation graph: float32, non-negative, symmetric, zero diagonal, (C, C); None if the data
            have none.
        groups: Each client's group, if the partition draws several clients from one part of a graph; else empty.
        is_directed: Whether the edges of any client's graph may go in one direction only.
        has_edge_weights: Whether the edges of the clients' graphs have weights.
        num_edge_attributes: Number of attributes of an edge, 0 for none; the same for all clients.
        has_cross_edges: Whether the clients know of the edges between their nodes and those of other clients.
        own_inputs: Whether features mean something else for each client.
        own_outputs: For each client how many of the outputs are its own; empty if outputs mean the same for all.
        data_digests: Digests of the clients' data, keyed by the folders of their sites; empty if the data are here.
        partition_hash: SHA-256 (hex) of data, partition and split.
        contents: Digest of what that hash leaves out, features of a graph's nodes and relations; empty for nothing.
        layout: What a collator decides for all clients together (``sparse_features`` of graphs), so that a process
            that has only some of the clients makes the same batches.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    cost: Sequence[int]
    task: Task
    num_features: int | tuple[int, ...]
    num_outputs: int
    relation_CC: Tensor | None = None
    groups: tuple[int, ...] = ()
    is_directed: bool = False
    has_edge_weights: bool = False
    num_edge_attributes: int = 0
    has_cross_edges: bool = False
    own_inputs: bool = False
    own_outputs: tuple[int, ...] = ()
    data_digests: tuple[str, ...] = ()
    partition_hash: str = ""
    contents: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        clients: Sequence[ClientData],
        *,
        task: Task,
        num_outputs: int,
        relation_CC: Tensor | None = None,
        groups: tuple[int, ...] = (),
        own_inputs: bool = False,
        own_outputs: tuple[int, ...] = (),
        partition_hash: str = "",
        contents: str = "",
    ) -> "ClientRegistry":
        """The registry of clients whose data are available; the other arguments are those of the class."""
        return ClientRegistry(
            **facts_of(clients),
            task=task,
            num_features=clients[0].num_features,
            num_outputs=num_outputs,
            relation_CC=relation_CC,
            groups=groups,
            own_inputs=own_inputs,
            own_outputs=own_outputs,
            partition_hash=partition_hash,
            contents=contents,
            layout=task.layout_of(clients),
        )

    def outputs_of(self, client_data: ClientData) -> int:
        """Outputs that a client's examples can have."""
        return client_data.num_outputs or self.num_outputs

    @property
    def own(self) -> list[str]:
        """What is each client's own: ``features``, ``outputs``, both, or nothing."""
        return [what for what, own in (("features", self.own_inputs), ("outputs", bool(self.own_outputs))) if own]

    def __len__(self) -> int:
        """Clients."""
        return len(self.names)


def facts_of(clients: Sequence[ClientData]) -> dict[str, Any]:
    """The names, sizes and costs of clients, and the facts about their edges."""
    if isinstance(clients, LazyClients):
        return dict(clients.facts)
    return {
        "names": tuple(client.name for client in clients),
        "sizes": tuple(client.size for client in clients),
        "cost": tuple(client.cost for client in clients),
        **common_edges({client.name: client.edge_facts for client in clients}),
    }


def common_edges(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a registry states about the edges of all clients, from the facts about each client, by its name.

    Raises:
        ValueError: The clients' edges do not all have the same weights or attributes, or only some know of the edges
            to other clients.
    """
    clients = [each for each in facts.values() if each]
    if not clients:
        return {}
    for fact in ("has_edge_weights", "num_edge_attributes", "has_cross_edges"):
        if len({each[fact] for each in clients}) > 1:
            values = {name: each[fact] for name, each in facts.items()}
            raise ValueError(f"the clients' {fact} must be alike: {values}")
    return {**clients[0], "is_directed": any(each["is_directed"] for each in clients)}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What a server knows before it has received anything.

    Attributes:
        num_clients: Number of all clients, including those held out of training; indices run from 0.
        training_clients: The clients that take part in the rounds.
        num_features: Width of the inputs, or the shape of one example.
        num_outputs: Number of classes, labels or values in a target; 0 if the server need not know.
        parameters: The initial parameters by name, common to all clients of the first architecture.
        learning_rate: Learning rate of the clients' optimizer, without a schedule.
        lr_schedule: How it changes from round to round; None if it does not.
        plain_sgd: Whether a client's step is its gradient times the learning rate: SGD without momentum, clipping or
            constraint.
        architectures: The initial parameters of every architecture; empty stands for ``parameters`` alone.
        architecture_of: Index of each client's architecture; empty stands for "assigned in turn".
        seed: Root of every random key.
        device: Where the server computes.
        relation_CC: Client relation graph over all clients: float32, non-negative, symmetric, zero diagonal, (C, C);
            None if the data have none.
        groups: Each client's true group, for controls that no real server could use; empty if unknown.
        client_names: Each client's own name. Random draws of the server that belong to a client are keyed by it, since
            indices depend on the order of the clients; empty stands for the indices.
        client: The client module with its net built, for what the server itself computes with the clients' nets.
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
    lr_schedule: LRSchedule | None = None
    plain_sgd: bool = False
    architectures: tuple[Mapping[str, Tensor], ...] = ()
    architecture_of: tuple[int, ...] = ()
    client_names: Sequence[str] = ()
    client: ClientModule | None = None

    def __post_init__(self) -> None:
        """Fill in the defaults of empty values."""
        architectures = self.architectures or (self.parameters,)
        object.__setattr__(self, "architectures", architectures)
        if not self.architecture_of:
            object.__setattr__(self, "architecture_of", in_turn(self.num_clients, len(architectures)))

    @property
    def has_schedule(self) -> bool:
        """Whether the clients' learning rate changes from round to round."""
        return self.lr_schedule is not None and bool(self.lr_schedule.at(0))

    def learning_rate_in(self, round_idx: int) -> float:
        """The clients' learning rate in a round; that of the first group, if parameters differ in it.

        Raises:
            ValueError: ``model.lr_scheduler`` ends before that round.
        """
        scheduled = () if self.lr_schedule is None else self.lr_schedule.at(round_idx)
        return float(scheduled[0]["lr"]) if scheduled else self.learning_rate

    @property
    def head_names(self) -> tuple[str, ...]:
        """Parameters of the last layer of the clients' net, if the net declares them (``net.head_names``)."""
        return () if self.client is None else tuple(getattr(self.client.net, "head_names", ()))

    @property
    def own_names(self) -> tuple[str, ...]:
        """Parameters that are each client's own, whatever the strategy (``ClientModule.own_layers``)."""
        if self.client is None or not self.client.own_layers:
            return ()
        known = self.client.communicated(self.client.net)
        return tuple(name for name, p in self.client.net.named_parameters() if name not in known and p.requires_grad)

    @cached_property
    def statistics(self) -> frozenset[str]:
        """Running statistics among the parameters of the clients' net."""
        return frozenset() if self.client is None else statistics_of(self.client.net)

    @property
    def embedding_channels(self) -> int | None:
        """Width of the clients' embeddings, if their net declares it (``net.embedding_channels``)."""
        return None if self.client is None else getattr(self.client.net, "embedding_channels", None)

    def keys(self, clients: Sequence[int], *path: int | str) -> Tensor:
        """A random key for each client, derived from its name whatever the order of the clients, int64 (C,)."""
        names = self.client_names or tuple(map(str, range(self.num_clients)))
        result = [derive_key(self.seed, *path, names[client]) for client in clients]
        return torch.tensor(result, dtype=torch.int64, device=self.device)


def in_turn(num_clients: int, num_architectures: int) -> tuple[int, ...]:
    """The index of each client's architecture, assigned in turn.

    Example:
        >>> in_turn(5, 2)
        (0, 1, 0, 1, 0)
    """
    return tuple(client % num_architectures for client in range(num_clients))
