"""Clients that hold sets of odd graphs: without edges, of one node, without features or with unequal ones, or none."""

import functools
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.record import Record
from campaign.test_hostile import tried
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.data import ClientSplit, GraphSets
from fl_lightning.models import GAT, GIN, GINE, GraphSAGE, PooledGCN
from fl_lightning.strategies import Ditto, FedAvg, FedPer, Local

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NETS = [GAT, GIN, GINE, GraphSAGE, PooledGCN]


def drawn_graph(draw: random.Random, *, width: int, target: str) -> Data:
    """A graph of at least one node, with any edges, loops and double ones too, each of which has two attributes."""
    size, edges = draw.choice([1, 1, 2, 3, 7]), draw.choice([0, 0, 1, 4, 12])
    ends = torch.tensor([[draw.randrange(size) for _ in range(edges)] for _ in range(2)], dtype=torch.int64)
    y = torch.tensor([draw.randrange(3)]) if target == "classes" else torch.tensor([[draw.random()]])
    x = {"x": torch.rand(size, width)} if width else {}
    return Data(**x, edge_index=ends.reshape(2, edges), edge_attr=torch.rand(edges, 2), y=y, num_nodes=size)


def drawn_sets(draw: random.Random) -> list[list[Data]]:
    """The graphs of some clients, one of which may be unlike the others."""
    target, width = draw.choice(["classes", "numbers"]), draw.choice([0, 1, 3])
    clients = []
    for client in range(draw.randrange(2, 5)):
        own_width = draw.choice([0, 2, 5]) if client and draw.random() < 0.25 else width
        number = 0 if client and draw.random() < 0.05 else draw.randrange(4, 10)
        graphs = [drawn_graph(draw, width=own_width, target=target) for _ in range(number)]
        if number and draw.random() < 0.1:  # a graph that does not fit the others
            graphs[-1] = drawn_graph(draw, width=own_width + 1, target=target)
        clients.append(graphs)
    return clients


def trained(sets: list[list[Data]], draw: random.Random, folder: Path) -> list[dict[str, float]]:
    """The metrics of two rounds on either executor."""
    net = draw.choice(NETS)
    pooling = draw.choice(["sum", "mean", "max", "attention"])
    more: dict[str, Any] = {"edge_channels": 2} if net is GINE else {}
    factory = functools.partial(net, hidden_channels=4, dropout=0.0, pooling=pooling, **more)
    strategy, batch_size = draw.choice([FedAvg, FedPer, Local, Ditto]), draw.choice([None, 3])
    results = []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        folders = {"root": str(folder), "cache_dir": str(folder)}
        splitter = ClientSplit(0.5, 0.25)
        data = FederatedDataModule(GraphSets(sets), splitter=splitter, batch_size=batch_size, **folders)
        trainer = FederatedTrainer(
            num_rounds=2,
            executor=executor,
            precision="64-true",
            accelerator="cpu",
            logger=False,
            default_root_dir=str(folder),
            default_callbacks=False,
        )
        trainer.fit(ClientModule(factory, functools.partial(SGD, lr=0.05)), data, strategy(num_epochs=1))
        results.append(trainer.run.history[-1])
    return results


def alike(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether the metrics of two executors agree, and the losses are finite."""
    names = [name for name in one if name.startswith(("train/", "val/", "test/"))]
    close = all(
        math.isclose(one[n], other[n], rel_tol=1e-5, abs_tol=1e-6) or (one[n] != one[n] and other[n] != other[n])
        for n in names
    )
    return close and math.isfinite(one["train/loss"])


def runs(number: int, seed: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """Both executors train on them and agree; or what does not fit is said, with the client, the graph or the net."""
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        sets = drawn_sets(draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield f"trial {trial}", alike(*trained(sets, draw, folder))
            except ValueError as error:
                yield f"trial {trial}: {error}", any(word in str(error) for word in ("client", "graph"))
            except Exception as error:  # which is what the campaign looks for
                yield f"trial {trial}: {error!r}", False


def test_sets_of_odd_graphs(seed: int, record: Record, tmp_path: Path) -> None:
    tried(record, "sets of odd graphs", runs(150, seed, tmp_path))
