"""Many graphs that are examples: as they are read, prepared, and cut into clients.

Shape legend: G graphs, N nodes and E edges of all of them, F features.
"""

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.data.allocation import masks_of, user_masks_of
from fl_lightning.data.columns import Column, numbered
from fl_lightning.data.edge_data import EDGE_DATA
from fl_lightning.data.preparation import Preparation, check_num_nodes, prepare_graph

#: What to do with graphs whose nodes have the targets.
_JOIN = "join each client's graphs into one, by torch_geometric.data.Batch.from_data_list(graphs)"
#: What every set of graphs can be sorted by.
TRAITS = ("size", "degree", "density", "features")


@dataclass(frozen=True, kw_only=True)
class LoadedGraphs:
    """Graphs as a source has read them.

    Attributes:
        graphs: Each with ``edge_index`` and ``y``: a class, or labels or numbers (nan where missing); and with ``x``,
            and perhaps ``edge_weight`` and ``edge_attr``, all of them or none.
        columns: More about each graph, texts (empty if unknown) or numbers by name; clients can be made by them.
        names: Names of the graphs for the file of predictions; None for their numbers.
        kind: Whether targets are ``classes``, ``labels`` or ``numbers``; None where their type and shape say it.
        class_names: What the classes are called; None where that is not known.
        roles: The :class:`~fl_lightning.data.split.Role` of each graph in a public split, int8; None without one.
    """

    graphs: Sequence[Data]
    columns: Mapping[str, Column] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    kind: str | None = None
    class_names: tuple[str, ...] | None = None
    roles: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedGraphs:
    """Graphs as one block-diagonal graph, one after another.

    Attributes:
        union: With ``x`` and ``edge_index``, and perhaps ``edge_weight`` and ``edge_attr``; edges are sorted by source.
        num_nodes_G: Number of nodes of each graph, int64, positive.
        y: The targets as they were given, (G, H).
        loaded: What else was read of the graphs.
        max_degree: The highest degree that is a feature of its own; None if graphs came with features.
    """

    union: Data
    num_nodes_G: Tensor
    y: Tensor
    loaded: LoadedGraphs
    max_degree: int | None = None

    def up_to_degree(self, highest: int) -> "PreparedGraphs":
        """The same graphs, whose features are degrees, with more of them."""
        assert self.max_degree is not None
        union = copy.copy(self.union)
        union.x = F.pad(union.x, (0, highest - self.max_degree))
        return dataclasses.replace(self, union=union, max_degree=highest)

    @property
    def num_graphs(self) -> int:
        """G."""
        return len(self.num_nodes_G)

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.union.x.shape[1])

    @cached_property
    def graph_of_N(self) -> Tensor:
        """The graph of each node."""
        return torch.arange(self.num_graphs).repeat_interleave(self.num_nodes_G)

    @cached_property
    def num_edges_G(self) -> Tensor:
        """Number of directed edges of each graph."""
        return torch.bincount(self.graph_of_N[self.union.edge_index[0]], minlength=self.num_graphs)

    def summary(self, y_G: Tensor) -> Data:
        """What partitioners and splitters see of each graph: :data:`TRAITS`, columns, and its class (or stratum).

        Also the masks of a public split. Texts are numbered in alphabetical order, an empty one is -1. ``examples`` is
        what messages call entries.
        """
        size_G, edges_G = self.num_nodes_G.double(), self.num_edges_G.double()
        sum_G = size_G.new_zeros(self.num_graphs).index_add(0, self.graph_of_N, self.union.x.double().mean(dim=1))
        traits = (size_G, edges_G / size_G, edges_G / (size_G * (size_G - 1)).clamp(min=1), sum_G / size_G)
        columns = {name: numbered(column) for name, column in self.loaded.columns.items()}
        if self.loaded.roles is not None:
            columns |= user_masks_of(self.loaded.roles)
        return Data(
            y=y_G, num_nodes=self.num_graphs, examples="graphs", **dict(zip(TRAITS, traits, strict=True)), **columns
        )

    def client(
        self,
        name: str,
        graph_M: Tensor,
        y_M: Tensor,
        role_M: Tensor,
        *,
        num_features: int | None = None,
        num_outputs: int | None = None,
    ) -> ClientGraphs:
        """Some of the graphs as a client holds them.

        Args:
            name: Of the client.
            graph_M: Their indices, ascending.
            y_M: Their targets.
            role_M: Their roles.
            num_features: Zeros are appended to the features until there are as many; None for none.
            num_outputs: How many outputs are its own; None if outputs are everybody's.
        """
        node_N, size_M = _ranges(self.num_nodes_G, graph_M)
        edge_E, count_M = _ranges(self.num_edges_G, graph_M)
        moved_M = (self.num_nodes_G.cumsum(0) - self.num_nodes_G)[graph_M] - (size_M.cumsum(0) - size_M)
        per_edge: dict[str, Any] = {
            f"{key}_{axes}": None if self.union.get(key) is None else self.union[key][edge_E]
            for key, axes in zip(EDGE_DATA, ("E", "EK"), strict=True)
        }
        union = ClientGraph(
            name=name,
            x_NF=F.pad(self.union.x[node_N], (0, (num_features or self.num_features) - self.num_features)),
            edge_index_2E=self.union.edge_index[:, edge_E] - moved_M.repeat_interleave(count_M),
            y_N=torch.full((len(node_N),), -1),
            **masks_of(torch.zeros(len(node_N))),
            node_idx_N=torch.arange(len(node_N)),
            **per_edge,
        )
        roles = masks_of(role_M)
        return ClientGraphs(
            name=name,
            union=union,
            num_nodes_G=size_M,
            max_degree=self.max_degree,
            own_width=None if num_features is None else self.num_features,
            y_N=y_M,
            num_outputs=num_outputs,
            **roles,
        )

    def names(self, graph_M: Tensor) -> tuple[str, ...]:
        """The names of some of the graphs; empty texts if they have none."""
        names = self.loaded.names
        return ("",) * len(graph_M) if names is None else tuple(names[graph] for graph in graph_M.tolist())


def prepared_graphs(
    loaded: LoadedGraphs, preparation: Preparation, title: str, max_degree: int | None = None
) -> PreparedGraphs:
    """Join and prepare graphs.

    Args:
        loaded: As they were read.
        preparation: What is done to each.
        title: What messages call them.
        max_degree: Graphs without features get the degrees of their nodes, one-hot; higher ones count as this, None for
            the highest that occurs.

    Raises:
        ValueError: A graph is not sound; the message names it.
    """
    graphs = list(loaded.graphs)
    _check_alike(graphs, title)
    num_nodes_G = torch.tensor([int(graph.num_nodes or 0) for graph in graphs])
    highest: int | None = None
    if "x" not in graphs[0]:
        _warn_of_unread(graphs[0], title)
        degrees = _degrees(graphs, num_nodes_G, preparation.undirected, max_degree)
        graphs = [Data(**{**graph.to_dict(), "x": x}) for graph, x in zip(graphs, degrees, strict=True)]
        highest = degrees[0].shape[1] - 1
    try:
        union = prepare_graph(_joined(graphs, num_nodes_G), preparation, title, may_lack_edges=True)
    except (ValueError, RuntimeError, IndexError):
        for index, graph in enumerate(graphs):  # to say which it is
            prepare_graph(_inputs(graph), preparation, f"{title}, graph {index}", may_lack_edges=True)
        raise
    y = torch.stack([torch.as_tensor(graph.y).reshape(-1) for graph in graphs])
    kind = loaded.kind or _kind(graphs, title)
    if kind is None and all(map(_may_be_of_nodes, graphs)):
        warnings.warn(
            f"{title}: y has as many numbers as a graph has nodes, and they are taken as targets of the graph; if they "
            f"are of its nodes, {_JOIN}; if not, set data.task = 'labels' or 'numbers' on the graphs",
            stacklevel=2,
        )
    rest = dataclasses.replace(loaded, graphs=(), kind=kind)
    return PreparedGraphs(union=union, num_nodes_G=num_nodes_G, y=y, loaded=rest, max_degree=highest)


def _warn_of_unread(graph: Data, title: str) -> None:
    """Say that graphs without features have something else for their nodes, which is not used."""
    if unread := [key for key in ("z", "pos") if graph.get(key) is not None]:
        warnings.warn(
            f"{title}: the graphs have no x, so each node's features are its degree, one-hot, and "
            f"{' and '.join(unread)} are not used; what nets should see goes into x: `data.x = data.{unread[-1]}`",
            stacklevel=2,
        )


def _may_be_of_nodes(graph: Data) -> bool:
    y = torch.as_tensor(graph.y)
    return y.dim() > 0 and len(y) == graph.num_nodes and y.numel() > 1


def _kind(graphs: Sequence[Data], title: str) -> str | None:
    """What the graphs say that their targets are, by their attribute ``task``."""
    kind: str | None = graphs[0].get("task")
    for index, graph in enumerate(graphs):
        if (given := graph.get("task")) != kind or given not in (None, "classes", "labels", "numbers"):
            raise ValueError(
                f"{title}, graph {index}: task is {given!r}, that of the first {kind!r}; it says what y holds, the "
                "same for all graphs: classes, labels or numbers"
            )
    return kind


def _check_alike(graphs: Sequence[Data], title: str) -> None:
    """Refuse graphs that cannot be put together."""
    if not graphs:
        raise ValueError(f"{title} has no graphs: give at least one")
    first = graphs[0]
    for index, graph in enumerate(graphs):
        name = f"{title}, graph {index}"
        if not isinstance(graph, Data):
            pairs = "; inputs and targets of examples are tensors or arrays" if isinstance(graph, list) else ""
            raise ValueError(f"{name} is a {type(graph).__name__}: give a torch_geometric.data.Data{pairs}")
        if missing := [key for key in ("edge_index", "y") if graph.get(key) is None]:
            raise ValueError(f"{name} has no {missing[0]}: edges and a target are needed of each graph, as tensors")
        _check_tensors(graph, name)
        check_num_nodes(graph, name)
        if not graph.num_nodes:
            raise ValueError(f"{name} has no nodes: leave it out")
        for key, of in (("x", "features of each node"), ("edge_attr", "attributes of each edge")):
            if (
                graph.get(key) is not None
                and first.get(key) is not None
                and graph[key].shape[1:] != first[key].shape[1:]
            ):
                widths = [tuple(each[key].shape[1:]) for each in (graph, first)]
                has, had = (width[0] if len(width) == 1 else width for width in widths)
                raise ValueError(f"{name} has {has} {of}, the first {had}: all graphs of a client need the same")
        for key in ("x", *EDGE_DATA):
            if (graph.get(key) is None) != (first.get(key) is None):
                without = index if graph.get(key) is None else 0
                raise ValueError(
                    f"{title}: graph {without} has no {key}, but graph {index - without} has: give all graphs "
                    f"{key}, or none of them"
                )
        if torch.as_tensor(graph.y).numel() != torch.as_tensor(first.y).numel():
            of_nodes = f"; if y is of the nodes, {_JOIN}" if all(map(_may_be_of_nodes, (first, graph))) else ""
            raise ValueError(
                f"{name} has {torch.as_tensor(graph.y).numel()} targets, the first {torch.as_tensor(first.y).numel()}: "
                f"give each graph one class, or as many labels or numbers as the others{of_nodes}"
            )


def _check_tensors(graph: Data, name: str) -> None:
    """Refuse a graph whose parts are none, or have too few axes to be compared with those of others."""
    for key in ("x", "edge_index", "y", *EDGE_DATA):
        if isinstance(value := graph.get(key), Tensor) and value.layout != torch.strided:
            raise ValueError(f"{name}: {key} is sparse; give it dense, as `data.{key} = data.{key}.to_dense()`")
    for key, least in (("x", 1), ("edge_index", 2), ("edge_weight", 1), ("edge_attr", 1)):
        value = graph.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.dim() < least):
            has = f"a tensor of {value.dim()} axes" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{name}: {key} is {has}; give a tensor: `data.{key} = torch.as_tensor(...)`")
    if (edges := graph.get("edge_index")) is not None and edges.dtype == torch.bool:  # joined with others they are 0, 1
        raise ValueError(f"{name}: edge_index is torch.bool; it must hold numbers of nodes")
    try:
        torch.as_tensor(graph.y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: y is a {type(graph.y).__name__} without numbers; number the classes, such as "
            "`data.y = torch.tensor([2])`"
        ) from error


def _inputs(graph: Data) -> Data:
    """A graph without its target, which is not its nodes'."""
    given = {key: graph[key] for key in ("x", "edge_index", *EDGE_DATA) if graph.get(key) is not None}
    return Data(**given, y=torch.zeros(int(graph.num_nodes or 0)))


def _joined(graphs: Sequence[Data], num_nodes_G: Tensor) -> Data:
    """The graphs as one, before they are prepared."""
    first_G = num_nodes_G.cumsum(0) - num_nodes_G
    given = {
        key: torch.cat([graph[key] for graph in graphs]) for key in ("x", *EDGE_DATA) if graphs[0].get(key) is not None
    }
    return Data(**given, edge_index=_joined_edges(graphs, num_nodes_G, first_G), y=torch.zeros(int(num_nodes_G.sum())))


def _joined_edges(graphs: Sequence[Data], num_nodes_G: Tensor, first_G: Tensor) -> Tensor:
    count_G = torch.tensor([graph.edge_index.shape[1] for graph in graphs])
    edge_2E = torch.cat([graph.edge_index for graph in graphs], dim=1)
    if bool(((edge_2E < 0) | (edge_2E >= num_nodes_G.repeat_interleave(count_G))).any()):
        raise ValueError("an edge leads to a node that there is not")  # which one, says who prepares them one by one
    return edge_2E + first_G.repeat_interleave(count_G)


def _degrees(
    graphs: Sequence[Data], num_nodes_G: Tensor, undirected: bool, max_degree: int | None
) -> tuple[Tensor, ...]:
    """One-hot degrees of each graph's nodes, without loops and double edges."""
    num_nodes = int(num_nodes_G.sum())
    edge_2E = _joined_edges(graphs, num_nodes_G, num_nodes_G.cumsum(0) - num_nodes_G).long()
    edge_2E = coalesce(remove_self_loops(edge_2E)[0], num_nodes=num_nodes)
    if undirected:
        edge_2E = to_undirected(edge_2E, num_nodes=num_nodes)
    degree_N = torch.bincount(edge_2E[1], minlength=num_nodes)
    highest = int(degree_N.max()) if max_degree is None else max_degree
    return torch.split(F.one_hot(degree_N.clamp(max=highest), highest + 1).float(), num_nodes_G.tolist())


def _ranges(size_G: Tensor, chosen_M: Tensor) -> tuple[Tensor, Tensor]:
    """The places of what some graphs have, where graph follows graph, and how many each of them has."""
    size_M = size_G[chosen_M]
    moved_M = (size_G.cumsum(0) - size_G)[chosen_M] - (size_M.cumsum(0) - size_M)
    return torch.arange(int(size_M.sum())) + moved_M.repeat_interleave(size_M), size_M
