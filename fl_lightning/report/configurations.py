"""Which of some runs are of one configuration: those that differ in nothing but seeds, names and folders."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_lightning.report.folder import Recorded
from fl_lightning.report.wording import setting

#: Settings in which runs of one configuration may differ.
_OF_A_RUN = (
    "ckpt_path",
    "config",
    "data.cache_dir",
    "data.partitioner.seed",
    "data.root",
    "data.seed",
    "profile",
    "resume_with_changes",
    "seed",
    "seed_everything",
    "trainer.accelerator",
    "trainer.default_root_dir",
    "trainer.devices",
    "trainer.executor",
    "trainer.logger",
    "trainer.num_nodes",
    "trainer.references",
    "trainer.run_name",
    "trainer.strategy",
)

#: Stands for a setting that is missing.
UNSET = "–"


def grouped(runs: Sequence[Recorded]) -> tuple[list[str], list[str]]:
    """The label of each run's configuration, and all labels."""
    settings = [configuration_of(run) for run in runs]
    keys = [
        repr(sorted((name, str(value)) for name, value in each.items())) + run.strategy
        for each, run in zip(settings, runs, strict=True)
    ]
    firsts = {key: index for index, key in reversed(list(enumerate(keys)))}
    order = sorted(firsts.values())
    differing = [
        name
        for name in dict.fromkeys(name for index in order for name in settings[index])
        if name != "strategy" and len({str(settings[index].get(name, UNSET)) for index in order}) > 1
    ]
    labels: dict[str, str] = {}
    for index in order:
        alike = [other for other in order if runs[other].strategy == runs[index].strategy]
        telling = [n for n in differing if len({str(settings[other].get(n, UNSET)) for other in alike}) > 1]
        parts = [f"{n.rpartition('.')[2]} {setting(settings[index].get(n, UNSET))}" for n in telling[:3]]
        label = ", ".join([runs[index].strategy or "run", *parts])
        labels[keys[index]] = label if label not in labels.values() else f"{label} ({runs[index].name})"
    return [labels[key] for key in keys], [labels[keys[index]] for index in order]


def configuration_of(run: Recorded) -> dict[str, Any]:
    """The settings that make a configuration."""
    return {
        name: value
        for name, value in run.flat_settings.items()
        if not any(name == local or name.startswith(f"{local}.") for local in _OF_A_RUN)
    }


def seed_of(run: Recorded) -> Any:
    """The seed of its training."""
    return run.result.get("seed", run.record.seed if run.record else None)


def partition_of(run: Recorded) -> str:
    """The hash of its partition; empty where none is recorded."""
    return str(run.result.get("partition_hash") or (run.record.partition_hash if run.record else ""))


def total_of(run: Recorded, name: str, *, last: bool) -> float:
    """The sum of a column over the rounds, or the largest value of one that adds up by itself."""
    column = run.column(name)
    if column is None:
        return math.nan
    return float(np.nanmax(column)) if last else float(np.nansum(column))
