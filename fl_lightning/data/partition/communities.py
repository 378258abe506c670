"""Communities of a graph, by METIS and by Louvain, and how they are put together.

Shape legend: N nodes, G groups (communities or clients), K classes.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.adjacency import adjacency_matrix, starts
from fl_lightning.kernels.edge_codes import codes, is_ascending, reversed_codes
from fl_lightning.kernels.metis import metis

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Groups: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


def metis_parts(data: Data, num_parts: int, seed: int) -> Groups:
    """The part of each node, (N,), by METIS: k-way, minimal edge cut; by recursive bisection where that leaves gaps."""
    source_E, target_E = data.edge_index
    code_E = codes(source_E, target_E, data.num_nodes)
    if is_ascending(code_E) and torch.equal(code_E, reversed_codes(code_E, data.num_nodes)):
        first_N, neighbor_E = starts(source_E, data.num_nodes).numpy(), target_E.numpy()
    else:
        matrix = _symmetric(data)
        first_N, neighbor_E = matrix.indptr, matrix.indices
    del code_E
    return metis(first_N, neighbor_E, num_parts, seed)


def louvain_communities(data: Data, resolution: float, seed: int) -> Groups:
    """The community of each node, (N,), by Louvain, numbered from 0."""
    from sknetwork.clustering import Louvain

    louvain = Louvain(resolution=resolution, shuffle_nodes=True, random_state=seed)
    return np.asarray(louvain.fit_predict(_symmetric(data)), dtype=np.int64)


def pieces(data: Data, group_N: Groups, most: float, seed: int) -> Groups:
    """Cut every group of more than ``most`` nodes by METIS into pieces of about that size, and renumber the groups."""
    matrix, cut_N, number = _symmetric(data), group_N.copy(), int(group_N.max()) + 1
    for group, size in enumerate(np.bincount(group_N)):
        if size > most:
            index = np.flatnonzero(group_N == group)
            num_pieces = min(int(np.ceil(size / most)), int(size))
            inside = matrix[index][:, index]
            cut_N[index] = number + metis(inside.indptr, inside.indices, num_pieces, seed)
            number += num_pieces
    return np.asarray(np.unique(cut_N, return_inverse=True)[1], dtype=np.int64)


def packed(group_N: Groups, num_clients: int) -> Groups:
    """Give each group whole to the client that has the fewest nodes so far, largest first; the client of each node."""
    sizes = np.bincount(group_N)
    client_G = np.empty(len(sizes), dtype=np.int64)
    load = np.zeros(num_clients, dtype=np.int64)
    for group in np.argsort(-sizes, kind="stable"):
        client_G[group] = load.argmin()
        load[client_G[group]] += sizes[group]
    return client_G[group_N]


def label_shares(data: Data, group_N: Groups) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The share of each class among a group's labeled nodes, (G, K); those of the graph where none is labeled."""
    y_N, num_groups = data.y.numpy(), int(group_N.max()) + 1
    labeled_N = y_N >= 0
    count_GK = np.zeros((num_groups, int(y_N.max()) + 1))
    np.add.at(count_GK, (group_N[labeled_N], y_N[labeled_N]), 1)
    count_GK[count_GK.sum(axis=1) == 0] = count_GK.sum(axis=0)
    return np.asarray(count_GK / count_GK.sum(axis=1, keepdims=True))


def members(group_N: np.ndarray[Any, Any], num_groups: int) -> list[Tensor]:
    """Return the ascending indices of each group's members by one stable sort."""
    order = np.argsort(group_N, kind="stable")
    ends = np.cumsum(np.bincount(group_N, minlength=num_groups))
    return [torch.from_numpy(nodes) for nodes in np.split(order, ends[:-1])]


def _symmetric(data: Data) -> "csr_matrix":
    """Return the adjacency matrix with both directions of every edge, also where the source keeps directions."""
    matrix = adjacency_matrix(data.edge_index, data.num_nodes)
    return matrix.maximum(matrix.T).tocsr()
