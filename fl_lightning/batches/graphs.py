"""Many clients' graphs padded to one shape, on which the clients' models compute.

Shape legend: C clients, N nodes (padded to the largest client of the batch), F features.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.base import NODES, ONE_CLIENT, Batch, Collator, common_fields, pad
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.coordinates import messages, offset
from fl_lightning.batches.edge_fields import EDGES, ENDS, edge_fields
from fl_lightning.batches.known_fields import known_fields, known_propagation
from fl_lightning.batches.plain_graph import PlainGraph
from fl_lightning.kernels.block_sparse import BlockSparse, block_matmul
from fl_lightning.kernels.csr import coordinates
from fl_lightning.kernels.edge_products import Edges
from fl_lightning.kernels.edges import drop_edges, kept_columns, kept_edges, mask_columns
from fl_lightning.kernels.randomness import subkey

#: What is made of the nodes of a graph.
Pooling = Literal["sum", "mean", "max"]


def check_pooling(pooling: Pooling) -> Pooling:
    """Return the pooling.

    Raises:
        ValueError: It is none of those there are.
    """
    if pooling not in ("sum", "mean", "max"):
        raise ValueError(f"pooling must be sum, mean or max, got {pooling!r}")
    return pooling


#: Features with a smaller share of non-zeros are multiplied as sparse matrices (bag-of-words graphs).
SPARSE_FEATURE_DENSITY = 0.05
#: Metadata of an operator from nodes to nodes.
SQUARE = {"axes": ("nodes", "nodes")}


@dataclass(frozen=True, kw_only=True)
class GraphBatch(Batch):
    """Graphs as a client's model sees them. Padding nodes have every mask false and no edges.

    Attributes:
        node_mask: Nodes that are not padding (C, N); the ``example_mask`` if nodes are the examples.
        degree: Number of neighbors of each node, without itself, int64 (C, N); in a directed graph those that send it
            messages. With those at other clients, if a strategy has made them known.
        dtype: Floating point type of the features, which sparse operators may not have (on a CPU none has bfloat16).
        x: The features X (C, N, F) if they are dense, else None.
        propagated_x: Â X (C, N, F) if the features are dense and neither they nor Â are random, or if a strategy has
            made that of the whole graph known; else None.
        adjacency: The normalized adjacency Â as an (N, N) operator: row t sums what target t receives from its sources.
        sparse_x: The features as an (N, F) operator if they are sparse, else None.
        plain: The graph for nets of PyG layers, in a batch of one client (in the sequential executor).
        neighbor_ids: Ids of each node's neighbors, int64 (C, N, M), 0 for none; None if clients have none.
        node_id: Id of each node that all clients share, from 1, int64 (C, N): negative for the nodes of other clients,
            0 for none; None if clients do not know of the edges between them.
        structure: Features of the structure around each node (C, N, S), if a strategy has computed them, else None.
        links: The edges as an (N, N) operator of ones without loops, of sampled edges how often each counts; None if
            they follow from Â, as for whole graphs without weights.
        has_edge_weights: Whether edges have weights.
        edge_attr: Attributes of each edge (C, E, K); None if edges have none, like the next ones.
        edge_mask: Edges that are not padding, nor left out of a random view (C, E).
        edge_ends: Source and target of each edge, int64 (C, E, 2); any for padding.
        edge_sources: Ones where a node is an edge's source, as an (N, E) operator.
        edge_targets: Likewise of targets.
    """

    node_mask: Tensor = field(metadata=NODES)
    degree: Tensor = field(metadata=NODES)
    dtype: torch.dtype
    x: Tensor | None = field(metadata=NODES)
    propagated_x: Tensor | None = field(metadata=NODES)
    adjacency: BlockSparse = field(metadata=SQUARE)
    sparse_x: BlockSparse | None = field(metadata=NODES)
    plain: PlainGraph | None = field(default=None, metadata=ONE_CLIENT)
    neighbor_ids: Tensor | None = field(default=None, metadata=NODES)
    node_id: Tensor | None = field(default=None, metadata=NODES)
    structure: Tensor | None = field(default=None, metadata=NODES)
    links: BlockSparse | None = field(default=None, metadata=SQUARE)
    has_edge_weights: bool = False
    edge_attr: Tensor | None = field(default=None, metadata=EDGES)
    edge_mask: Tensor | None = field(default=None, metadata=EDGES)
    edge_ends: Tensor | None = field(default=None, metadata=EDGES)
    edge_sources: BlockSparse | None = field(default=None, metadata=ENDS)
    edge_targets: BlockSparse | None = field(default=None, metadata=ENDS)

    def masks(self) -> dict[str, Tensor]:
        """The masks of examples, of nodes, and of edges with attributes."""
        masks = {**super().masks(), "nodes": self.node_mask}
        return masks if self.edge_mask is None else {**masks, "edges": self.edge_mask}

    def transform(self, weight_FD: Tensor) -> Tensor:
        """X W, (N, D): the features, dense or sparse, through a linear map; also on a stack and under ``vmap``."""
        if self.sparse_x is None:
            assert self.x is not None
            return self.x @ weight_FD
        if weight_FD.dim() < self.node_mask.dim() + 1:  # one map for a whole stack
            weight_FD = weight_FD.expand(*self.node_mask.shape[:-1], *weight_FD.shape)
        return block_matmul(self.sparse_x, weight_FD, owner=self.node_mask)

    def features_of(self, node_I: Tensor) -> Tensor:
        """The features of some of one client's nodes as dense rows, (I, F)."""
        if self.sparse_x is None:
            assert self.x is not None
            return self.x.index_select(0, node_I)
        chosen_NI = torch.zeros(len(self.node_mask), len(node_I), dtype=self.dtype, device=node_I.device)
        chosen_NI = chosen_NI.scatter(0, node_I[None], 1.0)
        return block_matmul(self.sparse_x, chosen_NI, transpose=True, owner=self.node_mask).mT

    def sum_neighbors(self, value_ND: Tensor) -> Tensor:
        """Σ over the neighbors of each node, without itself, (N, D); also on a stack and under ``vmap``.

        All neighbors count equally, whatever the weights of edges. Without weights it is D^(1/2) Â D^(1/2) - I with the
        loops in D, so that no other operator needs to be stored.
        """
        if self.links is not None:
            return block_matmul(self.links, value_ND, owner=self.node_mask)
        return self.sum_with_neighbors(value_ND) - value_ND * self.node_mask.unsqueeze(-1)

    def sum_with_neighbors(self, value_ND: Tensor) -> Tensor:
        """The same with each node itself, which takes fewer passes over the nodes; any for padding."""
        if self.links is not None:
            return value_ND + block_matmul(self.links, value_ND, owner=self.node_mask)
        scale_N1 = (self.degree + 1).to(value_ND.dtype).sqrt().unsqueeze(-1)
        return scale_N1 * block_matmul(self.adjacency, scale_N1 * value_ND, owner=self.node_mask)

    def sum_messages(self, value_ND: Tensor, edge_ED: Tensor) -> Tensor:
        """Σ over the edges to a node of ReLU(what the edge's source has + what the edge has), (N, D); likewise.

        Args:
            value_ND: What nodes have.
            edge_ED: What edges with attributes have, in the order of ``edge_attr``.
        """
        assert self.edge_sources is not None
        assert self.edge_targets is not None
        assert self.edge_mask is not None
        sent_ED = block_matmul(self.edge_sources, value_ND, transpose=True, owner=self.node_mask)
        message_ED = (sent_ED + edge_ED).relu() * self.edge_mask.unsqueeze(-1)
        return block_matmul(self.edge_targets, message_ED, owner=self.node_mask)

    def pool(self, value_ND: Tensor, how: Pooling = "mean") -> Tensor:
        """What the examples have, of what their nodes have: of nodes, which are examples themselves, the same."""
        return value_ND

    def spread(self, value_ND: Tensor) -> Tensor:
        """What the nodes have, of what their examples have: the same again."""
        return value_ND

    @property
    def graph_sizes(self) -> Tensor:
        """Number of nodes of each graph, which are consecutive, int64 (G,); here there is one graph."""
        return self.node_mask.sum(dim=-1, keepdim=True)

    @property
    def edge_operator(self) -> BlockSparse:
        """An (N, N) operator whose entries off the diagonal are the edges, whatever their values are.

        Its ``entries`` are the attributes of edges, if edges have any.
        """
        return self.adjacency if self.links is None else self.links

    @property
    def edges(self) -> Edges:
        """The edges, for products along them."""
        return self.edge_operator.edges

    def augmented(self, number: int, *, edge_dropout: float, feature_dropout: float) -> "GraphBatch":
        """A random view of the graph, without some edges (Â is normalized again) and some features of all nodes.

        Args:
            number: Index of the view, from 1; each view has separate draws, including those of its dropout.
            edge_dropout: Probability that an edge is dropped.
            feature_dropout: Probability that a feature is zero.
        """
        view = self.with_draw(number)
        adjacency, degree, links = drop_edges(subkey(view.key, "edges"), self.adjacency, edge_dropout, self.links)
        key, x, sparse_x = subkey(view.key, "features"), self.x, self.sparse_x
        if sparse_x is not None:
            sparse_x = mask_columns(key, sparse_x, feature_dropout)
        elif x is not None:
            x = x * kept_columns(key, x.shape[-1], feature_dropout).unsqueeze(-2)
        edge_mask = self.edge_mask
        if edge_mask is not None:
            assert self.edge_ends is not None
            kept_E = kept_edges(subkey(view.key, "edges").unsqueeze(-1), self.edge_ends, edge_dropout)
            edge_mask = edge_mask & kept_E
        view = dataclasses.replace(
            view,
            edge_mask=edge_mask,
            adjacency=adjacency,
            links=links,
            degree=degree,
            x=x,
            sparse_x=sparse_x,
            propagated_x=None,
            plain=None,
        )
        return view if self.plain is None else dataclasses.replace(view, plain=view._plain_view(self.plain))

    def _plain_view(self, whole: PlainGraph) -> PlainGraph:
        """The part of one client's whole graph in this view: its features, and the edges that Â still has."""
        row, column = coordinates(self.adjacency.matrix)
        count = len(self.node_mask)
        left = (row * count + column)[self.adjacency.matrix.values() != 0]
        source_E, target_E = whole.edge_index
        every_N = torch.arange(count, device=self.y.device)
        return whole.view(self.features_of(every_N), torch.isin(target_E * count + source_E, left))

    @property
    def edge_index(self) -> Tensor:
        """The edges of one client's graph (2, E), source and target, as in PyG.

        Raises:
            AttributeError: It is a stack of clients, which the stacked executor computes on.
        """
        if self.plain is None:
            raise AttributeError("a stack of clients has no edge_index: set trainer.executor to SequentialExecutor")
        return self.plain.edge_index

    def with_inputs(self) -> "GraphBatch":
        """The batch of one client with dense features."""
        return self if self.plain is None or self.x is not None else dataclasses.replace(self, x=self.plain.x)


class GraphCollator(Collator):
    """Turns clients' graphs into batches; normalizes and propagates each graph once.

    Args:
        graphs: The clients, in client order.
        layout: The decision for all clients of the federation (:meth:`layout_of`); None to decide for these.
        device: Device of the batches.
        dtype: Floating point type of features and adjacency.
    """

    def __init__(
        self,
        graphs: Sequence[ClientGraph],
        *,
        layout: Mapping[str, Any] | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.graphs = graphs
        self.device = device
        self.dtype = dtype
        self.exact_dtype = torch.promote_types(dtype, torch.float32)  # for what is computed once, on the CPU
        # a CPU has no product of sparse bfloat16 matrices
        self.operator_dtype = self.exact_dtype if device.type == "cpu" else dtype
        self.sparse_features: bool = (self.layout_of(graphs) if layout is None else layout)["sparse_features"]

    @staticmethod
    def layout_of(graphs: Sequence[ClientGraph]) -> dict[str, Any]:
        """The decision for all clients: whether their features are multiplied as sparse matrices."""
        nonzeros = sum(int(torch.count_nonzero(graph.x_NF)) for graph in graphs)
        return GraphCollator.layout_for(nonzeros / max(1, sum(graph.x_NF.numel() for graph in graphs)))

    @staticmethod
    def layout_for(density: float) -> dict[str, Any]:
        """The same, if only the share of nonzero features is known."""
        return {"sparse_features": density < SPARSE_FEATURE_DENSITY}

    def client_data(self, client: int) -> "ClientGraph":
        """A client's graph."""
        return self.graphs[client]

    def set_client_data(self, client: int, client_data: "ClientGraph") -> None:
        """Replace a client's graph."""
        self.graphs = [*self.graphs[:client], client_data, *self.graphs[client + 1 :]]

    def size(self, client: int) -> int:
        """Number of nodes of a client."""
        return self.graphs[client].num_nodes

    def __call__(self, clients: Sequence[int]) -> GraphBatch:
        """Batch the given clients' graphs, padded to the largest of them."""
        graphs = [self.graphs[client] for client in clients]
        return GraphBatch(**common_fields(graphs, device=self.device, dtype=self.dtype), **self.graph_fields(graphs))

    def graph_fields(self, graphs: Sequence[ClientGraph]) -> dict[str, Any]:
        """The fields of a batch for nodes and edges."""
        node_mask_CN = pad([torch.ones(graph.num_nodes, dtype=torch.bool) for graph in graphs], torch.device("cpu"))
        adjacency, size = self._adjacency(graphs, node_mask_CN), node_mask_CN.shape[1]
        return {
            "node_mask": node_mask_CN.to(self.device),
            "degree": pad([_degree(graph) for graph in graphs], self.device),
            "dtype": self.dtype,
            "x": None if self.sparse_features else pad([graph.x_NF.to(self.dtype) for graph in graphs], self.device),
            "propagated_x": self._propagated(graphs, adjacency),
            "adjacency": adjacency.to(self.device, self.operator_dtype),
            "sparse_x": self._features(graphs, size) if self.sparse_features else None,
            "plain": PlainGraph(graphs[0], device=self.device, dtype=self.dtype) if len(graphs) == 1 else None,
            **known_fields(graphs, size, device=self.device, dtype=self.dtype),
            "links": self._links(graphs, size),
            "has_edge_weights": graphs[0].edge_weight_E is not None,
            **edge_fields(graphs, size, device=self.device, dtype=self.dtype, operator_dtype=self.operator_dtype),
        }

    def _adjacency(self, graphs: Sequence[ClientGraph], node_mask_CN: Tensor) -> BlockSparse:
        """Â = D^(-1/2) (A + I) D^(-1/2) of every client, exact and on the CPU.

        As PyG's ``gcn_norm``: A has targets as rows, and the weights of edges as entries; D sums the rows of A + I.
        """
        num_clients, num_nodes = node_mask_CN.shape
        edges_2E = messages(graphs, num_nodes)
        index_2E = torch.cat([edges_2E, node_mask_CN.flatten().nonzero().t().expand(2, -1)], dim=1)
        weight_E = self._weights(graphs, index_2E.shape[1])
        degree = self._degrees(graphs, index_2E[0], weight_E, node_mask_CN)
        scale = degree.to(self.exact_dtype).rsqrt()
        values = scale[index_2E[0]] * scale[index_2E[1]]
        return BlockSparse.from_coordinates(
            index_2E,
            values if weight_E is None else values * weight_E.to(values),
            (num_nodes, num_nodes),
            num_clients,
            symmetric=not any(graph.is_directed for graph in graphs),
            entries=None if weight_E is not None else self._attributes(graphs, index_2E.shape[1]),
        )

    def _degrees(
        self, graphs: Sequence[ClientGraph], row: Tensor, weight_E: Tensor | None, node_mask_CN: Tensor
    ) -> Tensor:
        """What the rows of A + I sum to, (C·N,), as far as Â is normalized by it."""
        if any(graph.num_neighbors_N is not None for graph in graphs):  # also those at other clients
            return (pad([_degree(graph) for graph in graphs], node_mask_CN.device) + node_mask_CN).flatten()
        return torch.bincount(row, weight_E, minlength=node_mask_CN.numel())

    def _attributes(self, graphs: Sequence[ClientGraph], num_entries: int) -> Tensor | None:
        """Attributes of all edges, then zeros for the loops, (num_entries, K); None if edges have none."""
        attributes = [graph.edge_attr_EK for graph in graphs if graph.edge_attr_EK is not None]
        if len(attributes) < len(graphs):
            return None
        attr_EK = torch.cat(attributes).to(self.exact_dtype)
        return F.pad(attr_EK, (0, 0, 0, num_entries - len(attr_EK)))

    def _weights(self, graphs: Sequence[ClientGraph], num_entries: int) -> Tensor | None:
        """Weights of all edges, then those of the loops, which are 1; None if edges have none."""
        weights = [graph.edge_weight_E for graph in graphs if graph.edge_weight_E is not None]
        if not weights:
            return None
        if len(weights) < len(graphs):
            raise ValueError(f"{len(weights)} of {len(graphs)} clients have edge weights: all or none must have them")
        weight_E = torch.cat(weights).to(self.exact_dtype)
        return F.pad(weight_E, (0, num_entries - len(weight_E)), value=1.0)

    def _links(self, graphs: Sequence[ClientGraph], num_nodes: int) -> BlockSparse | None:
        """The edges of weighted graphs as an operator."""
        if graphs[0].edge_weight_E is None:
            return None
        edges_2E = messages(graphs, num_nodes)
        ones = torch.ones(edges_2E.shape[1], dtype=self.operator_dtype)
        symmetric = not any(graph.is_directed for graph in graphs)
        links = BlockSparse.from_coordinates(
            edges_2E,
            ones,
            (num_nodes, num_nodes),
            len(graphs),
            symmetric=symmetric,
            entries=self._attributes(graphs, edges_2E.shape[1]),
        )
        return links.to(self.device, self.operator_dtype)

    def _propagated(self, graphs: Sequence[ClientGraph], adjacency: BlockSparse) -> Tensor | None:
        """Â X, as clients know it or computed from their own graphs; None to compute it in every step."""
        if all(graph.propagated_NF is None for graph in graphs):
            return None if self.sparse_features else self._propagate(graphs, adjacency)
        return known_propagation(graphs, lambda: self._propagate(graphs, adjacency), dtype=self.dtype).to(self.device)

    def _propagate(self, graphs: Sequence[ClientGraph], adjacency: BlockSparse) -> Tensor:
        """Â X of every client, dense, (C, N, F)."""
        x_CNF = pad([graph.x_NF.to(self.exact_dtype) for graph in graphs], torch.device("cpu"))
        return (adjacency.matrix @ x_CNF.flatten(0, 1)).view_as(x_CNF).to(self.device, self.dtype)

    def _features(self, graphs: Sequence[ClientGraph], num_nodes: int) -> BlockSparse:
        """X of every client, sparse."""
        coordinates = [graph.x_NF.nonzero().t() for graph in graphs]
        values = [graph.x_NF[row, column] for graph, (row, column) in zip(graphs, coordinates, strict=True)]
        shape = (num_nodes, graphs[0].num_features)
        return BlockSparse.from_coordinates(
            offset(coordinates, shape), torch.cat(values).to(self.operator_dtype), shape, len(graphs)
        ).to(self.device, self.operator_dtype)


def _degree(graph: "ClientGraph") -> Tensor:
    """Number of neighbors that send messages to each node, (N,)."""
    known_N = graph.num_neighbors_N
    return torch.bincount(graph.edge_index_2E[1], minlength=graph.num_nodes) if known_N is None else known_N
