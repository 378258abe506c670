"""A client that joins after the training gets a model of its own, and leaves the run as it was."""

import copy
import csv
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import task_data
import torch
from line_clients import Lines
from torch.optim import SGD
from torch_geometric.data import Data
from trained_runs import graph_of, loaded

import fl_lightning as fl
from fl_lightning.callbacks import FederatedCheckpoint, RunReport
from fl_lightning.command_line import main
from fl_lightning.models import MLP
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.run.joining import extended
from fl_lightning.strategies import DPSGD, Ditto, FedBABU, FedPer, Panacea

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def accuracy(run: Any, name: str) -> float:
    data = run.data(name)
    right_N = run.predictions()[name].argmax(dim=1) == data.y_N
    return float(right_N[data.test_mask_N].float().mean())


@pytest.fixture
def unrelated(federation) -> Any:
    """Five clients without a relation graph."""
    data = copy.copy(federation)
    data._relation_CC = None
    data.__dict__.pop("registry", None)
    return data


@pytest.mark.parametrize("strategy", [FedPer, Ditto])
def test_a_new_client_learns_what_is_its_own(strategy, unrelated, make_trainer) -> None:
    run = loaded(make_trainer, unrelated, strategy)
    state, known = copy.deepcopy(run._run.strategy.state_dict()), run.predictions()
    data = run.data(run.names[0])
    turned_N = (data.y_N.clamp(min=0) + 1) % 3  # its classes mean something else than the others'
    few_N = torch.arange(data.size) % 2 == 0
    joined = run.onboard(graph_of(data, y=turned_N, train_mask=few_N), "late", num_epochs=60)
    assert joined.names == ("late",)
    assert joined.data("late").test_mask_N.equal(~few_N)
    assert joined.scores["test/acc"] == pytest.approx(accuracy(joined, "late"), abs=1e-6)
    borrowed = run.predict(graph_of(data), run.names[0]).argmax(dim=1) == turned_N
    assert joined.scores["test/acc"] > float(borrowed[~few_N].float().mean()) + 0.3
    model = joined.client("late")
    predicted = model(data.x_NF, data.edge_index_2E).softmax(dim=1)
    assert torch.allclose(predicted, joined.predictions()["late"], atol=1e-6)
    assert torch.allclose(joined.predict(graph_of(data), "late"), predicted, atol=1e-6)
    again = run.onboard(graph_of(data, y=turned_N, train_mask=few_N), "late", num_epochs=60)
    assert torch.equal(again.predictions()["late"], joined.predictions()["late"])
    for name, value in known.items():
        assert torch.equal(run.predictions()[name], value)
    for name, model in state["models"].items():
        assert torch.equal(run._run.strategy.state_dict()["models"][name], model)
    assert len(run._run.registry) == 5


def test_the_servers_model_is_that_of_the_run_that_a_client_joined(unrelated, make_trainer) -> None:
    run = loaded(make_trainer, unrelated, FedPer)
    data = run.data(run.names[0])
    new = graph_of(data, y=data.y_N)
    joined = run.onboard(new, "late", num_epochs=2)
    for ask in (joined.global_model, lambda: joined.predict(new), lambda: joined.predict(new, num_finetune_epochs=1)):
        with pytest.raises(ValueError, match="FedPer left each client a model of its own"):
            ask()
    run = loaded(make_trainer, unrelated, FedBABU)
    joined = run.onboard(new, "late")
    assert torch.equal(joined.predict(new), run.predict(new))
    assert not torch.equal(joined.predict(new), joined.predict(new, "late"))
    assert run.same(joined.onboard(new, "later").global_model(), run.global_model(), run.names[0])


def test_a_new_client_of_every_task(make_trainer, tmp_path) -> None:
    run = loaded(make_trainer, task_data.graph_data(batch_size=4, cache_dir=str(tmp_path)), FedPer)
    joined = run.onboard(task_data.graphs_of()[1], like=run.names[1])
    assert joined.predictions()["new-client"].shape == (len(task_data.graphs_of()[1]), 2)

    run = loaded(make_trainer, task_data.link_data(tmp_path), FedPer)
    data = run.data(run.names[0])
    new = Data(x=data.graph.x_NF, edge_index=data.graph.edge_index_2E, edge_label_index=data.pair_P2.t())
    new.edge_label, new.train_mask = data.y_N[:, 0], data.train_mask_N
    joined = run.onboard(new)
    assert joined.predictions()["new-client"].shape == (data.size, 1)
    assert 0 <= joined.scores["test/auroc"] <= 1

    lines = fl.FederatedDataModule(Lines(), cache_dir=str(tmp_path))
    lines.setup()
    run = loaded(make_trainer, lines, FedPer)
    data = run.data(run.names[0])
    joined = run.onboard({"x": data.x_NX, "y": data.y_N})
    assert joined.predictions()["new-client"].shape == run.predictions()[run.names[0]].shape


def test_who_cannot_join_is_told_why(unrelated, make_trainer) -> None:
    run = loaded(make_trainer, unrelated)
    data = run.data(run.names[0])
    new = graph_of(data, y=data.y_N)
    with pytest.raises(ValueError, match=f"there is a client '{run.names[1]}' already"):
        run.onboard(new, run.names[1])
    with pytest.raises(ValueError, match="no example has a target: give y"):
        run.onboard(graph_of(data))
    for wrong in (5, ""):
        with pytest.raises(ValueError, match="name must be a text such as 'hospital-7'"):
            run.onboard(new, wrong)
    with pytest.raises(ValueError, match="has 2 features, the run's clients have 6"):
        run.onboard(dataclasses.replace(data, x_NF=data.x_NF[:, :2]))
    with pytest.raises(ValueError, match="y has class 9, but the run's classes are 0 to 2"):
        run.onboard(dataclasses.replace(data, y_N=data.y_N + 7))
    with pytest.raises(ValueError, match="num_epochs must be at least 1, got 0"):
        run.onboard(new, num_epochs=0)
    with pytest.raises(ValueError, match="has 4 features, the run's clients have 6"):
        run.onboard(Data(x=torch.ones(3, 4), edge_index=torch.zeros(2, 0).long()))
    with pytest.raises(ValueError, match="neighbors are given, but the clients have no relation graph"):
        run.onboard(new, neighbors={run.names[0]: 1.0})

    def breaks(*_: Any) -> None:
        raise OverflowError("too much")

    run._run.model.loss = breaks
    with pytest.raises(ValueError, match=r"new-client cannot join, since its training failed: .*too much"):
        run.onboard(new)


def test_relations_to_the_others_are_asked_for(federation, make_trainer) -> None:
    run = loaded(make_trainer, federation, Panacea)
    own = run.data(run.names[0])
    new = graph_of(own, y=own.y_N)
    with pytest.raises(ValueError, match="the clients have a relation graph: give neighbors, the weight of each"):
        run.onboard(new)
    for wrong in ({"nobody": 1.0}, {run.names[0]: -1.0}, {run.names[0]: float("nan")}):
        with pytest.raises(ValueError, match="give numbers of at least 0 by name, of client-00"):
            run.onboard(new, neighbors=wrong)
    joined = run.onboard(new, neighbors={run.names[0]: 1.0, run.names[3]: 0.5})
    assert joined._run.registry.relation_CC[5].tolist() == [1.0, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert joined._run.registry.relation_CC[:5, :5].equal(federation.relation_CC)
    assert joined._run.registry.relation_CC.equal(joined._run.registry.relation_CC.T)
    run = loaded(make_trainer, federation, DPSGD)
    with pytest.raises(ValueError, match="nobody can join a run of DPSGD after the training, by how the method works"):
        run.onboard(new, neighbors={})


def test_what_private_training_spends_of_a_new_clients_examples(make_trainer, tmp_path) -> None:
    def parts() -> dict[str, Any]:
        privacy = RecordPrivacy(max_grad_norm=1.0, noise_multiplier=1.0)
        net, sgd = functools.partial(MLP, hidden_channels=4), functools.partial(SGD, lr=0.1)
        return {"client": fl.ClientModule(net, sgd, privacy=privacy), "strategy": FedPer(num_epochs=1)}

    data = fl.FederatedDataModule(Lines(), cache_dir=str(tmp_path), batch_size=4)
    trainer = make_trainer(num_rounds=1, callbacks=[FederatedCheckpoint(every_seconds=0), RunReport()])
    trained = parts()
    trainer.fit(trained["client"], data, trained["strategy"])
    run = fl.load_run(trainer.run.folder, data=data, **parts())
    new = run.data(run.names[0])
    joined = run.onboard({"x": new.x_NX, "y": new.y_N})
    assert joined.scores["epsilon"] == joined.scores["epsilon/new-client"] > 0


def test_a_servers_state_gets_a_row() -> None:
    saved = {
        "rows": torch.ones(3, 2),
        "pairs": torch.ones(3, 3),
        "wide": torch.ones(3, 4),
        "other": torch.ones(2, 3),
        "by_client": {0: torch.ones(1), 2: torch.ones(1)},
        "listed": [1.0, 2.0, 3.0],
        "steps": 7,
    }
    initial = {
        "rows": torch.full((4, 2), 5.0),
        "pairs": torch.zeros(4, 4),
        "wide": torch.zeros(4, 0),
        "other": torch.zeros(2, 3),
        "by_client": {client: torch.zeros(1) for client in range(4)},
        "listed": [0.0] * 4,
        "steps": 0,
    }
    result = extended(saved, initial, 3)
    assert result["rows"].tolist() == [[1, 1]] * 3 + [[5, 5]]
    assert result["pairs"].tolist() == [[1, 1, 1, 0]] * 3 + [[0, 0, 0, 0]]
    assert result["wide"].tolist() == [[1] * 4] * 3 + [[0] * 4]
    assert result["other"].equal(saved["other"])
    assert sorted(result["by_client"]) == [0, 2, 3]
    assert result["listed"] == [1.0, 2.0, 3.0, 0.0]
    assert result["steps"] == 7
    assert saved["rows"].shape == (3, 2)


@pytest.mark.full
def test_the_commands(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    small = ["--trainer.num_rounds", "1", "--data.source.init_args.num_nodes", "240", "--strategy", "FedPer"]
    assert main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *small]) == 0
    data = fl.load_run("runs/quickstart/version_0").data("client-03")
    torch.save(graph_of(data, y=data.y_N, train_mask=torch.arange(data.size) % 2 == 0).to_dict(), "new.pt")
    capsys.readouterr()
    assert main(["predict", "runs/quickstart/version_0", "--data", "new.pt", "--onboard", "--to", "late.csv"]) == 0
    assert re.search(r"^new-client: test/acc [01]\.?\d*$", capsys.readouterr().out, re.MULTILINE)
    with open("late.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == data.size
    assert main(["export", "runs/quickstart/version_0", "--onboard", "new.pt", "--to", "late.pt"]) == 0
    assert Path("load_late.py").is_file()
    command = ["predict", "runs/quickstart/version_0", "--data", "new.pt", "--onboard", "--neighbors"]
    capsys.readouterr()
    assert main([*command, "client-00=much"]) == 2
    assert "--neighbors client-00=much: give a number after the name, such as client-00=0.5" in capsys.readouterr().err
    assert main([*command, "client-00"]) == 2
    assert "neighbors are given, but the clients have no relation graph" in capsys.readouterr().err
    command[command.index("--onboard")] = "--global"
    assert main([*command, "client-00"]) == 2
    assert "--neighbors is of a new client: give --onboard with it" in capsys.readouterr().err
