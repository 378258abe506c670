"""Every file under configs/ is read, what it names is built, and it runs for a round on tiny data."""

import dataclasses
import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_files import write_example_files

from fl_lightning import FederatedTrainer, data
from fl_lightning.cli import FederatedCLI
from fl_lightning.data import Examples, ExampleSource, GraphSetSource, ManyGraphSets
from fl_lightning.relations.topology import Ring

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = {"wandb"}  # laid over another configuration
TINY = ["--trainer.num_rounds=1", "--model.init_args.net.init_args.hidden_channels=8"]
PLANTED = [
    "--data.source=PlantedCommunities",
    "--data.source.num_nodes=240",
    "--data.source.num_communities=6",
    "--data.partitioner=GivenPartitioner",
]
#: A graph that cannot be exchanged, because the configuration asks for its ground truth.
SUPER_CLUSTERS = ["--data.source.init_args.num_nodes=400"]
NUM_CLIENTS, NUM_EXAMPLES = 12, 72
ALL = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("papers/*.yaml")])
#: Those that the first tier runs: of each family, on graphs and on examples.
SIX = ("quickstart", "local_aux_cora", "fedsheafhn_cora", "fedrep_fl60", "panacea_dg60", "sheaf_fmtl_har")


def tiny(config: dict[str, Any]) -> list[str]:
    """Overrides that make a configuration small; an algorithm's own settings stay unless they cannot fit."""
    strategy = config["strategy"]
    assert isinstance(strategy, dict)
    given = strategy.get("init_args", {})
    small = {"num_epochs": 1, "init_epochs": 1, "num_finetune_epochs": 1}
    net = config["model"]["init_args"]["net"]
    wide = isinstance(net, dict) and "hidden_channels" in net.get("init_args", {})
    overrides = TINY if wide else TINY[:1]
    overrides = [*overrides, *(f"--strategy.init_args.{n}={value}" for n, value in small.items() if n in given)]
    source = config["data"]["source"]
    name = source if isinstance(source, str) else source["class_path"]
    if issubclass(getattr(data, name), GraphSetSource | ManyGraphSets):
        return overrides
    if issubclass(getattr(data, name), ExampleSource):
        return [*overrides, *(["--data.steps_per_epoch=2"] if "steps_per_epoch" in config["data"] else [])]
    if name == "Links":  # of the planted graph
        planted = [each.replace("data.source", "data.source.init_args.source") for each in PLANTED]
        return [*overrides, *planted, "--data.source.init_args.source.init_args.intra_degree=12"]
    return [*overrides, *(SUPER_CLUSTERS if name == "SuperClusterSBM" else PLANTED)]


def resampled(examples: Examples) -> Examples:
    """Twelve clients of 72 examples each, drawn in turn from those that there are, on a ring if they had a graph."""

    def repeated(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        own = itertools.islice(itertools.cycle(parts), NUM_CLIENTS)
        return tuple(
            part.repeat(math.ceil(NUM_EXAMPLES / len(part)), *[1] * (part.dim() - 1))[:NUM_EXAMPLES] for part in own
        )

    return dataclasses.replace(
        examples,
        names=tuple(f"client-{client:02d}" for client in range(NUM_CLIENTS)),
        x=repeated(examples.x),
        y=repeated(examples.y),
        relation_CC=None if examples.relation_CC is None else Ring()(NUM_CLIENTS, 0).float(),
    )


@pytest.fixture
def tiny_examples(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of examples read tiny files, or generate what they do, and hand out a few clients' worth of it."""

    def shrunk(load: Callable[..., Examples]) -> Callable[..., Examples]:
        return lambda self, root, seed: resampled(load(self, root, seed))

    def below(kind: type) -> Iterator[type]:
        for child in kind.__subclasses__():
            yield from (child, *below(child))

    files = write_example_files(tmp_path_factory.mktemp("files"))
    shutil.copy(files / "grda_toy" / "DG-15.npz", files / "grda_toy" / "DG-60.npz")
    monkeypatch.setenv("FL_DATA_ROOT", str(files))
    for kind in set(below(ExampleSource)):
        if "load" in vars(kind):
            monkeypatch.setattr(kind, "load", shrunk(vars(kind)["load"]))


class Built(FederatedCLI):
    """Reads a configuration and builds what it names, and no more."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def layers(path: Path) -> list[Path]:
    """The files that make a configuration whole."""
    return list(dict.fromkeys([CONFIGS / "quickstart.yaml" if path.stem in OVERLAYS else path, path]))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_config_is_read_and_built(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    built = Built(["fit", *(f"--config={layer}" for layer in layers(path))])
    assert isinstance(built.trainer, FederatedTrainer)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")  # on so few clients
@pytest.mark.filterwarnings("ignore:the clients have features and outputs of their own")
@pytest.mark.usefixtures("tiny_examples")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.full] if path.stem not in SIX else [], id=path.stem) for path in ALL],
)
def test_config_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_mode: Callable[[str], None]
) -> None:
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    wandb_mode("disabled")
    files = layers(path)
    overrides = tiny(yaml.safe_load(files[0].read_text()))
    cli = FederatedCLI(
        ["fit", *(f"--config={file}" for file in files), *overrides, f"--trainer.default_root_dir={tmp_path}"]
    )
    metric = cli.trainer.run.selection.monitor.replace("val/", "test/")
    assert math.isfinite(cli.trainer.run.selection.result[metric])
    assert (cli.trainer.run.folder / "config.yaml").is_file()
    assert (cli.trainer.run.folder / "checkpoints" / "last.ckpt").is_file()


def test_run_name_is_the_file_name() -> None:
    for path in set(ALL) - {CONFIGS / f"{name}.yaml" for name in OVERLAYS}:
        assert yaml.safe_load(path.read_text())["trainer"]["run_name"] == path.stem


def test_saved_config_reproduces_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    quickstart = CONFIGS / "quickstart.yaml"
    overrides = tiny(yaml.safe_load(quickstart.read_text()))
    folder = f"--trainer.default_root_dir={tmp_path}"
    first = FederatedCLI(["fit", f"--config={quickstart}", *overrides, folder]).trainer
    saved = f"--config={first.run.folder / 'config.yaml'}"
    FederatedCLI(["test", saved])
    second = FederatedCLI(["fit", saved]).trainer
    assert second.run.folder == first.run.folder.with_name("version_1")
    assert second.run.selection.result["test/acc"] == first.run.selection.result["test/acc"]
    assert second.run.selection.result["val/loss"] == first.run.selection.result["val/loss"]


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # jsonargparse takes a warning that is an error for a type that does not fit
@pytest.mark.usefixtures("tiny_examples")
def test_saved_architectures_reproduce_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of nets, and maps with settings of their own, survive being saved."""
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    config = CONFIGS / "sheaf_fmtl_cora_architectures.yaml"
    settings = [*tiny(yaml.safe_load(config.read_text())), "--strategy.maps.init_args.max_rank=3"]
    first = FederatedCLI(["fit", f"--config={config}", *settings, f"--trainer.default_root_dir={tmp_path}"]).trainer
    second = FederatedCLI(["fit", f"--config={first.run.folder / 'config.yaml'}"]).trainer
    assert len(second.run.architectures) == 3
    assert second.run.strategy.maps.keywords == {"max_rank": 3, "tolerance": 1e-6, "shared_initialization": False}
    assert second.run.selection.result == first.run.selection.result


@pytest.mark.full
def test_sweep_parameters_are_accepted(tmp_path: Path) -> None:
    """Draw parameters as an agent would and run the sweep's own command, offline."""
    for path in sorted((CONFIGS / "sweeps").glob("*.yaml")):
        sweep = yaml.safe_load(path.read_text())
        assert sweep["metric"] == {"name": "val/acc", "goal": "maximize"}
        drawn = [f"--{name}={space['values'][-1]}" for name, space in sweep["parameters"].items()]
        program, *command = (part for item in sweep["command"] for part in (drawn if item == "${args}" else [item]))
        assert program == sweep["program"] == "fl-train"
        small = [*TINY, *PLANTED, "--strategy.init_args.num_epochs=1", "--strategy.init_args.init_epochs=1"]
        folders = [f"--trainer.default_root_dir={tmp_path}", f"--trainer.logger.init_args.save_dir={tmp_path}"]
        environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "FL_CACHE_DIR": str(tmp_path / "cache")}
        subprocess.run(
            [Path(sys.executable).with_name(program), *command, *small, *folders],
            cwd=CONFIGS.parent,
            env=os.environ | environment,
            check=True,
        )
        (saved,) = tmp_path.glob("*/version_0/config.yaml")
        assert (
            yaml.safe_load(saved.read_text())["seed_everything"] == sweep["parameters"]["seed_everything"]["values"][-1]
        )
        assert list(tmp_path.glob("wandb/offline-run-*"))
