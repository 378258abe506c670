"""A client's graph by the targets of its edges, and parts of it.

Shape legend: N nodes, E edges, M nodes of a part.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_graph import ClientGraph


@dataclass(frozen=True, kw_only=True)
class SampledGraph(ClientGraph):
    """A part of a client's graph with sampled edges, which are directed; ``num_neighbors_N`` is of the whole graph.

    Attributes:
        factor_E: How often each edge counts, float32: d / k if k of the d edges to its target were sampled.
        position_N: Index of each node in the whole graph, int64.
        total_weight_N: Sum of the weights of each node's edges in the whole graph (1 if they have none) and of 1 for
            its loop, float32.
    """

    factor_E: Tensor
    position_N: Tensor
    total_weight_N: Tensor


class EdgesByTarget:
    """The edges of a client's graph, those of each target one after another.

    Args:
        graph: The graph.

    Attributes:
        graph: See above.
        first_N: Where the edges of each target begin, (N + 1,).
        source_E: Their sources; without a copy if the graph is undirected.
        order_E: Their indices in the graph; None for the edges in the graph's order, each of which stands for its
            reverse.
        total_weight_N: As that of :class:`SampledGraph`, of all nodes.
        cluster_N: The cluster of each node (:class:`~fl_lightning.batches.samplers.ClusterSampler`); None if unknown.
    """

    def __init__(self, graph: ClientGraph) -> None:
        self.graph = graph
        source_E, target_E = graph.edge_index_2E
        goes_both_ways = not graph.is_directed and graph.edge_attr_EK is None
        if goes_both_ways and bool((source_E[1:] >= source_E[:-1]).all()):  # then its reverse is sorted by target
            self.order_E: Tensor | None = None
            source_E, target_E = target_E, source_E
        else:
            self.order_E = target_E.argsort(stable=True)
            source_E = source_E[self.order_E]
        self.source_E = source_E
        degree_N = torch.bincount(target_E, minlength=graph.num_nodes)
        self.first_N = torch.cat([degree_N.new_zeros(1), degree_N.cumsum(0)])
        self.cluster_N: Tensor | None = None
        # the weights are in the order of the targets too, as an edge and its reverse have the same
        self.total_weight_N = torch.bincount(target_E, graph.edge_weight_E, minlength=graph.num_nodes).float() + 1

    def of_nodes(self, node_P: Tensor) -> tuple[Tensor, Tensor]:
        """The places of all edges of some nodes, and the nodes that they lead to."""
        first_P = self.first_N[node_P]
        degree_P = self.first_N[node_P + 1] - first_P
        row_E = torch.arange(len(node_P)).repeat_interleave(degree_P)
        rank_E = torch.arange(len(row_E)) - (degree_P.cumsum(0) - degree_P)[row_E]
        return first_P[row_E] + rank_E, node_P[row_E]

    def undirected(self) -> tuple[Tensor, Tensor]:
        """Where the neighbors of each node begin (N + 1,), and these; both directions of every edge."""
        if not self.graph.is_directed and self.order_E is None:
            return self.first_N, self.source_E
        num_nodes = self.graph.num_nodes
        source_E, target_E = torch.cat([self.graph.edge_index_2E, self.graph.edge_index_2E.flip(0)], dim=1)
        code_E = torch.unique(source_E * num_nodes + target_E)
        return torch.searchsorted(code_E, torch.arange(num_nodes + 1) * num_nodes), code_E % num_nodes

    def sample(
        self, node_M: Tensor, place_E: Tensor, target_E: Tensor, factor_E: Tensor, is_trained_M: Tensor
    ) -> SampledGraph:
        """A part of the graph with a sample of the edges that lead to its nodes.

        Args:
            node_M: Its nodes.
            place_E: The places of its edges, which may repeat.
            target_E: The nodes that they lead to.
            factor_E: How often each counts; of one that repeats, the sum counts.
            is_trained_M: Which nodes the loss is of.
        """
        index_N = self._indices(node_M)
        code_E = index_N[self.source_E[place_E]] * len(node_M) + index_N[target_E]
        code_E, group_E = torch.unique(code_E, return_inverse=True)
        place_E = torch.empty_like(code_E).index_copy_(0, group_E, place_E)
        factor_E = torch.zeros(len(code_E)).index_add_(0, group_E, factor_E)
        return SampledGraph(
            **self._fields(node_M, code_E, place_E, is_trained_M),
            is_directed=True,
            num_neighbors_N=self.first_N.diff()[node_M],
            factor_E=factor_E,
            position_N=node_M,
            total_weight_N=self.total_weight_N[node_M],
        )

    def induced(self, node_M: Tensor) -> ClientGraph:
        """The part of the graph with all edges between some nodes, a graph of its own."""
        index_N = self._indices(node_M)
        place_E, target_E = self.of_nodes(node_M)
        is_inside_E = index_N[self.source_E[place_E]] >= 0
        place_E, target_E = place_E[is_inside_E], target_E[is_inside_E]
        code_E, order_E = (index_N[self.source_E[place_E]] * len(node_M) + index_N[target_E]).sort()
        fields = self._fields(node_M, code_E, place_E[order_E], self.graph.train_mask_N[node_M])
        return ClientGraph(**fields, is_directed=self.graph.is_directed)

    def _indices(self, node_M: Tensor) -> Tensor:
        """The index of each node among some; -1 for the others."""
        index_N = torch.full((self.graph.num_nodes,), -1)
        index_N[node_M] = torch.arange(len(node_M))
        return index_N

    def _fields(self, node_M: Tensor, code_E: Tensor, place_E: Tensor, is_trained_M: Tensor) -> dict[str, Any]:
        """The fields of a part, whose edges are source · M + target."""
        graph, nothing_M = self.graph, torch.zeros_like(is_trained_M)
        edge_E = place_E if self.order_E is None else self.order_E[place_E]
        return {
            "name": graph.name,
            "num_outputs": graph.num_outputs,
            "x_NF": graph.x_NF[node_M],
            "y_N": graph.y_N[node_M],
            "node_idx_N": graph.node_idx_N[node_M],
            "train_mask_N": is_trained_M,
            "val_mask_N": nothing_M,
            "test_mask_N": nothing_M,
            "edge_index_2E": torch.stack([code_E // len(node_M), code_E % len(node_M)]),
            "edge_weight_E": None if graph.edge_weight_E is None else graph.edge_weight_E[edge_E],
            "edge_attr_EK": None if graph.edge_attr_EK is None else graph.edge_attr_EK[edge_E],
        }
