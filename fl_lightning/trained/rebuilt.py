"""The trainer and the parts of a run that is over: from the configuration in its folder, or from its checkpoint."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from fl_lightning.cli import FederatedCLI
from fl_lightning.report.folder import Recorded
from fl_lightning.trainer import FederatedTrainer


class _Rebuilt(FederatedCLI):
    """The objects of a configuration; its verb is not run."""

    def _run_subcommand(self, subcommand: str) -> None:
        return


def from_configuration(recorded: Recorded) -> tuple[FederatedTrainer, tuple[Any, Any, Any]]:
    """What the configuration in a run's folder describes."""
    named = Path(str(recorded.result.get("config") or "config.yaml")).name
    file = recorded.path / named
    if not file.is_file():
        raise ValueError(f"{recorded.path} has no {named}, as runs from Python: pass its client, data and strategy")
    here = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "logger=false", "default_callbacks=false")
    words = ["predict", "--config", str(file), *(f"--trainer.{each}" for each in here)]
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            cli = _Rebuilt(words)
    except SystemExit:
        why = heard.getvalue().rpartition("fl-train: error: ")[2].strip()
        raise ValueError(f"{file} cannot be rebuilt: {why}") from None
    sys.stderr.write(heard.getvalue())
    return cli.trainer, (cli.model, cli.datamodule, cli.config_init["predict"]["strategy"])  # type: ignore[return-value]


def from_parts(content: dict[str, Any]) -> FederatedTrainer:
    """A trainer for a run from Python, as far as a checkpoint tells."""
    of_trainer = content["settings"].get("trainer", {})
    return FederatedTrainer(
        accelerator="cpu",
        precision=str(of_trainer.get("precision", "32-true")),
        seed=int(content["identity"]["seed"]),
        logger=False,
        default_callbacks=False,
    )
