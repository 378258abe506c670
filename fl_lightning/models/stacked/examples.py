"""A plain module for examples on a stack of clients: it runs under ``vmap``, with these functions for some of torch's.

Shape legend: N examples of a client (padded), X the shape of one example, K channels.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.models.stacked.functions import NotStackable, StackedFunctions
from fl_lightning.models.stacked.trial import compare_on_stack, in_double_first, logits_together, moved, run_on_stack

#: Examples of the clients of a trial.
SIZES = (7, 4)


class StackedExamples(StackedFunctions):
    """The functions that mind padding or keys, for examples; as a context it replaces those of torch.

    Args:
        batch: The batch of one client, also under ``vmap``.
        has_dropout: Whether dropout drops anything in training.
    """

    def __init__(self, batch: ExampleBatch, *, has_dropout: bool = True) -> None:
        super().__init__(batch, has_dropout=has_dropout)
        self.example_mask = batch.example_mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what stands in for it here."""
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, *args, **(kwargs or {}))

    def channel_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``dropout1d`` and others, of whole channels of (N, K, ...)."""
        if not self.drops(p, training):
            return input
        if input.dim() < 3:
            raise NotStackable("it drops channels of inputs that have none")
        kept: Tensor = self.dropout(input.new_ones(input.shape[:2]), p, training)
        return input * kept.view(*input.shape[:2], *[1] * (input.dim() - 2))

    def batch_norm(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``batch_norm`` of (N, K, ...), over examples and places."""
        last = input.movedim(1, -1)
        result = super().batch_norm(last.reshape(-1, last.shape[-1]), *args, **kwargs)
        return result.view(last.shape).movedim(-1, 1).contiguous()  # which group_norm needs under vmap

    def instance_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        *settings: Any,
        **more: Any,
    ) -> Tensor:
        """``instance_norm``, which mixes examples in its running statistics alone."""
        if use_input_stats and running_mean is not None:
            raise NotStackable("its running statistics would count padding")
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, *settings, **more)

    def rows(self, x: Tensor) -> Tensor:
        """The rows of an example's places, one after another, are padding if the example is."""
        places, more = divmod(len(x), len(self.example_mask))
        if more:
            raise NotStackable(f"it normalizes over something else than examples, of shape {tuple(x.shape)}")
        return self.example_mask.unsqueeze(-1).expand(-1, places).flatten()


_RULES: dict[Any, Callable[..., Any]] = {
    F.dropout: StackedExamples.dropout,
    torch.dropout: StackedExamples.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), StackedExamples.channel_dropout),
    F.batch_norm: StackedExamples.batch_norm,
    F.instance_norm: StackedExamples.instance_norm,
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), StackedExamples.refuse),
}


def try_examples_on_stack(net: Any, shape: tuple[int, ...], *, has_numbers: bool = False) -> None:
    """Compare logits, gradients and running statistics on a stack of two clients with those of one at a time.

    Args:
        net: The net (``models/plain_examples.py``).
        shape: Of one example.
        has_numbers: Whether examples have the numbers of things, rather than quantities.

    Raises:
        NotStackable: They differ, or the net cannot be run on a stack.
    """
    for part in net.modules():
        if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
            raise NotStackable(f"{type(part).__name__} has no form for a stack of clients")
    in_double_first(net, functools.partial(_try_on_stack, shape=shape, has_numbers=has_numbers))


def _try_on_stack(net: Any, shape: tuple[int, ...], *, has_numbers: bool) -> None:
    like = next(net.parameters(), torch.zeros(()))
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    x = torch.randn(len(SIZES), max(SIZES), *shape, generator=draw)
    x = (x > 0) if has_numbers else torch.where(mask.view(*mask.shape, *[1] * len(shape)), x, 100 * x)
    x = x.to(like)
    masks: dict[str, Any] = {f"{role}_mask": mask.to(like.device) for role in ("example", "train", "val", "test")}
    key = torch.arange(len(SIZES), device=like.device)
    stack = ExampleBatch(x=x, y=key[:, None].expand(mask.shape), key=key, **masks)
    alone = []
    for row, size in enumerate(SIZES):
        one = stack.replace({name: tensor[row] for name, tensor in stack.tensors().items()})
        alone.append(one.replace({name: tensor[:size] for name, tensor in one.named_by("examples").items()}))
    start = moved(net, len(SIZES))
    together = functools.partial(logits_together, net, batch=stack)
    run_on_stack(net.train(), start, together, SIZES)  # with dropout, which must draw in no other way
    unlike = "for one client, as if it computed across examples other than by BatchNorm"
    compare_on_stack(net, start, together, alone, SIZES, unlike=unlike)
