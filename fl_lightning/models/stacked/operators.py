"""Operators that message passing needs beside Â, made of Â where they are first needed.

Shape legend: M nodes of all clients.
"""

import torch
from torch import Tensor

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.block_sparse import BlockSparse
from fl_lightning.kernels.csr import coordinates, with_values


def edge_operator(batch: GraphBatch, *, weighted: bool) -> BlockSparse:
    """A without loops: the weights of edges, or ones."""
    if not weighted and batch.links is not None:
        return batch.links
    return batch.adjacency.derived(_without_loops, weighted and batch.links is not None)


def _without_loops(adjacency: BlockSparse, weighted: bool) -> BlockSparse:
    """A of Â = D^(-1/2) (A + I) D^(-1/2), which has D⁻¹ on its diagonal."""
    row, column = coordinates(adjacency.matrix)
    loop, entry = row == column, adjacency.matrix.values()
    scale_M = entry.new_ones(len(adjacency.matrix))
    scale_M[row[loop]] = entry[loop].rsqrt()

    def without(matrix: Tensor) -> Tensor:
        row, column = coordinates(matrix)
        entry = matrix.values()
        value = entry * scale_M[row] * scale_M[column] if weighted else (entry != 0).to(entry)
        return with_values(matrix, torch.where(row == column, 0.0, value))

    matrix = without(adjacency.matrix)
    symmetric = adjacency.transposed is adjacency.matrix
    result = BlockSparse(matrix, matrix if symmetric else without(adjacency.transposed), adjacency.num_blocks)
    result.totals = None if adjacency.totals is None else adjacency.totals - 1  # without the loops
    return result


def normalized(batch: GraphBatch, *, weighted: bool, loop: float) -> BlockSparse:
    """D^(-1/2) (A + loop · I) D^(-1/2), D the sums of its rows, as PyG's ``gcn_norm``.

    Args:
        batch: The graphs.
        weighted: Whether A has the weights of edges.
        loop: What is added to the diagonal.
    """
    if loop == 1.0 and weighted == (batch.links is not None):
        return batch.adjacency
    return edge_operator(batch, weighted=weighted).derived(_normalized, batch.adjacency, loop)


def _normalized(edges: BlockSparse, adjacency: BlockSparse, loop: float) -> BlockSparse:
    """Â with other loops; those of ``adjacency`` say which nodes there are."""
    row, column = coordinates(edges.matrix)
    is_edge = row != column
    node = torch.stack(coordinates(adjacency.matrix))
    node = node[:, node[0] == node[1]]
    index = torch.cat([torch.stack([row, column])[:, is_edge], node], dim=1)
    value = torch.cat([edges.matrix.values()[is_edge], edges.matrix.values().new_full((node.shape[1],), loop)])
    degree_M = torch.bincount(index[0], value, minlength=len(edges.matrix)).to(value)
    if edges.totals is not None:  # a sample of the edges
        degree_M = edges.totals.to(value) + loop
    scale_M = torch.where(degree_M > 0, degree_M.rsqrt(), 0.0)
    return BlockSparse.from_coordinates(
        index,
        value * scale_M[index[0]] * scale_M[index[1]],
        (len(edges.matrix) // edges.num_blocks,) * 2,
        edges.num_blocks,
        symmetric=edges.transposed is edges.matrix,
    )


def edge_weights(links: BlockSparse, adjacency: BlockSparse) -> Tensor:
    """The weights of all clients' edges in the order of ``links.edges``, (C·E, 1)."""
    row, column = coordinates(adjacency.matrix)
    weight, count = adjacency.derived(_without_loops, True).matrix.values()[row != column], links.matrix.values()
    return links.edges.placed((weight / count)[count != 0].unsqueeze(-1))
