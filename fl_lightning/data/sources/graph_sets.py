"""Sources of many graphs, each of which is an example: the interface, and your own graphs in memory and in files."""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.allocation import Allocation, Asked, digest_of
from fl_lightning.data.graph_sets import LoadedGraphs, PreparedGraphs, prepared_graphs
from fl_lightning.data.partition.table import PartitionTable
from fl_lightning.data.preparation import Preparation, check_num_classes
from fl_lightning.data.settings import check_count, check_flag, check_is_file, user_path
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import allow_pickled_graphs
from fl_lightning.data.sources.in_file import InFile
from fl_lightning.data.sources.parts import check_used, has_parts, parts_in, roles_of
from fl_lightning.data.sources.sets import SetSource
from fl_lightning.data.split import GivenSplit, Splitter
from fl_lightning.data.targets import checked_targets
from fl_lightning.saved_tensors import load_data
from fl_lightning.tasks import GraphClassification, GraphRegression, Task
from fl_lightning.tasks.base import kind_of_target


class GraphSetSource(SetSource):
    """A set of graphs, each with a class, labels or numbers of its own. A partitioner makes clients of it.

    Partitioners see of each graph its class, ``size`` (nodes), ``degree`` (mean), ``density``, ``features`` (mean), and
    the columns of the source's table.

    Args:
        undirected: Add missing reverse edges.
        max_degree: Graphs without features get the degrees of their nodes, one-hot; higher ones count as this, None for
            the highest that occurs.
    """

    noun = "graphs"

    def __init__(self, undirected: bool = True, max_degree: int | None = None) -> None:
        check_flag("undirected", undirected)
        if max_degree is not None:
            check_count("max_degree", max_degree)
        self.undirected = undirected
        self.max_degree = max_degree

    @abstractmethod
    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:
        """Read the graphs.

        Args:
            root: Folder of the data sets (see :func:`fl_lightning.data.sources.folders.data_root`).
            cache_dir: Where converted files go; None for the default cache folder.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: They are not sound.
        """

    def new_graphs(self, given: Path | Sequence[str]) -> LoadedGraphs:
        """Graphs for a trained model from what describes them, such as SMILES of molecules.

        Args:
            given: A table, or a description of each graph.

        Raises:
            ValueError: The set's graphs cannot be described so, or one is not sound.
        """
        raise ValueError(f"the new data are texts or a table, but {self} has no molecules: give a list of graphs")

    @property
    def preparation(self) -> Preparation:
        """What is done to each graph."""
        return Preparation(normalize_features=False, largest_component=False, undirected=self.undirected)

    def preparation_of(self, client: int) -> Preparation:
        """The same for all."""
        return self.preparation

    def identity(self) -> dict[str, Any]:
        """What the graphs depend on, as JSON-ready values; their content is part of the partition's hash."""
        return {"source": type(self).__name__, "undirected": self.undirected, "max_degree": self.max_degree}

    def read(self, root: Path, cache_dir: Path | None, title: str = "") -> PreparedGraphs:
        """The graphs, read and prepared; messages call them by the title."""
        return prepared_graphs(self.load(root, cache_dir), self.preparation, title or str(self), self.max_degree)

    def prepare(self, asked: Asked) -> PreparedGraphs:
        """The graphs; what is converted is cached before other processes read it."""
        return self.read(asked.root, asked.cache_dir)

    def allocate(self, asked: Asked, prepared: PreparedGraphs) -> Allocation:
        """Every client's graphs."""
        assert asked.partitioner is not None
        task, [y_G] = task_and_targets([prepared], [str(self)])
        check_used(asked, given=prepared.loaded.roles is not None, title=str(self))
        summary = prepared.summary(task.target.strata(y_G))
        class_names = prepared.loaded.class_names or self.class_names
        if task.target.has_classes:
            check_num_classes(y_G, class_names, str(self), "graph")
        names, shares, roles = self.shared_out(asked, task, summary, prepared.loaded.columns)
        identity = asked.identity(self.identity(), partitioner=asked.partitioner.identity())
        has_names = prepared.loaded.names is not None
        return Allocation(
            task=task,
            clients=tuple(
                prepared.client(name, graph_M, y_G[graph_M], role_M)
                for name, graph_M, role_M in zip(names, shares, roles, strict=True)
            ),
            num_outputs=task.target.num_outputs([y_G], len(class_names or ())),
            source_idx=tuple(shares),
            partition_hash=digest_of(identity, (*content(prepared), y_G, *shares, *roles)),
            named_nodes=tuple(map(prepared.names, shares)) if has_names else None,
            class_names=class_names,
        )

    def describe(self, allocation: Allocation, *, seed: int, non_iidness: bool) -> PartitionTable:
        """Of graphs also sizes, degrees and targets."""
        return table_of(allocation)


class InMemoryGraphSet(GraphSetSource):
    """One set of graphs in memory, for a partitioner.

    Args:
        graphs: With ``edge_index``, ``y`` (a class, labels or numbers of the graph), ``x``, and perhaps ``edge_weight``
            and ``edge_attr``; all of them with the same. A set with a split of its own is ``{"train": graphs, "val":
            graphs, "test": graphs}``, of which ``val`` and ``test`` may be left out; it needs no splitter.
        undirected: Add missing reverse edges.
        max_degree: Graphs without features get the degrees of their nodes, one-hot; higher ones count as this, None for
            the highest that occurs.
    """

    def __init__(
        self,
        graphs: Sequence[Data] | Mapping[str, Sequence[Data]],
        undirected: bool = True,
        max_degree: int | None = None,
    ) -> None:
        super().__init__(undirected, max_degree)
        self.loaded = graphs_by_part(graphs)

    @property
    def default_splitter(self) -> Splitter:
        """The set's own split, if it comes with one."""
        return super().default_splitter if self.loaded.roles is None else GivenSplit()

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:  # noqa: D102
        return self.loaded


class GraphSetFile(InFile, GraphSetSource):
    """A set of graphs of your own: a list of ``torch_geometric.data.Data``, written by ``torch.save``.

    Args:
        path: The file; a relative path starts at the working directory.
        undirected: Add missing reverse edges.
        max_degree: Graphs without features get the degrees of their nodes, one-hot; higher ones count as this, None for
            the highest that occurs.
    """

    def __init__(self, path: str, undirected: bool = True, max_degree: int | None = None) -> None:
        super().__init__(undirected, max_degree)
        self.path = user_path("path", path)

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:  # noqa: D102
        check_is_file(self.path, "graphs")
        expected = "a list of torch_geometric Data that loads with weights_only=True, one for each graph"
        with reading(self.path, expected):
            with allow_pickled_graphs():
                saved = load_data(self.path)
            if not isinstance(saved, list):
                raise ValueError(f"it holds a {type(saved).__name__}")
            graphs = [Data.from_dict(each) if isinstance(each, dict) else each for each in saved]
        return LoadedGraphs(graphs=graphs)


def graphs_by_part(given: Sequence[Data] | Mapping[str, Sequence[Data]]) -> LoadedGraphs:
    """Graphs in a list, or by what trains, validates and tests, with these roles."""
    if not isinstance(given, Mapping):
        return LoadedGraphs(graphs=list(given))
    if not has_parts(given):
        raise ValueError(f"a set of graphs is a list, or lists called 'train', 'val' and 'test'; got {[*given]}")
    parts = parts_in(given)
    roles = roles_of({part: len(graphs) for part, graphs in parts.items()})
    return LoadedGraphs(graphs=[graph for graphs in parts.values() for graph in graphs], roles=roles)


def table_of(allocation: Allocation) -> PartitionTable:
    """The table of clients that hold many graphs."""
    table = PartitionTable.from_graph_sets(
        allocation.clients,
        num_classes=allocation.num_outputs,
        class_names=allocation.class_names,
        numbers=allocation.task.target.is_numeric,
    )
    if allocation.own_outputs:  # classes that mean something else for each client do not differ by their shares
        return dataclasses.replace(table, heterogeneity=math.nan)
    return table


def content(prepared: PreparedGraphs) -> tuple[Tensor, ...]:
    """What the hash of a partition covers of a set of graphs."""
    union = prepared.union
    edge_data = [union[key] for key in ("edge_weight", "edge_attr") if union.get(key) is not None]
    return (union.x, union.edge_index, prepared.num_nodes_G, *edge_data)


def task_and_targets(sets: Sequence[PreparedGraphs], titles: Sequence[str]) -> tuple[Task, list[Tensor]]:
    """What is learned of sets of graphs, and the checked targets of each.

    Raises:
        ValueError: Targets are not sound, or not of one kind.
    """
    kinds = [_kind(each) for each in sets]
    if len({each.y.shape[1] for each in sets}) == 1 and not any(each.loaded.kind for each in sets):
        kinds = [kind_of_target(torch.cat([each.y for each in sets]))] * len(sets)
    if len(set(kinds)) > 1:
        other = next(index for index, kind in enumerate(kinds) if kind != kinds[0])
        raise ValueError(
            f"the targets of {titles[other]} are {kinds[other]}, those of {titles[0]} {kinds[0]}: all clients need the "
            "same kind of target"
        )
    targets = [
        checked_targets(each.y, each.num_graphs, title, given=each.loaded.kind, example="graph", kind=kinds[0])
        for each, title in zip(sets, titles, strict=True)
    ]
    multi_label = kinds[0] == "labels"
    return GraphRegression() if kinds[0] == "numbers" else GraphClassification(multi_label=multi_label), targets


def _kind(prepared: PreparedGraphs) -> str:
    return kind_of_target(prepared.y, given=prepared.loaded.kind)
