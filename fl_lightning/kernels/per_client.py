"""A number of each client beside its tensors: for one client a scalar, for a stack of C clients (C,)."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
