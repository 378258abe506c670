"""Clients in groups for which the same features mean different classes: one model cannot serve them all."""

import torch

from fl_lightning.data import ClientGraph


def grouped_clients(
    *, num_clients: int = 6, num_nodes: int = 60, shift: int = 2, modulus: int = 4, scales: tuple[float, float] = (1, 1)
) -> list[ClientGraph]:
    """Graphs of nodes of two kinds, which their features show; a class is (kind + shift · group) % modulus.

    Client c is of group c % 2, whose features have a scale of their own. Nodes of a kind are linked; a fifth train.
    """
    clients = []
    for client in range(num_clients):
        draw = torch.Generator().manual_seed(client)
        kind_N = torch.arange(num_nodes) % 2
        x_NF = 2.0 * torch.eye(8)[kind_N] + 0.7 * torch.randn(num_nodes, 8, generator=draw)
        linked_NN = torch.rand(num_nodes, num_nodes, generator=draw) < 0.1
        linked_NN = (linked_NN & (kind_N[:, None] == kind_N)).triu(1)
        role_N = torch.randperm(num_nodes, generator=draw) % 5
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=scales[client % 2] * x_NF,
                edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
                y_N=(kind_N + shift * (client % 2)) % modulus,
                train_mask_N=role_N == 0,
                val_mask_N=role_N == 1,
                test_mask_N=role_N >= 2,
                node_idx_N=torch.arange(num_nodes) + client * num_nodes,
            )
        )
    return clients
