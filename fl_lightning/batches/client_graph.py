"""The subgraph of one client."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData, joined_fields
from fl_lightning.kernels.edge_codes import codes, distinct_codes, reversed_codes


@dataclass(frozen=True, kw_only=True)
class ClientGraph(ClientData):
    """A client's private subgraph: features, edges, targets and the roles of its nodes, which are the examples.

    Shape legend: N nodes of this client, F features, E directed edges, K attributes of an edge, M largest number of
    neighbors of a node, X directed edges to and from other clients, S structure features.

    Attributes:
        x_NF: Node features, float32, dense.
        edge_index_2E: int64, source and target of every edge, sorted by source and then by target, no self-loops, no
            duplicates; both directions of every edge unless the graph is directed.
        node_idx_N: int64, ascending, index of each node in the prepared global graph (for its index in the graph of
            the source, see ``FederatedDataModule.source_idx_N``). Nodes that a strategy has added follow: -1 if it has
            made them, -2 - i for the node i of another client.
        neighbor_ids_NM: int64, ids of the neighbors of each node, including those lost to other clients, which all
            clients share (``callbacks/neighbor_ids.py``); 0 for none. None if they are not needed.
        edge_weight_E: Non-negative weight of each edge, float32, in the order of the edges; None if edges have none.
        edge_attr_EK: Attributes of each edge, float32, in the order of the edges; None if edges have none.
        is_directed: Whether edges or their weights may differ between the directions; a message goes from source to
            target. It is set automatically if they do differ.
        is_inductive: Whether validation and test nodes and their edges are hidden from training (:meth:`seen`).
        cross_edge_2X: int64, source and target of every edge to or from another client, by index in the prepared global
            graph (``data.cross_edges``); None if they are not known.
        num_neighbors_N: int64, number of each node's neighbors at all clients, if a strategy has made it known: Â is
            normalized by it. None for the neighbors in this graph.
        propagated_NF: Â X of the whole graph, float, if a strategy has made it known; None for that of this graph.
        structure_NS: Features of the structure around each node, float, if a strategy has computed them, else None.

    Raises:
        ValueError: The number of weights or of rows of attributes is not that of edges.
    """

    x_NF: Tensor
    edge_index_2E: Tensor
    node_idx_N: Tensor
    neighbor_ids_NM: Tensor | None = None
    edge_weight_E: Tensor | None = None
    edge_attr_EK: Tensor | None = None
    is_directed: bool = False
    is_inductive: bool = False
    cross_edge_2X: Tensor | None = None
    num_neighbors_N: Tensor | None = None
    propagated_NF: Tensor | None = None
    structure_NS: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the sizes of edge weights and attributes, and whether edges go both ways."""
        for name, value in (("edge_weight_E", self.edge_weight_E), ("edge_attr_EK", self.edge_attr_EK)):
            if value is not None and len(value) != self.num_edges:
                raise ValueError(
                    f"{self.name}: {name} has {len(value)} rows for {self.num_edges} edges; give a row for each edge"
                )
        if not self.is_directed and not goes_both_ways(self.edge_index_2E, self.num_nodes, self.edge_weight_E):
            object.__setattr__(self, "is_directed", True)

    @property
    def inputs(self) -> Tensor:
        """The nodes' features."""
        return self.x_NF

    def with_inputs(self, inputs: Tensor) -> Self:
        """The graph with other features."""
        return dataclasses.replace(self, x_NF=inputs)

    def with_graph(self, change: Callable[[Any, Tensor], Any]) -> Self:
        """The graph that it is changed to."""
        changed: Self = change(self, torch.zeros(self.num_nodes, dtype=torch.int64))
        return changed

    def seen(self) -> Self:
        """The graph without validation and test nodes, their edges, and all ids of others, if it is inductive."""
        if not self.is_inductive:
            return self
        seen_N = ~(self.val_mask_N | self.test_mask_N)
        kept_E = seen_N[self.edge_index_2E].all(dim=0)
        edges_2E = (seen_N.cumsum(0) - 1)[self.edge_index_2E[:, kept_E]]
        nodes = ("x_NF", "y_N", "train_mask_N", "val_mask_N", "test_mask_N", "node_idx_N")
        kept: dict[str, Any] = {name: getattr(self, name)[seen_N] for name in nodes}
        for name in ("edge_weight_E", "edge_attr_EK"):
            if (value := getattr(self, name)) is not None:
                kept[name] = value[kept_E]
        return dataclasses.replace(
            self,
            **kept,
            edge_index_2E=edges_2E,
            neighbor_ids_NM=None,
            cross_edge_2X=None,
            is_inductive=False,
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of the subgraph."""
        return len(self.x_NF)

    @property
    def num_edges(self) -> int:
        """Directed edges of the subgraph (each undirected edge counts twice, as in PyG)."""
        return self.edge_index_2E.shape[1]

    @property
    def cost(self) -> int:
        """Cost of a step on the client, for distributing clients over processes: nodes plus edges."""
        return self.num_nodes + self.num_edges

    @property
    def num_features(self) -> int:
        """Features of a node."""
        return self.x_NF.shape[1]

    @property
    def global_idx_N(self) -> Tensor:
        """Those of its nodes in the global graph."""
        return self.node_idx_N

    @classmethod
    def pooled(cls, members: Sequence[Self]) -> Self:
        """Their graphs as one without edges between them; ``node_idx_N`` does not ascend, and may have a node twice."""
        sizes = torch.tensor([member.num_nodes for member in members])
        first = (sizes.cumsum(0) - sizes).tolist()
        edges = [member.edge_index_2E + start for member, start in zip(members, first, strict=True)]
        tensors = joined_fields(members, but=("edge_index_2E", "neighbor_ids_NM", "cross_edge_2X"))
        is_directed = any(member.is_directed for member in members)
        return cls(name="pool", edge_index_2E=torch.cat(edges, dim=1), is_directed=is_directed, **tensors)

    @property
    def edge_facts(self) -> Mapping[str, Any]:
        """Whether edges are directed, their weights and attributes, and whether those to other clients are known."""
        return {
            "is_directed": self.is_directed,
            "has_edge_weights": self.edge_weight_E is not None,
            "num_edge_attributes": 0 if self.edge_attr_EK is None else self.edge_attr_EK.shape[1],
            "has_cross_edges": self.cross_edge_2X is not None,
        }


def goes_both_ways(edge_index_2E: Tensor, num_nodes: int, weight_E: Tensor | None = None) -> bool:
    """Whether every edge has its reverse, with the same weight.

    Args:
        edge_index_2E: int64 edges (2, E), without duplicates.
        num_nodes: Number of nodes.
        weight_E: Weights; None if edges have none.

    Example:
        >>> goes_both_ways(torch.tensor([[0, 1], [1, 0]]), 2), goes_both_ways(torch.tensor([[0], [1]]), 2)
        (True, False)
    """
    code_E = distinct_codes(edge_index_2E, num_nodes)
    if not torch.equal(code_E, reversed_codes(code_E, num_nodes)):
        return False
    if weight_E is None:
        return True
    source_E, target_E = edge_index_2E
    forth_E, back_E = (codes(*ends, num_nodes).argsort() for ends in ((source_E, target_E), (target_E, source_E)))
    return torch.equal(weight_E[forth_E], weight_E[back_E])
