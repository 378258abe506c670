"""Every file under configs/ is parsed and run for a round on a tiny graph."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli import FederatedCLI

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


def tiny(config: dict[str, Any]) -> list[str]:
    """Overrides that make a configuration small; an algorithm's own settings stay unless they cannot fit."""
    strategy = config["strategy"]
    assert isinstance(strategy, dict)
    given = strategy.get("init_args", {})
    small = {"num_epochs": 1, "init_epochs": 1, "num_finetune_epochs": 1}
    own_graph = config["data"]["source"]["class_path"] == "SuperClusterSBM"
    data = SUPER_CLUSTERS if own_graph else PLANTED
    return [*TINY, *data, *(f"--strategy.init_args.{name}={value}" for name, value in small.items() if name in given)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    base = CONFIGS / "quickstart.yaml" if path.stem in OVERLAYS else path
    layers = [f"--config={layer}" for layer in dict.fromkeys([base, path])]
    overrides = tiny(yaml.safe_load(base.read_text()))
    cli = FederatedCLI(["fit", *layers, *overrides, f"--trainer.default_root_dir={tmp_path}"])
    assert 0 <= cli.trainer.selection.result["test/acc"] <= 1
    assert (cli.trainer.run_dir / "config.yaml").is_file()
    assert (cli.trainer.run_dir / "checkpoints" / "last.ckpt").is_file()


def test_run_name_is_the_file_name() -> None:
    for path in set(CONFIGS.glob("*.yaml")) - {CONFIGS / f"{name}.yaml" for name in OVERLAYS}:
        assert yaml.safe_load(path.read_text())["trainer"]["run_name"] == path.stem


def test_saved_config_reproduces_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    quickstart = CONFIGS / "quickstart.yaml"
    overrides = tiny(yaml.safe_load(quickstart.read_text()))
    folder = f"--trainer.default_root_dir={tmp_path}"
    first = FederatedCLI(["fit", f"--config={quickstart}", *overrides, folder]).trainer
    second = FederatedCLI(["fit", f"--config={first.run_dir / 'config.yaml'}"]).trainer
    assert second.run_dir == first.run_dir.with_name("version_1")
    assert second.selection.result["test/acc"] == first.selection.result["test/acc"]
    assert second.selection.result["val/loss"] == first.selection.result["val/loss"]


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
