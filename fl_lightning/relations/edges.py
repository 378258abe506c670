"""Edges of undirected graphs that are stored in both directions.

Shape legend: E directed edges.
"""

import itertools

import torch
from torch import Tensor


def opposite_pairs(edge_index_2E: Tensor, num_clients: int) -> Tensor:
    """For each column (n, m) the position of (m, n): the other end of the same edge, shape ``(E,)``.

    Raises:
        ValueError: The edge index has a self loop, or a column without its opposite.
    """
    source_E, target_E = edge_index_2E
    forward_E, backward_E = source_E * num_clients + target_E, target_E * num_clients + source_E
    forward_order_E, backward_order_E = forward_E.argsort(stable=True), backward_E.argsort(stable=True)
    if not torch.equal(forward_E[forward_order_E], backward_E[backward_order_E]) or (source_E == target_E).any():
        raise ValueError(
            "This needs an undirected edge index: both directions of every edge and no self loops. "
            "knn_graph gives one; torch_geometric.utils.to_undirected and remove_self_loops change another."
        )
    return torch.empty_like(forward_order_E).index_copy(0, forward_order_E, backward_order_E)


def edge_colors(edge_index_2E: Tensor, num_clients: int) -> Tensor:
    """An edge coloring: a number that no other edge at either end has, equal for both directions, (E,); greedy.

    Example:
        >>> edge_colors(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3).tolist()
        [0, 0, 1, 1]
    """
    color: dict[tuple[int, int], int] = {}
    taken: list[set[int]] = [set() for _ in range(num_clients)]
    edges = edge_index_2E.T.tolist()
    for i, j in edges:
        if i < j:
            free = next(number for number in itertools.count() if number not in taken[i] | taken[j])
            color[i, j] = color[j, i] = free
            taken[i].add(free)
            taken[j].add(free)
    return torch.tensor([color[i, j] for i, j in edges], dtype=torch.long)
