"""Nodes of different clients that have neighbors in common, and a draw among them.

Shape legend: C clients, N nodes of one, M neighbors of a node, E pairs.
"""

import numpy as np
import scipy.sparse as sp
from torch import Tensor


def common_neighbors(ids_CNM: Tensor, *, same: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of nodes of different clients that have a neighbor in common, or all of them; each pair occurs twice.

    Args:
        ids_CNM: Ids of each node's neighbors, 0 for none.
        same: Whether to match only nodes with the same neighbors.

    Returns:
        Indices of the nodes of each pair, where node v of client c has the index c N + v.
    """
    num_nodes = ids_CNM.shape[1]
    ids = ids_CNM.flatten(0, 1).numpy()
    node_E, place_E = ids.nonzero()
    neighbor_E = np.unique(ids[node_E, place_E], return_inverse=True)[1]
    has = sp.csr_matrix((np.ones(len(node_E), dtype=np.int32), (node_E, neighbor_E)), shape=(len(ids), len(node_E)))
    common = (has @ has.T).tocoo()
    kept_E = common.row // num_nodes != common.col // num_nodes
    if same:
        degree_N = np.bincount(node_E, minlength=len(ids))
        kept_E &= (common.data == degree_N[common.row]) & (common.data == degree_N[common.col])
    return common.row[kept_E].astype(np.int64), common.col[kept_E].astype(np.int64)


def drawn(row_E: np.ndarray, column_E: np.ndarray, ticket_E: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs with the smallest tickets of each row, at most ``most`` per row, ordered by row and ticket.

    Example:
        >>> rows, columns = drawn(np.array([0, 3, 0, 0]), np.array([5, 0, 6, 7]), np.array([9, 1, 2, 4]), 2)
        >>> rows.tolist(), columns.tolist()
        ([0, 0, 3], [6, 7, 0])
    """
    order_E = np.lexsort((ticket_E, row_E))
    row_E, column_E = row_E[order_E], column_E[order_E]
    kept_E = np.arange(len(row_E)) - np.searchsorted(row_E, row_E) < most
    return row_E[kept_E], column_E[kept_E]
