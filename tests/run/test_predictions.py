"""The file of predictions: what is reported can be computed from it again, in a simulation and at sites."""

import csv
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from line_clients import Affine
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.data import ClientSplit, Examples, ExampleSource, GlobalSplit
from fl_lightning.federation import UserNames
from fl_lightning.models import GCN
from fl_lightning.remote import LoopbackChannel, Site, SitePolicy, federate
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.strategies import FedAvg

NAMES = ["healthy", "ill", "dead"]


def ward(seed: int, names: list[str], num_nodes: int = 60) -> Data:
    """Patients with names of their own, of whom some have no label."""
    draw = torch.Generator().manual_seed(seed)
    state_N = torch.randint(3, (num_nodes,), generator=draw)
    x = torch.nn.functional.one_hot(state_N, 3) + 0.8 * torch.randn(num_nodes, 3, generator=draw)
    y = torch.tensor([names.index(NAMES[state]) for state in state_N])
    y[torch.rand(num_nodes, generator=draw) < 0.1] = -1
    edge_index = torch.randint(num_nodes, (2, 300), generator=draw)
    edge_index = edge_index[:, state_N[edge_index[0]] == state_N[edge_index[1]]]
    patients = [f"ward {seed}, patient {node}" for node in range(num_nodes)]
    return Data(x=x, y=y, edge_index=edge_index, class_names=names, node_names=patients)


def wards(tmp_path: Path) -> FederatedDataModule:
    graphs = [ward(0, NAMES), ward(1, ["dead", "healthy", "ill"]), ward(2, NAMES)]
    data = FederatedDataModule(graphs, splitter=GlobalSplit(0.5, 0.2), cache_dir=str(tmp_path))
    data.setup()
    return data


class Sums(ExampleSource):
    """The sum and the difference of two numbers, in three lengths."""

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        x = tuple(torch.randn(size, 2, generator=draw) for size in (20, 31, 26))
        y = tuple(torch.stack([each.sum(1), each[:, 0] - each[:, 1]], dim=1) for each in x)
        return Examples(names=("a", "b", "c"), x=x, y=y, num_outputs=2)


def graph_model() -> ClientModule:
    return ClientModule(functools.partial(GCN, hidden_channels=8), functools.partial(SGD, lr=0.3))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def accuracy(rows: Sequence[dict[str, str]], split: str) -> float:
    """The mean over the clients of the share that is right."""
    actual: dict[str, list[bool]] = {}
    for row in rows:
        if row["split"] == split:
            actual.setdefault(row["client"], []).append(row["label"] == row["prediction"])
    return statistics.fmean(statistics.fmean(each) for each in actual.values())


def simulated(data: FederatedDataModule, model: ClientModule, make_trainer: Any, path: Path) -> dict[str, float]:
    """Train, write what the last round predicts, and return its metrics."""
    trainer = make_trainer(num_rounds=3, callbacks=[FederatedCheckpoint()])
    trainer.fit(model, data, FedAvg(num_epochs=3))
    outputs = trainer.predict(model, data, FedAvg(num_epochs=3), ckpt_path="last")
    parts = [
        Predicted(task=data.task, client_data=data.clients[client], names=data.user_names(client), output_NK=output_NK)
        for client, output_NK in outputs.items()
    ]
    write_predictions(path, parts)
    return dict(trainer.test(model, data, FedAvg(num_epochs=3), ckpt_path="last"))


def test_the_reported_accuracy_is_that_of_the_file(make_trainer, tmp_path) -> None:
    data = wards(tmp_path)
    result = simulated(data, graph_model(), make_trainer, tmp_path / "predictions.csv")
    rows = rows_of(tmp_path / "predictions.csv")

    assert accuracy(rows, "test") == pytest.approx(result["test/acc"], abs=1e-6)
    assert 0.5 < result["test/acc"] < 1
    assert list(rows[0]) == [
        *("client", "node", "name", "split", "label", "prediction"),
        *("probability_healthy", "probability_ill", "probability_dead"),
    ]
    raw = [ward(0, NAMES), ward(1, ["dead", "healthy", "ill"]), ward(2, NAMES)]
    assert len(rows) == 180
    for row in rows:
        graph, node = raw[int(row["client"].removeprefix("client-"))], int(row["node"])
        label = int(graph.y[node])
        assert row["name"] == graph.node_names[node]
        assert row["label"] == ("" if label < 0 else graph.class_names[label])  # by its name, however it is numbered
        assert (row["split"] == "none") == (label < 0)
        shares = [float(row[f"probability_{name}"]) for name in NAMES]
        assert NAMES[shares.index(max(shares))] == row["prediction"]
        assert sum(shares) == pytest.approx(1, abs=1e-4)


def test_the_reported_error_of_a_regression_is_that_of_the_file(make_trainer, tmp_path) -> None:
    data = FederatedDataModule(Sums(), splitter=ClientSplit(0.5, 0.25), batch_size=6)
    data.setup()
    model = ClientModule(Affine, functools.partial(SGD, lr=0.05))
    result = simulated(data, model, make_trainer, tmp_path / "predictions.csv")
    rows = rows_of(tmp_path / "predictions.csv")

    kinds = ("target_0", "prediction_0", "target_1", "prediction_1")
    assert list(rows[0]) == ["client", "example", "split", *kinds]
    errors: dict[str, list[float]] = {}
    for row in (row for row in rows if row["split"] == "test"):
        gaps = [float(row[f"target_{index}"]) - float(row[f"prediction_{index}"]) for index in range(2)]
        errors.setdefault(row["client"], []).append(statistics.fmean(gap**2 for gap in gaps))
    assert statistics.fmean(map(statistics.fmean, errors.values())) == pytest.approx(result["test/mse"], rel=1e-4)
    source = Sums().load(None, 0)
    for row in rows:
        client = source.names.index(row["client"])
        assert float(row["target_1"]) == pytest.approx(float(source.y[client][int(row["example"]), 1]), rel=1e-4)


def test_a_site_writes_the_same_file(make_trainer, tmp_path) -> None:
    data = wards(tmp_path)
    simulated(data, graph_model(), make_trainer, tmp_path / "predictions.csv")
    sites = [
        Site(
            client,
            graph_model(),
            FedAvg(num_epochs=3),
            tmp_path / client.name,
            policy=SitePolicy(min_examples=1),
            names=data.user_names(number),
        )
        for number, client in enumerate(data.clients)
    ]
    trainer: FederatedTrainer = make_trainer(num_rounds=3, callbacks=[FederatedCheckpoint()])
    strategy = FedAvg(num_epochs=3)
    remote = federate(trainer, LoopbackChannel(sites), strategy)
    trainer.fit(graph_model(), remote, strategy)
    trainer.predict(graph_model(), remote, strategy, ckpt_path="last")
    result = trainer.test(graph_model(), remote, strategy, ckpt_path="last")

    own = [row for client in data.clients for row in rows_of(tmp_path / client.name / "predictions.csv")]
    whole = rows_of(tmp_path / "predictions.csv")
    assert accuracy(own, "test") == pytest.approx(result["test/acc"], abs=1e-6)
    assert [list(row) for row in own] == [list(row) for row in whole]
    reported = ("client", "node", "name", "split", "label", "prediction")
    assert [[row[name] for name in reported] for row in own] == [[row[name] for name in reported] for row in whole]
    for mine, theirs in zip(own, whole, strict=True):
        assert float(mine["probability_ill"]) == pytest.approx(float(theirs["probability_ill"]), abs=1e-4)


def test_classes_without_names_have_numbers(tmp_path) -> None:
    data = wards(tmp_path)
    own = UserNames(number_N=torch.arange(60), class_names=("sick", "\ud800"))
    output_NK = torch.tensor([0.2, 0.7, 0.1]).expand(60, 3)
    write_predictions(
        tmp_path / "p.csv", [Predicted(task=data.task, client_data=data.clients[0], names=own, output_NK=output_NK)]
    )
    rows = rows_of(tmp_path / "p.csv")
    assert list(rows[0])[-3:] == ["probability_sick", "probability_\\ud800", "probability_2"]
    assert {row["prediction"] for row in rows} == {"\\ud800"}
    assert {row["label"] for row in rows} <= {"sick", "\\ud800", "2", ""}
