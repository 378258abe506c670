"""Many graphs of each client as one block-diagonal graph, drawn in mini-batches of whole graphs.

Shape legend: C clients, G graphs and N nodes of a client (padded), B graphs of a mini-batch, M nodes or edges of these.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from fl_lightning.batches.base import EXAMPLES, NODES, common_fields, pad
from fl_lightning.batches.client_data import ClientData, joined_fields
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.draws import DrawnBatch, DrawnCollator
from fl_lightning.batches.edge_fields import incidence_fields
from fl_lightning.batches.graphs import GraphBatch, GraphCollator, Pooling

#: Number of graphs of each client in one part of an evaluation.
PART_GRAPHS = 256


@dataclass(frozen=True, kw_only=True)
class ClientGraphs(ClientData):
    """A client's private graphs, each of which is an example.

    Attributes:
        union: All of them as one graph without edges between them, one after another; its nodes have no roles.
        num_nodes_G: Number of nodes of each graph, int64, positive.
        max_degree: If the features are degrees, one-hot, the highest, which higher ones count as; None for others.
        own_width: How many of the features, the first ones, are the client's own, and the others zeros; None for all.
    """

    union: ClientGraph
    num_nodes_G: Tensor
    max_degree: int | None = None
    own_width: int | None = None

    def graph(self, index: int) -> tuple[Tensor, Tensor]:
        """One of the graphs: the features of its nodes (nodes, F), and its edges (2, edges)."""
        first, size = int(self.num_nodes_G[:index].sum()), int(self.num_nodes_G[index])
        source_E = self.union.edge_index_2E[0]
        is_own_E = (source_E >= first) & (source_E < first + size)
        return self.union.x_NF[first : first + size], self.union.edge_index_2E[:, is_own_E] - first

    @property
    def graph_of_N(self) -> Tensor:
        """The graph of each node."""
        return torch.arange(self.size).repeat_interleave(self.num_nodes_G)

    @property
    def inputs(self) -> Tensor:
        """The features of all nodes."""
        return self.union.x_NF

    def with_inputs(self, inputs: Tensor) -> Self:
        """The graphs with other features."""
        return dataclasses.replace(self, union=self.union.with_inputs(inputs))

    def with_graph(self, change: Callable[[Any, Tensor], Any]) -> Self:
        """The graphs with another union."""
        of_N = torch.arange(len(self.num_nodes_G)).repeat_interleave(self.num_nodes_G)
        return dataclasses.replace(self, union=change(self.union, of_N))

    @classmethod
    def pooled(cls, members: Sequence[Self]) -> Self:
        """Their graphs one after another."""
        union = ClientGraph.pooled([member.union for member in members])
        return cls(name="pool", union=union, **joined_fields(members))

    @property
    def cost(self) -> int:
        """Nodes plus edges."""
        return self.union.cost

    @property
    def edge_facts(self) -> Any:
        """The facts about the edges of the union."""
        return self.union.edge_facts


@dataclass(frozen=True, kw_only=True)
class GraphSetBatch(GraphBatch, DrawnBatch):
    """Graphs as a client's model sees them: ``y`` and the masks are of graphs, everything else of nodes.

    Attributes:
        num_nodes: Number of nodes of each graph, which are consecutive, int64 (C, G); 0 for padding.
        graph_of: The graph of each node, int64 (C, N); any for padding.
        num_edges: Number of edges of each graph, which are consecutive, int64 (C, G); None if edges have no attributes.
    """

    num_nodes: Tensor = field(metadata=EXAMPLES)
    graph_of: Tensor = field(metadata=NODES)
    num_edges: Tensor | None = field(default=None, metadata=EXAMPLES)

    @property
    def summary_mask(self) -> Tensor:
        """Training graphs alone."""
        return self.train_mask

    def pool(self, value_ND: Tensor, how: Pooling = "mean") -> Tensor:
        """Sum, mean or maximum over the nodes of each graph, (G, D), 0 for padding; also on a stack and under vmap."""
        graph_ND = self.graph_of.unsqueeze(-1).expand_as(value_ND)
        shape = (*value_ND.shape[:-2], self.num_nodes.shape[-1], value_ND.shape[-1])
        mask_N1, count_G1 = self.node_mask.unsqueeze(-1), self.num_nodes.unsqueeze(-1)
        if how == "max":
            start_GD = value_ND.new_full(shape, -torch.inf)
            most_GD = start_GD.scatter_reduce(-2, graph_ND, value_ND.masked_fill(~mask_N1, -torch.inf), "amax")
            return torch.where(count_G1 > 0, most_GD, 0.0)
        total_GD = value_ND.new_zeros(shape).scatter_add(-2, graph_ND, value_ND * mask_N1)
        return total_GD if how == "sum" else total_GD / count_G1.clamp(min=1)

    def spread(self, value_GD: Tensor) -> Tensor:
        """What each node's graph has, (N, D); also on a stack and under vmap."""
        return value_GD.gather(-2, self.graph_of.unsqueeze(-1).expand(*self.graph_of.shape, value_GD.shape[-1]))

    @property
    def graph_sizes(self) -> Tensor:
        """Number of nodes of each graph."""
        return self.num_nodes

    def parts(self) -> Iterator["GraphSetBatch"]:
        """Parts of ``PART_GRAPHS`` graphs of each client; in a stack and alone a client has the same parts."""
        num_graphs = self.example_mask.shape[-1]
        if num_graphs <= PART_GRAPHS:
            yield self
            return
        for order_B in torch.split(torch.arange(num_graphs, device=self.key.device), PART_GRAPHS):
            order = order_B.expand(*self.key.shape, -1).contiguous()
            yield self._with_roles(order, self.example_mask.gather(-1, order))

    def _pick(self, key: Tensor, order: Tensor, drawn_mask: Tensor) -> "GraphSetBatch":
        """The graphs with the given indices, (C, B), some of which may be padding, and only their nodes."""
        chosen = super()._pick(key, order, drawn_mask)
        graph_M, node_mask, moved_M = _places(self.num_nodes, order, drawn_mask, at_least=1)
        node_M = torch.where(node_mask, moved_M + _range_like(moved_M), 0)
        others = {"num_nodes": chosen.num_nodes * drawn_mask, "graph_of": graph_M, "node_mask": node_mask}
        names = self.named_by("nodes").items()
        tensors = {name: _rows(tensor, node_M) for name, tensor in names if name not in others}
        picked = dataclasses.replace(
            chosen.replace({**tensors, **others}),
            adjacency=self.adjacency.moved(node_M, node_mask),
            links=None if self.links is None else self.links.moved(node_M, node_mask),
        )
        return picked if self.num_edges is None else picked._with_edges_of(self, order, drawn_mask)

    def _with_edges_of(self, whole: "GraphSetBatch", order: Tensor, drawn_mask: Tensor) -> "GraphSetBatch":
        """The edges of the graphs that were picked."""
        assert whole.num_edges is not None
        assert whole.edge_ends is not None
        assert whole.edge_attr is not None
        assert whole.edge_targets is not None
        graph_E, edge_mask, moved_E = _places(whole.num_edges, order, drawn_mask, at_least=0)
        edge_E = torch.where(edge_mask, moved_E + _range_like(moved_E), 0)
        moved_B = _moved(whole.num_nodes, order, drawn_mask)
        ends = (_rows(whole.edge_ends, edge_E) - moved_B.gather(-1, graph_E).unsqueeze(-1)) * edge_mask.unsqueeze(-1)
        dtype = whole.edge_targets.matrix.dtype
        return dataclasses.replace(
            self,
            num_edges=whole.num_edges.gather(-1, order) * drawn_mask,
            edge_attr=_rows(whole.edge_attr, edge_E),
            **incidence_fields(ends, edge_mask, self.node_mask.shape[-1], dtype),
        )


def _moved(size_G: Tensor, order_B: Tensor, drawn_mask_B: Tensor) -> Tensor:
    """How far each of some graphs comes to the front, in units of what it has ``size`` of, (C, B)."""
    count_B = size_G.gather(-1, order_B) * drawn_mask_B
    first_G = size_G.cumsum(dim=-1) - size_G
    return first_G.gather(-1, order_B) - (count_B.cumsum(dim=-1) - count_B)


def _places(size_G: Tensor, order_B: Tensor, drawn_mask_B: Tensor, *, at_least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of what some graphs have one after another: whose it is, what is no padding, how far it comes to the front.

    Args:
        size_G: How many each graph has, (C, G).
        order_B: The graphs.
        drawn_mask_B: Which of them are no padding.
        at_least: Length of the result if there is nothing.
    """
    end_B = (size_G.gather(-1, order_B) * drawn_mask_B).cumsum(dim=-1)
    place_M = torch.arange(max(at_least, int(end_B.max())), device=end_B.device)
    place_M = place_M.expand(*end_B.shape[:-1], -1).contiguous()
    graph_M = torch.searchsorted(end_B, place_M, right=True).clamp(max=end_B.shape[-1] - 1)
    return graph_M, place_M < end_B[..., -1:], _moved(size_G, order_B, drawn_mask_B).gather(-1, graph_M)


def _range_like(value_M: Tensor) -> Tensor:
    return torch.arange(value_M.shape[-1], device=value_M.device)


def _rows(value: Tensor, row_M: Tensor) -> Tensor:
    """Some rows of each client's, (C, M, ...), copied as a whole: a tenth of what a gather of their numbers takes."""
    if row_M.dim() == 1:
        return value.index_select(0, row_M)
    first_C1 = torch.arange(len(value), device=value.device).unsqueeze(1) * value.shape[1]
    return value.flatten(0, 1).index_select(0, (row_M + first_C1).flatten()).view(*row_M.shape, *value.shape[2:])


class GraphSetCollator(DrawnCollator):
    """Turns clients' graphs into batches; the arguments are those of :class:`DrawnCollator`."""

    def may_draw_one_node(self, client: int) -> bool:
        """Whether a step may have one graph, and a graph to train on has one node."""
        member = self.clients[client]
        return self.least_examples(client) == 1 and bool((member.num_nodes_G[member.train_mask_N] == 1).any())

    def __call__(self, clients: Sequence[int]) -> GraphSetBatch:
        """Batch the given clients' graphs, padded to the largest numbers of graphs and of nodes."""
        members = [self.clients[client] for client in clients]
        unions = [each.union for each in members]
        nodes = GraphCollator(unions, layout={"sparse_features": False}, device=self.device, dtype=self.dtype)
        return GraphSetBatch(
            num_nodes=pad([each.num_nodes_G for each in members], self.device),
            graph_of=pad([each.graph_of_N for each in members], self.device),
            **common_fields(members, device=self.device, dtype=self.dtype),
            **{**nodes.graph_fields(unions), "plain": None},
            num_edges=self._num_edges(members),
            **self.drawing,
        )

    def _num_edges(self, members: Sequence[ClientGraphs]) -> Tensor | None:
        """Number of edges of each graph; None if edges have no attributes."""
        if any(each.union.edge_attr_EK is None for each in members):
            return None
        counts = [each.graph_of_N[each.union.edge_index_2E[0]].bincount(minlength=each.size) for each in members]
        return pad(counts, self.device)
