"""Clients with generated vectors, for private training."""

from collections.abc import Sequence

import torch
from lightning import LightningDataModule

from fl_lightning.batches.examples import ExampleCollator
from fl_lightning.data import ClientExamples
from fl_lightning.federation import ClientRegistry
from fl_lightning.tasks import ExampleClassification


def vectors(sizes: Sequence[int], *, num_features: int = 4, distance: float = 3.0) -> list[ClientExamples]:
    """Clients of so many examples of three classes, whose means are apart by about ``distance``; half train."""
    means = distance * torch.nn.functional.one_hot(torch.arange(3), num_features).float()
    clients = []
    for client, size in enumerate(sizes):
        draw = torch.Generator().manual_seed(client)
        role_N, y_N = torch.arange(size) % 4, torch.randint(3, (size,), generator=draw)
        y_N[:3] = torch.arange(3)
        clients.append(
            ClientExamples(
                name=f"client-{client}",
                x_NX=means[y_N] + torch.randn(size, num_features, generator=draw),
                y_N=y_N,
                train_mask_N=role_N < 2,
                val_mask_N=role_N == 2,
                test_mask_N=role_N == 3,
            )
        )
    return clients


class VectorData(LightningDataModule):
    """Those clients as data.

    Args:
        clients: The clients.
        batch_size: Examples of a mini-batch.
    """

    has_validation = True

    def __init__(self, clients: Sequence[ClientExamples], batch_size: int | None = 4, **batches: int | None) -> None:
        super().__init__()
        self.clients, self.batch_size, self.batches = list(clients), batch_size, batches
        self.registry = ClientRegistry.of(self.clients, task=ExampleClassification(), num_outputs=3)

    def setup(self, stage: str | None = None) -> None: ...

    def collator(self, clients, *, device, dtype):
        return ExampleCollator(clients, batch_size=self.batch_size, device=device, dtype=dtype, **self.batches)
