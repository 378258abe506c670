"""What a user meets at the command line: the verbs, and mistakes that end in one line and exit code 2."""

import contextlib
import csv
import errno
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from fl_lightning import FederatedTrainer, command_line, saved_tensors
from fl_lightning.cli import FederatedCLI, main
from fl_lightning.data import FederatedDataModule
from fl_lightning.report.folder import read

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = [
    f"--config={QUICKSTART}",
    "--trainer.num_rounds=2",
    "--data.source.num_nodes=200",
    "--data.source.num_communities=5",
    "--strategy.num_epochs=1",
    "--strategy.init_epochs=1",
    "--strategy.num_neighbors=2",
    "--model.init_args.net.init_args.hidden_channels=8",
]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_DATA_ROOT", raising=False)


def refused_after(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must be refused before training, in one line."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fl-train: error: ")]
    assert len(lines) == 1
    return lines[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    line = refused_after(capsys, *arguments)
    assert not list(Path("runs").glob("**/*.ckpt"))
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.rounds=3"], "--trainer.rounds"),
        (["--trainer.max_epochs=3"], "did you mean --trainer.num_rounds?"),
        (["--trainer.gradient_clip_val=3"], "did you mean --model.gradient_clip_val?"),
        (["--trainer.accumulate_grad_batches=2"], "--trainer.accumulate_grad_batches: a step has data.batch_size exam"),
        (["--trainer.evaluate_evry=3"], "did you mean --trainer.evaluate_every?"),
        (["--data.num_clients=3"], "did you mean --data.partitioner.num_clients?"),
        (
            ["--model.optimizer=null", '--model.init_args.optimizer={"init_args": {}}'],
            "model.optimizer has settings, but no class: give",
        ),
        (["--strategy=FedOpt", "--strategy.server_lr=.inf"], "strategy.server_lr must be finite, got inf"),
        (["--model.net=GCNN"], "did you mean fl_lightning.models.GCN?"),
        (["--model.net=Q"], "there is no net 'Q': give a class path, or one of fl_lightning.models.CNN"),
        (
            ["--model.net=lacking.Net"],
            "model.net: 'lacking.Net' cannot be imported: ModuleNotFoundError: No module",
        ),
        (["--data.source=mine.pt"], "data.source is a file: give --data.source FileSource --data.source.path mine.pt"),
        (["--strategy=nowhere.HalfWay"], "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (["--trainer.callbacks+=nowhere.Watch"], "'nowhere.Watch' cannot be imported: ModuleNotFoundError: No module"),
        (["--data.source=nowhere.Mine"], "data.source: 'nowhere.Mine' cannot be imported: ModuleNotFoundError: No mod"),
        (["--data.partitioner=fl_lightning.data.Cuts"], "'fl_lightning.data.Cuts' cannot be imported: AttributeError"),
        (["--trainer.num_rounds=many"], "trainer.num_rounds"),
        (["--trainer.num_rounds=0"], "trainer.num_rounds must be at least 1, got 0"),
        (["--strategy=FedAvgg"], "did you mean FedAvg?"),
        (["--strategy.num_neighbors=5"], "num_neighbors is 5, but each of the 5 training clients has 4 others"),
        (["--trainer.participation=Participation", "--trainer.participation.fraction=2"], "must be in (0, 1], got 2.0"),
        (["--trainer.participation=Participation", "--trainer.participation.num_clients=9"], "only 5 clients train"),
        (["--trainer.devices=some"], "trainer.devices is 'some'"),
        (["--trainer.precision=16-mixed"], "trainer.precision must be one of"),
        (["--trainer.callbacks+=EarlyStoping"], "did you mean EarlyStopping?"),
        (
            ["--trainer.callbacks+=fl_lightning.callbacks.EarlyStopping", "--trainer.callbacks.patience=0"],
            "patience must be at least 1, got 0",
        ),
        (["--trainer.logger=Wandb"], "trainer.logger: there is no class 'Wandb': did you mean WandbLogger?"),
        (["--strategy.num_epoch=3"], "FedSheafHN has no setting 'num_epoch'; did you mean --strategy.num_epochs?"),
        (
            ["--strategy.patience=3"],
            "has no setting 'patience' (it is one of EarlyStopping); its settings are ",
        ),
        (["--strategy.mu=1"], "--strategy.mu: FedSheafHN has no setting 'mu'; its settings are num_epochs, "),
        (["--strategy=FedProx", "--strategy.mu=1"], "has no setting 'mu'; did you mean --strategy.proximal_weight?"),
        (["--data.source.num_nodse=3"], "PlantedCommunities has no setting 'num_nodse'; did you mean --data.source"),
        (["--data.sourc.num_nodes=3"], "no option --data.sourc.num_nodes: did you mean --data.source.num_nodes?"),
        (["--model.net.hiden=3"], "GCN has no setting 'hiden'; "),
        (["--data.source.num_nodes=abc"], "--data.source.num_nodes: expected int, got abc"),
        (["--trainer.num_rounds=1.5"], "--trainer.num_rounds: expected int, got 1.5"),
        (["--data.source=null"], "--data.source: expected a class path, got None"),
        (
            ["--model.privacy={}"],
            "missing: --model.privacy.max_grad_norm, --model.privacy.noise_multiplier",
        ),
        (["--data.source=FileSource"], "missing: --data.source.path"),
        (["--model.netz.hidden=3"], "there is no option --model.netz.hidden: did you mean --model.net.hidden?"),
        (["--trainer.participation.fracton=1"], "Participation has no setting 'fracton'; did you mean --trainer.part"),
        (["--trainer.logger=MLFlowLogger"], "Requirement 'mlflow"),
        (
            ["--data.partitioner=MetisPartitioner", "--data.partitioner.num_clients=5000"],
            "exceeds the 200 nodes",
        ),
        (["--data.source=PlanetoidSource", "--data.source.name=Corra"], "name='Corra'"),
        (["--config=missing.yaml"], "missing.yaml"),
        (["--ckpt_path=missing.ckpt"], "missing.ckpt does not exist"),
        (["--ckpt_path=best"], "there is no best.ckpt"),
        (["--trainer.monitor=test/acc"], "trainer.monitor is 'test/acc', which is not a validation metric"),
        (["--ckpt_path=folder"], "checkpoint folder is no file: give the path of a .ckpt file"),
        (["--ckpt_path=text"], "checkpoint text cannot be read"),
        ([f"--ckpt_path={'x' * 300}"], "does not exist: give the path of a .ckpt file"),
        (["--seed_everything=-1"], "seed_everything must be in [0, 4294967295], got -1"),
        (["--seed_everything=99999999999"], "seed_everything must be in [0, 4294967295], got 99999999999"),
        (["--config=no_seed.yaml"], "seed_everything must be in [0, 4294967295], got None"),
        (["--config=a_seed_that_is_true.yaml"], "seed_everything must be in [0, 4294967295], got True"),
        (["--model.init_args={init_args: {}}"], "model.init_args takes no init_args"),
        (["--data={init_args: {}}"], "data takes no init_args"),
        (["--config=misspelled.yaml"], "there is no option --trainer.num_round: did you mean --trainer.num_rounds?"),
        (["--config=nested_settings.yaml"], "strategy.init_args takes no init_args"),
        (["--conifg=mine.yaml"], "there is no option --conifg: did you mean --config?"),
        (["--config=wrong_kind.yaml"], "data.partitioner.init_args.num_clients: expected int, got three"),
        (["--config=wrong_name.yaml"], "trainer.participation.fractoin: there is no setting 'fractoin' here: did you"),
        (
            ["--config=of_lightning.yaml"],
            "is not a fl_lightning.Callback: use fl_lightning.callbacks.FederatedCheckpoint",
        ),
        (["--seed_everything=many"], "seed_everything: expected bool or int, got many"),
        (["--strategy.init_epochs=-1"], "strategy.init_epochs must not be negative, got -1"),
        (["--strategy.hypernetwork_lr=-1"], "strategy.hypernetwork_lr must not be negative, got -1.0"),
        (["--strategy.hidden_channels=0"], "strategy.hidden_channels must be at least 1, got 0"),
        (["--strategy.hypernetwork_dropout=1"], "strategy.hypernetwork_dropout must be in [0, 1), got 1.0"),
        (["--strategy=Strategy"], "strategy: Strategy only says what such classes have in common: give one of APFL"),
        (["--config=beside.yaml"], "strategy: FedAvg has its settings under init_args; beside it and class_path there"),
        (["--strategy=7"], "strategy: there is no class '7': give a class path, or one of APFL"),
        (
            ["--model.net.hidden_channels=0"],
            "model.net, for inputs of 32 and 5 outputs: hidden_channels must be at least 1",
        ),
        (["--model.net.num_layers=0"], "model.net, for inputs of 32 and 5 outputs: num_layers must be at least 1"),
        (
            ["--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=-1"],
            "model.optimizer: Invalid learning rate: -1",
        ),
        (["--model.optimizer=torch.optim.SparseAdam"], "model.optimizer: SparseAdam cannot step"),
        (
            [
                "--model.lr_scheduler=torch.optim.lr_scheduler.OneCycleLR",
                "--model.lr_scheduler.max_lr=0.1",
                "--model.lr_scheduler.total_steps=3",
                "--trainer.num_rounds=6",
            ],
            "model.lr_scheduler ends after 4 rounds, and trainer.num_rounds is 6",
        ),
        (["--trainer.devices=0"], "trainer.devices is 0"),
        (["--trainer.devices=100000"], "trainer.devices asks for 100000 processes, but this machine has"),
        (["--trainer.num_nodes=0"], "trainer.num_nodes 0"),
        (["--trainer.accelerator=nothing"], "trainer.accelerator 'nothing'"),
        (["--trainer.strategy=deepspeed"], "trainer.strategy 'deepspeed'"),
        (["--trainer.run_name=../elsewhere"], "trainer.run_name is '../elsewhere': give the name of a folder"),
        (
            [f"--trainer.run_name={'x' * 300}"],
            "File name too long; choose another folder, for runs by trainer.default_root_dir",
        ),
        (
            ["--trainer.default_root_dir=text"],
            "Not a directory; choose another folder, for runs by trainer.default_root_dir",
        ),
        (["--config=binary"], "--config binary is not UTF-8 text"),
        (["--config=empty"], "--config empty has no settings"),
        (["--config=folder"], "--config folder cannot be read (Is a directory)"),
        (["--config=unbalanced"], "--config unbalanced is not YAML"),
        (
            ["--config=twice"],
            "--config twice is not YAML: num_rounds stands twice, in lines 2 and 4: remove one of them",
        ),
        ([f"--config={'x' * 300}"], "cannot be read (File name too long)"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_mistakes(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("text").write_text("hello")
    Path("mine.pt").write_bytes(bytes(range(128, 256)))
    Path("lacking.py").write_text("import nowhere\nclass Net: pass\n")
    Path("binary").write_bytes(bytes(range(128, 256)))
    Path("empty").touch()
    Path("unbalanced").write_text("trainer: [1, {")
    Path("twice").write_text("trainer:\n  num_rounds: 2\n  run_name: a\n  num_rounds: 3\n")
    Path("no_seed.yaml").write_text("seed_everything: null")
    Path("a_seed_that_is_true.yaml").write_text("seed_everything: true")
    Path("misspelled.yaml").write_text("trainer: {num_round: 3}")
    Path("beside.yaml").write_text("strategy: {class_path: FedAvg, num_epochs: 3}")
    Path("nested_settings.yaml").write_text("strategy: {class_path: FedAvg, init_args: {init_args: {}}}")
    wrong = "data: {partitioner: {class_path: MetisPartitioner, init_args: {num_clients: three}}}"
    Path("wrong_kind.yaml").write_text(wrong)
    Path("wrong_name.yaml").write_text("trainer: {participation: {fractoin: 1}}")
    of_lightning = "lightning.pytorch.callbacks.ModelCheckpoint"
    Path("of_lightning.yaml").write_text(f"trainer: {{callbacks: [{{class_path: {of_lightning}}}]}}")
    assert expected in refused(capsys, "fit", *SMALL, *arguments)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("{class_path: FedAvg, num_epochs: 3}", "strategy: FedAvg has its settings under init_args; beside it and"),
        ("{init_args: {num_epochs: 3}}", "strategy has settings, but no class: give one of APFL"),
        ("{class_path: FedAvg, init_args: {num_epoch: 3}}", "strategy.init_args.num_epoch: there is no setting 'num_e"),
    ],
)
def test_mistakes_in_a_file_in_another_folder(strategy: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine", "first.yaml").write_text("data: {source: PlantedCommunities}")
    Path("mine", "second.yaml").write_text(f"strategy: {strategy}")
    assert expected in refused(capsys, "fit", "--config=mine/first.yaml", "--config=mine/second.yaml")
    words = ["--data.source.init_args.num_nodes=90", f"--strategy={strategy}"]
    assert "data.source has settings, but no class: give one of AmazonSource" in refused(capsys, "fit", *words)


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


def test_what_is_missing_is_named_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: --data.source, --strategy (for example --config fl://quickstart)" in refused(capsys, "fit")
    said = refused(capsys, "fit", "--data.source=PlantedCommunities")
    assert "missing: --strategy (for example --strategy FedAvg)" in said
    said = refused(capsys, "fit", "--data.source=PlantedCommunities", "--strategy=FedAvg", "--model.optimizer.lr=0.1")
    assert "model.optimizer has settings, but no class: give --model.optimizer torch.optim.Adam before them" in said


PLAIN = [*SMALL[:4], "--strategy=FedAvg"]


def test_a_model_of_pyg_has_its_own_settings() -> None:
    words = ["--model.net=torch_geometric.nn.GCN", "--model.net.hidden_channels=6", "--model.net.num_layers=2"]
    client = FederatedCLI(["data", *PLAIN, *words]).model
    client.build(32, 5)
    assert [tuple(p.shape) for p in client.net.parameters() if p.dim() > 1] == [(6, 32), (5, 6)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--model.net=fl_lightning.models.CNN"],
            "model.net, for inputs of 32 and 5 outputs: in_features=32 is not the shape",
        ),
        (["--model.net=fl_lightning.models.Twin"], "model.net, for inputs of 32 and 5 outputs: it does not take"),
    ],
    ids=["graphs by CNN", "no net"],
)
def test_models_that_do_not_fit_the_data(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(capsys, "fit", *PLAIN, *arguments)


def test_early_stopping_by_what_is_no_metric(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "fit", *SMALL, "--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=foo")
    assert "EarlyStopping.monitor is 'foo', and it is unknown whether more or less of it is better" in message


def test_each_clients_value_of_what_is_no_metric(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--trainer.callbacks=PerClientMetrics", "--trainer.callbacks.metrics=[test/accuracy]"]
    assert "['test/accuracy'] are not among test/acc, test/loss" in refused(capsys, "fit", *SMALL, *named)


def test_more_processes_than_cores_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"asks for 3 processes, but this machine has 2 CPU cores: .*FL_OVERSUBSCRIBE=1"
    ):
        FederatedTrainer(accelerator="cpu", devices=3)
    FederatedTrainer(accelerator="cpu", devices=2)
    monkeypatch.setenv("FL_OVERSUBSCRIBE", "1")
    FederatedTrainer(accelerator="cpu", devices=3)


def test_a_full_disk_ends_with_one_line_and_leaves_the_older_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *SMALL]) == 0
    folder = Path("runs/quickstart/version_0")
    before = (folder / "checkpoints/last.ckpt").read_bytes()

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    own = saved_tensors._Written.__init__
    monkeypatch.setattr("fl_lightning.saved_tensors._Written.__init__", lambda self, file: own(self, Full()))
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, "--trainer.num_rounds=3", "--ckpt_path=last"])
    assert stop.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"error: (last|best)\.ckpt of [\d,]+ bytes cannot be written into /.*/checkpoints, where", message)
    assert "No space left on device; free space there" in message
    assert (folder / "checkpoints/last.ckpt").read_bytes() == before
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert not list(folder.glob("checkpoints/.*"))


def test_a_disk_too_small_for_the_checkpoints_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.callbacks.checkpoint.free_bytes", lambda folder: 1000)
    with pytest.warns(UserWarning, match=r"the checkpoints will take some [\d,]+ bytes in .* where 1,000 are free"):
        main(["fit", *SMALL])


def test_missing_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "there is no GPU here: use cpu or auto" in refused(capsys, "fit", *SMALL, "--trainer.accelerator=gpu")


def test_missing_data_names_the_folder_and_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torch_geometric.datasets.Planetoid.download", no_network)
    source = ["--data.source=PlanetoidSource", "--data.source.name=Cora", "--data.root=nowhere"]
    partitioner = ["--data.partitioner=MetisPartitioner", "--data.partitioner.num_clients=2"]
    message = refused(capsys, "fit", *SMALL, *source, *partitioner)
    assert "nowhere" in message
    assert "FL_DATA_ROOT" in message


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


def test_error_during_training_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug in the strategy")

    monkeypatch.setattr("fl_lightning.strategies.hypernetwork.fedsheafhn.FedSheafHN.aggregate", broken)
    with pytest.raises(ValueError, match="a bug in the strategy"):
        main(["fit", *SMALL])


def test_a_federation_that_fails_ends_with_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fl_lightning.round.client.ClientModule.training_step", broken)
    arguments = ["--trainer.executor=SequentialExecutor", "--trainer.num_rounds=9"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, *arguments])
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert re.search(r"fl-train: error: all 5 clients failed .*out of memory \(.*test_command_line\.py:\d+", said)
    record = json.loads(Path("runs/quickstart/version_0/result.json").read_text())
    assert (record["status"], record["num_rounds"]) == ("failed", 0)
    assert len(record["failures"]) == 5


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


def test_a_model_that_the_strategy_is_not_written_for(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "fit", *SMALL[:3], "--strategy=FedAux", "--model=ClientModule")
    assert "FedAux needs clients of the class FedAuxClient, but model is ClientModule" in message


@pytest.mark.parametrize("path", ["RegressionClient", "fl_lightning.RegressionClient"])
def test_the_client_of_regressions_is_refused_by_its_present_name(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.yaml").write_text(yaml.safe_dump({"model": {"class_path": path, "init_args": {"gradient_clip_val": 1}}}))
    for words in ([f"--model={path}"], ["--config=old.yaml"]):
        assert "RegressionClient was renamed to ClientModule" in refused(capsys, "fit", *SMALL, *words)


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
