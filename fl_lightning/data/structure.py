"""Features of nodes from the shape of their graph alone, for graphs without features.

Shape legend: N nodes, E directed edges.
"""

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.adjacency import adjacency_matrix

#: Number of structure features.
NUM_FEATURES = 5


def structure_features(edge_index_2E: Tensor, num_nodes: int) -> Tensor:
    """Five features of each node, float32 (N, 5): with d its degree and natural logarithms.

    1, log(1 + d), the mean and the maximum of its neighbors' log(1 + d), and its clustering coefficient; what needs
    neighbors is 0 without them.

    Args:
        edge_index_2E: int64 edges in both directions, without duplicates and loops.
        num_nodes: Nodes.

    Example:
        >>> path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> structure_features(path, 3)[:, 1].exp().sub(1).round().tolist()
        [1.0, 2.0, 1.0]
    """
    matrix = adjacency_matrix(edge_index_2E, num_nodes)
    degree_N = np.diff(matrix.indptr).astype(np.float64)
    size_N = np.log1p(degree_N)
    mean_N = (matrix @ size_N) / np.maximum(degree_N, 1)
    most_N = matrix.multiply(size_N[None, :]).tocsr().max(axis=1).toarray().ravel()
    triangles_N = np.asarray((matrix @ matrix).multiply(matrix).sum(axis=1), dtype=np.float64).ravel()
    clustering_N = triangles_N / np.maximum(degree_N * (degree_N - 1), 1)
    features = np.stack([np.ones(num_nodes), size_N, mean_N, most_N, clustering_N], axis=1)
    return torch.from_numpy(features).float()
