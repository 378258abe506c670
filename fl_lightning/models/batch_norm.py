"""Batch normalization in clients: a layer that leaves padding out, and its running statistics.

Ioffe, Szegedy: "Batch Normalization", ICML 2015. Running statistics are parameters without gradient here, named
``running_mean`` and ``running_var``, so that they are in checkpoints, and are communicated or kept local like other
parameters.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import lead_with_clients, quick
from fl_lightning.kernels.linear import check_widths

#: Names of running statistics in a layer.
STATISTICS = ("running_mean", "running_var")
#: Layers of PyTorch, and those of PyG that wrap them, that have running statistics and count padding.
TORCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
#: How PyTorch's error about a batch without variance begins.
TOO_FEW = "Expected more than 1 value per channel when training"


class BatchNorm(nn.Module):
    """Normalize each channel over the examples of a client that count; for one client, a stack, or under ``vmap``.

    In training mode it uses the batch's mean and variance, whose running means are kept, and in eval mode the latter.
    One example has no variance, and is refused in training as in PyTorch; this is not checked under ``vmap``, nor on a
    GPU, where reading the mask would cost time, so executors check all clients before they train.

    Args:
        num_features: Number of channels.
        momentum: Weight of the batch's statistics in the new running statistics, in (0, 1].
        eps: Added to the variance.

    Shapes:
        x ``(..., N, num_features)``, mask ``(..., N)``, result as x; all with a leading C for a stack.
    """

    def __init__(self, num_features: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        check_widths(num_features=num_features)
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum={momentum} is impossible: set it above 0, to at most 1")
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.running_mean = nn.Parameter(torch.zeros(num_features), requires_grad=False)
        self.running_var = nn.Parameter(torch.ones(num_features), requires_grad=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalize.

        Args:
            x: The examples.
            mask: Which of them count for the statistics.

        Raises:
            ValueError: In training, only one example of a client counts.
        """
        return normalize(
            x,
            mask,
            (self.running_mean, self.running_var),
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )


def normalize(
    x: Tensor,
    mask: Tensor,
    running: tuple[Tensor, Tensor] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """What :class:`BatchNorm` computes, with the same shapes.

    Args:
        x: The examples.
        mask: Which of them count for the statistics.
        running: Running mean and variance, which training changes; None to use the batch's in evaluation too.
        weight: The scale after normalization; None for 1.
        bias: The shift after normalization; None for 0.
        training: Whether to use the batch's statistics.
        momentum: Weight of the batch's statistics in the new running ones.
        eps: Added to the variance.

    Raises:
        ValueError: In training, only one example of a client counts.
    """
    if running is None or training:
        wide = x if running is None else x.to(torch.promote_types(x.dtype, running[0].dtype))
        share = mask.to(wide)
        count = share.sum(dim=-1, keepdim=True)
        if training and mask.device.type == "cpu" and not is_batchedtensor(mask):
            refuse_one(mask)
        mean, variance = _Moments.apply(wide, share / count.clamp(min=1))  # type: ignore[no-untyped-call]
        if running is not None:
            _follow(running, mean.detach(), variance.detach(), count, momentum)
    else:
        mean, variance = running
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else weight * scale
    shift = -mean * scale if bias is None else bias - mean * scale
    return torch.addcmul(shift.unsqueeze(-2), x, scale.unsqueeze(-2)).to(x.dtype)


@quick
class _Moments(Function):
    """Mean and variance of rows (..., N, D) by their weights (..., N), which have the sum 1 or 0; (..., D) each.

    In half of the passes over the rows that autograd takes for the formulas.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            row = weight.unsqueeze(-2)
            mean = row @ x
            return mean.squeeze(-2), (row @ (x - mean).square_()).squeeze(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        x, weight = inputs
        ctx.save_for_backward(x, weight, output[0])

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Tensor, None]:
        x, weight, mean = ctx.saved_tensors
        slope = 2 * of_variance
        of_x = torch.addcmul((of_mean - mean * slope).unsqueeze(-2), x, slope.unsqueeze(-2))
        return of_x * weight.unsqueeze(-1), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Moments.apply(*lead_with_clients(info.batch_size, in_dims, tensors)), (0, 0)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _follow(running: tuple[Tensor, Tensor], mean: Tensor, variance: Tensor, count: Tensor, momentum: float) -> None:
    """Move running statistics toward those of a batch."""
    share = momentum * (count > 1).to(mean)  # of one example there is no variance
    unbiased = variance * count / (count - 1).clamp(min=1)
    for statistic, new in zip(running, (mean, unbiased), strict=True):
        statistic.add_((share * (new - statistic)).to(statistic.dtype))


def refuse_one(mask: Tensor) -> None:
    """Refuse a batch in which only one example counts, for any client of a stack; mask (..., N).

    Raises:
        ValueError: Only one example counts.
    """
    if (mask.sum(dim=-1) == 1).any():
        raise ValueError(f"{TOO_FEW}, got one example")


def adopt_statistics(net: nn.Module) -> None:
    """Make the running statistics of PyTorch's layers parameters without gradient, as those of :class:`BatchNorm` are.

    Raises:
        ValueError: A layer averages over all batches that it has seen, and their number is not a parameter.
    """
    for name, layer in net.named_modules():
        if not isinstance(layer, TORCH_NORMS) or layer._buffers.get(STATISTICS[0]) is None:
            continue
        if layer.momentum is None:
            raise ValueError(f"{name} is a {type(layer).__name__} with momentum None: give it one, for example 0.1")
        for statistic in STATISTICS:
            adopt(layer, statistic)
        layer.num_batches_tracked = None


def adopt(net: nn.Module, name: str) -> None:
    """Turn a buffer that training changes into a parameter without gradient, one of the net's running statistics.

    Args:
        net: The net.
        name: Name of the buffer in it.
    """
    owner, _, statistic = name.rpartition(".")
    layer = net.get_submodule(owner)
    value = layer._buffers.pop(statistic)
    assert value is not None
    layer.register_parameter(statistic, nn.Parameter(value, requires_grad=False))
    if statistic not in STATISTICS:
        vars(layer)["_adopted"] = (*getattr(layer, "_adopted", ()), statistic)


def statistics_of(net: nn.Module) -> frozenset[str]:
    """Names of the running statistics among a net's parameters."""
    named = net.named_parameters()
    result = [n for n, p in named if not p.requires_grad and n.rpartition(".")[2] in STATISTICS]
    for name, layer in net.named_modules():
        result += [f"{name}.{statistic}".lstrip(".") for statistic in getattr(layer, "_adopted", ())]
    return frozenset(result)


def has_torch_norms(net: nn.Module) -> bool:
    """Whether the net has PyTorch layers that normalize over examples, including padding.

    Parts of it that leave padding out of such layers have a ``why_alone`` (``models/plain.py``) that is empty.
    """
    if getattr(net, "why_alone", None) is not None:
        return False
    return isinstance(net, TORCH_NORMS) or any(map(has_torch_norms, net.children()))


def norm_parameters(net: nn.Module) -> tuple[str, ...]:
    """Names of all parameters of normalization layers, running statistics included."""
    kinds = (BatchNorm, *TORCH_NORMS, nn.LayerNorm, nn.GroupNorm)
    layers = [
        name
        for name, layer in net.named_modules()
        if isinstance(layer, kinds) or type(layer).__module__.startswith("torch_geometric.nn.norm.")
    ]
    return tuple(name for name, _ in net.named_parameters() if name.rpartition(".")[0] in layers)
