"""Draws in which each training example is by chance and by itself, as the accounts of differential privacy ask for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fl_lightning.batches.examples import ExampleBatch


class Uniform(Protocol):
    """Where the chances come from."""

    def uniform(self, key: Tensor, count: int) -> Tensor:
        """Numbers in (0, 1), (*key.shape, count); the first do not depend on how many there are."""


@dataclass(frozen=True, kw_only=True)
class PoissonBatch(ExampleBatch):
    """Drawn examples, of which there may be none; ``train_mask`` tells them from padding.

    Attributes:
        expected: How many examples a draw has on average (C,).
    """

    expected: Tensor


def sampling_rate(num_examples: int, batch_size: int | None) -> float:
    """The probability with which each training example is in a draw: so that there are ``batch_size`` on average.

    Example:
        >>> sampling_rate(100, 20), sampling_rate(10, 20), sampling_rate(10, None)
        (0.2, 1.0, 1.0)
    """
    return 1.0 if batch_size is None or num_examples <= batch_size else batch_size / num_examples


def poisson_draws(batch: ExampleBatch, keys: Tensor, numbers: Uniform) -> Iterator[PoissonBatch]:
    """What each step trains on: every training example with the client's probability, in their own order.

    Draws are as large as the largest of a stack's clients.

    Args:
        batch: All of the examples of one client or of a stack.
        keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        numbers: Where the chances come from.
    """
    count = batch.train_mask.sum(dim=-1)
    rates = [sampling_rate(number, batch.batch_size) for number in count.flatten().tolist()]
    rate = torch.tensor(rates, dtype=torch.float64, device=count.device).view(count.shape)
    expected = (rate * count).clamp(min=1).to(batch.x.dtype)
    fields: dict[str, Any] = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    for key in keys:
        drawn = batch.train_mask & (numbers.uniform(key, batch.train_mask.shape[-1]) < rate[..., None])
        width = max(1, int(drawn.sum(dim=-1).max()))
        order = drawn.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
        picked = batch._pick(key, order, drawn.gather(-1, order))
        real = picked.example_mask.clone()
        real[..., 0] = True  # a stack's clients are selected by their real examples, which may not be none
        whole = fields | picked.tensors() | {"example_mask": real, "expected": expected}
        yield PoissonBatch(**whole)
