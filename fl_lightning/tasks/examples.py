"""Tasks on independent examples: rows of a table, series, images."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fl_lightning.batches.examples import ExampleCollator
from fl_lightning.models.cnn import CNN
from fl_lightning.models.gru import GRUForecaster
from fl_lightning.models.mlp import MLP
from fl_lightning.tasks.base import Classification, DrawnTask, Regression


@dataclass(frozen=True, kw_only=True)
class ExampleTask(DrawnTask):
    """A task on independent examples (:class:`~fl_lightning.batches.ClientExamples`)."""

    examples = "examples"
    example = "example"
    collator_class = ExampleCollator

    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """A CNN for images (channels, rows, columns), a GRU for forecasts of series (steps, features), else an MLP."""
        num_dims = 1 if isinstance(num_features, int) else len(num_features)
        if num_dims == 2 and self.target.is_numeric:
            return GRUForecaster
        return CNN if num_dims == 3 else MLP


@dataclass(frozen=True, kw_only=True)
class ExampleClassification(ExampleTask, Classification):
    """The class of each example, or its labels."""


@dataclass(frozen=True, kw_only=True)
class ExampleRegression(ExampleTask, Regression):
    """Numbers of each example."""
