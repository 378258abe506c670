"""Missing and wrong edges of clients' graphs.

Shape legend: N nodes and E directed edges of a client, P edges that are drawn: of an undirected graph its two
directions are one, the smaller node first.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.data.heterogeneity.base import AnyClient, Graded
from fl_lightning.tasks import Task

#: Which nodes new edges join.
Inserted = Literal["random", "heterophilic"]
#: How often pairs are drawn, as many as there are nodes and edges, before a graph counts as full.
_TRIES = 100


class EdgeRemoval(Graded):
    """Edges of a client's graph, or of its graphs, that are missing.

    Args:
        strength: Share of a client's edges, rounded to the nearest number, in [0, 1].
        clients: Share of the clients whose edges are missing, rounded to the nearest number, in [0, 1].
    """

    changes_edges = True

    def why_not(self, task: Task) -> str:
        """It needs edges that have no roles."""
        return _no_edges(task)

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Remove edges, both directions of an undirected one."""

        def removed(graph: ClientGraph, of_N: Tensor) -> ClientGraph:
            once_P = _once(graph)
            order_P = once_P[torch.randperm(len(once_P), generator=draw)]
            code_E = _codes(graph, graph.edge_index_2E)
            gone_E = torch.isin(code_E, code_E[order_P[: round(len(order_P) * self.strength)]])
            kept_E = (~gone_E).nonzero().squeeze(1)
            return _with_edges(graph, graph.edge_index_2E[:, kept_E], kept_E)

        return client.with_graph(removed)


class EdgeInsertion(Graded):
    """Edges of a client's graph, or of its graphs, that are wrong: between nodes that had none.

    They have the weights and attributes of edges drawn among the client's.

    Args:
        strength: Number of a client's new edges as a share of those that it has, rounded to the nearest number, in
            [0, 10].
        clients: Share of the clients that have wrong edges, rounded to the nearest number, in [0, 1].
        kind: ``random``, between any two nodes of a graph; or ``heterophilic``, between nodes of different classes,
            which must be known.
    """

    most = 10.0
    changes_edges = True

    def __init__(self, strength: float, clients: float = 1.0, kind: Inserted = "random") -> None:
        super().__init__(strength, clients)
        if kind not in get_args(Inserted):
            raise ValueError(f"EdgeInsertion.kind must be {' or '.join(get_args(Inserted))}, got {kind!r}")
        self.kind = kind

    def why_not(self, task: Task) -> str:
        """It needs edges that have no roles; heterophilic ones need classes of nodes."""
        if self.kind == "heterophilic" and not (task.is_on_nodes and task.target.has_classes):
            return f"of kind heterophilic is for nodes of one class each, but the task is {task}: take kind random"
        return _no_edges(task)

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Insert edges, both directions of an undirected one."""

        def inserted(graph: ClientGraph, of_N: Tensor) -> ClientGraph:
            number = round(len(_once(graph)) * self.strength)
            if not number:
                return graph
            pair_2P = self._pairs(graph, of_N, number, draw)
            like_P = torch.randint(graph.num_edges, (pair_2P.shape[1],), generator=draw)[:number]
            if not graph.is_directed:
                pair_2P, like_P = torch.cat([pair_2P, pair_2P.flip(0)], dim=1), like_P.repeat(2)
            edges_2E = torch.cat([graph.edge_index_2E, pair_2P], dim=1)
            return _with_edges(graph, edges_2E, torch.cat([torch.arange(graph.num_edges), like_P]))

        return client.with_graph(inserted)

    def _pairs(self, graph: ClientGraph, of_N: Tensor, number: int, draw: torch.Generator) -> Tensor:
        """So many different pairs of nodes of one graph without an edge, int64 (2, P)."""
        taken_E, num_nodes = _codes(graph, graph.edge_index_2E), graph.num_nodes
        size_N = torch.bincount(of_N)[of_N]
        first_N = torch.searchsorted(of_N, of_N)
        code_P = torch.empty(0, dtype=torch.int64)
        for _ in range(_TRIES):
            source = torch.randint(num_nodes, (num_nodes + graph.num_edges,), generator=draw)
            place = torch.rand(len(source), generator=draw, dtype=torch.float64)
            pair_2P = torch.stack([source, first_N[source] + (place * size_N[source]).long()])
            new_P = _codes(graph, pair_2P)
            fits_P = (pair_2P[0] != pair_2P[1]) & ~torch.isin(new_P, taken_E)
            if self.kind == "heterophilic":
                y_2P = graph.y_N[pair_2P]
                fits_P &= (y_2P[0] != y_2P[1]) & (y_2P >= 0).all(dim=0)
            code_P = torch.cat([code_P, new_P[fits_P]])
            _, place_P = np.unique(code_P.numpy(), return_index=True)
            code_P = code_P[torch.from_numpy(np.sort(place_P))]
            if len(code_P) >= number:
                code_P = code_P[:number]
                return torch.stack([code_P // num_nodes, code_P % num_nodes])
        raise ValueError(
            f"strength={self.strength:g} asks for {number:,} new edges, but hardly more than {len(code_P):,} fit into "
            f"{num_nodes:,} nodes with {len(_once(graph)):,} edges: lower it"
        )


def _no_edges(task: Task) -> str:
    if not task.has_graphs:
        return f"changes edges, but {task.examples} here have none: leave it out"
    return (
        "is for edges without roles, which links are not: lower message_fraction of Links instead"
        if task.shares_nodes
        else ""
    )


def _codes(graph: ClientGraph, edges_2P: Tensor) -> Tensor:
    """A number for each edge, int64 (P,); of an undirected graph the same for both directions."""
    source_P, target_P = edges_2P if graph.is_directed else edges_2P.sort(dim=0).values
    code_P: Tensor = source_P * graph.num_nodes + target_P
    return code_P


def _once(graph: ClientGraph) -> Tensor:
    """The indices of all edges, of an undirected graph of one direction of each, int64 (P,)."""
    source_E, target_E = graph.edge_index_2E
    return torch.where((source_E < target_E) | graph.is_directed)[0]


def _with_edges(graph: ClientGraph, edges_2P: Tensor, like_P: Tensor) -> ClientGraph:
    """A graph with other edges, each with the weight and the attributes of one of its own."""
    order_P = (edges_2P[0] * graph.num_nodes + edges_2P[1]).argsort()
    like_P = like_P[order_P]
    return dataclasses.replace(
        graph,
        edge_index_2E=edges_2P[:, order_P],
        edge_weight_E=None if graph.edge_weight_E is None else graph.edge_weight_E[like_P],
        edge_attr_EK=None if graph.edge_attr_EK is None else graph.edge_attr_EK[like_P],
    )
