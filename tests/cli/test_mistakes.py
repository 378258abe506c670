"""Mistakes at the command line: one line, and exit code 2 before training, 1 after it."""

import errno
import json
import re
from pathlib import Path

import pytest
import yaml
from commands import PLAIN, SMALL, refused

from fl_lightning import FederatedTrainer, saved_tensors
from fl_lightning.cli import main

pytestmark = pytest.mark.usefixtures("own_folders")


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
        (["--trainer.num_round=3"], "there is no option --trainer.num_round: did you mean --trainer.num_rounds?"),
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


def test_what_is_missing_is_named_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: --data.source, --strategy (for example --config fl://quickstart)" in refused(capsys, "fit")
    said = refused(capsys, "fit", "--data.source=PlantedCommunities")
    assert "missing: --strategy (for example --strategy FedAvg)" in said
    said = refused(capsys, "fit", "--data.source=PlantedCommunities", "--strategy=FedAvg", "--model.optimizer.lr=0.1")
    assert "model.optimizer has settings, but no class: give --model.optimizer torch.optim.Adam before them" in said


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
    assert re.search(r"fl-train: error: all 5 clients failed .*out of memory \(.*test_mistakes\.py:\d+", said)
    record = json.loads(Path("runs/quickstart/version_0/result.json").read_text())
    assert (record["status"], record["num_rounds"]) == ("failed", 0)
    assert len(record["failures"]) == 5


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
