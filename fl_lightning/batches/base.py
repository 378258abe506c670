"""The batches on which clients' models compute: one client's data, or many clients' data padded to one shape.

Shape legend: C clients, N examples (padded to the client of the batch that has most), H numbers of a target.
Without the leading C the same object is one client's batch; ``torch.vmap`` turns the first into the second.

Clients differ in how much they have, so some axes of a batch are ragged, and padded. A field names the ragged axes
after the client's in its metadata, ``field(metadata=EXAMPLES)``; selecting clients and slicing follow from it.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fl_lightning.batches.client_data import ClientData
from fl_lightning.kernels.block_sparse import BlockSparse
from fl_lightning.kernels.randomness import random_places, subkey

AnyBatch = TypeVar("AnyBatch", bound="Batch")

#: Metadata of a batch's field: the ragged axes after the client's; None for what only one client's batch has.
EXAMPLES, NODES, ONE_CLIENT = {"axes": ("examples",)}, {"axes": ("nodes",)}, {"axes": None}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Labels, roles and random key of clients' examples; each kind of data adds its inputs.

    Attributes:
        y: int64 labels (C, N), 0 where unknown; or float targets (C, N, H), nan where missing.
        example_mask: Examples that are not padding (C, N); for padding, every other mask is false.
        train_mask: Labeled training examples (C, N).
        val_mask: Validation examples (C, N).
        test_mask: Test examples (C, N).
        key: int64 key of this step's random draws (C,).
        num_outputs: How many of a net's outputs, the first ones, are a client's own, int64 (C,); None if all are
            everybody's.
    """

    y: Tensor = field(metadata=EXAMPLES)
    example_mask: Tensor = field(metadata=EXAMPLES)
    train_mask: Tensor = field(metadata=EXAMPLES)
    val_mask: Tensor = field(metadata=EXAMPLES)
    test_mask: Tensor = field(metadata=EXAMPLES)
    key: Tensor
    num_outputs: Tensor | None = None

    @property
    def summary_mask(self) -> Tensor:
        """Examples over which embeddings are averaged to describe the client to others, (C, N).

        Nodes whatever their role, as all of a graph is known in training; of other examples those that train.
        """
        return self.example_mask

    def tensors(self) -> dict[str, Tensor]:
        """The fields with a leading client dimension, by name: what ``vmap`` maps over."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def replace(self: AnyBatch, tensors: dict[str, Tensor]) -> AnyBatch:
        """The batch with some tensors replaced."""
        return dataclasses.replace(self, **tensors)

    def masks(self) -> dict[str, Tensor]:
        """What is not padding, by the name of each ragged axis, (C, length)."""
        return {"examples": self.example_mask}

    def named_by(self, axis: str) -> dict[str, Tensor]:
        """The tensors whose first axis after the client's is the given one, by name."""
        axes = {each.name: each.metadata.get("axes") for each in dataclasses.fields(self)}
        return {name: tensor for name, tensor in self.tensors().items() if (axes[name] or ("",))[0] == axis}

    def select(self: AnyBatch, rows: Tensor) -> AnyBatch:
        """The batch of some of its clients in the given order, as if only they had been padded to one shape."""
        lengths = {axis: int(mask.index_select(0, rows).sum(dim=1).max()) for axis, mask in self.masks().items()}
        chosen: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value, axes = getattr(self, each.name), each.metadata.get("axes", ())
            if axes is None:
                chosen[each.name] = None
            elif isinstance(value, BlockSparse):
                chosen[each.name] = value.select(rows, *(lengths[axis] for axis in axes))
            elif isinstance(value, Tensor):
                for dim, axis in enumerate(axes, start=1):
                    value = value.narrow(dim, 0, lengths[axis])
                chosen[each.name] = value.index_select(0, rows)
        return dataclasses.replace(self, **chosen)

    def padded(self: AnyBatch) -> AnyBatch:
        """A stack of one client with padding on all ragged axes, as if it were beside a larger client."""
        more = {axis: mask.shape[1] // 2 + 1 for axis, mask in self.masks().items()}
        changed: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value, axes = getattr(self, each.name), each.metadata.get("axes", ())
            if axes is None:
                changed[each.name] = None
            elif isinstance(value, BlockSparse):
                rows, columns = (*(more[axis] for axis in axes), 0)[:2]
                changed[each.name] = value.padded(rows, columns)
            elif isinstance(value, Tensor) and axes:
                after = [width for axis in reversed(axes) for width in (0, more[axis])]
                changed[each.name] = F.pad(value, [0, 0] * (value.dim() - 1 - len(axes)) + after)
        return dataclasses.replace(self, **changed)

    def slice(self: AnyBatch, start: int, length: int) -> AnyBatch:
        """Some consecutive examples of every client, if these are independent."""
        dim = self.key.dim()
        return self.replace({n: tensor.narrow(dim, start, length) for n, tensor in self.named_by("examples").items()})

    def with_draw(self: AnyBatch, number: int) -> AnyBatch:
        """The batch with another key, so that another view of it has separate dropout; 0 is the batch itself."""
        return self.replace({"key": subkey(self.key, "draw", number)}) if number else self

    def with_inputs(self: AnyBatch) -> AnyBatch:
        """The batch of one client with all inputs as dense tensors, for a user's ``training_step``."""
        return self

    def split(self: AnyBatch, parts: int) -> tuple[AnyBatch, ...]:
        """Distribute the training examples at random over parts, by the batch's key.

        Everything else stays in every part. The parts are disjoint and their sizes differ by at most one; if a client
        has fewer training examples than there are parts, each part has all of them. The part of an example does not
        depend on padding, and is the same for one client, on a stack and under ``vmap``.

        Args:
            parts: Number of parts, at least 1.

        Returns:
            The batch with the training examples of each part and with a key of the part's own.

        Raises:
            ValueError: ``parts`` is less than 1.
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
        """The batch of each local step: everything, unless the data are drawn in mini-batches.

        Args:
            keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        """
        for key in keys:
            yield self.replace({"key": key})

    def without_training_examples(self: AnyBatch) -> AnyBatch:
        """What it takes to score validation and test examples: everything, unless examples are independent."""
        return self

    def parts(self: AnyBatch) -> Iterator[AnyBatch]:
        """The batch in parts that fit into the memory of an evaluation, along the examples if these are independent."""
        yield self


class Collator(ABC):
    """Turns clients' data into batches.

    Attributes:
        device: Device of the batches.
        dtype: Floating point type of the batches.
        evaluation: Makes the batches that models are scored on, if these have examples that training does not see.
    """

    device: torch.device
    dtype: torch.dtype
    evaluation: "Collator | None" = None

    @abstractmethod
    def size(self, client: int) -> int:
        """Number of examples of a client, before padding."""

    @abstractmethod
    def client_data(self, client: int) -> Any:
        """The data of a client."""

    @abstractmethod
    def set_client_data(self, client: int, client_data: Any) -> None:
        """Replace the data of a client."""

    @abstractmethod
    def __call__(self, clients: Sequence[int]) -> Batch:
        """Batch the given clients' data, padded to the largest of them."""

    def steps_per_epoch(self, client: int) -> int:
        """Number of local steps in an epoch; 1 if a step uses all of the client's data."""
        return 1

    def least_examples(self, client: int) -> int:
        """Training examples in the smallest step of an epoch; all of them if a step uses all of the client's data."""
        result: int = self.client_data(client).num_examples
        return result

    def may_draw_one_node(self, client: int) -> bool:
        """Whether a step may be one graph that has one node."""
        return False


def pad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack tensors (N_i, ...) to (C, N, ...) with the longest N, padded with zeros; one alone is not copied."""
    if len(tensors) == 1:
        return tensors[0].contiguous()[None].to(device)
    return pad_sequence(list(tensors), batch_first=True).to(device)


def common_fields(members: Sequence[ClientData], *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The fields that every batch has, for some clients, padded to the one with the most examples."""
    targets = [each.y_N.to(dtype) if each.y_N.is_floating_point() else each.y_N.clamp(min=0) for each in members]
    return {
        "y": pad(targets, device),
        "example_mask": pad([torch.ones_like(each.train_mask_N) for each in members], device),
        "train_mask": pad([each.train_mask_N for each in members], device),
        "val_mask": pad([each.val_mask_N for each in members], device),
        "test_mask": pad([each.test_mask_N for each in members], device),
        "key": torch.zeros(len(members), dtype=torch.int64, device=device),
        "num_outputs": _own_outputs(members, device),
    }


def _own_outputs(members: Sequence[ClientData], device: torch.device) -> Tensor | None:
    """How many outputs are the clients' own, (C,); None if outputs are everybody's."""
    counts = [each.num_outputs for each in members if each.num_outputs is not None]
    return torch.tensor(counts, device=device) if counts else None


def single(batch: AnyBatch) -> AnyBatch:
    """One client's batch without the client dimension, for a model called outside ``vmap``.

    Raises:
        ValueError: The batch has more than one client.
    """
    if len(batch.y) != 1:
        raise ValueError(f"only a batch of one client has a single form, this one has {len(batch.y)}")
    return batch.replace({name: tensor[0] for name, tensor in batch.tensors().items()})
