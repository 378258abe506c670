"""Functions of torch for a user's module on a stack of clients: they mind keys and padding.

Shape legend: N rows (nodes, graphs or examples) of one client, with a leading C on a stack; D channels.
"""

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fl_lightning.batches.base import Batch
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.batch_norm import normalize


class NotStackable(Exception):
    """A net does something that is not known on a stack; the message says what."""


class StackedFunctions(TorchFunctionMode):
    """A context that replaces functions of torch.

    Args:
        batch: The batch of one client, also under ``vmap``, or a stack.
        has_dropout: Whether dropout drops anything in training.
    """

    def __init__(self, batch: Batch, *, has_dropout: bool = True) -> None:
        super().__init__()
        self.key = batch.key
        self.has_dropout = has_dropout
        self.num_dropouts = 0

    def dense(self, input: Any) -> Tensor:
        """An input as a tensor."""
        tensor: Tensor = input
        return tensor

    def drops(self, p: float, training: bool) -> bool:
        """Whether dropout with these settings drops anything."""
        return training and p > 0 and self.has_dropout

    def dropout(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """``dropout`` that follows from the batch's key."""
        if not self.drops(p, training):
            return input
        x = self.dense(input)
        if p >= 1:
            return torch.zeros_like(x)
        key, lead = self.key + self.num_dropouts, self.key.dim()
        self.num_dropouts += 1
        rows = x.unsqueeze(-1) if x.dim() == lead + 1 else x.flatten(lead + 1)
        return dropout(rows, key, p).view(x.shape)

    def batch_norm(
        self,
        input: Any,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``batch_norm`` over the rows (N, D) that are no padding."""
        x = self.dense(input)
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        mask = self.rows(x)
        return normalize(x, mask, running, weight, bias, training=training, momentum=momentum, eps=eps)

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """Which rows are no padding, (N,).

        Raises:
            NotStackable: It is not known of these.
        """

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A function that would mix rows with padding, or draw in a way of its own."""
        raise NotStackable("it normalizes or draws in a way that is not known on a stack")
