"""A plain module for examples on a stack of clients: it runs under ``vmap``, with these functions for some of torch's.

Shape legend: N examples of a client (padded), X the shape of one example, K channels.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.batch_norm import normalize
from fl_lightning.models.stacked.graph import NotStackable
from fl_lightning.models.stacked.trial import close, logits_of, results_of

#: Examples of the clients of a trial.
SIZES = (7, 4)


class StackedExamples(TorchFunctionMode):
    """A context in which dropout follows from the batch's key, and batch normalization leaves padding out.

    Args:
        batch: The batch of one client, also under ``vmap``.
        has_dropout: Whether dropout drops anything in training.
    """

    def __init__(self, batch: ExampleBatch, *, has_dropout: bool = True) -> None:
        super().__init__()
        self._data = batch
        self.has_dropout = has_dropout
        self.num_dropouts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what stands in for it here."""
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, *args, **(kwargs or {}))

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``dropout`` of each number."""
        if not training or not p or not self.has_dropout:
            return input
        return self._drop(input.flatten(1) if input.dim() > 1 else input.unsqueeze(1), p).view(input.shape)

    def channel_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``dropout1d`` and others, of whole channels of (N, K, ...)."""
        if not training or not p or not self.has_dropout:
            return input
        if input.dim() < 3:
            raise NotStackable("it drops channels of inputs that have none")
        return input * self._drop(input.new_ones(input.shape[:2]), p).view(*input.shape[:2], *[1] * (input.dim() - 2))

    def _drop(self, value_ND: Tensor, p: float) -> Tensor:
        if p >= 1:
            return torch.zeros_like(value_ND)
        self.num_dropouts += 1
        return dropout(value_ND, self._data.key + (self.num_dropouts - 1), p)

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``batch_norm`` of (N, K, ...)."""
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        last = input.movedim(1, -1)
        mask = torch.ones(last.shape[:-1], dtype=torch.bool, device=input.device)
        if training:
            own_N = self._data.example_mask
            if len(input) != len(own_N):
                raise NotStackable(f"it normalizes over something else than examples, of shape {tuple(input.shape)}")
            mask = mask & own_N.view(-1, *[1] * (last.dim() - 2))
        rows, flags = last.reshape(-1, last.shape[-1]), mask.reshape(-1)
        result = normalize(rows, flags, running, weight, bias, training=training, momentum=momentum, eps=eps)
        return result.view(last.shape).movedim(-1, 1).contiguous()  # which group_norm needs under vmap

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A function that draws in a way of its own."""
        raise NotStackable("it draws in a way that is not known on a stack")


_RULES: dict[Any, Callable[..., Any]] = {
    F.dropout: StackedExamples.dropout,
    torch.dropout: StackedExamples.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), StackedExamples.channel_dropout),
    F.batch_norm: StackedExamples.batch_norm,
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), StackedExamples.refuse),
}


def try_examples_on_stack(net: Any, shape: tuple[int, ...]) -> None:
    """Compare logits, and gradients in all parameters, on a stack of two clients with those of one at a time.

    Args:
        net: The net (``models/plain_examples.py``).
        shape: Of one example.

    Raises:
        NotStackable: They differ, or the net cannot be run on a stack.
    """
    for part in net.modules():
        if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
            raise NotStackable(f"{type(part).__name__} has no form for a stack of clients")
    net = copy.deepcopy(net)
    like = next(net.parameters(), torch.zeros(()))
    draw = torch.Generator().manual_seed(0)
    count = len(SIZES)
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    x = torch.randn(count, max(SIZES), *shape, generator=draw)
    x = torch.where(mask.view(*mask.shape, *[1] * len(shape)), x, 100 * x).to(like)
    masks: dict[str, Any] = {f"{role}_mask": mask.to(like.device) for role in ("example", "train", "val", "test")}
    key = torch.arange(count, device=like.device)
    stack = ExampleBatch(x=x, y=key[:, None].expand(mask.shape), key=key, **masks)
    start = {}
    for name, p in net.named_parameters():  # moved, so that what begins at zero is seen
        noise = 0.1 * torch.randn(count, *p.shape, generator=draw).to(p)
        start[name] = p.detach() + (noise if p.requires_grad else torch.zeros_like(noise))

    def together(parameters: dict[str, Tensor]) -> Tensor:
        mapped: Tensor = torch.vmap(lambda p, t: logits_of(net, p, stack.replace(t)))(parameters, stack.tensors())
        return mapped

    for training, has_dropout in ((True, True), (True, False), (False, False)):
        net.train(training)
        net.has_dropout = has_dropout
        try:
            found = results_of(net, start, together, SIZES)
        except Exception as error:  # it is the user's code
            said = str(error).strip().partition("\n")[0]
            why = said if isinstance(error, NotStackable) else f"{type(error).__name__}: {said}"
            raise NotStackable(f"{net.plain_name} does not run on a stack of clients ({why})") from error
        for row, size in enumerate(SIZES if not has_dropout else ()):
            alone = stack.replace(
                {name: tensor[row, :size] for name, tensor in stack.tensors().items() if name != "key"}
            )
            alone = alone.replace({"key": stack.key[row]})
            rows = {name: value[row] for name, value in start.items()}
            expected = results_of(net, rows, functools.partial(logits_of, net, batch=alone), SIZES)
            for name, value in expected.items():
                if not close(found[name][row] if name else found[""][row, :size], value):
                    what = f"a gradient of {name}" if name else "outputs"
                    raise NotStackable(
                        f"{net.plain_name}.forward has {what} on a stack of clients that it does not have for one "
                        "client, as if it computed across examples other than by BatchNorm"
                    )
