"""Sparse products for many clients at once: C sparse matrices of one shape as one block-diagonal CSR matrix.

Under ``torch.vmap`` over clients, :func:`block_matmul` stacks its dense operand and multiplies once:
one kernel for the message passing of a whole federation.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function

from fl_lightning.kernels.autograd import lead_with_clients, quick
from fl_lightning.kernels.csr import csr_from_coo, csr_matmul, with_values
from fl_lightning.kernels.edge_products import Edges

Made = TypeVar("Made")


class BlockSparse:
    """C sparse (N x M) matrices on the diagonal of one CSR matrix (C·N x C·M), with its transpose for the backward.

    It is an opaque object to ``vmap``: all clients' blocks are passed in one instance.

    Args:
        matrix: CSR matrix of shape (C·N, C·M), with 32-bit indices.
        transposed: Its transpose, likewise; the same object if it is symmetric.
        num_blocks: C.
        entries: What else every entry of the matrix has, (nnz, K), such as the attributes of edges; None for nothing.

    Attributes:
        totals: Of a sample of a square matrix, what the rows of the whole matrix sum to, (C·N,); None for another.
    """

    def __init__(self, matrix: Tensor, transposed: Tensor, num_blocks: int, entries: Tensor | None = None) -> None:
        self.matrix = matrix
        self.transposed = transposed
        self.num_blocks = num_blocks
        self.entries = entries
        self.totals: Tensor | None = None
        self._derived: dict[tuple[Any, ...], Any] = {}
        self._facts: dict[tuple[Any, ...], Tensor] = {}
        self._origin: tuple[BlockSparse, Tensor, Tensor | None] | None = None

    @classmethod
    def from_coordinates(
        cls,
        index: Tensor,
        values: Tensor,
        shape: tuple[int, int],
        num_blocks: int,
        *,
        symmetric: bool = False,
        entries: Tensor | None = None,
    ) -> "BlockSparse":
        """Assemble from the coordinates of all clients.

        Args:
            index: Row and column within the whole matrix, (2, nnz): client c's begin at c·N and c·M.
            values: Their values (nnz,); those of equal coordinates are added.
            shape: (N, M) of every block; smaller clients have empty rows and columns at their end.
            num_blocks: C.
            symmetric: Every block is symmetric.
            entries: What else the entries have, (nnz, K); then no two coordinates may be equal.
        """
        size = (num_blocks * shape[0], num_blocks * shape[1])
        coo = torch.sparse_coo_tensor(index, values, size, check_invariants=False).coalesce()
        matrix = csr_from_coo(coo)
        transposed = matrix if symmetric else csr_from_coo(coo.t().coalesce())
        if entries is not None:
            entries = entries[(index[0] * size[1] + index[1]).argsort()]
        return cls(matrix, transposed, num_blocks, entries)

    @classmethod
    def incidence(cls, end: Tensor, mask: Tensor, num_nodes: int, dtype: torch.dtype) -> "BlockSparse":
        """Ones where an edge has its end, (nodes x edges) for each client.

        Args:
            end: A node of each edge, int64 (C, E), or (E,) for one client; any for padding.
            mask: Which edges are no padding.
            num_nodes: N.
            dtype: Type of the ones.
        """
        num_blocks = end.shape[:-1].numel()
        block_C1 = torch.arange(num_blocks, device=end.device)[:, None]
        node_E = (end.view(num_blocks, -1) + num_nodes * block_C1)[mask.view(num_blocks, -1)]
        edge_E = mask.flatten().nonzero().flatten().int()
        count = node_E.bincount(minlength=num_blocks * num_nodes)
        ones = torch.ones(len(node_E), dtype=dtype, device=end.device)
        size = (num_blocks * num_nodes, mask.numel())

        def matrix(count: Tensor, column: Tensor, size: tuple[int, int]) -> Tensor:
            crow = torch.nn.functional.pad(count.cumsum(0).int(), (1, 0))
            return torch.sparse_csr_tensor(crow, column, ones, size, check_invariants=False)

        forth = matrix(count, edge_E[node_E.argsort(stable=True)], size)
        return cls(forth, matrix(mask.flatten(), node_E.int(), size[::-1]), num_blocks)

    def to(self, device: torch.device, dtype: torch.dtype) -> "BlockSparse":
        """The same matrix elsewhere, or with values of another type."""
        matrix = self.matrix.to(device, dtype)
        transposed = matrix if self.transposed is self.matrix else self.transposed.to(device, dtype)
        entries = None if self.entries is None else self.entries.to(device, dtype)
        return BlockSparse(matrix, transposed, self.num_blocks, entries)

    @cached_property
    def common(self) -> Tensor:
        """All blocks one below the other (C·N x M), for the products with one matrix that all clients have."""
        width = self.matrix.shape[1] // self.num_blocks
        size = (self.matrix.shape[0], width)
        parts = (self.matrix.crow_indices(), self.matrix.col_indices() % width, self.matrix.values())
        return torch.sparse_csr_tensor(*parts, size, check_invariants=False)

    @property
    def edges(self) -> Edges:
        """What is not zero off the diagonal of square blocks, for products along edges."""
        return self.derived(_edges)

    def derived(self, make: Callable[..., Made], *settings: Any) -> Made:
        """What a function makes of this operator and settings, which must be hashable; it is called once.

        It is called outside all transforms of ``torch.func``, whose tensors may not outlive them.
        """
        asked = (make, *settings)
        if asked not in self._derived:
            with temporarily_clear_interpreter_stack(), torch.no_grad():
                self._derived[asked] = make(self, *settings)
        made: Made = self._derived[asked]
        return made

    def facts(self, find: Callable[..., Tensor], *settings: int) -> Tensor:
        """What a function finds of the rows of a square matrix, (C·N, S), see ``kernels/node_facts.py``.

        Of an operator that was selected or moved from another one it is that one's rows.
        """
        asked: tuple[Any, ...] = (find, *settings)
        if asked not in self._facts:
            if self._origin is None:
                self._facts[asked] = find(self.matrix, *settings).to(self.matrix.device)
            else:
                origin, rows, mask = self._origin
                found = origin.facts(find, *settings)[rows]
                self._facts[asked] = found if mask is None else found * mask.unsqueeze(-1)
        return self._facts[asked]

    def sampled_from(self, whole: "BlockSparse", rows: Tensor, mask: Tensor, totals: Tensor) -> None:
        """Say that this is a sample of another operator's entries in some rows and the like columns.

        Args:
            whole: The other operator.
            rows: Which rows these are, by their numbers in the whole matrix, (C·M,); any for padding.
            mask: Which of them are no padding.
            totals: What they sum to there.
        """
        self._origin, self.totals = (whole, rows, mask), totals

    def multiply(self, x: Tensor, *, transpose: bool = False) -> Tensor:
        """What :func:`block_matmul` returns, without a gradient and not under ``vmap``."""
        matrix = self.transposed if transpose else self.matrix
        dtype, leading, width = x.dtype, x.shape[:-2], x.shape[-1]
        x = x.detach().to(matrix.dtype)  # detached, or the kernel would prepare for a backward pass of its own
        if x.dim() > 2 and self.num_blocks == 1:  # one matrix for all clients: their columns side by side
            columns = x.flatten(0, -3).movedim(0, 1).flatten(1)
            product = csr_matmul(matrix, columns).view(len(matrix), leading.numel(), width).movedim(0, 1)
            return product.reshape(*leading, len(matrix), width).to(dtype)
        if x.shape[:-1].numel() != matrix.shape[1]:
            raise ValueError(
                f"{self.num_blocks} blocks of {matrix.shape[1] // self.num_blocks} columns cannot be multiplied with "
                f"a matrix of shape {tuple(x.shape)}: it needs one for each block. Under vmap name the blocks' owner"
            )
        if x.dim() == 3 and x.stride(0) == 0 and not transpose:
            product = csr_matmul(self.common, x[0])
        else:
            product = csr_matmul(matrix, x.flatten(0, -2))
        return product.view(*leading, len(product) // leading.numel(), width).to(dtype)

    def select(self, blocks: Tensor, num_rows: int, num_columns: int | None = None) -> "BlockSparse":
        """The blocks of some clients in the given order, cut to the first rows and columns (None: all columns).

        Nothing but padding may lie beyond.
        """
        width = self.matrix.shape[1] // self.num_blocks if num_columns is None else num_columns
        matrix = _select(self.matrix, self.num_blocks, blocks, (num_rows, width))
        is_symmetric = self.transposed is self.matrix
        transposed = matrix if is_symmetric else _select(self.transposed, self.num_blocks, blocks, (width, num_rows))
        entries = self._entries(lambda numbered: _select(numbered, self.num_blocks, blocks, (num_rows, width)))
        selected = BlockSparse(matrix, transposed, len(blocks), entries)
        first_B1 = (blocks * (len(self.matrix) // self.num_blocks))[:, None]
        rows = (first_B1 + torch.arange(num_rows, device=blocks.device)).flatten()
        selected._origin = self, rows, None
        selected.totals = None if self.totals is None else self.totals[rows]
        return selected

    def moved(self, rows: Tensor, mask: Tensor) -> "BlockSparse":
        """Some rows of every square block with the like columns, in another order.

        Rows with entries in each other's columns must stay at the same distance, as those of one of many graphs do.

        Args:
            rows: Their numbers within each block, (C, M), or (M,) of one block.
            mask: Which of them there are; the others become empty.
        """
        matrix = _moved(self.matrix, self.num_blocks, rows, mask)
        is_symmetric = self.transposed is self.matrix
        transposed = matrix if is_symmetric else _moved(self.transposed, self.num_blocks, rows, mask)
        entries = self._entries(lambda numbered: _moved(numbered, self.num_blocks, rows, mask))
        moved = BlockSparse(matrix, transposed, self.num_blocks, entries)
        moved._origin = self, _rows_of_all(rows, self.num_blocks, len(self.matrix)), mask.flatten()
        return moved

    def padded(self, num_rows: int, num_columns: int) -> "BlockSparse":
        """The only block with so many empty rows and columns after its own.

        Raises:
            ValueError: There are several blocks.
        """
        if self.num_blocks != 1:
            raise ValueError(f"only one block can be padded, these are {self.num_blocks}")
        matrix = _padded(self.matrix, num_rows, num_columns)
        transposed = matrix if self.transposed is self.matrix else _padded(self.transposed, num_columns, num_rows)
        padded = BlockSparse(matrix, transposed, 1, self.entries)
        row_N = torch.arange(len(matrix), device=matrix.device)
        padded._origin = self, row_N.clamp(max=len(self.matrix) - 1), row_N < len(self.matrix)
        if self.totals is not None:
            padded.totals = torch.nn.functional.pad(self.totals, (0, num_rows), value=1.0)
        return padded

    def _entries(self, rearranged: Callable[[Tensor], Tensor]) -> Tensor | None:
        """What the entries have after the matrix was rearranged."""
        if self.entries is None:
            return None
        numbers = torch.arange(len(self.entries), device=self.entries.device)
        return self.entries[rearranged(with_values(self.matrix, numbers)).values()]


def _edges(operator: BlockSparse) -> Edges:
    return Edges(operator.matrix, operator.num_blocks)


def _padded(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """A CSR matrix with so many empty rows and columns after its own."""
    crow = matrix.crow_indices()
    crow = torch.cat([crow, crow[-1:].expand(num_rows)])
    size = (matrix.shape[0] + num_rows, matrix.shape[1] + num_columns)
    return torch.sparse_csr_tensor(crow, matrix.col_indices(), matrix.values(), size, check_invariants=False)


def _moved(matrix: Tensor, num_blocks: int, rows: Tensor, mask: Tensor) -> Tensor:
    """:meth:`BlockSparse.moved` of a block-diagonal CSR matrix: columns move as far as the rows that they are in."""
    old = _rows_of_all(rows, num_blocks, len(matrix))
    crow = matrix.crow_indices().long()
    count = torch.where(mask.flatten(), crow[old + 1] - crow[old], 0)
    end = count.cumsum(0)
    source = torch.arange(int(end[-1]), device=rows.device) + (crow[old] - end + count).repeat_interleave(count)
    shift = torch.arange(len(old), device=rows.device) - old
    col = matrix.col_indices()[source] + shift.int().repeat_interleave(count)
    crow = torch.nn.functional.pad(end.int(), (1, 0))
    size = (len(old), len(old))
    return torch.sparse_csr_tensor(crow, col, matrix.values()[source], size, check_invariants=False)


def _rows_of_all(rows: Tensor, num_blocks: int, num_rows: int) -> Tensor:
    """Rows of each block, (C, M) or (M,), by their numbers in the whole matrix of so many rows, (C·M,)."""
    block_B1 = torch.arange(num_blocks, device=rows.device)[:, None]
    return (rows.view(num_blocks, -1) + block_B1 * (num_rows // num_blocks)).flatten()


def _select(matrix: Tensor, num_blocks: int, blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Some blocks of a block-diagonal CSR matrix, each cut to ``shape``."""
    num_rows, num_columns = shape
    old_rows, old_columns = (length // num_blocks for length in matrix.shape)
    index = torch.arange(len(blocks), device=blocks.device)
    entry_B = matrix.crow_indices()[blocks * old_rows].long()  # where the blocks begin among the values
    end_BN = matrix.crow_indices()[blocks[:, None] * old_rows + torch.arange(1, num_rows + 1, device=blocks.device)]
    count_B = matrix.crow_indices()[blocks * old_rows + num_rows] - entry_B
    shift_B = entry_B - (count_B.cumsum(0) - count_B)
    source = torch.arange(int(count_B.sum()), device=blocks.device) + shift_B.repeat_interleave(count_B)
    column_shift_B = (index * num_columns - blocks * old_columns).int()
    crow = torch.nn.functional.pad((end_BN - shift_B[:, None]).flatten().int(), (1, 0))
    col = matrix.col_indices()[source] + column_shift_B.repeat_interleave(count_B)
    size = (len(blocks) * num_rows, len(blocks) * num_columns)
    return torch.sparse_csr_tensor(crow, col, matrix.values()[source], size, check_invariants=False)


@quick
class _BlockMatmul(Function):
    @staticmethod
    def forward(x: Tensor, operator: BlockSparse, transpose: bool, owner: Tensor | None) -> Tensor:
        return operator.multiply(x, transpose=transpose)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.operator, ctx.transpose, owner = inputs
        ctx.save_for_backward(owner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        [owner] = ctx.saved_tensors
        return block_matmul(ctx.operator, grad, transpose=not ctx.transpose, owner=owner), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, operator: BlockSparse, transpose: bool, owner: Tensor | None
    ) -> tuple[Tensor, int]:
        x_dim, _, _, owner_dim = in_dims
        if owner is not None and owner_dim is None:  # this vmap is not over the clients: side by side
            columns = x.movedim(x_dim, -2)
            product = block_matmul(operator, columns.flatten(-2), transpose=transpose, owner=owner)
            return torch.unflatten(product, -1, columns.shape[-2:]), product.dim() - 1
        [x] = lead_with_clients(info.batch_size, [x_dim], [x])
        if owner is not None:
            owner = owner.movedim(owner_dim, 0)
        return block_matmul(operator, x, transpose=transpose, owner=owner), 0


def block_matmul(operator: BlockSparse, x: Tensor, *, transpose: bool = False, owner: Tensor | None = None) -> Tensor:
    """Multiply each client's sparse block (or its transpose) with its dense matrix, or with one that all have.

    ``vmap`` cannot tell to which clients the blocks belong, as they are passed in one object. The owner, a tensor that
    it sees, tells it: if the owner is mapped, every client has a block of its own, even if ``x`` is the same for all;
    if not, the blocks are the same for everything that is mapped.

    Args:
        operator: The blocks.
        x: The dense matrices.
        transpose: Multiply with the transposed blocks.
        owner: Any tensor of the clients that has a leading client dimension if the blocks have one, such as a mask of
            their batch; its values are not read. None if every ``vmap`` of ``x`` is over the clients.

    Shapes:
        x: (M, D), or (C, M, D), also where it is seen as (M, D) under ``vmap``; the operator's ``num_blocks`` must be
            C, or 1 for one matrix that all clients share.

    Returns:
        (N, D), or (C, N, D).
    """
    product: Tensor = _BlockMatmul.apply(x, operator, transpose, owner)  # type: ignore[no-untyped-call]
    return product
