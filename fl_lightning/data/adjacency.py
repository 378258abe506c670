"""Sparse adjacency matrices of graphs, and what is counted on them."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_MAX_PRODUCTS = 20_000_000
"""Paths of length two that are held at once; bounds the memory of the clustering coefficient at some 0.3 GB."""


def adjacency_matrix(edge_index_2E: Tensor, num_nodes: int) -> "csr_matrix":
    """Return the adjacency matrix of a coalesced graph.

    Args:
        edge_index_2E: int64 edges (2, E) on the CPU, without duplicates.
        num_nodes: Nodes.

    Returns:
        float32 ones in CSR with sorted indices, shape (num_nodes, num_nodes).
    """
    from scipy.sparse import csr_matrix

    row, col = edge_index_2E.numpy()
    matrix = csr_matrix((np.ones(len(row), np.float32), (row, col)), shape=(num_nodes, num_nodes))
    matrix.sort_indices()
    return matrix


def clustering_coefficient(matrix: "csr_matrix") -> float:
    """Return the mean over the nodes of the local clustering coefficient.

    A node of degree d in t triangles has 2 t / (d (d - 1)); below two neighbours it counts as 0, as in networkx.

    Args:
        matrix: Symmetric adjacency of ones without a diagonal.

    Example:
        >>> import torch
        >>> triangle_with_tail = torch.tensor([[0, 1, 0, 2, 1, 2, 2, 3], [1, 0, 2, 0, 2, 1, 3, 2]])
        >>> round(clustering_coefficient(adjacency_matrix(triangle_with_tail, 4)), 4)
        0.5833
    """
    degree_N = np.diff(matrix.indptr)
    if degree_N.size == 0:
        return 0.0
    cost_N = matrix @ degree_N.astype(np.float64)
    block_N = np.cumsum(cost_N) // _MAX_PRODUCTS
    starts = np.flatnonzero(np.diff(block_N, prepend=-1.0))
    closed_N = np.concatenate(
        [
            np.asarray((rows @ matrix).multiply(rows).sum(axis=1), dtype=np.float64).ravel()
            for rows in (matrix[start:end] for start, end in zip(starts, [*starts[1:], len(degree_N)], strict=True))
        ]
    )
    pairs_N = degree_N * (degree_N - 1.0)
    return float(np.divide(closed_N, pairs_N, out=np.zeros_like(closed_N), where=pairs_N > 0).mean())
