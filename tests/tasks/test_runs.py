"""Federations of every task from data to report: both executors, predictions, sites."""

import functools
import json

import pytest
import torch
from both_executors import both_executors
from task_data import FEATURES, NODES, LabeledRows, graph_data, node_data, ring, rows_of_predictions
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import RunReport
from fl_lightning.data import DirichletPartitioner, Examples, InMemorySource, ManyGraphs, RandomPartitioner
from fl_lightning.models import GCN, MLP, GRUForecaster, PooledGCN
from fl_lightning.report.record import RunRecord
from fl_lightning.round.stage import Evaluation
from fl_lightning.strategies import APFL, SCAFFOLD, Ditto, FedAvg, FedGTA, FedProto, FedPub, FedSheafHN, Kin
from fl_lightning.tasks import (
    ExampleClassification,
    ExampleRegression,
    GraphClassification,
    GraphRegression,
    NodeClassification,
    NodeRegression,
)

RATE = functools.partial(SGD, lr=0.05)


def client(net=GCN, **settings) -> ClientModule:
    return ClientModule(functools.partial(net, hidden_channels=8, **settings), RATE)


def agree(data, make, strategy, make_trainer, assert_same, *, num_rounds: int = 2):
    """The same run by both executors; returns the reference's trainer and its result."""
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true", num_rounds=num_rounds)
        runs.append((trainer, trainer.fit(make(), data, strategy())))
    (reference, expected), (trainer, result) = runs
    assert_same(trainer.run.executor.state().parameters, reference.run.executor.state().parameters, tolerance=1e-9)
    assert_same(result, expected, tolerance=1e-5)
    predicted = [each.run.executor.predict(each.run.strategy.evaluations([0])[""], [0], 1)[0] for each, _ in runs]
    assert torch.allclose(*predicted, atol=1e-6)
    return reference, expected


@pytest.mark.parametrize("kind", ["numbers", "labels"])
@pytest.mark.parametrize("strategy", [FedAvg, Ditto, Kin, FedSheafHN], ids=lambda kind: kind.__name__)
def test_nodes_with_gaps(kind, strategy, make_trainer, assert_same, tmp_path) -> None:
    data = node_data(kind, tmp_path)
    assert data.task == (NodeRegression() if kind == "numbers" else NodeClassification(multi_label=True))
    assert data.num_outputs == (2 if kind == "numbers" else 3)
    settings = {"num_neighbors": 2, "hidden_channels": 8} if strategy is FedSheafHN else {}
    trainer, result = agree(data, client, lambda: strategy(**settings), make_trainer, assert_same, num_rounds=3)
    metrics = {"mse", "loss"} if kind == "numbers" else {"acc", "loss", "auroc", "average_precision"}
    assert {f"test/{name}" for name in metrics} <= set(result)
    course = [row["train/loss"] for row in trainer.run.history]
    assert course[-1] < course[0]
    monitor, best = ("val/mse", min) if kind == "numbers" else ("val/auroc", max)
    assert trainer.run.selection.monitor == monitor
    assert result[monitor] == pytest.approx(best(row[monitor] for row in trainer.run.history))
    worst = max if kind == "numbers" else min
    scores = trainer.run.scores[""].extras[monitor.replace("val", "test")]
    assert trainer.run.history[-1][f"{monitor.replace('val', 'test')}_worst"] == pytest.approx(
        worst((scores[:, 0] / scores[:, 1]).tolist())
    )


def test_a_node_of_which_nothing_is_known_has_no_role(tmp_path) -> None:
    data = node_data("numbers", tmp_path)
    roles = torch.zeros(NODES, dtype=torch.bool)
    for each, idx in zip(data.clients, data.allocation.source_idx, strict=True):
        roles[idx] = each.train_mask_N | each.val_mask_N | each.test_mask_N
    known = torch.zeros(NODES, dtype=torch.bool)
    for each, idx in zip(data.clients, data.allocation.source_idx, strict=True):
        known[idx] = ~each.y_N.isnan().all(dim=1)
    assert not roles[5]
    assert torch.equal(roles, known)


def test_several_labels_of_rows(make_trainer, assert_same, monkeypatch) -> None:
    monkeypatch.setattr("fl_lightning.batches.examples.PART_NUMBERS", 64)  # in parts, which are scored together
    data = FederatedDataModule(LabeledRows(), batch_size=6)
    data.setup()
    assert data.task == ExampleClassification(multi_label=True)
    trainer, result = agree(data, lambda: client(MLP), FedAvg, make_trainer, assert_same, num_rounds=4)
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[0]["train/loss"]
    assert result["val/auroc"] == max(row["val/auroc"] for row in trainer.run.history)
    with pytest.raises(ValueError, match=r"model.metrics has 'f1', which ExampleClassification \(multi_label\) does"):
        make_trainer().fit(ClientModule(metrics=["f1"]), data, FedAvg())


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("strategy", [FedAvg, Ditto, SCAFFOLD, FedSheafHN, FedProto], ids=lambda kind: kind.__name__)
def test_whole_graphs(strategy, batch_size, make_trainer, assert_same, monkeypatch) -> None:
    if batch_size is not None:
        monkeypatch.setattr("fl_lightning.batches.graph_sets.PART_GRAPHS", 5)  # scored and predicted in parts
    data = graph_data(batch_size=batch_size)
    assert data.task == GraphClassification()
    settings = {"num_neighbors": 2, "hidden_channels": 8} if strategy is FedSheafHN else {}
    make = functools.partial(client, PooledGCN, num_layers=2)
    trainer, _ = agree(data, make, lambda: strategy(**settings), make_trainer, assert_same, num_rounds=3)
    course = [row["train/loss"] for row in trainer.run.history]
    assert course[-1] < course[0] or strategy is FedProto  # which is pulled elsewhere, too


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
@pytest.mark.parametrize("kind", ["graphs", "rows", "nodes"])
def test_only_the_main_model_is_scored_on_training_examples(kind, executor, make_trainer, tmp_path) -> None:
    """Unless that costs nothing, as for the nodes of a graph."""
    data = {"graphs": graph_data, "nodes": lambda: node_data("labels", tmp_path)}.get(kind, FederatedDataModule)
    data = data(LabeledRows()) if kind == "rows" else data()
    trainer = make_trainer(executor=executor(), num_rounds=1)
    trainer.fit(client({"graphs": PooledGCN, "rows": MLP}.get(kind, GCN)), data, FedAvg(num_epochs=1))
    row = trainer.run.history[-1]
    assert {"train/acc", "val/acc", "test/acc", "trained/val/acc", "trained/test/acc"} <= set(row)
    assert ("trained/train/acc" in row) == ("trained/train/acc_weighted" in row) == (kind == "nodes")
    scored = {"": Evaluation()}, {"other/": Evaluation()}
    main, other = (next(iter(trainer.run.executor.evaluate(each, [0, 1], 0).values())).upload.extras for each in scored)
    assert main.keys() == other.keys()
    for name, pair in main.items():
        expected = torch.zeros_like(pair) if name.startswith("train/") and kind != "nodes" else pair
        assert torch.allclose(other[name], expected), name
    whole, some = (
        trainer.run.executor.predict(Evaluation(training_examples=each), [0, 1], 0) for each in (True, False)
    )
    for number, own in enumerate(data.clients[:2]):
        assert len(whole[number]) == own.size
        rows = own.val_mask_N | own.test_mask_N if kind != "nodes" else torch.ones_like(own.val_mask_N)
        assert torch.allclose(some[number], whole[number][rows], atol=1e-6)


@pytest.mark.parametrize("kind", ["numbers", "labels"])
@pytest.mark.parametrize("pooling", ["sum", "max"])
def test_other_targets_of_graphs(kind, pooling, make_trainer, assert_same) -> None:
    data = graph_data(kind=kind, batch_size=5)
    assert data.task == (GraphRegression() if kind == "numbers" else GraphClassification(multi_label=True))
    make = functools.partial(client, PooledGCN, pooling=pooling, batch_norm=True)
    agree(data, make, FedAvg, make_trainer, assert_same)


def test_the_client_fits_every_task(make_trainer, tmp_path) -> None:
    for data, net in (
        (node_data("numbers", tmp_path), GCN),
        (graph_data(), PooledGCN),
        (FederatedDataModule(LabeledRows()), MLP),
        (FederatedDataModule(Steps()), GRUForecaster),
    ):
        trainer = make_trainer(num_rounds=1)
        trainer.fit(ClientModule(), data, FedAvg(num_epochs=1))
        assert trainer.run.model.net_factories == [net]
        assert trainer.run.model.task == data.task


class Steps(LabeledRows):
    """Series of which a number follows."""

    def load(self, root, seed):
        x = tuple(torch.randn(12, 5, 2, generator=torch.Generator().manual_seed(c)) for c in range(2))
        return Examples(names=("a", "b"), x=x, y=tuple(each.sum(dim=(1, 2))[:, None] for each in x), num_outputs=1)


def test_files_of_predictions_have_gaps(make_trainer, tmp_path) -> None:
    for kind, columns in (
        ("numbers", ["target_0", "prediction_0", "target_1", "prediction_1"]),
        ("labels", ["label_0", "probability_0", "label_1", "probability_1", "label_2", "probability_2"]),
    ):
        data = node_data(kind, tmp_path)
        trainer = make_trainer(num_rounds=1)
        trainer.fit(client(), data, FedAvg(num_epochs=1))
        rows = rows_of_predictions(trainer, data, tmp_path / "p.csv")
        assert list(rows[0]) == ["client", "node", "split", *columns]
        assert len(rows) == NODES
        (nothing,) = [row for row in rows if row["node"] == "5"]
        assert nothing["split"] == "none"
        assert {nothing[name] for name in columns[::2]} == {""}
        assert all(nothing[name] for name in columns[1::2])
        assert any(row[columns[0]] for row in rows)


@pytest.mark.parametrize(("kind", "words"), [("numbers", "Predicted over true values"), ("labels", "F1 of the labels")])
def test_reports(kind, words, make_trainer, tmp_path) -> None:
    trainer = make_trainer(callbacks=RunReport())
    trainer.fit(client(), node_data(kind, tmp_path / "cache"), FedAvg())
    record = RunRecord.read(trainer.run.folder)
    assert record.task == trainer.run.registry.task.plain
    assert (record.examples, record.regression, record.unkept) == ("nodes", True, [])
    assert record.best.confusion is None
    bare = "mse" if kind == "numbers" else "acc"
    assert 0 < record.reference[f"test/{bare}"] < 10
    text = (trainer.run.folder / "report.html").read_text()
    assert words in text
    assert ("test/mse without a model" in text) == (kind == "numbers")
    if kind == "labels":
        held = [c for c in trainer.run.datamodule.clients]
        known = sum(int((~each.y_N[each.test_mask_N].isnan()).sum()) for each in held)
        assert torch.tensor(record.best.label_counts).sum() == known


def test_reports_of_before_tasks_are_read(make_trainer, tmp_path) -> None:
    trainer = make_trainer(callbacks=RunReport(page=False))
    trainer.fit(client(), node_data("numbers", tmp_path / "cache"), FedAvg(num_epochs=1))
    path = trainer.run.folder / "report.json"
    content = json.loads(path.read_text())
    for name in ("task", "examples", "reference"):
        del content[name]
    path.write_text(json.dumps({**content, "kind": "graphs"}))
    assert RunRecord.read(trainer.run.folder).examples == "nodes"


def test_strategies_refuse_what_they_are_not_for(make_trainer, tmp_path) -> None:
    numbers, graphs = node_data("numbers", tmp_path), graph_data()
    for data, strategy, message in (
        (numbers, FedProto(), "FedProto is for classes, but the targets are numbers: choose a source of classes"),
        (numbers, FedGTA(), "FedGTA is for classes, but the targets are numbers"),
        (node_data("labels", tmp_path), FedProto(), "FedProto is for classes, but the targets are labels"),
        (
            graphs,
            FedPub(),
            "FedPub is for clients with graphs whose nodes are the examples, but here the examples are",
        ),
        (
            FederatedDataModule(LabeledRows()),
            FedPub(),
            "FedPub is for clients with graphs, but these have independent exam",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer().fit(data=data, strategy=strategy)
    with pytest.raises(ValueError, match=r"GraphClassification needs a net with an output for each graph: set model"):
        make_trainer().fit(client(), graphs, FedAvg())


def test_partitioners_by_class_refuse_numbers(tmp_path) -> None:
    graph = Data(x=torch.rand(NODES, FEATURES), edge_index=ring(NODES), y=torch.rand(NODES))
    data = FederatedDataModule(graph, DirichletPartitioner(2), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="DirichletPartitioner shares nodes out by their classes, but these have n"):
        data.setup()


def test_graphs_of_a_list_learn_the_same(tmp_path) -> None:
    numbers = Data(x=torch.rand(NODES, FEATURES), edge_index=ring(NODES), y=torch.rand(NODES, 2))
    other = Data(x=torch.rand(NODES, FEATURES), edge_index=ring(NODES), y=torch.arange(NODES) % 2)
    data = FederatedDataModule([numbers, numbers], cache_dir=str(tmp_path))
    data.setup()
    assert (data.task, data.num_outputs) == (NodeRegression(), 2)
    sources = [InMemorySource(each) for each in (numbers, other)]
    with pytest.raises(ValueError, match=r"graph 1 has targets of shape \(60,\), the first \(60, 2\): all clients"):
        FederatedDataModule(ManyGraphs(sources), cache_dir=str(tmp_path)).setup()


def test_a_graph_says_itself_what_its_targets_are(tmp_path) -> None:
    graph = Data(x=torch.rand(NODES, FEATURES), edge_index=ring(NODES), y=torch.arange(NODES).float(), task="numbers")
    for source, partitioner in ((graph, RandomPartitioner(2)), ([graph, graph], None)):
        data = FederatedDataModule(source, partitioner, cache_dir=str(tmp_path))
        data.setup()
        assert (data.task, data.num_outputs) == (NodeRegression(), 1)
        assert data.statistics(non_iidness=False).label_counts == ()


def test_monitors_of_a_subclass_win(make_trainer, tmp_path) -> None:
    class Absolute(ClientModule):
        monitor = "val/mae"
        metric_directions = {"mae": "min"}  # noqa: RUF012

        def scores(self, output, batch):
            from fl_lightning.tasks.targets import split_scores

            error = (output.logits - batch.y).abs().nanmean(dim=-1)
            return super().scores(output, batch) | split_scores(batch, {"mae": error.nan_to_num()})

        def loss(self, output, batch):
            error = (output.logits - torch.where(batch.y.isnan(), output.logits, batch.y)).abs().sum(dim=-1)
            return (error * batch.train_mask).sum(dim=-1) / batch.train_mask.sum(dim=-1)

    trainer = make_trainer(num_rounds=3)
    result = trainer.fit(
        Absolute(functools.partial(GCN, hidden_channels=8), RATE), node_data("numbers", tmp_path), FedAvg()
    )
    assert trainer.run.selection.monitor == "val/mae"
    assert result["val/mae"] == min(row["val/mae"] for row in trainer.run.history)


@both_executors
def test_two_models_of_a_client_regress(executor, make_trainer, tmp_path) -> None:
    trainer = make_trainer(executor=executor())
    result = trainer.fit(client(), node_data("numbers", tmp_path), APFL(num_epochs=1))
    assert result["test/mse"] > 0
    assert trainer.run.model.task != ExampleRegression()
