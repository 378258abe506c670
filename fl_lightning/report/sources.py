"""Which runs are meant: folders, patterns of folders, and runs of Weights & Biases."""

import glob
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fl_lightning.report.folder import Recorded, columns_of, is_run, read

_WANDB = "wandb:"
#: What W&B's states are called here; others are failures.
_STATES = {"finished": "finished", "killed": "interrupted", "preempted": "interrupted", "running": "unknown"}


class WandbRun(Protocol):
    """What is used of ``wandb.apis.public.Run``."""

    state: str
    config: Mapping[str, Any]

    def scan_history(self) -> Any:
        """The logged rows."""


class WandbApi(Protocol):
    """What is used of ``wandb.Api``."""

    def run(self, path: str) -> WandbRun:
        """The run at ``entity/project/run``."""


def find(runs: Sequence[str | Path], *, wandb_api: Callable[[], WandbApi] | None = None) -> list[Recorded]:
    """Read the runs that are meant, each once, in the order they are given.

    Args:
        runs: Folders of runs, folders that runs lie below, shell-style patterns of folders, and
            ``wandb:entity/project/run``.
        wandb_api: Opens W&B's public API; None for ``wandb.Api``.

    Raises:
        ValueError: One of them is not a run.
    """
    result: dict[str, Recorded] = {}
    for each in runs:
        if str(each).startswith(_WANDB):
            result.setdefault(str(each), _from_wandb(str(each), wandb_api or _open_wandb))
        else:
            for folder in folders_of(str(each)):
                result.setdefault(str(folder.absolute()), read(folder))
    if not result:
        raise ValueError(
            "no runs were given: give their folders, such as runs/quickstart/version_0, or patterns of them"
        )
    return list(result.values())


def folders_of(pattern: str) -> list[Path]:
    """The folder itself, the runs below it, or what a pattern matches."""
    paths = [Path(pattern)] if Path(pattern).exists() else [Path(path) for path in glob.glob(pattern, recursive=True)]
    result = []
    for path in sorted(paths, key=_in_order):
        if path.is_dir() and is_run(path):
            result.append(path)
        elif path.is_dir():
            result += sorted((below for below in path.glob("**/version_*") if is_run(below)), key=_in_order)
    if not result:
        raise ValueError(f"{pattern} is not a run, and contains none: give the folder of a run, or a pattern")
    return result


def _in_order(path: Path) -> tuple[str, int, str]:
    """``version_10`` after ``version_9``."""
    number = path.name.rpartition("_")[2]
    return str(path.parent), int(number) if number.isdigit() else -1, path.name


def _open_wandb() -> WandbApi:
    import wandb

    api: WandbApi = wandb.Api()
    return api


def _from_wandb(name: str, open_api: Callable[[], WandbApi]) -> Recorded:
    path = name.removeprefix(_WANDB)
    if path.count("/") != 2:
        raise ValueError(f"{name}: give a W&B run as wandb:entity/project/run")
    try:
        run = open_api().run(path)
        rows = [dict(row) for row in run.scan_history()]
    except Exception as error:  # W&B raises its own errors, and those of its network library
        raise ValueError(f"{name} cannot be read from W&B: {' '.join(str(error).split())}") from error
    numbered = ((row.get("trainer/global_step", row.get("_step")), row) for row in rows)  # Lightning's number, or W&B's
    rounds, history = columns_of([{**row, "round": round_idx} for round_idx, row in numbered if round_idx is not None])
    settings = dict(run.config)
    trainer = settings.get("trainer")
    monitor = trainer.get("monitor") if isinstance(trainer, Mapping) else None
    usual = (name for name in ("val/acc", "val/mse", "val/loss") if name in history)
    result = {
        "status": _STATES.get(run.state, "failed"),
        "seed": settings.get("seed_everything"),
        "monitor": monitor or next(usual, "val/acc"),
        "mode": trainer.get("monitor_mode") if isinstance(trainer, Mapping) else None,
    }
    return Recorded(path=Path(path), rounds=rounds, history=history, result=result, settings=settings)
