"""How the parameters of many clients lie in memory.

A plain PyG net multiplies sparse features with the transposed weight of its first layer, for which the kernels need the
transposed rows one after another. Copying them in every pass takes longer than the product, so the executor stores
such weights *column by column*: of the usual shape, but each client's columns are contiguous. Everything may read them
as any other tensor; what is here keeps whole-tensor work, such as sums over clients, free of copies.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_columns(tensor: Tensor) -> Tensor:
    """The same values, the last two dimensions stored column by column."""
    return tensor.mT.contiguous().mT


def is_by_columns(tensor: Tensor) -> bool:
    """Whether a stack of matrices, (C, D, F), is stored column by column and not also row by row."""
    return tensor.dim() == 3 and not tensor.is_contiguous() and tensor.mT.is_contiguous()


def make_like(
    allocate: Callable[[Sequence[int], torch.dtype, torch.device], Tensor], shape: Sequence[int], like: Tensor
) -> Tensor:
    """Memory for a stack of clients' tensors, of the type of another one, on its device and stored as it is.

    Args:
        allocate: Makes memory of a shape, type and device.
        shape: Of the result.
        like: Another stack, or one client's tensor.
    """
    if not is_by_columns(like if like.dim() == len(shape) else like.unsqueeze(0)):
        return allocate(shape, like.dtype, like.device)
    return allocate((*shape[:-2], shape[-1], shape[-2]), like.dtype, like.device).mT


def rows_of(positions: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index of the given rows: a slice, which needs no copy, if they are adjacent."""
    first = positions[0] if len(positions) else 0
    if list(positions) == list(range(first, first + len(positions))):
        return slice(first, first + len(positions))
    return torch.tensor(positions, dtype=torch.int64, device=device)


def rows_at(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Some clients' rows, stored as before: a view if they are a slice, else a copy."""
    stored = tensor.mT if is_by_columns(tensor) else tensor
    picked = stored[rows] if isinstance(rows, slice) else stored.index_select(0, rows)  # [rows] takes many times longer
    return picked.mT if stored is not tensor else picked


def stored_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, copied if another one of the same shape, which has no gaps, is stored in another order."""
    if tensor.shape != like.shape or tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Each client's numbers as one row, (C, *shape) -> (C, P), in the order in which they are stored."""
    return (tensor.mT if is_by_columns(tensor) else tensor).reshape(len(tensor), -1)


def from_memory_order(rows_RP: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`in_memory_order` for rows of the same order, such as sums of them: (R, P) -> (R, *shape)."""
    if is_by_columns(like):
        return rows_RP.view(len(rows_RP), *like.mT.shape[1:]).mT
    return rows_RP.view(len(rows_RP), *like.shape[1:])
