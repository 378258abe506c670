"""Mini-batches of a client's training examples, as drawn by each local step.

Shape legend: C clients, N examples (padded), B examples of a mini-batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.lazy_clients import LazyClients, num_examples_of, size_of
from fl_lightning.kernels.randomness import random_order

AnyDrawn = TypeVar("AnyDrawn", bound="DrawnBatch")

#: Number of random numbers that are drawn at once to sample the examples of some steps.
ORDER_NUMBERS = 2**18


def batches_of(num_examples: int, batch_size: int | None, drop_last: bool = False) -> int:
    """Number of mini-batches in one pass over a client's training examples.

    Args:
        num_examples: Number of training examples of the client.
        batch_size: Size of a mini-batch; None for all at once.
        drop_last: Leave out a last batch that is short. A client with less than one batch keeps its only one.

    Example:
        >>> batches_of(10, 4), batches_of(10, 4, drop_last=True), batches_of(3, 4, drop_last=True)
        (3, 2, 1)
    """
    if batch_size is None:
        return 1
    whole = num_examples // batch_size
    return whole if drop_last and whole else math.ceil(num_examples / batch_size)


def least_of(count: int, batch_size: int | None, drop_last: bool, sampling: bool) -> int:
    """Examples in the smallest mini-batch, of so many; the other arguments are those of :class:`DrawnBatch`."""
    if batch_size is None or count <= batch_size:
        return count
    return (0 if sampling or drop_last else count % batch_size) or batch_size


@dataclass(frozen=True, kw_only=True)
class DrawnBatch(Batch):
    """A batch from which each local step may draw some examples.

    Attributes:
        batch_size: Size of a mini-batch; None to train on all examples at once.
        drop_last: Leave out the last mini-batch of a pass if it is short.
        sampling: Draw every step's mini-batch independently, instead of passing over the examples.
    """

    batch_size: int | None = None
    drop_last: bool = False
    sampling: bool = False

    @property
    def drawn_from(self) -> Tensor:
        """What steps draw from, boolean (C, U): the training examples, unless these are drawn in units."""
        return self.train_mask

    def draws(self: AnyDrawn, keys: Tensor) -> Iterator[AnyDrawn]:
        """Mini-batches of each client's training examples; without a batch size every step has them all.

        Without ``sampling`` a client passes over its examples repeatedly, each time in an order drawn by the key of the
        pass's first step, divided into batches: it sees each example once in a pass, however many examples other
        clients have. The last batch may be short, or is left out with ``drop_last``. With ``sampling`` every step
        independently draws ``batch_size`` examples without replacement, or all of them if the client has fewer. In a
        stack, short batches are padded; in a pass over one client there is no padding.

        Args:
            keys: int64 key of every step and client, (steps, C), or (steps,) for one client's batch.
        """
        if self.batch_size is None:
            training = self._training_examples()
            for key in keys:
                yield training.replace({"key": key})
        elif self.sampling:
            yield from self._samples(keys, min(self.batch_size, self.drawn_from.shape[-1]))
        elif keys.dim() == 1:
            yield from self._own_passes(keys, self.batch_size)
        else:
            yield from self._passes(keys, self.batch_size)

    def _training_examples(self: AnyDrawn) -> AnyDrawn:
        """No other examples: batch normalization would see the inputs of those that models are scored on."""
        if bool(self.drawn_from.all()):
            return self
        return self._pick(self.key, *in_order(self.drawn_from))

    def without_training_examples(self: AnyDrawn) -> AnyDrawn:
        """The validation and test examples, with their roles."""
        return self._with_roles(*in_order(self.val_mask | self.test_mask))

    def _with_roles(self: AnyDrawn, order: Tensor, drawn_mask: Tensor) -> AnyDrawn:
        """As :meth:`_pick`, but examples keep their roles."""
        roles = {name: getattr(self, name).gather(-1, order) for name in ("train_mask", "val_mask", "test_mask")}
        return self._pick(self.key, order, drawn_mask).replace({n: mask & drawn_mask for n, mask in roles.items()})

    def _samples(self: AnyDrawn, keys: Tensor, count: int) -> Iterator[AnyDrawn]:
        """An independent draw for every step."""
        for some in torch.split(keys, max(1, ORDER_NUMBERS // self.drawn_from.numel())):
            mask = self.drawn_from.expand(len(some), *self.drawn_from.shape)
            for key, order, drawn_mask in zip(some, *random_order(some, mask, count), strict=True):
                yield self._pick(key, order, drawn_mask)

    def _own_passes(self: AnyDrawn, keys: Tensor, batch_size: int) -> Iterator[AnyDrawn]:
        """Passes over one client's examples; keys (steps,)."""
        count = int(self.drawn_from.sum())
        length = max(1, batches_of(count, batch_size, self.drop_last))
        for step, key in enumerate(keys):
            if step % length == 0:
                order, drawn_mask = random_order(key, self.drawn_from, max(1, count))
            index = slice(step % length * batch_size, (step % length + 1) * batch_size)
            yield self._pick(key, order[index], drawn_mask[index])

    def _passes(self: AnyDrawn, keys: Tensor, batch_size: int) -> Iterator[AnyDrawn]:
        """Passes over the examples of a stack, each client's with its own length; keys (steps, C)."""
        count_C = self.drawn_from.sum(dim=1)
        lengths = [max(1, batches_of(count, batch_size, self.drop_last)) for count in count_C.tolist()]
        length_C = torch.tensor(lengths, device=keys.device)
        order_CN = torch.zeros(len(lengths), max(1, int(count_C.max())), dtype=torch.int64, device=keys.device)
        column_B = torch.arange(min(batch_size, order_CN.shape[1]), device=keys.device)
        for step, key in enumerate(keys):
            begins = [client for client, length in enumerate(lengths) if step % length == 0]
            if len(begins) == len(lengths):
                order_CN = random_order(key, self.drawn_from, order_CN.shape[1])[0]
            elif begins:
                rows = torch.tensor(begins, device=keys.device)
                order_CN[rows] = random_order(key[rows], self.drawn_from[rows], order_CN.shape[1])[0]
            place_CB = (step % length_C * batch_size)[:, None] + column_B
            order_CB = order_CN.gather(1, place_CB.clamp(max=order_CN.shape[1] - 1))
            yield self._pick(key, order_CB, place_CB < count_C[:, None])

    def _pick(self: AnyDrawn, key: Tensor, order: Tensor, drawn_mask: Tensor) -> AnyDrawn:
        """The examples with the given indices, (C, B), some of which may be padding."""
        if key.dim():
            order = order + torch.arange(len(key), device=key.device)[:, None] * self.train_mask.shape[-1]

        def pick(tensor: Tensor) -> Tensor:
            examples = tensor.flatten(0, key.dim())
            return examples.index_select(0, order.flatten()).view(*order.shape, *examples.shape[1:])

        nothing = torch.zeros_like(drawn_mask)
        masks = {"example_mask": drawn_mask, "train_mask": drawn_mask, "val_mask": nothing, "test_mask": nothing}
        others = {name: pick(tensor) for name, tensor in self.named_by("examples").items() if name not in masks}
        return self.replace({**others, "key": key, **masks})


def in_order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of a mask's (C, N) examples in their order, (C, B), and which of them are no padding."""
    width = max(1, int(mask.sum(dim=-1).max()))
    order = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    return order, mask.gather(-1, order)


class DrawnCollator(Collator):
    """Turns client data into batches from which mini-batches are drawn.

    Args:
        clients: Every client of the federation, in order.
        batch_size: Size of a mini-batch; None for all of a client's examples at once.
        steps_per_epoch: Number of mini-batches in an epoch, each drawn independently; None for a pass over the client's
            training examples, divided into batches.
        drop_last: Leave out the last mini-batch of a pass if it is short.
        device: Device of the batches.
        dtype: Floating point type of inputs and targets.
    """

    def __init__(
        self,
        clients: Sequence[Any],
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

    @property
    def drawing(self) -> dict[str, Any]:
        """The settings of a batch."""
        return {"batch_size": self.batch_size, "drop_last": self.drop_last, "sampling": self.steps is not None}

    def client_data(self, client: int) -> Any:
        """The data of a client."""
        return self.clients[client]

    def set_client_data(self, client: int, client_data: ClientData) -> None:
        """Replace the data of a client."""
        if isinstance(self.clients, LazyClients):
            self.clients = self.clients.replaced(client, client_data)
        else:
            self.clients = [*self.clients[:client], client_data, *self.clients[client + 1 :]]

    def size(self, client: int) -> int:
        """Number of examples of a client."""
        return size_of(self.clients, client)

    def steps_per_epoch(self, client: int) -> int:
        """The number that is set, or that of a pass over the client's training examples."""
        if self.steps is not None:
            return self.steps
        return batches_of(num_examples_of(self.clients, client), self.batch_size, self.drop_last)

    def least_examples(self, client: int) -> int:
        """Those of the last batch of a pass, or of every draw if ``steps_per_epoch`` is set."""
        return least_of(num_examples_of(self.clients, client), **self.drawing)
