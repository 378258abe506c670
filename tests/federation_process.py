"""Small runs in processes of their own: ``python federation_process.py '[{"root": ..., ...}, ...]'``."""

import functools
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from torch_geometric.data import Data

from fl_lightning import (
    Callback,
    ClientModule,
    FederatedDataModule,
    FederatedTrainer,
    Participation,
    executors,
    strategies,
)
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.data import Partitioner, PlantedCommunities
from fl_lightning.models import GCN

SIZES = [26, 22, 16, 12, 16]


class Slices(Partitioner):
    """Consecutive nodes, in unequal shares."""

    def assign(self, data: Data, seed: int) -> list[Tensor]:
        return list(torch.arange(data.num_nodes).split(SIZES))


class Smallest(ClientModule):
    """The smallest client (client-03) fails at every training."""

    def training_step(self, batch, batch_idx):
        if len(batch.y) == min(SIZES):
            raise RuntimeError("out of memory")
        return super().training_step(batch, batch_idx)


class Kill(Callback):
    """Ends the process in the middle of a round: the clients have trained, the server has not."""

    def __init__(self, round_idx: int, number: int) -> None:
        self.round_idx, self.number = round_idx, number

    def on_upload(self, trainer, stage, payload):
        if trainer.run.round_idx == self.round_idx and stage.name == "train":
            os.kill(os.getpid(), self.number)
        return payload


def train(
    root: str,
    *,
    strategy: str = "FedAvg",
    executor: str = "SequentialExecutor",
    num_rounds: int = 5,
    participation: dict[str, Any] | None = None,
    precision: str = "32-true",
    failing: bool = False,
    signal_in_round: tuple[int, str] | None = None,
    ckpt_path: str | None = None,
    devices: int = 1,
    num_nodes: int = 1,
) -> FederatedTrainer:
    """Run a federation in ``root``, with a checkpoint after every round."""
    data = FederatedDataModule(
        PlantedCommunities(num_nodes=sum(SIZES), num_communities=5, num_classes=3, num_features=6),
        Slices(len(SIZES)),
        root=root,
        cache_dir=root,
    )
    callbacks: list[Callback] = [FederatedCheckpoint(every_seconds=0, every_n_rounds=1, keep=None)]
    if signal_in_round is not None:
        callbacks.append(Kill(signal_in_round[0], getattr(signal, signal_in_round[1])))
    settings = {"FedSheafHN": {"init_epochs": 2, "num_neighbors": 2, "refresh_every": 2, "hidden_channels": 8}}
    trainer = FederatedTrainer(
        default_callbacks=False,
        num_rounds=num_rounds,
        executor=getattr(executors, executor)(),
        participation=Participation(**(participation or {})),
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy="ddp" if devices * num_nodes > 1 else "auto",
        precision=precision,
        callbacks=callbacks,
        logger=False,
        default_root_dir=root,
    )
    model = (Smallest if failing else ClientModule)(functools.partial(GCN, hidden_channels=8), ADAM)
    trainer.fit(model, data, getattr(strategies, strategy)(**settings.get(strategy, {})), ckpt_path=ckpt_path)
    return trainer


ADAM = functools.partial(Adam, lr=0.05, weight_decay=5e-4)

if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("default", "client-03 failed")
    warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
    torch.set_num_threads(1)
    for run in json.loads(sys.argv[1]):
        Path(run["root"]).mkdir(parents=True, exist_ok=True)
        train(**run)
