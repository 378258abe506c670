"""Coordinates in the blocks of many clients as those in one block-diagonal matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.batches.client_graph import ClientGraph


def messages(graphs: Sequence[ClientGraph], num_nodes: int) -> Tensor:
    """Target and source of every edge of all clients, within the block-diagonal matrix, (2, E)."""
    return offset([graph.edge_index_2E.flip(0) for graph in graphs], (num_nodes, num_nodes))


def offset(coordinates: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Coordinates within blocks (2, nnz_i) as those within the block-diagonal matrix, one after another."""
    if len(coordinates) == 1:
        return coordinates[0]
    count = torch.tensor([index.shape[1] for index in coordinates])
    block = torch.repeat_interleave(count)
    return torch.cat(list(coordinates), dim=1) + torch.stack([block * shape[0], block * shape[1]])
