"""Trained models predict new data of every task, as the run's own, and bad data are refused by name."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import task_data
import torch
from line_clients import Lines
from torch_geometric.data import Data
from trained_runs import graph_of, loaded

import fl_lightning as fl
from fl_lightning.command_line import main
from fl_lightning.data.preparation import Preparation
from fl_lightning.data.sources.many_graph_sets import GraphSets
from fl_lightning.strategies import APFL, FedPer, Local
from fl_lightning.tasks import NodeClassification, NodeRegression
from fl_lightning.trained.new_data import Like, as_client_data

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(federation, make_trainer) -> Any:
    return loaded(make_trainer, federation)


def test_a_clients_own_graph_is_predicted_as_it_was(run) -> None:
    for name in run.names[:2]:
        data = run.data(name)
        assert torch.allclose(run.predict(graph_of(data), name), run.predictions()[name], atol=1e-6)
        assert torch.allclose(run.predict(graph_of(data)), run.predictions()[name], atol=1e-6)  # FedAvg has one model


def test_fine_tuning_learns_the_new_targets_and_leaves_the_run_as_it_was(run) -> None:
    data = run.data(run.names[0])
    turned = (data.y_N.clamp(min=0) + 1) % 3
    new = graph_of(data, y=turned)
    before = run.predict(new)
    tuned = run.predict(new, num_finetune_epochs=60)
    right = [float((each.argmax(dim=1) == turned).float().mean()) for each in (before, tuned)]
    assert right[1] > right[0] + 0.2
    assert torch.equal(run.predict(new), before)
    assert torch.equal(run.predict(new, num_finetune_epochs=60), tuned)
    few = torch.zeros(data.size, dtype=torch.bool)
    few[:4] = True
    made = run.new_data(graph_of(data, y=turned, train_mask=few))
    assert made.train_mask_N.equal(few)
    assert made.test_mask_N.equal(~few)


def test_who_trains_and_who_tests_is_as_given(run, make_trainer, tmp_path) -> None:
    data = run.data(run.names[0])
    third = torch.arange(data.size) % 3
    masks = {f"{part}_mask": third == i for i, part in enumerate(("train", "val", "test"))}
    made = run.new_data(graph_of(data, y=data.y_N, **masks))
    known_N = data.y_N >= 0
    for name, mask_N in masks.items():
        assert getattr(made, f"{name}_N").equal(mask_N & known_N)
    made = run.new_data(graph_of(data, y=data.y_N, train_mask=(third == 0).long()))
    assert made.test_mask_N.equal(known_N & (third != 0))
    for wrong, message in (
        ({"test_mask": third == 2}, "has test_mask without train_mask: say what trains as well"),
        ({"train_mask": third < 2, "test_mask": third > 0}, "train_mask and test_mask overlap"),
        ({"train_mask": third}, "train_mask is torch.int64 of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            run.new_data(graph_of(data, y=data.y_N, **wrong))

    rows = fl.FederatedDataModule(Lines(), cache_dir=str(tmp_path))
    rows.setup()
    run = loaded(make_trainer, rows)
    x, y = run.data(run.names[0]).x_NX, run.data(run.names[0]).y_N
    parts = {"train": (x[:4], y[:4]), "test": (x[4:], y[4:])}
    for new in (parts, {"x": x, "y": y, "train_mask": torch.arange(len(x)) < 4}):
        made = run.new_data(new)
        assert torch.equal(made.x_NX, x)
        assert made.train_mask_N.nonzero().flatten().tolist() == [0, 1, 2, 3]
    for new in ((x, y), {"x": x.numpy(), "y": y.numpy()}):
        assert run.new_data(new).train_mask_N.all()
    with pytest.raises(ValueError, match="has 'trian_mask': give x, y and train_mask"):
        run.new_data({"x": x, "y": y, "trian_mask": torch.ones(len(x))})


@pytest.mark.parametrize(
    ("regression", "ignore_label", "given", "expected"),
    [
        (True, None, [-3, -1], [[-3.0], [-1.0]]),
        (True, None, [math.nan, math.nan], [[-99.0], [-99.0]]),
        (True, 7, [-3, 7], [[-3.0], [-99.0]]),
        (False, None, [-3, -1], [-1, -1]),
        (False, 255, [255, 1], [-1, 1]),
        (False, 255, [255, 255], [-1, -1]),
    ],
    ids=[
        "negative numbers",
        "missing numbers",
        "an ignored number",
        "negative classes",
        "an ignored class",
        "no class",
    ],
)
def test_which_targets_are_unknown(regression, ignore_label, given, expected) -> None:
    task = NodeRegression() if regression else NodeClassification()
    client_data = SimpleNamespace(y_N=torch.zeros(4, 1) if regression else torch.zeros(4).long(), num_outputs=None)
    registry = SimpleNamespace(task=task, outputs_of=lambda client_data: 3)
    like = Like(client_data=client_data, registry=registry, source=None, preparation=Preparation())
    assert like.targets(given, 2, ignore_label).nan_to_num(-99).tolist() == expected


def test_an_ignored_label_of_the_source_is_none_of_new_data(run) -> None:
    data = run.data(run.names[0])
    like = Like(
        client_data=data,
        registry=run._run.registry,
        source=None,
        preparation=Preparation(normalize_features=False, ignore_label=2),
    )
    made = as_client_data(data, graph_of(data, y=data.y_N), like)
    assert torch.equal(made.y_N, torch.where(data.y_N == 2, -1, data.y_N))


def test_what_does_not_fit_is_named(run, tmp_path) -> None:
    data = run.data(run.names[0])
    for new, message in (
        (tmp_path / "none.pt", "there is no file"),
        (torch.zeros(3, 6), "the new data is Tensor of shape .3, 6.: give one graph"),
        (Data(x=torch.ones(3, 4), edge_index=torch.zeros(2, 0).long()), "has 4 features, the run's clients have 6"),
        (graph_of(data, y=torch.full((data.size,), 3)), "y has class 3, but the run's classes are 0 to 2"),
        (graph_of(data, y=data.y_N, train_mask=torch.ones(2)), "train_mask is torch.float32 of shape .2,."),
        (graph_of(data, y=["a"] * data.size), r"y is a list that makes no tensor \(too many .*: give numbers"),
        (graph_of(data, y=data.y_N, train_mask=["yes"]), "train_mask is a list that makes no tensor"),
        (
            graph_of(data, edge_weight=torch.ones(data.num_edges)),
            "must have the edge_weight that the run",
        ),
        (Data(x=data.x_NF), "has no edge_index"),
    ):
        with pytest.raises(ValueError, match=message):
            run.predict(new)
    with pytest.raises(ValueError, match="nothing to fine-tune on: give y"):
        run.predict(graph_of(data), num_finetune_epochs=1)
    with pytest.raises(ValueError, match="num_finetune_epochs must be at least 0, got -1"):
        run.predict(graph_of(data), num_finetune_epochs=-1)
    (tmp_path / "bad.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"bad.pt cannot be read"):
        run.predict(tmp_path / "bad.pt")


def test_a_method_without_a_model_for_new_clients(federation, make_trainer) -> None:
    run = loaded(make_trainer, federation, Local)
    data = run.data(run.names[1])
    with pytest.raises(ValueError, match="Local left each client a model of its own"):
        run.predict(graph_of(data))
    run = loaded(make_trainer, federation, APFL)
    with pytest.raises(ValueError, match="APFL computes outputs by a rule of its own, so that it cannot be fine-tuned"):
        run.predict(graph_of(data, y=data.y_N), run.names[1], num_finetune_epochs=1)


def test_graphs(make_trainer, tmp_path) -> None:
    data = task_data.graph_data(batch_size=4, cache_dir=str(tmp_path))
    run = loaded(make_trainer, data)
    graphs = task_data.graphs_of()[1]
    unlabeled = [Data(x=g.x, edge_index=g.edge_index, edge_weight=g.edge_weight) for g in graphs]
    torch.save(unlabeled, tmp_path / "new.pt")
    assert torch.allclose(run.predict(tmp_path / "new.pt", run.names[1]), run.predictions()[run.names[1]], atol=1e-6)
    assert run.predict(graphs, num_finetune_epochs=2).shape == (len(graphs), 2)
    made = run.new_data({"train": graphs[:2], "test": graphs[2:]})
    assert made.train_mask_N.sum() == 2
    with pytest.raises(ValueError, match="the new data has no graphs: give at least one"):
        run.predict([])
    with pytest.raises(ValueError, match="the new data is a Data: give a list of graphs"):
        run.predict(graphs[0])
    wrong = Data(**{**graphs[1].to_dict(), "edge_index": graphs[1].edge_index > 0})
    with pytest.raises(ValueError, match=r"the new data, graph 1: edge_index is torch\.bool"):
        run.predict([graphs[0], wrong])


def test_graphs_of_a_client_with_features_of_its_own(make_trainer, tmp_path) -> None:
    graphs = task_data.graphs_of()[0]
    wide = [Data(**{**graph.to_dict(), "x": graph.x.repeat(1, 2)}) for graph in graphs]
    data = fl.FederatedDataModule(GraphSets([graphs, wide]), cache_dir=str(tmp_path))
    data.setup()
    run = loaded(make_trainer, data, FedPer)
    own = graphs[0].x.shape[1]
    padded = [Data(**{**graph.to_dict(), "x": torch.nn.functional.pad(graph.x, (0, own))}) for graph in graphs]
    assert torch.equal(run.predict(padded, run.names[0]), run.predict(graphs, run.names[0]))
    for name, width, fits in zip(run.names, (own, 2 * own), (graphs, wide), strict=True):
        assert run.predict(fits, name).shape == (len(graphs), 2)
        for other in {own - 1, own, own + 1, 2 * own, 2 * own + 1} - {width}:
            others = [Data(**{**graph.to_dict(), "x": torch.ones(graph.num_nodes, other)}) for graph in graphs]
            with pytest.raises(ValueError, match=f"has {other} features, the client's graphs {width}: give the same"):
                run.predict(others, name)


def test_graphs_without_features_have_the_degrees_of_the_runs(make_trainer, tmp_path) -> None:
    plain = [
        [Data(edge_index=g.edge_index, num_nodes=g.num_nodes, y=g.y) for g in own] for own in task_data.graphs_of()[:2]
    ]
    run = loaded(make_trainer, fl.FederatedDataModule(plain, cache_dir=str(tmp_path)))
    highest = run.data(run.names[0]).max_degree
    for size in (3, highest + 3):
        ends = torch.arange(1, size)
        star = Data(edge_index=torch.stack([torch.zeros_like(ends), ends]), num_nodes=size)
        made = run.new_data([star])
        assert made.union.x_NF.shape == (size, highest + 1)
        assert made.union.x_NF.argmax(dim=1).tolist() == [min(size - 1, highest), *[1] * (size - 1)]
        assert run.predict([star]).shape == (1, 2)
    given = loaded(make_trainer, task_data.graph_data(cache_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="the new data has no x: give features of each node"):
        given.predict(plain[0])


def test_links(make_trainer, tmp_path) -> None:
    run = loaded(make_trainer, task_data.link_data(tmp_path))
    data = run.data(run.names[0])
    new = Data(x=data.graph.x_NF, edge_index=data.graph.edge_index_2E, edge_label_index=data.pair_P2.t())
    assert torch.allclose(run.predict(new, run.names[0]), run.predictions()[run.names[0]], atol=1e-6)
    made = run.new_data(new)
    run.write_predictions(tmp_path / "links.csv", made, run.predict(made))
    rows = list(csv.DictReader((tmp_path / "links.csv").open()))
    assert [int(rows[0]["source"]), int(rows[0]["target"])] == data.pair_P2[0].tolist()
    assert rows[0]["linked"] == ""
    new.edge_label = data.y_N[:, 0]
    made = run.new_data(new)
    for trained, split in ((False, "none"), (True, "train")):
        run.write_predictions(tmp_path / "links.csv", made, run.predict(made), trained=trained)
        assert splits_in(tmp_path / "links.csv") == [split] * data.size
    assert run.predict(new, num_finetune_epochs=1).shape == (data.size, 1)
    new.edge_label_index = new.edge_label_index.to_sparse()
    with pytest.raises(ValueError, match="the new data: edge_label_index is sparse; save it dense"):
        run.predict(new)
    with pytest.raises(ValueError, match="has no edge_label_index: give the pairs"):
        run.predict(Data(x=data.graph.x_NF, edge_index=data.graph.edge_index_2E))


def test_links_that_are_tested_on_must_not_be_edges(make_trainer, tmp_path) -> None:
    run = loaded(make_trainer, task_data.link_data(tmp_path))
    data = run.data(run.names[0])
    new = Data(x=data.graph.x_NF, edge_index=data.graph.edge_index_2E, edge_label_index=data.pair_P2.t())
    new.edge_label, new.train_mask = data.y_N[:, 0], data.train_mask_N
    assert run.predict(new, num_finetune_epochs=1).shape == (data.size, 1)
    tested = data.pair_P2[data.test_mask_N & (data.y_N[:, 0] == 1)]
    new.edge_index = torch.cat([new.edge_index, tested[:2].flip(1).t()], dim=1)
    message = rf"2 links that are tested or validated on .* are edges of the graph or train, such as \({tested[0, 0]}"
    for role in ("test_mask", "val_mask"):
        new[role] = ~data.train_mask_N
        with pytest.raises(ValueError, match=message):
            run.predict(new, num_finetune_epochs=1)
        del new[role]
    new.edge_index = data.graph.edge_index_2E
    new.edge_label_index = torch.cat([new.edge_label_index, tested[:1].flip(1).t()], dim=1)
    new.edge_label = torch.cat([new.edge_label, torch.ones(1)])
    new.train_mask = torch.cat([new.train_mask, torch.ones(1, dtype=torch.bool)])
    with pytest.raises(ValueError, match="1 links that are tested or validated on"):
        run.predict(new)


def test_wrong_pairs_and_labels_of_pairs_are_named(make_trainer, tmp_path) -> None:
    run = loaded(make_trainer, task_data.link_data(tmp_path))
    graph = run.data(run.names[0]).graph
    good = torch.tensor([[0, 1], [2, 3]])
    for name, wrong, message in (
        (
            "edge_label_index",
            torch.ones(3, 2).long(),
            r"edge_label_index is torch.int64 of shape \(3, 2\); it must hold a",
        ),
        ("edge_label_index", good > 1, "edge_label_index is torch.bool of shape"),
        ("edge_label_index", good + 1000, r"edge 0 joins nodes \[1000, 1002\], .*; correct edge_label_index"),
        (
            "edge_label",
            torch.tensor([0, 2]),
            r"edge_label is Tensor of shape \(2,\); give 1, 0 or nan .* each of 2 pairs",
        ),
        ("edge_label", torch.ones(3), r"edge_label is Tensor of shape \(3,\); give 1, 0 or nan .* each of 2 pairs"),
    ):
        new = Data(x=graph.x_NF, edge_index=graph.edge_index_2E, edge_label_index=good)
        new[name] = wrong
        with pytest.raises(ValueError, match=message):
            run.predict(new)
    new.edge_label = torch.tensor([True, False])
    assert run.new_data(new).y_N.tolist() == [[1.0], [0.0]]


def test_negatives_are_drawn_from_training_pairs_alone(make_trainer, tmp_path) -> None:
    run = loaded(make_trainer, task_data.link_data(tmp_path))
    data = run.data(run.names[0])
    new = Data(x=data.graph.x_NF, edge_index=data.graph.edge_index_2E, edge_label_index=data.pair_P2.t())
    new.edge_label, new.train_mask, new.val_mask = data.y_N[:, 0], data.train_mask_N, data.val_mask_N
    made = run.new_data(new)
    assert torch.equal(made.candidate_M2, data.pair_P2[data.train_mask_N & (data.y_N[:, 0] == 0)])


def test_links_of_several_relations(make_trainer, tmp_path) -> None:
    source = fl.data.InMemorySource(task_data.relational_graph())
    run = loaded(make_trainer, task_data.link_data(tmp_path, source=source))
    data = run.data(run.names[0])
    new = Data(x=data.graph.x_NF, edge_index=data.graph.edge_index_2E, edge_label_index=data.pair_P2.t())
    for wrong in (None, data.relation_P[1:], data.relation_P + 1, data.relation_P.float()):
        new.edge_label_type = wrong
        with pytest.raises(ValueError, match="has no edge_label_type with a relation from 0 to 1 for each"):
            run.predict(new)
    new.edge_label_type = data.relation_P
    assert torch.allclose(run.predict(new, run.names[0]), run.predictions()[run.names[0]], atol=1e-6)


def test_rows(make_trainer, tmp_path) -> None:
    data = fl.FederatedDataModule(Lines(), cache_dir=str(tmp_path))
    data.setup()
    run = loaded(make_trainer, data)
    rows = run.data(run.names[0]).x_NX
    assert torch.allclose(run.predict(rows, run.names[0]), run.predictions()[run.names[0]], atol=1e-6)
    for wrong in (rows[0], rows.double() * 1e300):  # the nets' type holds no such numbers
        with pytest.raises(ValueError, match="give finite numbers x, a row for each example"):
            run.predict(wrong)
    for odd in (torch.Tensor.to_sparse, lambda each: each.to(torch.complex64), lambda each: each.to("meta")):
        for name, given in (("x", {"x": odd(rows)}), ("y", {"x": rows, "y": odd(rows[:, :3])})):
            with pytest.raises(ValueError, match=f"the new data: {name} is sparse, complex or without values"):
                run.predict(given)


@pytest.mark.parametrize("whose", [["--client", "c"], ["--client=c"], ["--global"], ["--onboard"]])
def test_the_run_may_be_named_last(whose: list[str], capsys) -> None:
    assert main(["predict", "--data", "mine.pt", *whose, "runs/none"]) == 2
    assert "fl-train predict: error: there is no folder runs/none" in capsys.readouterr().err


def splits_in(file: str | Path) -> list[str]:
    with open(file, newline="") as rows:
        return [row["split"] for row in csv.DictReader(rows)]


@pytest.mark.full
def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    small = ["--trainer.num_rounds", "1", "--data.source.init_args.num_nodes", "240"]
    assert main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *small]) == 0
    data = fl.load_run("runs/quickstart/version_0").data("client-03")
    torch.save(graph_of(data, y=data.y_N).to_dict(), "new.pt")
    command = ["predict", "runs/quickstart/version_0", "--data", "new.pt", "--client", "client-03"]
    assert main([*command, "--finetune", "2"]) == 0
    assert splits_in("predictions.csv") == ["train"] * data.size
    assert "predictions in predictions.csv: FedSheafHN after round 0" in capsys.readouterr().out
    assert main(command) == 0
    assert splits_in("predictions.csv") == ["none"] * data.size
    assert main([*command[:-1], "nobody"]) == 2
    assert "there is no training client 'nobody'" in capsys.readouterr().err
