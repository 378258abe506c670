"""What autograd functions on stacks of clients share.

Such a function computes on tensors with a leading client dimension; its rule for ``vmap`` calls it on the stack.
"""

import inspect
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor
from torch.autograd import Function

AnyFunction = TypeVar("AnyFunction", bound=type[Function])


def quick(function: AnyFunction) -> AnyFunction:
    """Class decorator: remember the signature of ``forward``, which ``apply`` would work out in every call."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def lead_with_clients(batch_size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Put the dimension that ``vmap`` maps over first, and give it to the tensors that all clients share.

    Args:
        batch_size: Size of the mapped dimension.
        in_dims: Where each tensor has it; None where all share one.
        tensors: The tensors.

    Example:
        >>> import torch
        >>> shared, own = torch.zeros(7), torch.zeros(7, 3)
        >>> [tuple(tensor.shape) for tensor in lead_with_clients(3, [None, 1], [shared, own])]
        [(3, 7), (3, 7)]
    """
    return [
        tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]


def fold_clients(batch_size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make the dimension that ``vmap`` maps over part of each tensor's leading client dimension.

    For functions that have such a dimension already, which then are called on the larger stack; see
    :func:`lead_with_clients`.

    Example:
        >>> import torch
        >>> shared, own = torch.zeros(2, 7), torch.zeros(2, 7, 3)
        >>> [tuple(tensor.shape) for tensor in fold_clients(3, [None, 2], [shared, own])]
        [(6, 7), (6, 7)]
    """
    return [tensor.flatten(0, 1) for tensor in lead_with_clients(batch_size, in_dims, tensors)]
