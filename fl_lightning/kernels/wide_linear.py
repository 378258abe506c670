"""The linear layer that ends a hypernetwork: a few rows of input, hundreds of thousands of outputs.

Its three products read or write the whole weight and little else. The library packs a matrix of such a shape anew in
every product, which takes as long as the arithmetic; in a batch of blocks of outputs it does not.

Shape legend: C clients (rows), D channels, P outputs, K blocks of B outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fl_lightning.kernels.autograd import first_derivative_only

#: Outputs in a block.
BLOCK = 1024


def wide_linear(x_CD: Tensor, weight_PD: Tensor, bias_P: Tensor | None) -> Tensor:
    """Do what ``torch.nn.functional.linear`` does, in blocks of outputs where that is faster: on a CPU.

    In blocks it has a first derivative only, and no rule for ``vmap``.

    Shapes:
        x_CD ``(C, D)``; weight_PD ``(P, D)``; bias_P ``(P,)``; result ``(C, P)``.
    """
    in_blocks = x_CD.dim() == 2 and len(x_CD) > 0 and len(weight_PD) >= 2 * BLOCK and bias_P is not None
    if not in_blocks or x_CD.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(x_CD, weight_PD, bias_P)
    mapped: Tensor = _Blocks.apply(x_CD, weight_PD, bias_P)  # type: ignore[no-untyped-call]
    return mapped


class WideLinear(nn.Linear):
    """``torch.nn.Linear`` by :func:`wide_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (C, in_features) to (C, out_features)."""
        return wide_linear(input, self.weight, self.bias)


class _Blocks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        split, num_blocks = _split(len(weight))
        out = x.new_empty(len(x), len(weight))
        product = torch.bmm(x.expand(num_blocks, *x.shape), weight[:split].view(num_blocks, BLOCK, -1).mT)
        torch.add(product.transpose(0, 1), bias[:split].view(num_blocks, BLOCK), out=_blocks(out[:, :split]))
        torch.addmm(bias[split:], x, weight[split:].t(), out=out[:, split:])
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        split, num_blocks = _split(len(weight))
        grad_KCB = _blocks(grad[:, :split]).transpose(0, 1)
        grad_x = grad_weight = None
        if of_x:
            grad_x = torch.bmm(grad_KCB, weight[:split].view(num_blocks, BLOCK, -1)).sum(dim=0)
            grad_x.addmm_(grad[:, split:], weight[split:])
        if of_weight:
            grad_weight = torch.empty_like(weight)
            whole = grad_weight[:split].view(num_blocks, BLOCK, -1)
            torch.bmm(grad_KCB.mT, x.expand(num_blocks, *x.shape), out=whole)
            torch.mm(grad[:, split:].t(), x, out=grad_weight[split:])
        return grad_x, grad_weight, grad.sum(dim=0)


def _split(num_outputs: int) -> tuple[int, int]:
    """Outputs in whole blocks, and the number of these."""
    num_blocks = num_outputs // BLOCK
    return num_blocks * BLOCK, num_blocks


def _blocks(rows: Tensor) -> Tensor:
    """(C, K · B) as (C, K, B)."""
    return rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK)
