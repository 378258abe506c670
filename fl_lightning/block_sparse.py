"""Sparse products for many clients at once: C sparse matrices of one shape as one block-diagonal CSR matrix.

Under ``torch.vmap`` over clients, :func:`block_matmul` stacks its dense operand and multiplies once:
one kernel for the message passing of a whole federation.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class BlockSparse:
    """C sparse (N x M) matrices on the diagonal of one CSR matrix (C·N x C·M), with its transpose for the backward.

    It is an opaque object to ``vmap``: all clients' blocks travel in one instance.

    Args:
        matrix: CSR matrix of shape (C·N, C·M).
        num_blocks: C.
        symmetric: The matrix equals its transpose, which is then not stored twice.
    """

    def __init__(self, matrix: Tensor, num_blocks: int, *, symmetric: bool = False) -> None:
        self.matrix = matrix
        self.num_blocks = num_blocks
        self.transposed = matrix if symmetric else _csr(matrix.to_sparse_coo().t().coalesce())  # type: ignore[no-untyped-call]

    @classmethod
    def from_blocks(
        cls,
        blocks: Sequence[tuple[Tensor, Tensor]],
        shape: tuple[int, int],
        *,
        symmetric: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> "BlockSparse":
        """Assemble from per-client coordinates.

        Args:
            blocks: For each client its coordinates (2, nnz_i) and values (nnz_i,).
            shape: (N, M) of every block; smaller clients are padded with empty rows and columns.
            symmetric: Every block is symmetric.
            dtype: Type of the values.
            device: Where the matrix is to live.
        """
        num_rows, num_columns = shape
        index = torch.cat([coordinates for coordinates, _ in blocks], dim=1)
        block = torch.repeat_interleave(torch.tensor([values.numel() for _, values in blocks]))
        index = index + torch.stack([block * num_rows, block * num_columns])
        values = torch.cat([values for _, values in blocks]).to(dtype)
        size = (len(blocks) * num_rows, len(blocks) * num_columns)
        coo = torch.sparse_coo_tensor(index, values, size, check_invariants=False).coalesce()
        return cls(_csr(coo).to(device), len(blocks), symmetric=symmetric)


def _csr(coo: Tensor) -> Tensor:
    """Convert to CSR with 32-bit indices, which the libraries take without converting them in every product."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        csr = coo.to_sparse_csr()
        crow, col = csr.crow_indices().int(), csr.col_indices().int()
        return torch.sparse_csr_tensor(crow, col, csr.values(), csr.shape, check_invariants=False)


def _csr_matmul(matrix: Tensor, x: Tensor) -> Tensor:
    """CSR matrix times dense matrix; no gradient."""
    if x.device.type == "cpu":
        # a row of the product is a weighted sum of rows of x, and PyTorch's kernel for such bags is two to four times
        # as fast as its sparse product (27 ms against 104 ms at ogbn-arxiv's size on two cores)
        return F.embedding_bag(
            matrix.col_indices(),
            x,
            matrix.crow_indices(),
            mode="sum",
            per_sample_weights=matrix.values(),
            include_last_offset=True,
        )
    product = torch.empty(matrix.shape[0], x.shape[1], dtype=matrix.dtype, device=x.device)
    # beta=0 into an empty result: `matrix @ x` would fill a result with zeros and copy it before it multiplies
    return torch.addmm(product, matrix, x, beta=0, out=product)


class _BlockMatmul(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, operator: BlockSparse, transpose: bool) -> Tensor:
        matrix = operator.transposed if transpose else operator.matrix
        return _csr_matmul(matrix, x.to(matrix.dtype)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.operator, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _BlockMatmul.apply(grad, ctx.operator, not ctx.transpose), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, operator: BlockSparse, transpose: bool) -> tuple[Any, int]:
        x = x.movedim(in_dims[0], 0)
        num_clients, num_rows, width = x.shape
        if operator.num_blocks == 1:  # one matrix for all clients (a server's proxy graph): their columns side by side
            columns = x.movedim(0, 1).reshape(num_rows, -1)
            product = _BlockMatmul.apply(columns, operator, transpose)  # type: ignore[no-untyped-call]
            return product.view(-1, num_clients, width), 1
        product = _BlockMatmul.apply(x.reshape(-1, width), operator, transpose)  # type: ignore[no-untyped-call]
        return product.view(num_clients, -1, width), 0


def block_matmul(operator: BlockSparse, x: Tensor) -> Tensor:
    """Multiply each client's sparse block with its dense matrix.

    Shapes:
        x: (M, D), or (C, M, D), also where it is seen as (M, D) under ``vmap``; the operator's ``num_blocks`` must be
            C, or, under ``vmap``, 1 for one matrix that all clients share.

    Returns:
        (N, D), likewise.
    """
    product: Tensor = _BlockMatmul.apply(x.flatten(0, -2), operator, False)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-2], -1, x.shape[-1])
