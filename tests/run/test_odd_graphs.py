"""Sets with graphs of one node, without edges and without features: every net trains on them, on both executors."""

import csv
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.data import ClientSplit, GraphSets, GraphSetSource, LoadedGraphs, RandomPartitioner
from fl_lightning.models import GAT, GIN, GINE, DecoupledGIN, GraphSAGE, PooledGCN, SpectralGNN
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.strategies import FedAvg, FedSSP, FedStar

pytestmark = pytest.mark.filterwarnings("ignore:.*not use the graph's edge_attr")
SLOW = functools.partial(SGD, lr=0.05)
NETS = [GAT, GIN, GINE, GraphSAGE, PooledGCN]


def odd(seed: int, *, bare: bool = False) -> list[Data]:
    """A node alone, several nodes without an edge, an edge, and triangles."""
    draw = torch.Generator().manual_seed(seed)
    edges = {
        1: torch.empty(2, 0, dtype=torch.int64),
        4: torch.empty(2, 0, dtype=torch.int64),
        2: torch.tensor([[0], [1]]),
        3: torch.tensor([[0, 1, 2], [1, 2, 0]]),
    }
    graphs = []
    for index in range(12):
        size = (1, 4, 2, 3)[index % 4]
        x = {} if bare else {"x": torch.randn(size, 3, generator=draw)}
        attr = torch.ones(edges[size].shape[1], 2)
        graphs.append(Data(**x, edge_index=edges[size], edge_attr=attr, y=torch.tensor([index % 2]), num_nodes=size))
    return graphs


def odd_data(**settings: Any) -> FederatedDataModule:
    alone = [graph for graph in odd(3) if graph.num_nodes == 1] * 2  # a client without any edge
    data = FederatedDataModule(GraphSets([odd(1), odd(2), alone]), splitter=ClientSplit(0.5, 0.25), **settings)
    data.setup()
    return data


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("net", [*NETS, DecoupledGIN, SpectralGNN], ids=lambda net: net.__name__)
def test_every_net_trains_on_them(net: Any, batch_size: int | None, make_trainer: Any, assert_same: Any) -> None:
    strategy = {DecoupledGIN: FedStar, SpectralGNN: FedSSP}.get(net, FedAvg)
    more = {"edge_channels": 2} if net is GINE else {}
    model = functools.partial(net, hidden_channels=8, dropout=0.0, **more)
    data, runs = odd_data(batch_size=batch_size), []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        trainer.fit(strategy.client_class(model, SLOW), data, strategy(num_epochs=1))
        assert all(math.isfinite(each["train/loss"]) for each in trainer.run.history)
        runs.append(trainer.run.history)
    assert_same(*runs, tolerance=1e-7)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_attributes_of_edges_that_nobody_has(batch_size: int | None, make_trainer: Any) -> None:
    """No client has an edge, so that there is nothing to read of any."""
    bare = [graph for graph in odd(3) if not graph.num_edges]
    data = FederatedDataModule(GraphSets([bare, bare]), splitter=ClientSplit(0.5, 0.25), batch_size=batch_size)
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(functools.partial(GINE, edge_channels=2)), data, FedAvg(num_epochs=1))
    assert math.isfinite(trainer.run.history[0]["train/loss"])


def test_degrees_stand_for_features_that_there_are_not(make_trainer: Any) -> None:
    data = FederatedDataModule(GraphSets([odd(1, bare=True), odd(2, bare=True)]))
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(functools.partial(GIN, hidden_channels=8)), data, FedAvg(num_epochs=1))
    assert data.num_features == 3  # degrees 0, 1 and 2
    assert data.clients[0].union.x_NF[:7].argmax(dim=1).tolist() == [0, 0, 0, 0, 0, 1, 1]


class Named(GraphSetSource):
    """Odd graphs with names."""

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:
        return LoadedGraphs(
            graphs=odd(4), names=tuple(f"graph {index}" for index in range(12)), class_names=("no", "yes")
        )


@pytest.mark.filterwarnings("ignore:no checkpoint was written")
def test_predictions_have_the_names_of_graphs(make_trainer: Any, tmp_path: Path) -> None:
    data = FederatedDataModule(Named(), RandomPartitioner(2), ClientSplit(0.5, 0.25), cache_dir=str(tmp_path))
    trainer = make_trainer(num_rounds=1)
    model = ClientModule(functools.partial(GIN, hidden_channels=8))
    trainer.fit(model, data, FedAvg(num_epochs=1))
    predicted = trainer.predict()
    parts = [
        Predicted(task=data.task, client_data=data.clients[c], names=data.user_names(c), output_NK=output)
        for c, output in predicted.items()
    ]
    write_predictions(tmp_path / "predictions.csv", parts)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert sorted(int(row["graph"]) for row in rows) == list(range(12))
    assert all(row["name"] == f"graph {row['graph']}" for row in rows)
    assert all(row["label"] == ("no", "yes")[int(row["graph"]) % 2] for row in rows)
    assert set(rows[0]) >= {"probability_no", "probability_yes"}
