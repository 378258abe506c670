"""Which of some runs are of one configuration: those that differ in nothing but seeds, names and folders."""

import itertools
import math
from collections.abc import Collection, Sequence
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

#: A label has so many of the settings that differ, and more where these do not tell it apart.
_SHOWN = 3
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
        shown: dict[str, str] = {}
        for name in telling:
            values = {other: setting(settings[other].get(name, UNSET)) for other in alike}
            if len(shown) < _SHOWN or len(set(values.values())) > 1:
                shown[name] = values[index]
                alike = [other for other in alike if values[other] == values[index]]
        parts = [f"{name.rpartition('.')[2]} {value}" for name, value in shown.items()]
        labels[keys[index]] = _free(", ".join([runs[index].strategy or "run", *parts]), labels.values())
    return [labels[key] for key in keys], [labels[keys[index]] for index in order]


def _free(label: str, taken: Collection[str]) -> str:
    """The label, with the first number that tells it apart from others where these are the same."""
    numbered = (f"{label} ({number})" for number in itertools.count(2))
    return label if label not in taken else next(each for each in numbered if each not in taken)


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
