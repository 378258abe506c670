"""What a user meets at the command line: the verbs, their settings and files."""

import contextlib
import csv
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from commands import PLAIN, QUICKSTART, SMALL, refused, refused_after

from fl_lightning import command_line
from fl_lightning.cli import FederatedCLI, main
from fl_lightning.data import FederatedDataModule
from fl_lightning.report.folder import read

pytestmark = pytest.mark.usefixtures("own_folders")


def test_settings_in_files_of_single_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """As in LightningCLI; a class that such a file names was taken for a missing module."""
    Path("parts").mkdir()
    Path("parts", "strategy.yaml").write_text("{class_path: FedProx, init_args: {proximal_weight: 0.25}}")
    Path("parts", "data.yaml").write_text("source: PlantedCommunities")
    Path("model.yaml").write_text("net: {class_path: fl_lightning.models.GCN, init_args: {hidden_channels: 8}}")
    Path("all.yaml").write_text("strategy: parts/strategy.yaml")
    words = ["--data=parts/data.yaml", "--model=model.yaml", "--print_config"]
    for strategy in ("--strategy=parts/strategy.yaml", "--config=all.yaml"):
        with pytest.raises(SystemExit) as done:
            main(["fit", strategy, *words])
        printed = yaml.safe_load(capsys.readouterr().out)
        assert not done.value.code
        assert printed["strategy"]["class_path"] == "fl_lightning.strategies.FedProx"
        assert printed["strategy"]["init_args"]["proximal_weight"] == 0.25
        assert printed["model"]["init_args"]["net"]["init_args"]["hidden_channels"] == 8
    Path("model.yaml").write_text("net: {class_path: fl_lightning.models.GCM}")
    assert "model.net: 'fl_lightning.models.GCM' cannot be imported" in refused(capsys, "fit", strategy, *words)


def test_a_model_of_pyg_has_its_own_settings() -> None:
    words = ["--model.net=torch_geometric.nn.GCN", "--model.net.hidden_channels=6", "--model.net.num_layers=2"]
    client = FederatedCLI(["data", *PLAIN, *words]).model
    client.build(32, 5)
    assert [tuple(p.shape) for p in client.net.parameters() if p.dim() > 1] == [(6, 32), (5, 6)]


def test_without_arguments_the_verbs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "{fit,validate,test,predict,data}" in refused(capsys)


@pytest.mark.parametrize(
    "words", [["fit"], ["export", "no", "--client=a"], ["predict", "no", "--client=a", "--data=b"]]
)
def test_warnings_are_one_line_of_the_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with contextlib.suppress(SystemExit):
        command_line.main(words)
    assert warnings.formatwarning("text", UserWarning, "file.py", 1) == "fl-train: warning: text\n"


def test_a_resume_with_other_settings_is_refused_or_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/quickstart/version_0")
    assert main(["fit", *SMALL]) == 0
    changed = [
        "fit",
        *SMALL,
        "--trainer.num_rounds=3",
        "--ckpt_path=last",
        "--model.init_args.net.init_args.dropout=0.7",
    ]
    with pytest.raises(SystemExit) as stop:
        main(changed)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "made with other settings; model.init_args.net.0.init_args.dropout: 0.5 then, 0.7 now. Use the conf" in said
    assert "--resume_with_changes" in said
    with pytest.warns(UserWarning, match="resumed with other settings"):
        assert main([*changed, "--resume_with_changes"]) == 0
    configs = [yaml.safe_load((folder / name).read_text()) for name in ("config.yaml", "config_resumed_2.yaml")]
    assert [config["model"]["init_args"]["net"][0]["init_args"]["dropout"] for config in configs] == [0.5, 0.7]
    record = json.loads((folder / "result.json").read_text())
    assert record["config"] == "config_resumed_2.yaml"
    assert record["config_sources"] == [str(QUICKSTART)]
    assert record["changes"] == [
        "from round 2 on: trainer.num_rounds: 2 then, 3 now",
        "from round 2 on: model.init_args.net.0.init_args.dropout: 0.5 then, 0.7 now",
    ]
    quick = ["--trainer.executor=SequentialExecutor", "--trainer.num_rounds=4", "--trainer.logger=false"]
    assert main([*changed, *quick]) == 0  # with the settings of the last checkpoint, and another executor


def test_fit_then_validate_test_predict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL]) == 0
    assert "test/acc" in capsys.readouterr().out
    assert main(["validate", *SMALL]) == 0
    assert "val/acc" in capsys.readouterr().out
    assert main(["test", *SMALL, "--ckpt_path=last"]) == 0
    assert "test/acc" in capsys.readouterr().out
    assert main(["predict", *SMALL]) == 0
    with Path("runs/quickstart/version_0/predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    assert sorted(int(row["node"]) for row in rows) == list(range(200))
    assert {row["split"] for row in rows} == {"train", "val", "test"}
    for row in rows:
        shares = {name.removeprefix("probability_"): float(row[name]) for name in row if name.startswith("prob")}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
        assert row["prediction"] == max(shares, key=shares.__getitem__)


def test_test_reports_the_chosen_round() -> None:
    fitted = FederatedCLI(["fit", *SMALL]).trainer.run.selection.result
    tested = FederatedCLI(["test", *SMALL])
    assert tested.trainer.run.selection.best_round == fitted["best_round"]
    metrics = tested.trainer.evaluate(tested.trainer.run.training_clients)
    assert metrics["test/acc"] == fitted["test/acc"]
    assert metrics["val/loss"] == pytest.approx(fitted["val/loss"], rel=1e-6)


def test_second_run_takes_the_next_version_and_last_continues_the_newest() -> None:
    FederatedCLI(["fit", *SMALL])
    second = FederatedCLI(["fit", *SMALL]).trainer
    assert second.run.folder == Path("runs/quickstart/version_1")
    longer = FederatedCLI(["fit", *SMALL, "--trainer.num_rounds=3", "--ckpt_path=last"]).trainer
    assert longer.run.folder == second.run.folder
    assert [row["round"] for row in longer.run.history] == [0, 1, 2]
    at_once = FederatedCLI(["fit", *SMALL, "--trainer.num_rounds=3"]).trainer
    assert longer.run.history[-1]["val/loss"] == at_once.run.history[-1]["val/loss"]


def test_data_prints_and_saves_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *SMALL, "--csv=tables/clients.csv", "--picture=labels.png"]) == 0
    assert "heterogeneity" in capsys.readouterr().out
    with Path("tables/clients.csv").open() as file:
        assert [row["client"] for row in csv.DictReader(file)][:2] == ["client-00", "client-01"]
    assert Path("labels.png").read_bytes().startswith(b"\x89PNG")


def test_data_need_no_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    source = ["--data.source=PlantedCommunities", "--data.source.num_nodes=200", "--data.source.num_communities=5"]
    cut = ["--data.partitioner=MetisPartitioner", "--data.partitioner.num_clients=3"]
    assert main(["data", *source, *cut]) == 0
    assert "client-02" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "value"),
    [([], True), (["true"], True), (["True"], True), (["false"], False), (["--trainer.num_rounds=3"], True)],
)
def test_a_flag_may_have_a_value(words: list[str], value: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *SMALL, "--print_config", "--profile", *words])
    assert yaml.safe_load(capsys.readouterr().out)["profile"] is value


def test_print_config_can_be_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["strategy"]["init_args"]["num_neighbors"] == 2
    assert printed["trainer"]["num_rounds"] == 2
    Path("printed.yaml").write_text(yaml.safe_dump(printed))
    assert main(["fit", "--config=printed.yaml"]) == 0


@pytest.mark.parametrize(
    ("arguments", "client", "net"),
    [
        (["--strategy=FedAux"], "FedAuxClient", "ProjectionGCN"),
        (["--strategy", "fl_lightning.strategies.FedAux", "--model.projection_lr_multiplier=2"], "FedAuxClient", None),
        (["--strategy=FedPub"], "ClientModule", "MaskedGCN"),
        (["--strategy.class_path=FedPub", "--model.net.dropout=0.1"], "ClientModule", "MaskedGCN"),
        (["--config=own.yaml"], "FedAuxClient", "ProjectionGCN"),
        (["--strategy={class_path: FedPub}"], "ClientModule", "MaskedGCN"),
        (["--config=own.yaml", "--strategy=FedAvg"], "ClientModule", "GCN"),
        (["--strategy=FedAvg", "--config=nested.yaml"], "FedAuxClient", "ProjectionGCN"),
        (["--strategy=FedPub", "--model=ClientModule", "--model.net=fl_lightning.models.GCN"], "ClientModule", "GCN"),
    ],
    ids=str,
)
def test_the_strategy_chooses_the_default_model(
    arguments: list[str], client: str, net: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.yaml").write_text("strategy: {class_path: FedAux, init_args: {num_epochs: 2}}\ntrainer: {num_rounds: 2}")
    Path("nested.yaml").write_text("strategy: FedAux")
    with pytest.raises(SystemExit) as stop:
        main(["fit", *arguments, "--data.source=PlantedCommunities", "--print_config"])
    assert stop.value.code == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert model["class_path"].endswith(f".{client}")
    written = model["init_args"]["net"]  # null is the strategy's own, which tests/test_python_door.py runs
    assert written is None or f".{net}" in str(written)
    assert written is not None or not any(argument.startswith("--model.net") for argument in arguments)


@pytest.mark.parametrize("named", ["--config=net.yaml", "--model.net=fl_lightning.models.CNN"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_net_that_is_named_has_no_settings_of_the_default_one(
    named: str, as_list: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    net = {"class_path": "fl_lightning.models.CNN"}
    Path("net.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"net": [net] if as_list else net}}}))
    words = [named, "--strategy=FedAvg", "--data.source=FL60", "--model.net.init_args.filters=[8]", "--print_config"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *words])
    assert stop.value.code == 0
    actual = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["net"]
    actual = actual[0] if isinstance(actual, list) else actual
    assert actual["class_path"].endswith(".CNN")
    assert actual["init_args"]["filters"] == [8]
    assert actual["init_args"]["dropout"] == 0.0  # a CNN's, not a GCN's


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "fl-train fit  --config fl://quickstart" in shown
    assert "Train the federation" in shown


def test_seed_reaches_the_trainer_and_data_seed_the_partition() -> None:
    cli = FederatedCLI(["fit", *SMALL, "--seed_everything=7", "--data.seed=3", "--trainer.logger=false"])
    assert cli.trainer.seed == 7
    assert isinstance(cli.datamodule, FederatedDataModule)
    assert cli.datamodule.seed == 3


def test_installed_command_ends_by_sigterm_with_its_exit_code(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("fl-train")
    arguments = [program, "fit", *SMALL, "--trainer.num_rounds=100000"]
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        metrics = tmp_path / "runs/quickstart/version_0/metrics.csv"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            os.sched_yield()
        process.terminate()
        process.wait(timeout=60)
    assert process.returncode == 128 + 15
    assert (tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger", "WandbLogger"])
def test_loggers_by_their_bare_names(logger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert (
        main(
            ["fit", *SMALL, "--trainer.num_rounds=1", "--trainer.default_callbacks=false", f"--trainer.logger={logger}"]
        )
        == 0
    )
    folder = Path("runs/quickstart/version_0")
    assert len((folder / "metrics.csv").read_text().splitlines()) == 2
    assert bool(list(folder.glob("events.out.tfevents.*"))) == (logger == "TensorBoardLogger")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["logger"]["class_path"] == f"fl_lightning.run.loggers.{logger}"


def test_the_newest_run_of_these_settings_is_meant(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fit = ["fit", *SMALL, "--trainer.default_callbacks=false", "--trainer.callbacks=FederatedCheckpoint"]
    other = "--model.init_args.net.init_args.hidden_channels=4"
    assert main(fit) == 0
    assert main([*fit, "--strategy.num_epochs=2"]) == 0
    assert main([*fit, other]) == 0
    more = ["--strategy.num_epochs=3"]
    for arguments, version, had in (
        ([], 0, ""),
        (["--strategy.num_epochs=2"], 1, ""),
        (more, 1, ", which had other settings: strategy.init_args.num_epochs: 2 then, 3 now"),
        ([other], 2, ""),
    ):
        caplog.clear()
        assert main(["test", *SMALL, *arguments]) == 0
        assert f"--ckpt_path best: runs/quickstart/version_{version}/checkpoints/best.ckpt{had}" in caplog.messages
    assert main([*fit, "--ckpt_path=last", "--trainer.num_rounds=3"]) == 0
    folder = Path("runs/quickstart/version_0")
    assert [row.split(",")[0] for row in (folder / "metrics.csv").read_text().split()] == ["round", "0", "1", "2"]
    message = refused_after(capsys, "predict", *SMALL, "--data.source.num_nodes=210", "--seed_everything=4")
    assert "no best.ckpt in runs/quickstart is of a run of these settings: version_2 (" in message
    assert "seed_everything: 0 then, 4 now" in message
    message = refused_after(capsys, "predict", *SMALL, "--data.source.num_nodes=210")
    assert message.count("data.source.init_args.num_nodes: 200 then, 210 now") == 3


def test_more_rounds_are_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", *SMALL]
    assert main(fit) == 0
    assert main([*fit, "--ckpt_path=last", "--trainer.num_rounds=4"]) == 0
    folder = Path("runs/quickstart/version_0")
    configs = [yaml.safe_load((folder / name).read_text()) for name in ("config.yaml", "config_resumed_2.yaml")]
    assert [config["trainer"]["num_rounds"] for config in configs] == [2, 4]
    actual = read(folder)
    assert actual.result["changes"] == ["from round 2 on: trainer.num_rounds: 2 then, 4 now"]
    assert actual.flat_settings["trainer.num_rounds"] == 4
    assert actual.record is not None
    pictures = [(each.round, each.name) for each in actual.record.snapshots]
    assert len(set(pictures)) == len(pictures)
    matrices = [(each.name, each.values) for each in actual.record.snapshots]
    assert all(first != second for first, second in itertools.pairwise(sorted(matrices)))
