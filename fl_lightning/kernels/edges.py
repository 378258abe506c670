"""Random neighbors, edges and columns of many clients' sparse matrices at once.

What is drawn for a client depends on its key and on indices in its own block, but not on padding or other clients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import lead_with_clients, quick
from fl_lightning.kernels.block_sparse import BlockSparse
from fl_lightning.kernels.csr import coordinates, csr_matmul, with_values
from fl_lightning.kernels.randomness import pair_words


@quick
class _SampleNeighbors(Function):
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
        result = torch.full((allowed.numel(), count), -1, device=row.device)
        within = rank < count
        result[row[within], rank[within]] = column[within] % num_nodes
        return result.view(*allowed.shape, count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: Tensor, allowed: Tensor, operator: BlockSparse, count: int
    ) -> tuple[Tensor, int]:
        key, allowed = lead_with_clients(info.batch_size, in_dims[:2], [key, allowed])
        return _SampleNeighbors.apply(key, allowed, operator, count), 0  # type: ignore[no-untyped-call]


def sample_neighbors(key: Tensor, allowed: Tensor, operator: BlockSparse, count: int) -> Tensor:
    """Up to ``count`` neighbors of each node, drawn without replacement; itself is not among them.

    Args:
        key: int64 key of each client (C,), or a scalar for one client, also under ``vmap``.
        allowed: Nodes that may be drawn, (C, N) or (N,).
        operator: Its entries are the edges, (N, N) for each client; the neighbors of a row are its columns.
        count: Largest number of neighbors of a node.

    Returns:
        int64 indices of the neighbors, (C, N, count) or (N, count); -1 where there are no more.
    """
    drawn: Tensor = _SampleNeighbors.apply(key, allowed, operator, count)  # type: ignore[no-untyped-call]
    return drawn


@quick
class _DropEdges(Function):
    """Values of Â and of its transpose after some edges are dropped, of links likewise, and degrees; of all clients."""

    @staticmethod
    def forward(
        key: Tensor, operator: BlockSparse, probability: float, links: BlockSparse | None
    ) -> tuple[Tensor, ...]:
        key_C, size = _keys(key, operator), len(operator.matrix) // operator.num_blocks

        def is_kept(row: Tensor, column: Tensor) -> Tensor:
            kept = kept_edges(key_C[row // size], torch.stack([row, column], dim=-1) % size, probability)
            return kept | (row == column)

        row, column = coordinates(operator.matrix)
        keep = is_kept(row, column)
        count = torch.zeros(len(operator.matrix), dtype=torch.int64, device=row.device)
        count = count.index_add(0, row, keep.long())
        degree = (count - 1).clamp(min=0).view(*key.shape, size)
        values = []
        if links is None:
            scale = count.clamp(min=1).to(operator.matrix.dtype).rsqrt()
            for matrix in _forms(operator):
                row, column = coordinates(matrix)
                values.append(is_kept(row, column) * scale[row] * scale[column])
            return *values, degree
        loop, entry = row == column, operator.matrix.values()
        old = torch.ones_like(entry[:1]).repeat(len(count))  # D^(1/2), for the loops' entries in Â are those of D^(-1)
        old[row[loop]] = entry[loop].rsqrt()
        rest = with_values(operator.matrix, keep * entry * old[row] * old[column])
        total = csr_matmul(rest, torch.ones_like(old)[:, None])[:, 0]
        scale = old * torch.where(total > 0, total, 1.0).rsqrt()
        for matrix in _forms(operator):
            row, column = coordinates(matrix)
            values.append(is_kept(row, column) * matrix.values() * (scale[row] * scale[column]))
        values += [is_kept(*coordinates(matrix)) * matrix.values() for matrix in _forms(links)]
        return *values, degree

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        key: Tensor,
        operator: BlockSparse,
        probability: float,
        links: BlockSparse | None,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        result = _DropEdges.apply(key.movedim(in_dims[0], 0), operator, probability, links)  # type: ignore[no-untyped-call]
        return result, (*[None] * (len(result) - 1), 0)


@quick
class _MaskColumns(Function):
    """Values of a matrix and of its transpose without some columns, (nnz,); under ``vmap`` of all clients'."""

    @staticmethod
    def forward(key: Tensor, operator: BlockSparse, probability: float) -> tuple[Tensor, Tensor]:
        key_C = _keys(key, operator)
        result = []
        for matrix, transposed in ((operator.matrix, False), (operator.transposed, True)):
            column = coordinates(matrix)[0 if transposed else 1]
            width = operator.matrix.shape[1] // operator.num_blocks
            keep = _kept(pair_words(key_C[column // width], column % width, torch.zeros_like(column)), probability)
            result.append(matrix.values() * keep)
        return result[0], result[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], key: Tensor, operator: BlockSparse, probability: float
    ) -> tuple[tuple[Tensor, Tensor], tuple[None, None]]:
        return _MaskColumns.apply(key.movedim(in_dims[0], 0), operator, probability), (None, None)  # type: ignore[no-untyped-call]


def drop_edges(
    key: Tensor, operator: BlockSparse, probability: float, links: BlockSparse | None = None
) -> tuple[BlockSparse, Tensor, BlockSparse | None]:
    """Drop edges at random from Â = D^(-1/2) (A + I) D^(-1/2), and normalize what is left.

    An edge and its reverse are dropped together.

    Args:
        key: int64 key of each client (C,), or a scalar for one client, also under ``vmap``.
        operator: Â of the clients, D the sums of the rows of A + I.
        probability: Probability that an edge is dropped, in [0, 1]; loops stay.
        links: Ones where A has entries, if these are weights; None if they are ones.

    Returns:
        Â of the rest, its number of neighbors of each node, (C, N) or (N,), and the links of the rest.
    """
    *values, degree = _DropEdges.apply(key, operator, probability, links)  # type: ignore[no-untyped-call]
    rest = _with_values(operator, values)
    return rest, degree, None if links is None else _with_values(links, values)


def kept_edges(key: Tensor, end_E2: Tensor, probability: float) -> Tensor:
    """Which edges :func:`drop_edges` keeps, boolean (E,), by their ends within a client's block; also on a stack.

    Args:
        key: int64 key of each edge, or one that spreads to that.
        end_E2: The two ends of each edge, in any order.
        probability: Probability that an edge is dropped.
    """
    first_E, last_E = end_E2.amin(dim=-1), end_E2.amax(dim=-1)
    return _kept(pair_words(key, first_E, last_E), probability)


def _forms(operator: BlockSparse) -> list[Tensor]:
    """The matrix, and its transpose where that is another."""
    symmetric = operator.transposed is operator.matrix
    return [operator.matrix] if symmetric else [operator.matrix, operator.transposed]


def _with_values(operator: BlockSparse, values: list[Tensor]) -> BlockSparse:
    """The operator with other values, which are taken from the front of a list; those of its transpose are next."""
    matrix = with_values(operator.matrix, values.pop(0))
    symmetric = operator.transposed is operator.matrix
    transposed = matrix if symmetric else with_values(operator.transposed, values.pop(0))
    return BlockSparse(matrix, transposed, operator.num_blocks, operator.entries)


def mask_columns(key: Tensor, operator: BlockSparse, probability: float) -> BlockSparse:
    """Set columns to zero at random, such as features of all nodes of a client.

    Args:
        key: int64 key of each client (C,), or a scalar for one client, also under ``vmap``.
        operator: The clients' matrices.
        probability: Probability of a column, in [0, 1].
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
