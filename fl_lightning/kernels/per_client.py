"""What one client has or computes, and the same for a stack of C clients: a number, or a function."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def along(number: Tensor, tensor: Tensor) -> Tensor:
    """The numbers, scalar or (C,), shaped to broadcast against a tensor of the client or of the stack."""
    return number.reshape(*number.shape, *[1] * (tensor.dim() - number.dim()))


def norm(tensors: Sequence[Tensor], *, is_stack: bool) -> Tensor:
    """The Euclidean norm of several tensors as one vector: scalar, or on a stack (C,).

    Example:
        >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])], is_stack=False)
        tensor(5.)
        >>> norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [2.0]])], is_stack=True)
        tensor([5., 2.])
    """
    dims = 1 if is_stack else 0
    norms = [torch.linalg.vector_norm(each.reshape(*each.shape[:dims], -1), dim=-1) for each in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return total


def over_clients(function: AnyFunction) -> AnyFunction:
    """A function of one client's tensors as one of a stack's, which have a leading C: ``torch.vmap``.

    A stack of one client is computed without it, in half of the time where tensors are small.

    Example:
        >>> over_clients(torch.dot)(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([11.])
    """

    def mapped(*stacks: Any) -> Any:
        if len(tree_leaves(stacks)[0]) > 1:
            return torch.vmap(function)(*stacks)
        return tree_map(lambda tensor: tensor.unsqueeze(0), function(*tree_map(lambda each: each.squeeze(0), stacks)))

    return cast("AnyFunction", mapped)
