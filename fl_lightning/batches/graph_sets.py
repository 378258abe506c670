"""Many graphs of each client as one block-diagonal graph, drawn in mini-batches of whole graphs.

Shape legend: C clients, G graphs and N nodes of a client (padded), B graphs of a mini-batch, M nodes of these.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from fl_lightning.batches.base import EXAMPLES, NODES, common_fields, pad
from fl_lightning.batches.client_data import ClientData, joined_fields
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.draws import DrawnBatch, DrawnCollator
from fl_lightning.batches.graphs import GraphBatch, GraphCollator, Pooling


@dataclass(frozen=True, kw_only=True)
class ClientGraphs(ClientData):
    """A client's private graphs, each of which is an example.

    Attributes:
        union: All of them as one graph without edges between them, one after another; its nodes have no roles.
        num_nodes_G: Number of nodes of each graph, int64, positive.
    """

    union: ClientGraph
    num_nodes_G: Tensor

    @property
    def inputs(self) -> Tensor:
        """The features of all nodes."""
        return self.union.x_NF

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
        most_nodes: No graph has more nodes.
    """

    num_nodes: Tensor = field(metadata=EXAMPLES)
    graph_of: Tensor = field(metadata=NODES)
    most_nodes: int

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

    def slots(self) -> tuple[Tensor, Tensor]:
        """The nodes of each graph in a row, (G, W), any for padding, and which of them are no padding."""
        place_W = torch.arange(self.most_nodes, device=self.num_nodes.device)
        first_G1 = (self.num_nodes.cumsum(dim=-1) - self.num_nodes).unsqueeze(-1)
        return (first_G1 + place_W).clamp(max=self.graph_of.shape[-1] - 1), place_W < self.num_nodes.unsqueeze(-1)

    def _pick(self, key: Tensor, order: Tensor, drawn_mask: Tensor) -> "GraphSetBatch":
        """The graphs with the given indices, (C, B), some of which may be padding, and only their nodes."""
        chosen = super()._pick(key, order, drawn_mask)
        count_B = chosen.num_nodes * drawn_mask
        end_B = count_B.cumsum(dim=-1)
        first_G = self.num_nodes.cumsum(dim=-1) - self.num_nodes
        place_M = torch.arange(max(1, int(end_B.max())), device=key.device).expand(*end_B.shape[:-1], -1).contiguous()
        graph_M = torch.searchsorted(end_B, place_M, right=True).clamp(max=end_B.shape[-1] - 1)
        node_mask = place_M < end_B[..., -1:]
        moved_B = first_G.gather(-1, order) - (end_B - count_B)
        node_M = torch.where(node_mask, place_M + moved_B.gather(-1, graph_M), 0)

        def pick(value: Tensor) -> Tensor:
            index = node_M.view(*node_M.shape, *[1] * (value.dim() - node_M.dim()))
            return value.take_along_dim(index, dim=node_M.dim() - 1)

        others = {"num_nodes": count_B, "graph_of": graph_M, "node_mask": node_mask}
        tensors = {name: pick(tensor) for name, tensor in self.named_by("nodes").items() if name not in others}
        return dataclasses.replace(
            chosen.replace({**tensors, **others}),
            adjacency=self.adjacency.moved(node_M, node_mask),
            links=None if self.links is None else self.links.moved(node_M, node_mask),
        )


class GraphSetCollator(DrawnCollator):
    """Turns clients' graphs into batches; the arguments are those of :class:`DrawnCollator`."""

    def __call__(self, clients: Sequence[int]) -> GraphSetBatch:
        """Batch the given clients' graphs, padded to the largest numbers of graphs and of nodes."""
        members = [self.clients[client] for client in clients]
        unions = [each.union for each in members]
        nodes = GraphCollator(unions, layout={"sparse_features": False}, device=self.device, dtype=self.dtype)
        return GraphSetBatch(
            num_nodes=pad([each.num_nodes_G for each in members], self.device),
            most_nodes=max(int(each.num_nodes_G.max()) for each in members),
            graph_of=pad(
                [torch.arange(each.size).repeat_interleave(each.num_nodes_G) for each in members], self.device
            ),
            **common_fields(members, device=self.device, dtype=self.dtype),
            **{**nodes.graph_fields(unions), "plain": None},
            **self.drawing,
        )
