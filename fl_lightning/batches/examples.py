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
#: Random numbers that are drawn at once to sample the examples of some steps.
ORDER_NUMBERS = 2**18


def batches_of(num_examples: int, batch_size: int | None, drop_last: bool = False) -> int:
    """Mini-batches that one pass over a client's training examples takes.

    Args:
        num_examples: Training examples of the client.
        batch_size: Examples of a mini-batch; None for all at once.
        drop_last: Leave out a last batch that is short. A client with fewer examples than one batch keeps its only one.

    Example:
        >>> batches_of(10, 4), batches_of(10, 4, drop_last=True), batches_of(3, 4, drop_last=True)
        (3, 2, 1)
    """
    if batch_size is None:
        return 1
    whole = num_examples // batch_size
    return whole if drop_last and whole else math.ceil(num_examples / batch_size)


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(Batch):
    """Examples as a client's model sees them.

    Attributes:
        x: Inputs (C, N, X).
        batch_size: Examples of a mini-batch; None to train on all at once.
        drop_last: Leave out the last mini-batch of a pass if it is short.
        sampling: Draw every step's mini-batch by itself, instead of passing over the examples.
    """

    x: Tensor
    batch_size: int | None = None
    drop_last: bool = False
    sampling: bool = False

    def draws(self, keys: Tensor) -> Iterator["ExampleBatch"]:
        """Mini-batches of each client's training examples.

        Without ``sampling`` a client passes over its examples again and again, each time in an order that the key of
        the pass's first step gives, cut into batches: it sees each example once in a pass, however many the other
        clients have. The last batch may be short, or is left out with ``drop_last``. With ``sampling`` every step
        draws ``batch_size`` examples without replacement by itself, all where a client has fewer. Padding fills up
        what is short in a stack; one client's batches have none in a pass.

        Args:
            keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        """
        if self.batch_size is None:
            yield from super().draws(keys)
        elif self.sampling:
            yield from self._samples(keys, min(self.batch_size, self.train_mask.shape[-1]))
        elif keys.dim() == 1:
            yield from self._own_passes(keys, self.batch_size)
        else:
            yield from self._passes(keys, self.batch_size)

    def _samples(self, keys: Tensor, count: int) -> Iterator["ExampleBatch"]:
        """A draw for every step by itself."""
        for some in torch.split(keys, max(1, ORDER_NUMBERS // self.train_mask.numel())):
            mask = self.train_mask.expand(len(some), *self.train_mask.shape)
            for key, order, drawn_mask in zip(some, *random_order(some, mask, count), strict=True):
                yield self._pick(key, order, drawn_mask)

    def _own_passes(self, keys: Tensor, batch_size: int) -> Iterator["ExampleBatch"]:
        """Passes over one client's examples; keys (steps,)."""
        count = int(self.train_mask.sum())
        length = max(1, batches_of(count, batch_size, self.drop_last))
        for step, key in enumerate(keys):
            if step % length == 0:
                order, drawn_mask = random_order(key, self.train_mask, max(1, count))
            place = slice(step % length * batch_size, (step % length + 1) * batch_size)
            yield self._pick(key, order[place], drawn_mask[place])

    def _passes(self, keys: Tensor, batch_size: int) -> Iterator["ExampleBatch"]:
        """Passes over the examples of a stack, each client's as long as it takes; keys (steps, C)."""
        count_C = self.train_mask.sum(dim=1)
        lengths = [max(1, batches_of(count, batch_size, self.drop_last)) for count in count_C.tolist()]
        length_C = torch.tensor(lengths, device=keys.device)
        order_CN = torch.zeros(len(lengths), max(1, int(count_C.max())), dtype=torch.int64, device=keys.device)
        column_B = torch.arange(min(batch_size, order_CN.shape[1]), device=keys.device)
        for step, key in enumerate(keys):
            begins = [client for client, length in enumerate(lengths) if step % length == 0]
            if len(begins) == len(lengths):
                order_CN = random_order(key, self.train_mask, order_CN.shape[1])[0]
            elif begins:
                rows = torch.tensor(begins, device=keys.device)
                order_CN[rows] = random_order(key[rows], self.train_mask[rows], order_CN.shape[1])[0]
            place_CB = (step % length_C * batch_size)[:, None] + column_B
            order_CB = order_CN.gather(1, place_CB.clamp(max=order_CN.shape[1] - 1))
            yield self._pick(key, order_CB, place_CB < count_C[:, None])

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
        steps_per_epoch: Mini-batches that make an epoch, each drawn by itself; None for a pass over the client's
            training examples, cut into batches.
        drop_last: Leave out the last mini-batch of a pass if it is short.
        device: Where batches live.
        dtype: Floating point type of inputs and targets.
    """

    def __init__(
        self,
        clients: Sequence[ClientExamples],
        *,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.clients = clients
        self.batch_size = batch_size
        self.steps = steps_per_epoch
        self.drop_last = drop_last
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
        return batches_of(self.clients[client].num_examples, self.batch_size, self.drop_last)

    def least_examples(self, client: int) -> int:
        """Those of the last batch of a pass; of every draw where ``steps_per_epoch`` is set."""
        count = self.clients[client].num_examples
        if self.batch_size is None or count <= self.batch_size:
            return count
        rest = 0 if self.steps is not None or self.drop_last else count % self.batch_size
        return rest or self.batch_size

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
            drop_last=self.drop_last,
            sampling=self.steps is not None,
        )
