"""Many clients' independent examples (rows of a table, sequences, images), trained in mini-batches.

Shape legend: C clients, N examples (padded), B examples of a mini-batch, X the shape of one example.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator, pad
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.kernels.randomness import random_order

#: Numbers of the inputs of one piece of an evaluation (16 MiB in float32).
PART_NUMBERS = 4 * 2**20
#: Examples of one piece, for nets that make much of small inputs.
PART_EXAMPLES = 2**14
#: Random numbers that are drawn at once to order the examples of some steps.
ORDER_NUMBERS = 2**18


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(Batch):
    """Examples as a client's model sees them.

    Attributes:
        x: Inputs (C, N, X).
        batch_size: Examples of a mini-batch; None to train on all at once.
    """

    x: Tensor
    batch_size: int | None = None

    def draws(self, keys: Tensor) -> Iterator["ExampleBatch"]:
        """Mini-batches: ``batch_size`` of each client's training examples, drawn without replacement for every step.

        Clients with fewer give all they have, in a random order; padding fills the rest.

        Args:
            keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        """
        if self.batch_size is None:
            yield from super().draws(keys)
            return
        num_examples = self.train_mask.shape[-1]
        count = min(self.batch_size, num_examples)
        for some in torch.split(keys, max(1, ORDER_NUMBERS // self.train_mask.numel())):
            mask = self.train_mask.expand(len(some), *self.train_mask.shape)
            for key, order, drawn_mask in zip(some, *random_order(some, mask, count), strict=True):
                yield self._pick(key, order, drawn_mask)

    def _pick(self, key: Tensor, order: Tensor, drawn_mask: Tensor) -> "ExampleBatch":
        """The examples at the given places, (C, B), of which some may be padding."""
        if key.dim():
            order = order + torch.arange(len(key), device=key.device)[:, None] * self.train_mask.shape[-1]

        def pick(tensor: Tensor) -> Tensor:
            examples = tensor.flatten(0, key.dim())
            return examples.index_select(0, order.flatten()).view(*order.shape, *examples.shape[1:])

        nothing = torch.zeros_like(drawn_mask)
        masks = {"real_mask": drawn_mask, "train_mask": drawn_mask, "val_mask": nothing, "test_mask": nothing}
        return self.replace({"x": pick(self.x), "y": pick(self.y), "key": key, **masks})

    def parts(self) -> Iterator["ExampleBatch"]:
        """Pieces of at most ``PART_EXAMPLES`` examples and ``PART_NUMBERS`` input numbers, all clients together."""
        dim, num_examples = self.key.dim(), self.train_mask.shape[-1]
        num_rows = self.train_mask.numel() // num_examples
        numbers = self.x.numel() // (num_rows * num_examples)
        size = max(1, min(PART_NUMBERS // numbers, PART_EXAMPLES) // num_rows)
        for start in range(0, num_examples, size):
            length = min(size, num_examples - start)
            named = {name: tensor for name, tensor in self.tensors().items() if name != "key"}
            yield self.replace({name: tensor.narrow(dim, start, length) for name, tensor in named.items()})


class ExampleCollator(Collator):
    """Turns clients' examples into batches.

    Args:
        clients: Every client of the federation, in order.
        batch_size: Examples of a mini-batch; None for all of a client's at once.
        steps_per_epoch: Mini-batches that make an epoch; None for as many as a pass over the client's examples takes.
        device: Where batches live.
        dtype: Floating point type of inputs and targets.
    """

    def __init__(
        self,
        clients: Sequence[ClientExamples],
        *,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.clients = clients
        self.batch_size = batch_size
        self.steps = steps_per_epoch
        self.device = device
        self.dtype = dtype

    def held(self, client: int) -> "ClientExamples":
        """A client's examples."""
        return self.clients[client]

    def hold(self, client: int, held: "ClientExamples") -> None:
        """Give a client other examples."""
        self.clients = [*self.clients[:client], held, *self.clients[client + 1 :]]

    def size(self, client: int) -> int:
        """Number of examples of a client."""
        return self.clients[client].size

    def steps_per_epoch(self, client: int) -> int:
        """As set, or what a pass over the client's training examples takes."""
        if self.steps is not None:
            return self.steps
        return 1 if self.batch_size is None else math.ceil(self.clients[client].num_examples / self.batch_size)

    def __call__(self, clients: Sequence[int]) -> ExampleBatch:
        """Batch the given clients' examples, padded to the largest of them."""
        members = [self.clients[client] for client in clients]
        targets = [c.y_N.to(self.dtype) if c.y_N.is_floating_point() else c.y_N.clamp(min=0) for c in members]
        return ExampleBatch(
            x=pad([client.x_NX.to(self.dtype) for client in members], self.device),
            y=pad(targets, self.device),
            real_mask=pad([torch.ones_like(client.train_mask_N) for client in members], self.device),
            train_mask=pad([client.train_mask_N for client in members], self.device),
            val_mask=pad([client.val_mask_N for client in members], self.device),
            test_mask=pad([client.test_mask_N for client in members], self.device),
            key=torch.zeros(len(members), dtype=torch.int64, device=self.device),
            batch_size=self.batch_size,
        )
