"""What autograd functions on stacks of clients share.

Such a function computes on tensors with a leading client dimension; its rule for ``vmap`` calls it on the stack.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

AnyFunction = TypeVar("AnyFunction", bound=type[Function])
Backward = Callable[..., tuple[Tensor | None, ...]]


def quick(function: AnyFunction) -> AnyFunction:
    """Class decorator: remember the signature of ``forward``, which ``apply`` would work out in every call."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def first_derivative_only(backward: Backward) -> Backward:
    """Decorator of a ``backward``: its results may not be differentiated.

    With ``once_differentiable`` of torch, ``torch.autograd.grad`` returns a wrong second derivative: it only follows
    paths to the inputs that it is asked for, and the error is on none of them. Here it is on all.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            result = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return result
        sources = [tensor for tensor in (*grads, *ctx.saved_tensors) if tensor is not None and tensor.requires_grad]
        return tuple(None if gradient is None else _Last.apply(gradient, *sources) for gradient in result)  # type: ignore[no-untyped-call]

    return guarded


class _Last(Function):
    """A gradient as it is, which depends on the given tensors in a way that is not known."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "a function that has a first derivative only was differentiated twice. Functions on stacks of clients are "
            "such: for second derivatives run the objective under torch.vmap, as one client's"
        )


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
