"""What the nets on examples share: a linear layer and a rule for ``vmap`` on stacks of clients, checks of settings."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose weight and bias may have leading client dimensions, as its input may."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        alike = input.shape[:-2] == self.weight.shape[:-2] and input.dim() > 1
        product: Tensor = _Product.apply(input, self.weight) if alike else input @ self.weight.mT  # type: ignore[no-untyped-call]
        return product + self.bias.unsqueeze(-2)


class _Product(Function):
    """x W^T whose gradient in W is a product of W's shape: for few outputs, the transposed takes four times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors  # under autocast they may be of other types than the product
        of_x, of_weight = ctx.needs_input_grad
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if of_x else None
        return grad_x, (grad.mT @ x.to(grad.dtype)).to(weight.dtype) if of_weight else None


def fold_clients(batch_size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make the dimension that ``vmap`` maps over part of each tensor's leading client dimension.

    For the ``vmap`` method of an autograd function on stacks, which then is called on the larger stack.

    Args:
        batch_size: Size of the mapped dimension.
        in_dims: Where each tensor has it; None where all share one.
        tensors: Each with a client dimension first, not counting the mapped one.

    Example:
        >>> import torch
        >>> shared, own = torch.zeros(2, 7), torch.zeros(2, 7, 3)
        >>> [tuple(tensor.shape) for tensor in fold_clients(3, [None, 2], [shared, own])]
        [(6, 7), (6, 7)]
    """
    mapped = [
        tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    return [tensor.flatten(0, 1) for tensor in mapped]


def check_widths(**widths: int) -> None:
    """Check numbers of channels, layers and the like, given by the names of their settings.

    Raises:
        ValueError: One of them is not a positive integer.
    """
    for name, width in widths.items():
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"{name}={width!r} is impossible: set it to an integer of at least 1")


def check_dropout(probability: float) -> float:
    """Return the probability.

    Raises:
        ValueError: It is not in [0, 1).
    """
    if not 0 <= probability < 1:
        raise ValueError(f"dropout={probability} is impossible: set it to at least 0 and below 1")
    return probability
