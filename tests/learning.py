"""Small generated federations on which a method's own idea matters, and what comes of a strategy on them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedTrainer
from fl_lightning.batches import ClientExamples, ExampleCollator
from fl_lightning.federation import ClientRegistry
from fl_lightning.models import MLP
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import ExampleClassification

NUM_FEATURES = 8
NUM_CLASSES = 4


class Tables(LightningDataModule):
    """A federation of the given clients, which train on all of their examples at once."""

    partition_hash = "tables"
    has_validation = True

    def __init__(self, clients: Sequence[ClientExamples], relation_CC: Tensor | None = None) -> None:
        super().__init__()
        self.clients = list(clients)
        self.registry = ClientRegistry.of(
            self.clients,
            task=ExampleClassification(),
            num_outputs=NUM_CLASSES,
            relation_CC=relation_CC,
            partition_hash=self.partition_hash,
        )

    def setup(self, stage: str | None = None) -> None:
        """Nothing to do."""

    def collator(self, clients: Any, *, device: torch.device, dtype: torch.dtype) -> ExampleCollator:
        """Full batches."""
        return ExampleCollator(clients, device=device, dtype=dtype)


def quadrants(
    num_clients: int,
    *,
    num_train: int,
    labels: Callable[[int, Tensor], Tensor] = lambda client, y_N: y_N,
    inputs: Callable[[int, Tensor], Tensor] = lambda client, x_NF: x_NF,
    classes: Callable[[int], Sequence[int]] = lambda client: range(NUM_CLASSES),
    seed: int = 0,
) -> list[ClientExamples]:
    """Normal inputs whose class is the quadrant of two hidden directions; 40 validate and 200 test.

    Args:
        num_clients: Clients.
        num_train: Training examples of each.
        labels: What a client calls the classes.
        inputs: How it sees the inputs.
        classes: Which classes it has.
        seed: Of the draw.
    """
    rng = torch.Generator().manual_seed(seed)
    hidden_F2 = torch.linalg.qr(torch.randn(NUM_FEATURES, 2, generator=rng))[0]
    clients = []
    for client in range(num_clients):
        x_NF = torch.randn(16 * (num_train + 240), NUM_FEATURES, generator=rng)
        y_N = ((x_NF @ hidden_F2) > 0).long() @ torch.tensor([1, 2])
        own_N = torch.isin(y_N, torch.tensor(list(classes(client)))).nonzero().flatten()[: num_train + 240]
        place_N = torch.arange(len(own_N))
        clients.append(
            ClientExamples(
                name=f"client-{client:02d}",
                x_NX=inputs(client, x_NF[own_N]),
                y_N=labels(client, y_N[own_N]),
                train_mask_N=place_N < num_train,
                val_mask_N=(place_N >= num_train) & (place_N < num_train + 40),
                test_mask_N=place_N >= num_train + 40,
            )
        )
    return clients


def learned(
    strategy: Strategy,
    clients: Sequence[ClientExamples],
    *,
    num_rounds: int = 30,
    lr: float = 0.3,
    momentum: float = 0.0,
    net: Any = MLP,
    relation_CC: Tensor | None = None,
    running_statistics: Literal["personal", "shared"] = "personal",
) -> float:
    """Mean test accuracy of the round that validation chose."""

    def optimizer(parameters: Any) -> SGD:
        return SGD(parameters, lr=lr, momentum=momentum)

    model = ClientModule(net, optimizer, running_statistics=running_statistics)
    trainer = FederatedTrainer(
        num_rounds=num_rounds, accelerator="cpu", logger=False, default_callbacks=False, run_name="learning"
    )
    return trainer.fit(model, Tables(clients, relation_CC), strategy)["test/acc"]
