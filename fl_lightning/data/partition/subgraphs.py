"""The subgraphs that clients hold of a partitioned graph."""

from collections.abc import Sequence

import numpy as np
import torch
from torch_geometric.data import Data

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.data.adjacency import adjacency_matrix
from fl_lightning.data.allocation import masks_of
from fl_lightning.data.partition.record import PartitionRecord


def client_graphs(
    data: Data, record: PartitionRecord, names: Sequence[str] | None = None
) -> tuple[tuple[ClientGraph, ...], tuple[int, ...]]:
    """Cut out each client's induced subgraph; also count the directed edges that it lacks from other nodes."""
    weight_E, attr_EK = data.get("edge_weight"), data.get("edge_attr")
    carried = weight_E is not None or attr_EK is not None
    matrix = adjacency_matrix(data.edge_index, data.num_nodes, numbered=carried)
    received_N = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    width = max(2, len(str(len(record.node_idx) - 1)))
    clients, edges_lost = [], []
    for client, (node_idx_N, role_N) in enumerate(zip(record.node_idx, record.roles, strict=True)):
        rows = matrix[node_idx_N.numpy()]
        inside = rows[:, node_idx_N.numpy()].tocoo()
        edges_lost.append(int(received_N[node_idx_N].sum()) - inside.nnz)
        number_E = torch.from_numpy(inside.data) if carried else None
        clients.append(
            ClientGraph(
                name=f"client-{client:0{width}d}" if names is None else names[client],
                x_NF=data.x[node_idx_N],
                edge_index_2E=torch.from_numpy(np.stack([inside.row, inside.col]).astype(np.int64)),
                y_N=data.y[node_idx_N],
                **masks_of(role_N),
                node_idx_N=node_idx_N,
                edge_weight_E=None if weight_E is None else weight_E[number_E],
                edge_attr_EK=None if attr_EK is None else attr_EK[number_E],
                cross_edge_2X=record.cross_edges[client] if record.cross_edges else None,
            )
        )
    return tuple(clients), tuple(edges_lost)
