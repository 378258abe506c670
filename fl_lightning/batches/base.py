"""What a client's model computes on: one client's data, or many clients' data padded to one shape.

Shape legend: C clients, N examples (nodes of a graph; padded to the largest client of the batch).
Without the leading C the same object is one client's batch; ``torch.vmap`` turns the first into the second.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fl_lightning.kernels.randomness import random_places, subkey

AnyBatch = TypeVar("AnyBatch", bound="Batch")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Labels, roles and random key of clients' examples; each kind of data adds its inputs.

    Attributes:
        y: int64 labels (C, N), 0 where unknown; or float targets (C, N, H).
        real_mask: Examples that are no padding (C, N); padding has every other mask false.
        train_mask: Labelled training examples (C, N).
        val_mask: Validation examples (C, N).
        test_mask: Test examples (C, N).
        key: int64 key of this step's random draws (C,).
    """

    y: Tensor
    real_mask: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    key: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields with a leading client dimension, by name: what ``vmap`` maps over."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def replace(self: AnyBatch, tensors: dict[str, Tensor]) -> AnyBatch:
        """The same batch with some tensors exchanged."""
        return dataclasses.replace(self, **tensors)

    def select(self: AnyBatch, rows: Tensor) -> AnyBatch:
        """The batch of some of its clients in the given order, as if only they had been padded to one shape."""
        size = int(self.real_mask.index_select(0, rows).sum(dim=1).max())

        def pick(tensor: Tensor) -> Tensor:
            return (tensor.narrow(1, 0, size) if tensor.dim() > 1 else tensor).index_select(0, rows)

        return self.replace({name: pick(tensor) for name, tensor in self.tensors().items()})

    def with_draw(self: AnyBatch, number: int) -> AnyBatch:
        """The batch with another key, so that another view of it is dropped at random by itself; 0 is the batch."""
        return self.replace({"key": subkey(self.key, "draw", number)}) if number else self

    def with_inputs(self: AnyBatch) -> AnyBatch:
        """The batch of one client with all inputs as dense tensors, for a ``training_step`` of a user's."""
        return self

    def split(self: AnyBatch, parts: int) -> tuple[AnyBatch, ...]:
        """Share the training examples out at random, by the batch's key.

        Everything else stays in every part. The parts are disjoint and their sizes differ by at most one; where a
        client has fewer training examples than there are parts, each of them has all. What becomes of an example
        does not depend on padding, and is the same for one client, on a stack and under ``vmap``.

        Args:
            parts: Number of parts, at least 1.

        Returns:
            The batch with the training examples of each part and with a key of the part's own.

        Raises:
            ValueError: There would be no part.
        """
        if parts < 1:
            raise ValueError(f"a batch cannot be split into {parts} parts: split it into at least 1")
        key = subkey(self.key, "split")
        part_N = random_places(key, self.train_mask) % parts
        too_few_1 = self.train_mask.sum(dim=-1, keepdim=True) < parts
        return tuple(
            self.replace({"train_mask": self.train_mask & ((part_N == part) | too_few_1), "key": subkey(key, part)})
            for part in range(parts)
        )

    def draws(self: AnyBatch, keys: Tensor) -> Iterator[AnyBatch]:
        """What each local step trains on; everything, unless the kind of data draws mini-batches.

        Args:
            keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        """
        for key in keys:
            yield self.replace({"key": key})

    def parts(self: AnyBatch) -> Iterator[AnyBatch]:
        """The batch in pieces that fit the memory of an evaluation; along the examples, which must be independent."""
        yield self


class Collator(ABC):
    """Turns clients' data into batches.

    Attributes:
        device: Where batches live.
        dtype: Their floating point type.
    """

    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def size(self, client: int) -> int:
        """Number of examples of a client: what is padded."""

    @abstractmethod
    def held(self, client: int) -> Any:
        """What a client holds."""

    @abstractmethod
    def hold(self, client: int, held: Any) -> None:
        """Let a client hold something else from now on."""

    @abstractmethod
    def __call__(self, clients: Sequence[int]) -> Batch:
        """Batch the given clients' data, padded to the largest of them."""

    def steps_per_epoch(self, client: int) -> int:
        """Local steps that make an epoch; 1 where a step sees all of the client's data."""
        return 1

    def least_examples(self, client: int) -> int:
        """Training examples in the smallest step of an epoch; all of the client's where a step sees all its data."""
        found: int = self.held(client).num_examples
        return found


def pad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack tensors (N_i, ...) to (C, N, ...) with N that of the longest, zeros after each one's own rows."""
    return pad_sequence(list(tensors), batch_first=True).to(device)


def single(batch: AnyBatch) -> AnyBatch:
    """One client's batch without the client dimension, for a model called outside ``vmap``.

    Raises:
        ValueError: The batch holds more than one client.
    """
    if len(batch.y) != 1:
        raise ValueError(f"only a batch of one client has a single form, this one holds {len(batch.y)}")
    return batch.replace({name: tensor[0] for name, tensor in batch.tensors().items()})
