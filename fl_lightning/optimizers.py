"""Optimizers whose weight decay acts only where a step has a gradient.

Weight decay moves every coordinate, even those that a client's data never touch: Adam moves them by the learning rate
in each step, whatever the decay, because the decay is then the whole gradient. A federation that averages such
coordinates forgets what other clients learned in them. These optimizers are those of torch except that a coordinate
without a gradient in a step is not decayed in it. Both executors can step many clients as one with them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer


class _TouchedDecay(Optimizer):
    """Applies the decay itself, then lets the optimizer step without decay."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure, if any, is evaluated first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = 0.0
                for parameter in group["params"] if decay else ():
                    if parameter.grad is not None:
                        self._decay(parameter, parameter.grad, group, decay)
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _decay(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], decay: float) -> None:
        """Coupled: add the gradient of decay / 2 ‖θ‖² to the gradient (out of place, since others may read it)."""
        sign = -1 if group["maximize"] else 1
        parameter.grad = gradient.addcmul(parameter, (gradient != 0).to(parameter), value=sign * decay)


class TouchedAdam(_TouchedDecay, Adam):
    """``torch.optim.Adam`` whose weight decay is added to the gradient only where there is one.

    Example:
        >>> parameter = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> parameter.grad = torch.tensor([0.5, 0.0])
        >>> TouchedAdam([parameter], lr=0.1, weight_decay=0.01).step()
        >>> parameter.data
        tensor([0.9000, 1.0000])
    """


class TouchedAdamW(_TouchedDecay, AdamW):
    """``torch.optim.AdamW`` that shrinks a coordinate by lr · weight_decay only in steps in which it has a gradient."""

    def _decay(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], decay: float) -> None:
        """Decoupled: θ <- (1 - lr · decay) θ before the step."""
        parameter.sub_((gradient != 0).to(parameter).mul_(parameter).mul_(group["lr"] * decay))


class TouchedSGD(_TouchedDecay, SGD):
    """``torch.optim.SGD`` whose weight decay is added to the gradient only where there is one."""
