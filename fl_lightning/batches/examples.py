"""Many clients' independent examples (rows of a table, sequences, images), trained in mini-batches.

Shape legend: C clients, N examples (padded), X the shape of one example.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fl_lightning.batches.base import EXAMPLES, common_fields, pad
from fl_lightning.batches.draws import DrawnBatch, DrawnCollator

#: Largest number of input values in one part of an evaluation (16 MiB in float32).
PART_NUMBERS = 4 * 2**20
#: Largest number of examples in one part, for nets with activations much larger than their inputs.
PART_EXAMPLES = 2**14


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(DrawnBatch):
    """Examples as a client's model sees them.

    Attributes:
        x: Inputs (C, N, X).
    """

    x: Tensor = field(metadata=EXAMPLES)

    @property
    def summary_mask(self) -> Tensor:
        """Training examples alone."""
        return self.train_mask

    def parts(self) -> Iterator["ExampleBatch"]:
        """Parts of at most ``PART_EXAMPLES`` examples and ``PART_NUMBERS`` input values, for all clients together."""
        num_examples = self.train_mask.shape[-1]
        num_rows = self.train_mask.numel() // num_examples
        numbers = self.x.numel() // (num_rows * num_examples)
        size = max(1, min(PART_NUMBERS // numbers, PART_EXAMPLES) // num_rows)
        for start in range(0, num_examples, size):
            yield self.slice(start, min(size, num_examples - start))


class ExampleCollator(DrawnCollator):
    """Turns clients' examples into batches; the arguments are those of :class:`DrawnCollator`."""

    def __call__(self, clients: Sequence[int]) -> ExampleBatch:
        """Batch the given clients' examples, padded to the largest of them."""
        members = [self.clients[client] for client in clients]
        return ExampleBatch(
            x=pad([client.x_NX.to(self.dtype) for client in members], self.device),
            **common_fields(members, device=self.device, dtype=self.dtype),
            **self.drawing,
        )
