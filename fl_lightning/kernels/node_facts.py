"""What the shape of a graph says of its nodes: found once for each graph, whatever mini-batches it is drawn into.

Each connected component is a dense matrix for a moment, so that the largest one counts: time grows with the cube of its
nodes, memory with the square.

Shape legend: M nodes of all graphs of all clients, B components of N nodes each, W nodes of the largest component.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import quick
from fl_lightning.kernels.block_sparse import BlockSparse
from fl_lightning.kernels.csr import coordinates
from fl_lightning.memory import require

#: Of the dense matrices that are made at once.
MOST_NUMBERS = 2**22
#: Of what does not fit into memory.
REMEDY = "leave the large graphs out (data.source), or choose a net and a strategy that need no spectra and walks"


def node_facts(operator: BlockSparse, find: Callable[..., Tensor], *settings: int, owner: Tensor) -> Tensor:
    """What a function finds of every node, float64 (N, S); without a gradient, also on a stack and under ``vmap``.

    Args:
        operator: Entries off the diagonal that are not zero are edges, from column to row.
        find: From a CSR matrix of edges (M, M) and the settings to rows for its nodes (M, S), such as
            :func:`walk_returns`. It is called once for an operator and those that are selected or drawn of it.
        settings: Its settings.
        owner: Any tensor (N,) of the clients' that has a leading client dimension wherever they have graphs of their
            own, such as their ``node_mask``; its values are not read.
    """
    found: Tensor = _NodeFacts.apply(owner, operator, (find, *settings))  # type: ignore[no-untyped-call]
    return found


@quick
class _NodeFacts(Function):
    @staticmethod
    def forward(owner: Tensor, operator: BlockSparse, asked: tuple[Any, ...]) -> Tensor:
        return operator.facts(*asked).view(*owner.shape, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], owner: Tensor, operator: BlockSparse, asked: tuple[Any, ...]
    ) -> tuple[Tensor, int | None]:
        if in_dims[0] is None:
            return _NodeFacts.apply(owner, operator, asked), None  # type: ignore[no-untyped-call]
        return _NodeFacts.apply(owner.movedim(in_dims[0], 0), operator, asked), 0  # type: ignore[no-untyped-call]


def components(matrix: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The connected components of two nodes or more, those of one size together.

    Args:
        matrix: CSR (M, M); its entries off the diagonal that are not zero are edges.

    Returns:
        Their nodes, ascending, int64 (B, N), and where they have edges, ones in float64 (B, N, N).

    Raises:
        ValueError: The largest one does not fit into memory as a dense matrix.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    row, column = coordinates(matrix.cpu())
    is_edge = (row != column) & (matrix.values().cpu() != 0)
    row, column = row[is_edge], column[is_edge]
    graph = csr_matrix((np.ones(len(row)), (row.numpy(), column.numpy())), shape=tuple(matrix.shape))
    label_M = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
    label_M = label_M.bincount().argsort(stable=True).argsort()[label_M]  # smaller components come first
    size_L, order_M, order_E = label_M.bincount(), label_M.argsort(stable=True), label_M[row].argsort(stable=True)
    first_L, edges_L = size_L.cumsum(0) - size_L, label_M[row].bincount(minlength=len(size_L))
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(len(order_M), device="cpu") - first_L.repeat_interleave(size_L)
    row, column, end_L = row[order_E], column[order_E], edges_L.cumsum(0)
    largest = int(size_L.max()) if len(size_L) else 0
    require(8 * largest**2, f"the dense matrix of a graph with {largest:,} connected nodes", REMEDY)
    for size in sorted(set(size_L.tolist())):
        for label_B in (size_L == size).nonzero().flatten().split(max(1, MOST_NUMBERS // size**2)):
            if size == 1:
                continue
            start, stop = int(end_L[label_B[0]] - edges_L[label_B[0]]), int(end_L[label_B[-1]])
            to_E, from_E = row[start:stop], column[start:stop]
            edge_BNN = torch.zeros(len(label_B), size, size, dtype=torch.float64, device="cpu")
            edge_BNN[label_M[to_E] - label_B[0], place_M[to_E], place_M[from_E]] = 1.0
            yield order_M[first_L[label_B][:, None] + torch.arange(size, device="cpu")], edge_BNN


def walk_returns(matrix: Tensor, num_steps: int) -> Tensor:
    """diag((A D⁻¹)^k), k = 1 … ``num_steps``: how likely a random walk is back after k steps; 0 without neighbors.

    Example:
        >>> from fl_lightning.kernels.csr import csr_from_coo
        >>> pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to_sparse()
        >>> walk_returns(csr_from_coo(pair), 3)
        tensor([[0., 1., 0.],
                [0., 1., 0.]], dtype=torch.float64)
    """
    found_MK = torch.zeros(len(matrix), num_steps, dtype=torch.float64, device="cpu")
    for node_BN, edge_BNN in components(matrix):
        walk_BNN = edge_BNN / edge_BNN.sum(dim=1, keepdim=True).clamp(min=1)
        power_BNN = walk_BNN
        for step in range(num_steps):
            found_MK[node_BN, step] = power_BNN.diagonal(dim1=1, dim2=2)
            power_BNN = power_BNN @ walk_BNN
    return found_MK


def spectrum(matrix: Tensor) -> Tensor:
    """Eigenvalues and eigenvectors of each component's Laplacian D - A, laid out over its nodes, (M, 1 + 2 W).

    The k-th node of a component holds the k-th eigenvalue. Every node holds its own entries of all W eigenvectors, 0
    beyond the component, and how far from it, in rows, each eigenvector's eigenvalue is; these stay right where graphs
    are drawn into other batches. A node without neighbors has the eigenvalue 0, which is right, and no eigenvector.

    Raises:
        ValueError: An edge goes one way only, or the eigenvectors do not fit into memory.
    """
    parts = list(components(matrix))
    width = max((node_BN.shape[1] for node_BN, _ in parts), default=1)
    what = f"the eigenvectors of {len(matrix):,} nodes, of which up to {width:,} are connected,"
    require(8 * len(matrix) * (1 + 2 * width), what, REMEDY)
    found_MS = torch.zeros(len(matrix), 1 + 2 * width, dtype=torch.float64, device="cpu")
    for node_BN, edge_BNN in parts:
        if not torch.equal(edge_BNN, edge_BNN.mT):
            raise ValueError("a graph has edges that go one way only, so that its Laplacian has no real spectrum")
        size = node_BN.shape[1]
        value_BN, vector_BNN = torch.linalg.eigh(torch.diag_embed(edge_BNN.sum(dim=1)) - edge_BNN)
        found_MS[node_BN, 0] = value_BN
        found_MS[node_BN, 1 : 1 + size] = vector_BNN
        found_MS[node_BN, 1 + width : 1 + width + size] = (node_BN[:, None, :] - node_BN[:, :, None]).double()
    return found_MS
