"""Random neighbours, edges and columns of many clients' sparse matrices at once.

What is drawn for a client depends on its key and on places in its own block, neither on padding nor on the others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import lead_with_clients, quick
from fl_lightning.kernels.block_sparse import BlockSparse
from fl_lightning.kernels.csr import coordinates, with_values
from fl_lightning.kernels.randomness import pair_words


@quick
class _SampleNeighbours(Function):
    """Under ``vmap`` one draw for all clients."""

    @staticmethod
    def forward(key: Tensor, allowed: Tensor, operator: BlockSparse, count: int) -> Tensor:
        num_nodes = allowed.shape[-1]
        row, column = coordinates(operator.matrix)
        usable = (row != column) & allowed.flatten()[column]
        row, column = row[usable], column[usable]
        drawn = pair_words(
            key.expand(allowed.shape[:-1]).flatten()[row // num_nodes], row % num_nodes, column % num_nodes
        )
        order = drawn.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        row, column = row[order], column[order]
        first = torch.searchsorted(row, torch.arange(allowed.numel(), device=row.device))
        rank = torch.arange(len(row), device=row.device) - first[row]
        found = torch.full((allowed.numel(), count), -1, device=row.device)
        within = rank < count
        found[row[within], rank[within]] = column[within] % num_nodes
        return found.view(*allowed.shape, count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: Tensor, allowed: Tensor, operator: BlockSparse, count: int
    ) -> tuple[Tensor, int]:
        key, allowed = lead_with_clients(info.batch_size, in_dims[:2], [key, allowed])
        return _SampleNeighbours.apply(key, allowed, operator, count), 0  # type: ignore[no-untyped-call]


def sample_neighbours(key: Tensor, allowed: Tensor, operator: BlockSparse, count: int) -> Tensor:
    """Up to ``count`` neighbours of each node, drawn without replacement; itself is not among them.

    Args:
        key: int64 key of each client (C,), or a scalar for one client, also under ``vmap``.
        allowed: Nodes that may be drawn, (C, N) or (N,).
        operator: Its entries are the edges, (N, N) for each client.
        count: Most neighbours of a node.

    Returns:
        int64 places of the neighbours, (C, N, count) or (N, count); -1 where there are no more.
    """
    drawn: Tensor = _SampleNeighbours.apply(key, allowed, operator, count)  # type: ignore[no-untyped-call]
    return drawn


@quick
class _DropEdges(Function):
    """Values of a normalised adjacency after some edges are dropped, (nnz,), and degrees; under ``vmap`` of all."""

    @staticmethod
    def forward(key: Tensor, operator: BlockSparse, probability: float) -> tuple[Tensor, Tensor]:
        key_C, size = _keys(key, operator), len(operator.matrix) // operator.num_blocks
        row, column = coordinates(operator.matrix)
        first, last = torch.minimum(row, column) % size, torch.maximum(row, column) % size
        kept = _kept(pair_words(key_C[row // size], first, last), probability) | (row == column)
        count = torch.zeros(len(operator.matrix), dtype=torch.int64, device=row.device)
        count = count.index_add(0, row, kept.long())
        scale = count.clamp(min=1).to(operator.matrix.dtype).rsqrt()
        values = kept * scale[row] * scale[column]
        return values, (count - 1).clamp(min=0).view(*key.shape, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: Tensor, operator: BlockSparse, probability: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[None, int]]:
        return _DropEdges.apply(key.movedim(in_dims[0], 0), operator, probability), (None, 0)  # type: ignore[no-untyped-call]


@quick
class _MaskColumns(Function):
    """Values of a matrix and of its transpose without some columns, (nnz,); under ``vmap`` of all clients'."""

    @staticmethod
    def forward(key: Tensor, operator: BlockSparse, probability: float) -> tuple[Tensor, Tensor]:
        key_C = _keys(key, operator)
        found = []
        for matrix, transposed in ((operator.matrix, False), (operator.transposed, True)):
            column = coordinates(matrix)[0 if transposed else 1]
            width = operator.matrix.shape[1] // operator.num_blocks
            kept = _kept(pair_words(key_C[column // width], column % width, torch.zeros_like(column)), probability)
            found.append(matrix.values() * kept)
        return found[0], found[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: Tensor, operator: BlockSparse, probability: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[None, None]]:
        return _MaskColumns.apply(key.movedim(in_dims[0], 0), operator, probability), (None, None)  # type: ignore[no-untyped-call]


def drop_edges(key: Tensor, operator: BlockSparse, probability: float) -> tuple[BlockSparse, Tensor]:
    """Drop undirected edges at random from Â = D^(-1/2) (A + I) D^(-1/2), and normalise what is left.

    Args:
        key: int64 key of each client (C,), or a scalar for one client, also under ``vmap``.
        operator: Â of the clients, symmetric.
        probability: Of an edge to be dropped, in [0, 1]; loops stay.

    Returns:
        Â of the rest, and its number of neighbours of each node, (C, N) or (N,).
    """
    values, degree = _DropEdges.apply(key, operator, probability)  # type: ignore[no-untyped-call]
    matrix = with_values(operator.matrix, values)
    return BlockSparse(matrix, matrix, operator.num_blocks), degree


def mask_columns(key: Tensor, operator: BlockSparse, probability: float) -> BlockSparse:
    """Set columns to zero at random, such as features of all nodes of a client.

    Args:
        key: int64 key of each client (C,), or a scalar for one client, also under ``vmap``.
        operator: The clients' matrices.
        probability: Of a column, in [0, 1].
    """
    values, transposed = _MaskColumns.apply(key, operator, probability)  # type: ignore[no-untyped-call]
    pair = (with_values(operator.matrix, values), with_values(operator.transposed, transposed))
    return BlockSparse(*pair, operator.num_blocks)


def kept_columns(key: Tensor, width: int, probability: float) -> Tensor:
    """Which columns :func:`mask_columns` keeps, boolean (*key.shape, width)."""
    column = torch.arange(width, device=key.device)
    return _kept(pair_words(key[..., None], column, torch.zeros_like(column)), probability)


def _kept(word: Tensor, probability: float) -> Tensor:
    """Whether a random word is one of those that are kept."""
    return (word & 0xFFFFFF) >= round(probability * 2**24)


def _keys(key: Tensor, operator: BlockSparse) -> Tensor:
    """The key of every block.

    Raises:
        ValueError: There are not as many keys as blocks.
    """
    if key.numel() != operator.num_blocks:
        raise ValueError(f"{key.numel()} keys for {operator.num_blocks} matrices: give each matrix a key of its own")
    return key.reshape(-1)
