"""A linear layer for stacks of clients, and checks of settings that the nets share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fl_lightning.kernels.autograd import lead_with_clients, quick


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose weight and bias may have leading client dimensions, like its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Do what ``torch.nn.functional.linear`` does; weight and bias may have leading client dimensions, like x."""
    bias = weight.new_zeros(weight.shape[:-1]) if bias is None else bias
    if x.shape[:-2] != weight.shape[:-2] or x.dim() == 1:
        return x @ weight.mT + bias.unsqueeze(-2)
    mapped: Tensor = _Affine.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return mapped


def add_bias(product: Tensor, bias: Tensor) -> Tensor:
    """Add a bias (..., D) to a product (..., N, D) that nothing else uses: in place, if their types are the same."""
    bias = bias.unsqueeze(-2)
    return product.add_(bias) if product.dtype == bias.dtype else product + bias


@quick
class _Affine(Function):
    """x W^T + b whose gradient in W is a product of W's shape: for few outputs, W^T's takes four times as long."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_bias(x @ weight.mT, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        device = output.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else output.dtype
        ctx.bias_dtype = bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        of_product = grad.to(ctx.dtype)  # of another type than x and the weight under autocast
        grad_x = (of_product @ weight.to(ctx.dtype)).to(x.dtype) if of_x else None
        grad_weight = (of_product.mT @ x.to(ctx.dtype)).to(weight.dtype) if of_weight else None
        return grad_x, grad_weight, grad.sum(dim=-2).to(ctx.bias_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        return _Affine.apply(*lead_with_clients(info.batch_size, in_dims, tensors)), 0  # type: ignore[no-untyped-call]


def check_widths(**widths: int) -> None:
    """Check numbers of channels, layers and the like, given by the names of their settings.

    Raises:
        ValueError: One of them is not a positive integer.
    """
    for name, width in widths.items():
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"{name}={width!r} is impossible: set it to an integer of at least 1")


def check_dropout(probability: float) -> float:
    """Return the probability.

    Raises:
        ValueError: It is not in [0, 1).
    """
    if not 0 <= probability < 1:
        raise ValueError(f"dropout={probability} is impossible: set it to at least 0 and below 1")
    return probability
