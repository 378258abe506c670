"""Sparse adjacency matrices of graphs, and what is counted on them."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_MAX_PRODUCTS = 20_000_000
"""Paths of length two that are held at once; bounds the memory of the clustering coefficient at some 0.3 GB."""


def adjacency_matrix(edge_index_2E: Tensor, num_nodes: int) -> "csr_matrix":
    """Return the adjacency matrix of a coalesced graph: rows are sources, columns targets.

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


def starts(source_E: Tensor, num_nodes: int) -> Tensor:
    """Where the edges of each source begin, int64 (N + 1,), if they are sorted by it."""
    return F.pad(torch.bincount(source_E, minlength=num_nodes).cumsum(0), (1, 0))


def clustering_coefficient(matrix: "csr_matrix", *, directed: bool = False) -> float:
    """Return the mean over the nodes of the local clustering coefficient.

    A node of degree d in t triangles has 2 t / (d (d - 1)); below two neighbors it counts as 0, as in networkx. In a
    directed graph it is the share of the directed triangles that the node's edges allow, which is the same where all
    edges go both ways: with S = A + Aᵀ, d the edges from and to the node and b its neighbors both ways,
    (S³)_ii / (2 (d (d - 1) - 2 b)).

    Args:
        matrix: Adjacency of ones without a diagonal.
        directed: Whether it is not symmetric.

    Source: for directed graphs Fagiolo, "Clustering in Complex Directed Networks", Physical Review E, 2007.

    Example:
        >>> import torch
        >>> triangle_with_tail = torch.tensor([[0, 1, 0, 2, 1, 2, 2, 3], [1, 0, 2, 0, 2, 1, 3, 2]])
        >>> round(clustering_coefficient(adjacency_matrix(triangle_with_tail, 4)), 4)
        0.5833
    """
    num_both_N: np.ndarray[Any, Any] | float = 0.0
    degree_N = np.diff(matrix.indptr)
    if degree_N.size == 0:
        return 0.0
    if directed:
        num_both_N = np.asarray(matrix.multiply(matrix.T).sum(axis=1), dtype=np.float64).ravel()
        matrix = (matrix + matrix.T).tocsr()
        degree_N = np.asarray(matrix.sum(axis=1), dtype=np.int64).ravel()
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
    if directed:
        pairs_N = 2 * (pairs_N - 2 * num_both_N)
    return float(np.divide(closed_N, pairs_N, out=np.zeros_like(closed_N), where=pairs_N > 0).mean())
