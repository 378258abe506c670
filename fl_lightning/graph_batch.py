"""Many clients' graphs padded to one shape, and what a model of one client computes on.

Shape legend: C clients, N nodes (padded to the largest client of the batch), F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.batch import Batch, Collator, pad
from fl_lightning.block_sparse import BlockSparse

if TYPE_CHECKING:
    from fl_lightning.data import ClientGraph

#: Features with a smaller share of non-zeros are multiplied as sparse matrices (bag-of-words graphs).
SPARSE_FEATURE_DENSITY = 0.05


class PlainGraph:
    """One client's graph as PyG layers take it, on the device.

    Attributes:
        x: Features (N, F).
        edge_index: Edges (2, E), both directions, without self loops.
    """

    def __init__(self, graph: "ClientGraph", *, device: torch.device, dtype: torch.dtype) -> None:
        self._graph, self._device, self._dtype = graph, device, dtype

    @cached_property
    def x(self) -> Tensor:
        """Features (N, F)."""
        return self._graph.x_NF.to(self._device, self._dtype)

    @cached_property
    def edge_index(self) -> Tensor:
        """Edges (2, E)."""
        return self._graph.edge_index_2E.to(self._device)


@dataclass(frozen=True, kw_only=True)
class GraphBatch(Batch):
    """Graphs as a client's model sees them, trained full-batch. Padding nodes have every mask false and no edges.

    Attributes:
        propagated_x: Â X (C, N, F) where the features are dense, else None.
        adjacency: The normalised adjacency Â as an (N, N) operator.
        sparse_x: The features as an (N, F) operator where they are sparse, else None.
        plain: The graph for nets of PyG layers, in a batch of one client (under the sequential executor).
    """

    propagated_x: Tensor | None
    adjacency: BlockSparse
    sparse_x: BlockSparse | None
    plain: PlainGraph | None = None


class GraphCollator(Collator):
    """Turns clients' graphs into batches; normalises and propagates each graph once.

    Args:
        graphs: Every client of the federation, in client order.
        device: Where batches live.
        dtype: Floating point type of features and adjacency.
    """

    def __init__(self, graphs: Sequence["ClientGraph"], *, device: torch.device, dtype: torch.dtype) -> None:
        self.graphs = graphs
        self.device = device
        self.dtype = dtype
        self.exact_dtype = torch.promote_types(dtype, torch.float32)  # of what is computed once, on the CPU
        # no product of sparse bfloat16 matrices on a CPU
        self.operator_dtype = self.exact_dtype if device.type == "cpu" else dtype
        nonzeros = sum(int(torch.count_nonzero(graph.x_NF)) for graph in graphs)
        self.sparse_features = nonzeros < SPARSE_FEATURE_DENSITY * sum(graph.x_NF.numel() for graph in graphs)
        self._adjacency: dict[int, tuple[Tensor, Tensor]] = {}
        self._propagated_x: dict[int, Tensor] = {}

    def size(self, client: int) -> int:
        """Number of nodes of a client."""
        return self.graphs[client].num_nodes

    def __call__(self, clients: Sequence[int]) -> GraphBatch:
        """Batch the given clients' graphs, padded to the largest of them."""
        graphs = [self.graphs[client] for client in clients]
        num_nodes = max(graph.num_nodes for graph in graphs)

        def operator(blocks: list[tuple[Tensor, Tensor]], num_columns: int, *, symmetric: bool) -> BlockSparse:
            return BlockSparse.from_blocks(
                blocks, (num_nodes, num_columns), symmetric=symmetric, dtype=self.operator_dtype, device=self.device
            )

        sparse_x = None
        if self.sparse_features:
            coordinates = [graph.x_NF.nonzero().t() for graph in graphs]
            blocks = [(index, graph.x_NF[index[0], index[1]]) for index, graph in zip(coordinates, graphs, strict=True)]
            sparse_x = operator(blocks, graphs[0].x_NF.shape[1], symmetric=False)
        return GraphBatch(
            y=pad([graph.y_N.clamp(min=0) for graph in graphs], num_nodes, self.device),
            real_mask=pad([torch.ones_like(graph.train_mask_N) for graph in graphs], num_nodes, self.device),
            train_mask=pad([graph.train_mask_N for graph in graphs], num_nodes, self.device),
            val_mask=pad([graph.val_mask_N for graph in graphs], num_nodes, self.device),
            test_mask=pad([graph.test_mask_N for graph in graphs], num_nodes, self.device),
            key=torch.zeros(len(graphs), dtype=torch.int64, device=self.device),
            propagated_x=None
            if self.sparse_features
            else pad([self._propagate(client) for client in clients], num_nodes, self.device),
            adjacency=operator([self._normalise(client) for client in clients], num_nodes, symmetric=True),
            sparse_x=sparse_x,
            plain=PlainGraph(graphs[0], device=self.device, dtype=self.dtype) if len(graphs) == 1 else None,
        )

    def _normalise(self, client: int) -> tuple[Tensor, Tensor]:
        """Coordinates and values of Â = D^(-1/2) (A + I) D^(-1/2) of one client."""
        if client not in self._adjacency:
            graph = self.graphs[client]
            loops = torch.arange(graph.num_nodes).expand(2, -1)
            index_2E = torch.cat([graph.edge_index_2E, loops], dim=1)
            scale_N = torch.bincount(index_2E[0], minlength=graph.num_nodes).to(self.exact_dtype).rsqrt()
            self._adjacency[client] = index_2E, scale_N[index_2E[0]] * scale_N[index_2E[1]]
        return self._adjacency[client]

    def _propagate(self, client: int) -> Tensor:
        """Â X of one client, dense."""
        if client not in self._propagated_x:
            graph = self.graphs[client]
            size = (graph.num_nodes, graph.num_nodes)
            blocks = [self._normalise(client)]
            adjacency = BlockSparse.from_blocks(blocks, size, symmetric=True, dtype=self.exact_dtype)
            self._propagated_x[client] = (adjacency.matrix @ graph.x_NF.to(self.exact_dtype)).to(self.dtype)
        return self._propagated_x[client]
