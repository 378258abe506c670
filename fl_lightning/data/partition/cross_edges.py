"""The edges between clients, which a cut takes from all of them: where both ends know of them, they are kept.

Shape legend: N nodes of the global graph, E its directed edges, X those with one end at a client.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data


def cross_edges(data: Data, node_idx: Sequence[Tensor], setting: str) -> tuple[Tensor, ...]:
    """The directed edges of a graph with one end at a client and the other at another client.

    Args:
        data: The graph.
        node_idx: For each client the indices of its nodes.
        setting: What messages call the setting by which they are kept.

    Returns:
        For each client source and target of its edges, by index in the graph, int64 (2, X), in the order of the graph.

    Raises:
        ValueError: Clients have nodes in common, so that it is not known whose edges are between clients.

    Example:
        >>> path = Data(edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
        >>> [each.tolist() for each in cross_edges(path, [torch.tensor([0, 1]), torch.tensor([2])], "cross_edges")]
        [[[1, 2], [2, 1]], [[1, 2], [2, 1]]]
    """
    client_N = torch.full((data.num_nodes or 0,), -1)
    for client, nodes in enumerate(node_idx):
        if bool((taken := client_N[nodes] >= 0).any()):
            node = int(nodes[taken][0])
            raise ValueError(
                f"{setting} is for disjoint clients, but node {node} is at clients {int(client_N[node])} and {client}: "
                "leave it out, or choose a partitioner of disjoint clients, such as MetisPartitioner"
            )
        client_N[nodes] = client
    client_2E = client_N[data.edge_index]
    between_E = (client_2E[0] != client_2E[1]) & (client_2E >= 0).all(dim=0)
    edges_2E, client_2E = data.edge_index[:, between_E], client_2E[:, between_E]
    return tuple(edges_2E[:, (client_2E == client).any(dim=0)] for client in range(len(node_idx)))
