"""Poisson sampling: each training example is drawn independently, as differential privacy accounting requires."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fl_lightning.batches.draws import in_order
from fl_lightning.batches.examples import ExampleBatch


class Uniform(Protocol):
    """A source of uniform random numbers."""

    def uniform(self, key: Tensor, count: int) -> Tensor:
        """Numbers in (0, 1), (*key.shape, count); the first ones do not depend on ``count``."""


@dataclass(frozen=True, kw_only=True)
class PoissonBatch(ExampleBatch):
    """Drawn examples, possibly none; ``train_mask`` distinguishes them from padding.

    Attributes:
        expected: Expected number of examples in a draw (C,).
    """

    expected: Tensor


def sampling_rate(num_examples: int, batch_size: int | None) -> float:
    """The probability with which each training example is drawn, such that the expected number is ``batch_size``.

    Example:
        >>> sampling_rate(100, 20), sampling_rate(10, 20), sampling_rate(10, None)
        (0.2, 1.0, 1.0)
    """
    return 1.0 if batch_size is None or num_examples <= batch_size else batch_size / num_examples


def poisson_draws(batch: ExampleBatch, keys: Tensor, numbers: Uniform) -> Iterator[PoissonBatch]:
    """The batch of each step: every training example with the client's probability, in order.

    Draws are as large as that of the stack's client with the most drawn examples.

    Args:
        batch: All examples of one client or of a stack.
        keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        numbers: Source of random numbers.
    """
    count = batch.train_mask.sum(dim=-1)
    rates = [sampling_rate(number, batch.batch_size) for number in count.flatten().tolist()]
    rate = torch.tensor(rates, dtype=torch.float64, device=count.device).view(count.shape)
    expected = (rate * count).clamp(min=1).to(batch.x.dtype)
    fields: dict[str, Any] = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    for key in keys:
        drawn = batch.train_mask & (numbers.uniform(key, batch.train_mask.shape[-1]) < rate[..., None])
        picked = batch._pick(key, *in_order(drawn))
        real = picked.example_mask.clone()
        real[..., 0] = True  # a stack's clients are selected by their real examples, so there must be one
        whole = fields | picked.tensors() | {"example_mask": real, "expected": expected}
        yield PoissonBatch(**whole)
