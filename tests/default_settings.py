"""Default settings against a method's own configuration: how far each comes in a few rounds, by ``configs/``.

``python tests/default_settings.py [CONFIG ...]`` trains own configurations, all or some of those that
``strategies/default_settings.csv`` names, and writes their metrics into it; ``strategies/test_default_settings.py``
trains with default settings and compares.
"""

import csv
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli import FederatedCLI

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).parent / "strategies" / "default_settings.csv"
#: Points by which default settings may stay below the method's own.
MARGIN = 0.02
#: Settings of strategies that no default can take the place of.
NEEDED = ("topology",)
#: What a federation is, beside its data.
FEDERATION = ("participation", "evaluate_every", "callbacks")


def accuracy(arguments: Sequence[str], folder: Path) -> float:
    """Test accuracy of the round that validation chooses."""
    quiet = ("logger=false", "default_callbacks=false", f"default_root_dir={folder}", "accelerator=cpu")
    cli = FederatedCLI(["fit", *arguments, *(f"--trainer.{setting}" for setting in quiet)])
    result: dict[str, float] = cli.trainer.run.selection.result  # type: ignore[attr-defined]
    return result["test/acc"]


def data_alone(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without all that has a default: what is left are data, federation, and the strategy's name."""
    strategy, trainer = config["strategy"], config.get("trainer", {})
    settings = {name: value for name, value in strategy.get("init_args", {}).items() if name in NEEDED}
    return {
        "data": config["data"],
        "strategy": {"class_path": strategy["class_path"], "init_args": settings}
        if settings
        else strategy["class_path"],
        "trainer": {name: value for name, value in trainer.items() if name in FEDERATION},
    }


def file_of(config: str) -> Path:
    """The file of a configuration, which may be a paper's."""
    folder = ROOT / "configs"
    return next(path for path in (folder / f"{config}.yaml", folder / "papers" / f"{config}.yaml") if path.exists())


def arguments_of(config: Path, num_rounds: int, seed: int) -> list[str]:
    """What trains a configuration for some rounds."""
    return [f"--config={config}", f"--trainer.num_rounds={num_rounds}", f"--seed_everything={seed}"]


def rows() -> list[dict[str, str]]:
    """The table."""
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Train own configurations, for all seeds of the table, and write the mean of each."""
    actual = rows()
    with tempfile.TemporaryDirectory() as folder:
        for row in actual:
            if sys.argv[1:] and row["config"] not in sys.argv[1:]:
                continue
            seeds = [int(seed) for seed in row["seeds"].split()]
            metrics = [
                accuracy(arguments_of(file_of(row["config"]), int(row["rounds"]), seed), Path(folder)) for seed in seeds
            ]
            row["own"] = f"{sum(metrics) / len(metrics):.4f}"
            sys.stdout.write(f"{row['config']} {row['own']}\n")
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(actual[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(actual)


def write_default(config: str, folder: Path) -> Path:
    """Write what is left of a configuration without its settings; returns the file."""
    path = folder / f"{config}.yaml"
    path.write_text(yaml.safe_dump(data_alone(yaml.safe_load(file_of(config).read_text()))))
    return path


if __name__ == "__main__":
    main()
