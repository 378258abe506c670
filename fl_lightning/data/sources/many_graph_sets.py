"""Federations of several sets of graphs, each of which is a client, with features and classes of its own if need be."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.allocation import Allocation, Asked, digest_of, split_examples
from fl_lightning.data.columns import joined
from fl_lightning.data.edge_data import same_edge_data
from fl_lightning.data.graph_sets import PreparedGraphs
from fl_lightning.data.partition.table import PartitionTable
from fl_lightning.data.preparation import Preparation, check_num_classes
from fl_lightning.data.sources.base import Source
from fl_lightning.data.sources.examples import client_names
from fl_lightning.data.sources.graph_sets import GraphSetSource, InMemoryGraphSet, content, table_of, task_and_targets
from fl_lightning.data.split import GivenSplit, Splitter


class ManyGraphSets(Source):
    """Sets of graphs that are a client each: needs no partitioner.

    Sets may differ in features and in classes, labels or numbers. The layers that read features or compute outputs are
    then each client's own: nobody else receives them (``model.net`` has them as wide as the widest client needs; what a
    client lacks is zero, or missing).

    Args:
        sources: Where each client's graphs come from.
        names: Of the clients; None for their numbers.
        own_outputs: Whether classes (labels, numbers) mean something else in each set, so that a net's last layer is
            the client's own; None for yes where sets differ in their features, or in how many labels or numbers they
            have.

    Raises:
        ValueError: There are no sets, or not a name for each.
    """

    def __init__(
        self, sources: list[GraphSetSource], names: list[str] | None = None, own_outputs: bool | None = None
    ) -> None:
        if not isinstance(sources, Sequence) or not sources:
            raise ValueError(f"ManyGraphSets.sources is {sources!r}: give a set of graphs for each client")
        if strangers := [each for each in sources if not isinstance(each, GraphSetSource)]:
            raise ValueError(f"ManyGraphSets.sources holds {strangers[0]!r}, which is not a set of graphs")
        if names is not None and (len(names) != len(sources) or len(set(names)) < len(names)):
            raise ValueError(f"ManyGraphSets.names is {names}: give each of the {len(sources)} clients its own")
        if not isinstance(own_outputs, bool | None):
            raise ValueError(f"ManyGraphSets.own_outputs is {own_outputs!r}: give true, false or null")
        self.sources = sources
        self.names = client_names("client", len(sources)) if names is None else tuple(names)
        self.own_outputs = own_outputs

    def of_client(self, client: int) -> Source:
        """The client's own set."""
        return self.sources[client]

    def preparation_of(self, client: int) -> Preparation:
        """That of the client's own set."""
        return self.sources[client].preparation

    def identity(self) -> dict[str, Any]:
        """The sets, with the names of the clients; the graphs themselves are part of the partition's hash."""
        sources = [source.identity() for source in self.sources]
        more = {"own_outputs": self.own_outputs} if self.own_outputs is not None else {}
        return {"source": type(self).__name__, "names": list(self.names), "sources": sources, **more}

    @property
    def default_splitter(self) -> Splitter:
        """The clients' own split, if they come with one."""
        return GivenSplit() if any(map(_has_parts, self.sources)) else super().default_splitter

    def prepare(self, asked: Asked) -> list[PreparedGraphs]:
        """All sets."""
        return [
            source.read(asked.root, asked.cache_dir, name)
            for source, name in zip(self.sources, self.names, strict=True)
        ]

    def allocate(self, asked: Asked, prepared: list[PreparedGraphs]) -> Allocation:
        """Every client's graphs."""
        task, targets = task_and_targets(prepared, self.names)
        same_edge_data([each.union for each in prepared])
        widths = [each.num_features for each in prepared]
        counts = [task.target.num_outputs([y_G]) for y_G in targets]
        own_inputs = len(set(widths)) > 1
        own_outputs = self.own_outputs
        if own_outputs is None:
            own_outputs = own_inputs or (not task.target.has_classes and len(set(counts)) > 1)
        if not own_outputs and not task.target.has_classes and len(set(counts)) > 1:
            raise ValueError(
                f"ManyGraphSets.own_outputs is false, but the clients have {counts} {task.target.name}: leave it out, "
                "or give all the same"
            )
        named = [
            each.loaded.class_names or source.class_names for each, source in zip(prepared, self.sources, strict=True)
        ]
        if task.target.has_classes:
            together = (
                zip(self.names, targets, named, strict=True)
                if own_outputs
                else [("the clients' graphs together", torch.cat(targets), next(filter(None, named), None))]
            )
            for name, y_G, class_names in together:
                check_num_classes(y_G, class_names, name, "graph")
        has_own = own_outputs and task.target.has_classes  # labels and numbers that a client lacks are missing
        given = [each.loaded.roles for each in prepared]
        roles = split_examples(task, targets, asked, given, joined([each.loaded.columns for each in prepared]))
        everything = [torch.arange(each.num_graphs) for each in prepared]
        padded = [_padded(y_G, max(counts)) for y_G in targets]
        clients = tuple(
            each.client(name, *of_client, num_features=max(widths), num_outputs=count if has_own else None)
            for name, each, count, *of_client in zip(
                self.names, prepared, counts, everything, padded, roles, strict=True
            )
        )
        tensors = [tensor for each in prepared for tensor in content(each)]
        has_names = any(each.loaded.names is not None for each in prepared)
        return Allocation(
            task=task,
            clients=clients,
            num_outputs=max(counts),
            source_idx=tuple(everything),
            partition_hash=digest_of(asked.identity(self.identity()), (*tensors, *targets, *roles)),
            named_nodes=tuple(p.names(g) for p, g in zip(prepared, everything, strict=True)) if has_names else None,
            class_names=named[0] if len(set(named)) == 1 and not own_outputs else None,
            own_inputs=own_inputs,
            own_outputs=tuple(counts) if own_outputs else (),
        )

    def describe(self, allocation: Allocation, *, seed: int, non_iidness: bool) -> PartitionTable:
        """Of graphs also sizes, degrees and targets."""
        return table_of(allocation)


def _has_parts(source: GraphSetSource) -> bool:
    """Whether the graphs were given by what trains, validates and tests."""
    return isinstance(source, InMemoryGraphSet) and source.loaded.roles is not None


def _padded(y_G: Tensor, num_outputs: int) -> Tensor:
    """Labels or numbers, with missing ones up to the number of outputs; classes as they are."""
    if y_G.dim() == 1:
        return y_G
    return F.pad(y_G, (0, num_outputs - y_G.shape[1]), value=torch.nan)


class GraphSets(ManyGraphSets):
    """Graphs in memory, for each client its own.

    Args:
        clients: For each client its graphs, with ``edge_index``, ``y`` (a class, labels or numbers of the graph),
            ``x``, and perhaps ``edge_weight`` and ``edge_attr``. Clients with a split of their own have ``{"train":
            graphs, "val": graphs, "test": graphs}``, of which ``val`` and ``test`` may be left out; they need no
            splitter.
        names: Of the clients; None for their numbers.
        undirected: Add missing reverse edges.
        own_outputs: As :class:`ManyGraphSets` has it.
        max_degree: If no client's graphs have features, these are the degrees of nodes, one-hot, the same for all
            clients; higher ones count as this, None for the highest that occurs at any client.

    Raises:
        ValueError: A client has no graphs, or not a name for each client.
    """

    def __init__(
        self,
        clients: Sequence[Sequence[Data] | Mapping[str, Sequence[Data]]],
        names: Sequence[str] | None = None,
        undirected: bool = True,
        own_outputs: bool | None = None,
        max_degree: int | None = None,
    ) -> None:
        if not clients:
            raise ValueError("GraphSets.clients is empty: give a list of graphs for each client")
        if empty := [index for index, each in enumerate(clients) if not len(each)]:
            raise ValueError(f"GraphSets.clients[{empty[0]}] has no graphs: give at least one, or leave the client out")
        sources: list[GraphSetSource] = [InMemoryGraphSet(each, undirected, max_degree) for each in clients]
        super().__init__(sources, None if names is None else list(names), own_outputs)

    def prepare(self, asked: Asked) -> list[PreparedGraphs]:
        """All sets; a degree is the same feature for all clients."""
        prepared = super().prepare(asked)
        degrees = [each.max_degree for each in prepared if each.max_degree is not None]
        return prepared if len(degrees) < len(prepared) else [each.up_to_degree(max(degrees)) for each in prepared]
