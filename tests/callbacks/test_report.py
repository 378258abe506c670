"""What a run keeps for its report, and the page at its end."""

import functools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_checks import check_page
from run.test_own_layers import own_sets
from task_data import graph_data
from torch import Tensor

import fl_lightning.report
from fl_lightning import (
    Callback,
    ClientModule,
    FederatedDataModule,
    Participation,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.callbacks import FederatedCheckpoint, LabelFlipping, RunReport, report, report_parts
from fl_lightning.callbacks.report_graphs import example_graphs, in_words
from fl_lightning.data import Examples, ExampleSource
from fl_lightning.models import GIN, MLP
from fl_lightning.report.pictures import Album
from fl_lightning.report.record import ExampleGraph, RunRecord
from fl_lightning.run.checkpoint import read
from fl_lightning.strategies import DPSGD, FedAvg, FedSheafHN, Local, PFedHN


class Lines(ExampleSource):
    """Four clients with two targets each, linear in three inputs."""

    def load(self, root: Path, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        x = tuple(torch.randn(20 + 10 * client, 3, generator=draw) for client in range(4))
        y = tuple(torch.stack([inputs.sum(dim=1), inputs[:, 0]], dim=1) for inputs in x)
        return Examples(names=("a", "b", "c", "d"), x=x, y=y, num_outputs=2)


def record_of(trainer: Any) -> RunRecord:
    actual = RunRecord.read(trainer.run.folder)
    assert actual is not None
    return actual


def page_of(trainer: Any) -> str:
    return check_page((trainer.run.folder / "report.html").read_text())


def test_what_is_kept_of_the_chosen_round(federation, make_model, make_trainer) -> None:
    kept = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        trainer = make_trainer(num_rounds=4, executor=executor, callbacks=RunReport())
        result = trainer.fit(make_model(), federation, FedAvg())
        record = record_of(trainer)
        chosen = record.best
        assert chosen is not None
        assert chosen.round == result["best_round"]
        values = [value for value in chosen.scores[""]["test/acc"] if value is not None]
        assert sum(values) / len(values) == pytest.approx(result["test/acc"], rel=1e-5)
        counts = torch.tensor(chosen.confusion)
        assert counts.sum() == sum(int(client.test_mask_N.sum()) for client in federation.clients)
        right = result["test/acc_weighted"] * float(counts.sum())
        assert float(counts.diagonal().sum()) == pytest.approx(right, abs=1e-3)
        assert set(chosen.scores) == {"", "trained/"}
        assert [each.round for each in record.snapshots] == [0, 1, 2, 3]
        assert {each.name for each in record.snapshots} == {"cosines of parameters"}
        assert record.points is not None
        assert len(record.points.x) == sum(record.sizes)
        assert set(record.points.label) == {0, 1, 2}
        assert record.partition is not None
        assert record.partition.labels == [list(row) for row in federation.statistics().label_counts]
        assert record.timing is not None
        assert record.timing.num_rounds == 4
        assert "balanced accuracy" in page_of(trainer)
        kept.append(chosen)
    assert kept[0].confusion == kept[1].confusion


@pytest.mark.filterwarnings("ignore:the clients have features and outputs of their own")
def test_classes_of_their_own_are_not_added_up(make_trainer) -> None:
    """Class 0 of one client has nothing to do with that of another."""
    data, trainer = own_sets(), make_trainer(num_rounds=1, callbacks=RunReport())
    trainer.fit(ClientModule(functools.partial(GIN, hidden_channels=6)), data, FedAvg(num_epochs=1))
    record = record_of(trainer)
    assert record.own_outputs == [2, 2, 3]
    assert record.best is not None
    assert record.best.confusion is None
    own = {name: torch.tensor(counts) for name, counts in record.best.own.items()}
    assert [tuple(counts.shape) for counts in own.values()] == [(2, 2), (2, 2), (3, 3)]
    assert list(own) == record.names
    for client in data.clients:
        assert own[client.name].sum() == client.test_mask_N.sum()
    assert record.partition is not None
    assert record.partition.heterogeneity is None
    words = page_of(trainer)
    assert "Classes are each client's own." in words
    assert "Graphs by class" not in words


@pytest.mark.parametrize(
    ("strategy", "matrices"),
    [
        (FedSheafHN(init_epochs=1, num_neighbors=2), {"embedding", "adjacency", "cosines of updates"}),
        (PFedHN(), {"embedding", "cosines of updates"}),
        (DPSGD(), {"adjacency", "cosines of parameters"}),
        (Local(), set()),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, set) else "",
)
def test_every_family_has_a_page(strategy, matrices, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=RunReport())
    trainer.fit(make_model(strategy), federation, strategy)
    record = record_of(trainer)
    assert {each.name for each in record.snapshots} == matrices
    static = [each.round for each in record.snapshots if each.name == "adjacency"]
    assert not isinstance(strategy, DPSGD) or static == [0], "a topology that stays is kept once"
    assert not record.unkept
    assert f"{type(strategy).__name__}" in page_of(trainer)


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_regression_on_examples(executor, make_trainer, tmp_path) -> None:
    data = FederatedDataModule(Lines(), cache_dir=str(tmp_path), root=str(tmp_path))
    trainer = make_trainer(executor=executor(), callbacks=RunReport())
    trainer.fit(ClientModule(MLP), data, FedAvg())
    record = record_of(trainer)
    assert (record.examples, record.regression, record.mode, record.monitor) == ("examples", True, "min", "val/mse")
    assert record.best is not None
    assert record.best.confusion is None
    predicted = torch.tensor(record.best.predicted)
    assert len(predicted) == sum(int(client.test_mask_N.sum()) for client in data.clients)
    words = page_of(trainer)
    assert "Predicted over true values" in words
    assert "Examples by client" in words


def test_an_attack_and_new_clients(federation, make_model, make_trainer) -> None:
    participation = Participation(held_out_fraction=0.2)
    attack = LabelFlipping(ratio=0.25)
    trainer = make_trainer(participation=participation, callbacks=[attack, RunReport()])
    trainer.fit(make_model(), federation, FedAvg())
    words = page_of(trainer)
    malicious = federation.clients[attack.malicious[0]].name
    assert f"LabelFlipping: {malicious} (1 client)." in words
    assert "Unseen clients, held out of training, by test/acc" in words
    assert "and 1 held out" in words


def test_a_resumed_run_keeps_what_an_unbroken_one_does(
    federation, make_model, make_trainer, tmp_path, assert_same
) -> None:
    states = []
    for rounds, root in (((4,), "whole"), ((2, 4), "parts")):
        for number in rounds:
            settings = {"num_rounds": number, "default_root_dir": str(tmp_path / root)}
            trainer = make_trainer(
                **settings, callbacks=[FederatedCheckpoint(every_seconds=0), RunReport(num_snapshots=1)]
            )
            strategy = FedSheafHN(init_epochs=1, num_neighbors=2)
            trainer.fit(make_model(), federation, strategy, ckpt_path=None if number == rounds[0] else "last")
        states.append(
            (read(trainer.run.folder / "checkpoints/last.ckpt")["callbacks"]["RunReport"], record_of(trainer))
        )
    (whole_state, whole), (parts_state, parts) = states
    assert whole_state["best"] is not None
    assert_same({"best": parts_state["best"]}, {"best": whole_state["best"]})
    assert whole.best == parts.best
    assert [each.values for each in whole.snapshots[:1]] == [each.values for each in parts.snapshots[:1]]
    assert parts.timing is not None
    assert (parts.timing.first_round, parts.timing.num_rounds) == (2, 2)


class Ends(Callback):
    """Ends the run in its second round: by a client output, or by an error."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def on_round_start(self, trainer: Any) -> None:
        if trainer.run.round_idx == 1:
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGTERM)


def test_interrupted_runs_have_a_page_and_failed_ones_what_makes_one(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=[Ends(None), RunReport()])
    trainer.fit(make_model(), federation, FedAvg())
    assert "FedAvg on PlantedCommunities interrupted" in page_of(trainer)
    trainer = make_trainer(callbacks=[RunReport(), Ends(RuntimeError("a bug"))])
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.fit(make_model(), federation, FedAvg())
    assert not (trainer.run.folder / "report.html").exists()
    fl_lightning.report.write(trainer.run.folder)
    words = page_of(trainer)
    assert "The run failed: RuntimeError: a bug" in words
    assert "client-02" in words


def test_a_failing_report_never_loses_a_run(federation, make_model, make_trainer, monkeypatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such color")

    monkeypatch.setattr(fl_lightning.report, "write", fails)
    trainer = make_trainer(callbacks=RunReport())
    with pytest.warns(UserWarning, match=r"report: report.html failed and is left out \(KeyError: 'no such color'\)"):
        trainer.fit(make_model(), federation, FedAvg())
    assert json.loads((trainer.run.folder / "result.json").read_text())["status"] == "finished"
    assert not (trainer.run.folder / "report.html").exists()


class Unshown(FedAvg):
    """A strategy whose matrices cannot be made."""

    def matrices(self) -> dict[str, Tensor]:
        raise ZeroDivisionError("no rows")


def test_what_cannot_be_kept_is_said(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=RunReport())
    with pytest.warns(UserWarning, match=r"report: the matrices failed and is left out \(ZeroDivisionError: no rows\)"):
        trainer.fit(make_model(), federation, Unshown())
    assert trainer.run.round_idx == 3
    assert "Left out: the matrices failed (ZeroDivisionError: no rows)." in page_of(trainer)


def test_clients_whose_data_cannot_be_described(graphs, given_clients, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=RunReport())
    trainer.fit(make_model(), given_clients(graphs), FedAvg())
    assert record_of(trainer).partition is None
    assert "How the data are shared out was not kept." in page_of(trainer)


def test_clients_whose_data_lie_elsewhere(federation, make_model, make_trainer, monkeypatch) -> None:
    elsewhere = SimpleNamespace(run=SimpleNamespace(datamodule=SimpleNamespace(clients=(None, None))))
    assert report_parts.data_of(elsewhere) is None
    for module in (report, report_parts):
        monkeypatch.setattr(module, "data_of", lambda trainer: None)
    trainer = make_trainer(callbacks=RunReport())
    trainer.fit(make_model(), federation, FedAvg())
    record = record_of(trainer)
    assert record.best is not None
    assert (record.partition, record.points, record.best.confusion) == (None, None, None)
    assert "No predictions were kept." in page_of(trainer)


def test_nothing_of_the_training_depends_on_it(federation, make_model, make_trainer, assert_same) -> None:
    histories = []
    for callbacks in ([], [RunReport()]):
        trainer = make_trainer(callbacks=callbacks)
        trainer.fit(make_model(), federation, FedSheafHN(init_epochs=1, num_neighbors=2))
        histories.append((trainer.run.history, trainer.state_dict()["clients"]))
    assert_same(histories[0], histories[1])


def test_settings(federation, make_model, make_trainer, tmp_path) -> None:
    little = RunReport(page=False, predictions=False, embeddings=False, num_snapshots=0)
    trainer = make_trainer(callbacks=little)
    trainer.fit(make_model(), federation, FedAvg())
    record = record_of(trainer)
    assert not (trainer.run.folder / "report.html").exists()
    assert record.best is not None
    assert (record.best.confusion, record.points, record.snapshots) == (None, None, [])
    against = make_trainer(callbacks=RunReport(against=str(trainer.run.folder)))
    against.fit(make_model(), federation, Local())
    assert "Each client against FedAvg" in page_of(against)
    with pytest.raises(ValueError, match=r"RunReport.num_snapshots must not be negative, got -1"):
        RunReport(num_snapshots=-1)
    with pytest.raises(ValueError, match=r"RunReport.against: .* has no report.json"):
        RunReport(against=str(tmp_path))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*not use the graph's edge_weight")
def test_clients_with_many_graphs(make_trainer) -> None:
    for kind, shown in (("classes", "Labels of the clients"), ("numbers", "Targets of the clients")):
        trainer = make_trainer(num_rounds=1, callbacks=RunReport())
        trainer.fit(ClientModule(GIN), graph_data(kind=kind), FedAvg(num_epochs=1))
        words = page_of(trainer)
        for expected in ("Graphs of the clients", "nodes of a graph, mean", shown):
            assert expected in words
        record = record_of(trainer)
        assert record.examples == "graphs"
        assert [graph.client for graph in record.graphs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        for graph in record.graphs:
            assert len(graph.kinds) == graph.num_nodes
            assert all(first < second < graph.num_nodes for first, second in graph.edges)
        again = example_graphs(trainer, trainer.run.datamodule.clients)
        assert again == record.graphs
        if kind == "classes":
            assert {graph.target for graph in record.graphs[:2]} == {"class 0", "class 1"}
        assert "Example graphs" in words
        for graph in record.graphs:
            assert f"{graph.num_nodes} nodes and {len(graph.edges)} edges, {graph.target}" in words


def test_graphs_in_words_and_pictures_of_graphs_without_edges() -> None:
    assert in_words(torch.tensor(1), ("no", "yes")) == "yes"
    assert in_words(torch.tensor(-1), None) == "unlabeled"
    assert in_words(torch.tensor([-0.5, torch.nan, 2.0, 3.0, 4.0]), None) == "\N{MINUS SIGN}0.5, 2, 3, ..."
    lone = [ExampleGraph(client=0, num_nodes=n, edges=[], kinds=[9] * n, target="class 0") for n in (1, 3)]
    assert "1 node and 0 edges, class 0; 3 nodes" in Album().graphs(lone, title="a").svg
