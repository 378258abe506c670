"""``fl-train choose`` and ``fl.choose`` from the question to the answer, and what they refuse."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import fl_lightning as fl
from fl_lightning.choice.candidates import WrongChoice
from fl_lightning.command_line import main
from fl_lightning.data import GivenPartitioner, PlantedCommunities

SMALL = ["--data.source.num_nodes", "80", "--trainer.num_rounds", "3", "--processes", "1"]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["choose", *words])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--budget", "30"],
            "--budget is '30': give a time with its unit, such as 90s, 30m or 2h, or work, such as 20runs",
        ),
        (["--max-bytes", "many"], "--max-bytes is 'many': give a size such as 200MB"),
        (["--processes", "0"], "'0' is not a whole number of at least 1"),
        (["--grid", "lr"], "--grid 'lr' is no setting with its values: write model.optimizer.lr=0.01,0.1"),
        (["--sites", "berlin"], "--sites and --secure are for a federation: give the submitter's --kit, too"),
        (["--kit", "kits/wards", "--processes", "2"], "--processes is for a simulation"),
        (["--kit", "kits/wards", "--seeds", "2"], "--seeds is for a simulation"),
        (["--kit", "kits/wards"], "--kit kits/wards is not a submitter's kit: it has no startup/fed_admin.json"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, "--config", "mine.yaml", *words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": -1}, "seeds is -1: give a whole number of at least 1, or leave it out"),
        ({"processes": 0}, "processes is 0: give a whole number of at least 1"),
        ({"methods": "FedAvg"}, "methods is 'FedAvg': give a list"),
        ({"overrides": "--trainer.num_rounds=3"}, "overrides is '--trainer.num_rounds=3': give a list"),
        ({"grid": {"model.optimizer.lr": []}}, r"the grid's model.optimizer.lr is \[\]: give a list of values"),
        ({"grid": {"model.optimizer.lr": 0.1}}, r"the grid's model.optimizer.lr is 0.1: give a list of values"),
        ({"budget": None}, "--budget is None: give a time with its unit"),
        ({"folder": "mine.yaml"}, "mine.yaml is a file: give the search a folder"),
    ],
    ids=str,
)
def test_mistakes_in_python(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongChoice, match=message):
        fl.choose(**{"config": "mine.yaml", **arguments})


def test_objects_are_not_passed_over() -> None:
    strategy = fl.strategies.FedAvg()
    with pytest.raises(WrongChoice, match=r"^strategy beside config: give either objects or configuration files$"):
        fl.choose(strategy=strategy, config="mine.yaml")
    with pytest.raises(WrongChoice, match=r"^strategy without data: give the data$"):
        fl.choose(strategy=strategy)


@pytest.mark.full
def test_settings_are_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert "num_rounds" in refusal(capsys, "--config", "mine.yaml", "--trainer.num_rounds", "0")
    assert "nothing.yaml" in refusal(capsys, "--config", "nothing.yaml")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_command_from_the_question_to_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--config", "mine.yaml", "--budget", "20m", "--methods", "FedAvg", "FedAux", "--output", "out", *SMALL]
    monkeypatch.setattr("fl_lightning.choice.search.MOST_SEEDS", 3)
    assert main(["choose", *words]) == 0
    shown = capsys.readouterr().out
    assert "fl-train fit --config out/chosen.yaml" in shown
    assert "three seeds" in shown
    assert (tmp_path / "out" / "choice.html").stat().st_size > 5000
    assert main(["choose", *words]) == 0
    again = capsys.readouterr().out
    assert "val/acc" not in again.partition("finalists")[0]
    assert again.split("\n\n")[1] == shown.split("\n\n")[1]
    assert main(["fit", "--config", "out/chosen.yaml", "--trainer.default_callbacks", "false"]) == 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_same_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.choice.search.MOST_SEEDS", 3)
    data = fl.FederatedDataModule(PlantedCommunities(num_nodes=80, num_communities=4), GivenPartitioner())
    trainer = fl.FederatedTrainer(num_rounds=2, accelerator="cpu")
    said: list[str] = []
    answer = fl.choose(
        data, trainer=trainer, methods=["FedAvg"], budget="20m", processes=1, folder="out", say=said.append
    )
    assert answer.method in ("Local", "FedAvg")
    assert str(answer).startswith(answer.sentence)
    assert list(answer.results["method"]) == ["Local", "FedAvg", "Pooled"]
    assert (answer.results["seeds"] == 3).all()
    assert logging.getLogger("lightning.pytorch").isEnabledFor(logging.INFO)  # as before


def test_data_that_no_process_could_read_are_refused() -> None:
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    graph = Data(x=torch.randn(4, 2), edge_index=edges, y=torch.tensor([0, 1, 0, 1]))
    with pytest.raises(WrongChoice, match=r"data.source.* cannot be written as a configuration.*FileSource"):
        fl.choose(fl.FederatedDataModule([graph, graph]))
