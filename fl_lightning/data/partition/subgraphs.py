"""The subgraphs that clients hold of a partitioned graph.

Shape legend: N nodes, P nodes of a client, E edges.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.data.adjacency import starts
from fl_lightning.data.allocation import masks_of
from fl_lightning.data.partition.record import PartitionRecord

#: Nodes whose edges are looked up at once; bounds the memory beside the graph and the clients.
_BLOCK = 2**15


def client_graphs(
    data: Data, record: PartitionRecord, names: Sequence[str] | None = None
) -> tuple[tuple[ClientGraph, ...], tuple[int, ...]]:
    """Cut out each client's induced subgraph; also count the directed edges that it lacks from other nodes.

    Args:
        data: A prepared graph, whose edges are sorted by source and then by target.
        record: Which nodes clients have, and their roles.
        names: What the clients are called; None for numbers.
    """
    weight_E, attr_EK = data.get("edge_weight"), data.get("edge_attr")
    first_N = starts(data.edge_index[0], data.num_nodes)
    received_N = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    width = max(2, len(str(len(record.node_idx) - 1)))
    clients, edges_lost = [], []
    for client, (node_idx_N, role_N) in enumerate(zip(record.node_idx, record.roles, strict=True)):
        edges_2E, place_E = _inside(data.edge_index[1], first_N, node_idx_N)
        edges_lost.append(int(received_N[node_idx_N].sum()) - edges_2E.shape[1])
        clients.append(
            ClientGraph(
                name=f"client-{client:0{width}d}" if names is None else names[client],
                x_NF=data.x[node_idx_N],
                edge_index_2E=edges_2E,
                y_N=data.y[node_idx_N],
                **masks_of(role_N),
                node_idx_N=node_idx_N,
                edge_weight_E=None if weight_E is None else weight_E[place_E],
                edge_attr_EK=None if attr_EK is None else attr_EK[place_E],
                cross_edge_2X=record.cross_edges[client] if record.cross_edges else None,
            )
        )
    return tuple(clients), tuple(edges_lost)


def _inside(target_E: Tensor, first_N: Tensor, node_P: Tensor) -> tuple[Tensor, Tensor]:
    """The edges between some nodes, numbered as these are, and their places among all edges."""
    index_N = torch.full((len(first_N) - 1,), -1)
    index_N[node_P] = torch.arange(len(node_P))
    edges, places = [], []
    for row_P in torch.split(torch.arange(len(node_P)), _BLOCK):
        first_P = first_N[node_P[row_P]]
        degree_P = first_N[node_P[row_P] + 1] - first_P
        shift_P = first_P + degree_P - degree_P.cumsum(0)
        place_E = torch.arange(int(degree_P.sum())) + shift_P.repeat_interleave(degree_P)
        column_E = index_N[target_E[place_E]]
        is_inside_E = column_E >= 0
        edges.append(torch.stack([row_P.repeat_interleave(degree_P)[is_inside_E], column_E[is_inside_E]]))
        places.append(place_E[is_inside_E])
    return torch.cat(edges, dim=1), torch.cat(places)
