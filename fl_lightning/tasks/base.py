"""A task: all in which federations differ that learn different things of different data.

One object says what a client holds and what the examples are, how they become batches, what is predicted of them
(:class:`~fl_lightning.tasks.targets.Target`: loss, metrics, predictions), and which net fits. The data module finds it
from the source, clients and strategies ask it, and sites send it: nothing else looks at the kind of data.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.batches.base import Collator
from fl_lightning.batches.draws import DrawnCollator
from fl_lightning.tasks.targets import CLASSES, LABELS, NUMBERS, Target


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a client's training examples are drawn in steps.

    Attributes:
        batch_size: Examples of a mini-batch; None for all of a client's at once.
        steps_per_epoch: Mini-batches of an epoch, each drawn by itself; None for passes over the examples.
        drop_last: Leave out a short last mini-batch of a pass.
    """

    batch_size: int | None = None
    steps_per_epoch: int | None = None
    drop_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What is learned. Its fields are its settings; tasks with the same settings are equal."""

    #: What many examples are called, and one.
    examples: ClassVar[str]
    example: ClassVar[str]
    #: Whether clients hold graphs, and whether the examples are the nodes of one.
    has_graphs: ClassVar[bool] = False
    is_on_nodes: ClassVar[bool] = False
    #: Why the privacy of single training examples cannot cover it; empty if it does.
    not_private: ClassVar[str] = ""

    @property
    @abstractmethod
    def target(self) -> Target:
        """What is predicted of an example."""

    @property
    def plain(self) -> dict[str, Any]:
        """The task as data: its name and its settings."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        """The name, with what is set."""
        summary = [name for name, value in dataclasses.asdict(self).items() if value]
        return " ".join([type(self).__name__, *(f"({name})" for name in summary)])

    @abstractmethod
    def collator(
        self,
        clients: Sequence[Any],
        *,
        layout: Mapping[str, Any] | None = None,
        drawing: Drawing | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Collator:
        """Make the clients' batches.

        Args:
            clients: What each client holds.
            layout: What was decided over all clients of the federation (:meth:`layout_of`); None to decide over these.
            drawing: How training examples are drawn; None for all at once.
            device: Where batches live.
            dtype: Their floating point type.
        """

    def layout_of(self, clients: Sequence[Any]) -> dict[str, Any]:
        """What is decided over all clients."""
        return {}

    def layout_for(self, density: float) -> dict[str, Any]:
        """The same, where only the share of the features that are not zero is known."""
        return {}

    @abstractmethod
    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """The net of clients that were given none.

        Args:
            num_features: Width of the inputs, or their shape.
            local: What the strategy has for nodes of a graph; None for nothing of its own.
        """

    def check_net(self, net: nn.Module) -> None:
        """Refuse a net that cannot compute on the examples.

        Raises:
            ValueError: It cannot.
        """
        return

    def reference(self, clients: Sequence[Any], num_outputs: int) -> dict[str, float]:
        """The clients' mean metrics if each told all its examples the same, by its training examples alone.

        A majority class, the labels' shares, or a mean: what a model has to beat.
        """
        result: dict[str, list[float]] = {}
        for client in clients:
            logits_K = self.target.constant(client.y_N[client.train_mask_N], num_outputs)
            logits_NK = logits_K.expand(client.size, -1)
            y_N = client.y_N.double() if client.y_N.is_floating_point() else client.y_N.clamp(min=0)
            values = self.target.values(logits_NK, y_N)
            for split, mask_N in (("val", client.val_mask_N), ("test", client.test_mask_N)):
                for name, value_N in values.items() if bool(mask_N.any()) else ():
                    result.setdefault(f"{split}/{name}", []).append(float(value_N[mask_N].double().mean()))
        return {name: sum(each) / len(each) for name, each in result.items()}


@dataclass(frozen=True, kw_only=True)
class DrawnTask(Task):
    """A task whose examples are drawn in mini-batches."""

    #: Makes the batches.
    collator_class: ClassVar[type[DrawnCollator]]

    def collator(  # noqa: D102
        self,
        clients: Sequence[Any],
        *,
        layout: Mapping[str, Any] | None = None,
        drawing: Drawing | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Collator:
        settings = dataclasses.asdict(drawing or Drawing())
        return self.collator_class(clients, **settings, device=device, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """A task whose examples are of one class each, or have several labels.

    Attributes:
        multi_label: Each example has or lacks each of several labels; targets are 0, 1, or nan where that is not known.
    """

    multi_label: bool = False

    @property
    def target(self) -> Target:
        """Classes or labels."""
        return LABELS if self.multi_label else CLASSES


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """A task whose examples have one or several numbers, nan where one is missing."""

    @property
    def target(self) -> Target:
        """Numbers."""
        return NUMBERS


def kind_of_target(y: Tensor, *, given: str | None = None) -> str:
    """Whether targets are ``classes``, ``labels`` or ``numbers``, by their type and shape.

    Whole numbers in one column are classes; a matrix of zeros and ones (nan where unknown) is of labels; everything
    else is numbers.

    Args:
        y: One row (or number) for each example.
        given: What they are, where their owner has said it.
    """
    if given is not None:
        return given
    known = y[~y.isnan()] if y.is_floating_point() else y
    if y.dim() == 1 or y.shape[1] == 1:
        return "classes" if bool((known == known.round()).all()) else "numbers"
    return "labels" if bool(((known == 0) | (known == 1)).all()) else "numbers"
