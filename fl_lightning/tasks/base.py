"""A task: everything that depends on what is learned and on which kind of data.

One object defines what data a client has and what the examples are, how they become batches, what is predicted
(:class:`~fl_lightning.tasks.targets.Target`: loss, metrics, predictions), and which net fits. The data module
determines it from the source, clients and strategies use it, and sites send it: nothing else depends on the kind of
data.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.batches.draws import DrawnCollator
from fl_lightning.batches.samplers import GraphSampler
from fl_lightning.models.plain import name_of
from fl_lightning.tasks.targets import CLASSES, LABELS, NUMBERS, Target


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a client's training examples are drawn in steps.

    Attributes:
        batch_size: Size of a mini-batch; None for all of a client's examples at once.
        steps_per_epoch: Number of mini-batches in an epoch, each drawn independently; None for passes over the
            examples.
        drop_last: Leave out a short last mini-batch of a pass.
        sampler: Draws parts of a graph whose nodes are the examples; None to train on whole graphs.
    """

    batch_size: int | None = None
    steps_per_epoch: int | None = None
    drop_last: bool = False
    sampler: GraphSampler | None = None

    @property
    def of_examples(self) -> dict[str, Any]:
        """The settings of independent examples, by name."""
        return {name: value for name, value in vars(self).items() if name != "sampler"}

    @property
    def plain(self) -> dict[str, Any]:
        """All settings as data."""
        return {**self.of_examples, **({} if self.sampler is None else {"sampler": self.sampler.plain()})}


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Base class of tasks. Its fields are its settings; tasks with the same settings are equal."""

    #: The noun for examples, in the plural and in the singular.
    examples: ClassVar[str]
    example: ClassVar[str]
    #: The columns of the file of predictions for the user's own number of an example; empty for one named as it is.
    number_columns: ClassVar[tuple[str, ...]] = ()
    #: Whether clients have graphs, and whether the examples are the nodes of one.
    has_graphs: ClassVar[bool] = False
    is_on_nodes: ClassVar[bool] = False
    #: Whether the examples are graphs, of which reports draw a few.
    has_graph_examples: ClassVar[bool] = False
    #: Whether a node may be in several examples.
    shares_nodes: ClassVar[bool] = False
    #: Settings that count what occurs in a client's data: the largest of the clients' holds for their federation.
    counted: ClassVar[tuple[str, ...]] = ()
    #: Why private training cannot cover it; empty if it can.
    not_private: ClassVar[str] = ""

    @property
    @abstractmethod
    def target(self) -> Target:
        """What is predicted for an example."""

    @property
    def notes(self) -> dict[str, str]:
        """What is said beside a result (``result.json``, the table at the end), by name, if metrics depend on it."""
        return {}

    @property
    def plain(self) -> dict[str, Any]:
        """The task as data: its name and its settings."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}

    def of_all(self, others: Sequence["Task"]) -> "Task":
        """This task in a federation with clients that have others, whose counts may be larger."""
        alike = [self, *(each for each in others if type(each) is type(self))]
        return dataclasses.replace(self, **{name: max(getattr(each, name) for each in alike) for name in self.counted})

    def lacks(self, client_data: Any) -> str:
        """What the data of a client lack that others' have, in words; empty for nothing."""
        return ""

    def __str__(self) -> str:
        """The name, with what is set to something else than its default."""
        names = [each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default]
        return " ".join([type(self).__name__, *(f"({name})" for name in names)])

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
        """Create the collator, which makes the clients' batches.

        Args:
            clients: The data of each client.
            layout: The decision for all clients of the federation (:meth:`layout_of`); None to decide for these.
            drawing: How training examples are drawn; None for all at once.
            device: Device of the batches.
            dtype: Floating point type of the batches.
        """

    def layout_of(self, clients: Sequence[Any]) -> dict[str, Any]:
        """What a collator decides for all clients together."""
        return {}

    def layout_for(self, density: float) -> dict[str, Any]:
        """The same, if only the share of nonzero features is known."""
        return {}

    @abstractmethod
    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """The default net of clients.

        Args:
            num_features: Width of the inputs, or their shape.
            local: The strategy's net for nodes of a graph; None if it has none.
        """

    def check_net(self, net: nn.Module) -> None:
        """Refuse a net that cannot compute on the examples.

        Raises:
            ValueError: The net does not fit the task.
        """
        if getattr(net, "needs_graph_examples", False) and not self.has_graph_examples:
            raise ValueError(
                f"model.net {name_of(net)} returns a row for each graph of a batch, but the examples of "
                f"{type(self).__name__} are {self.examples}: give a net without pooling"
            )
        if getattr(net, "needs_rows", False) and self.has_graphs:
            raise ValueError(
                f"model.net {name_of(net)} reads no edges, but clients of {type(self).__name__} have graphs: give its "
                "forward a parameter edge_index, whether it reads it or not"
            )

    @property
    def on_demand(self) -> tuple[str, ...]:
        """Metrics that ``model.metrics`` may ask for."""
        return self.target.on_demand

    def whole_scores(
        self, metrics: Sequence[str], parts: Sequence[Batch], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerators and denominators (splits, ...) of metrics that are computed from all outputs at once.

        Args:
            metrics: Names among the target's ``always`` and those in ``on_demand``.
            parts: The batches that the outputs are of, one after another.
            logits: (..., N, K).
            y: The targets.
            masks: Examples of each split, (splits, ..., N).
        """
        return self.target.whole_scores(metrics, logits, y, masks)

    def reference(self, clients: Sequence[Any], num_outputs: int) -> dict[str, float]:
        """The clients' mean metrics if each makes the same prediction for all examples, by its training examples.

        The prediction is a majority class, the labels' shares, or a mean: the baseline that a model has to beat.
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

    def heuristics(self, clients: Sequence[Any]) -> dict[str, dict[str, float]]:
        """The clients' mean metrics by predictions without learning, by the heuristic's name; empty if there are none.

        They are measured on the examples that models are measured on, and always stand beside a result.
        """
        return {}


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
        settings = (drawing or Drawing()).of_examples
        return self.collator_class(clients, **settings, device=device, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """A task whose examples are of one class each, or have several labels.

    Attributes:
        multi_label: Whether each example has or lacks each of several labels; targets are then 0, 1, or nan if unknown.
    """

    multi_label: bool = False

    @property
    def target(self) -> Target:
        """Classes or labels."""
        return LABELS if self.multi_label else CLASSES


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """A task whose examples have one or several numbers, nan if missing."""

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
        given: The kind, if the owner of the data has set it.
    """
    if given is not None:
        return given
    known = y[~y.isnan()] if y.is_floating_point() else y
    if y.dim() == 1 or y.shape[1] == 1:
        is_whole = not y.is_floating_point() or bool((known == known.round()).all())
        return "classes" if is_whole else "numbers"
    return "labels" if bool(((known == 0) | (known == 1)).all()) else "numbers"
