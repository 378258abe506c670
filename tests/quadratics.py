"""Three clients with one parameter each: what an algorithm computes can be followed with a pencil.

f_i(x) = a_i / 2 (x - b_i)^2 with a = (2, 0.5, 1), b = (1, -2, 3), n = (1, 3, 2) training examples; start x = 0.
"""

import functools
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedTrainer
from fl_lightning.batches import ClientExamples, ExampleBatch, ExampleCollator
from fl_lightning.executors import Executor
from fl_lightning.federation import ClientRegistry
from fl_lightning.models.output import NetOutput
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import ExampleRegression
from fl_lightning.tasks.targets import split_scores

CURVATURES = (2.0, 0.5, 1.0)
MINIMA = (1.0, -2.0, 3.0)
EXAMPLES = (1, 3, 2)


class Point(nn.Module):
    """The parameter x, which is what it predicts for every example."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))

    def forward(self, batch: ExampleBatch) -> NetOutput:
        """Predict x everywhere."""
        x_N1 = self.x.unsqueeze(-2).expand(*batch.y.shape)
        return NetOutput(x_N1, x_N1)


class Product(nn.Module):
    """A body p and a head q, whose product is predicted for every example; start p = 1, q = 0.5."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
        self.q = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, batch: ExampleBatch) -> NetOutput:
        """Predict p q everywhere."""
        x_N1 = (self.p * self.q).unsqueeze(-2).expand(*batch.y.shape)
        return NetOutput(x_N1, x_N1)


class Quadratic(ClientModule):
    """A client with f_i as its loss; one validation and one test example like the training ones."""

    monitor = "val/loss"

    def values(self, output: NetOutput, batch: ExampleBatch) -> Tensor:
        """a/2 (x - b)^2 at every example."""
        curvature_N, minimum_N = batch.x.unbind(dim=-1)
        return 0.5 * curvature_N * (output.logits[..., 0] - minimum_N).square()

    def loss(self, output: NetOutput, batch: ExampleBatch) -> Tensor:
        """f_i."""
        weight_N = batch.train_mask.to(output.logits.dtype)
        return (self.values(output, batch) * weight_N).sum(dim=-1) / weight_N.sum(dim=-1)

    def scores(self, output: NetOutput, batch: ExampleBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """f_i on every split."""
        return split_scores(batch, {"loss": self.values(output, batch)})


class Quadratics(LightningDataModule):
    """The clients, in the order of a permutation."""

    partition_hash = "quadratics"
    has_validation = True

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.clients = [self.client(index) for index in order]
        self.registry = ClientRegistry.of(
            self.clients, task=ExampleRegression(), num_outputs=1, partition_hash=self.partition_hash
        )

    @staticmethod
    def client(index: int) -> ClientExamples:
        """One client."""
        size = EXAMPLES[index] + 2
        place_N = torch.arange(size)
        return ClientExamples(
            name=f"client-{index}",
            x_NX=torch.tensor([[CURVATURES[index], MINIMA[index]]]).expand(size, 2),
            y_N=torch.zeros(size, 1),
            train_mask_N=place_N < EXAMPLES[index],
            val_mask_N=place_N == EXAMPLES[index],
            test_mask_N=place_N == EXAMPLES[index] + 1,
        )

    def setup(self, stage: str | None = None) -> None:
        """Nothing to do."""

    def collator(self, clients: Any, *, device: torch.device, dtype: torch.dtype) -> ExampleCollator:
        """Full batches."""
        return ExampleCollator(clients, device=device, dtype=dtype)


def fit_quadratics(
    strategy: Strategy,
    executor: Executor,
    *,
    num_rounds: int,
    learning_rate: float = 0.1,
    model: type[ClientModule] = Quadratic,
    net: type[nn.Module] = Point,
    momentum: float = 0.0,
    **settings: Any,
) -> FederatedTrainer:
    """Train by SGD in float64; two local steps a round are ``num_epochs=2``. Returns the trainer."""
    defaults = {"accelerator": "cpu", "logger": False, "precision": "64-true", "executor": executor}
    trainer = FederatedTrainer(num_rounds=num_rounds, default_callbacks=False, **{**defaults, **settings})
    trainer.fit(model(net, functools.partial(SGD, lr=learning_rate, momentum=momentum)), Quadratics(), strategy)
    return trainer


def parameters(trainer: FederatedTrainer, name: str = "x") -> list[float]:
    """Every client's parameter."""
    values: list[float] = trainer.run.executor.state().parameters[name].flatten().tolist()
    return values
