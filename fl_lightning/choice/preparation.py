"""What a search is made of: the configuration with everything in it, and the study of its candidates."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.callbacks import defaults_beside
from fl_lightning.choice.budget import amount_of
from fl_lightning.choice.candidates import CASE, Candidate, WrongChoice, candidates
from fl_lightning.data import FederatedDataModule
from fl_lightning.direction import direction_of
from fl_lightning.files import whole_file
from fl_lightning.round.client import ClientModule
from fl_lightning.run.description import Description
from fl_lightning.run.own_code import digest_of_files, own_files, own_names
from fl_lightning.strategies import Strategy
from fl_lightning.study.definition import Study
from fl_lightning.study.runs import digest_of
from fl_lightning.study.worker import resolve
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.yaml_input import dump_yaml, parse_yaml

_SIZES = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
#: Gigabytes of the states from which settings go on.
_STATES_GB = 10.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for; most attributes are the arguments of :func:`fl_lightning.choice.choose`.

    Attributes:
        seeds: Of the finalists, at most; None for as many as there is time for, up to ten.
        command: What trains a configuration.
    """

    config: Sequence[str]
    folder: Path
    overrides: Sequence[str] = ()
    budget: str | float = "30m"
    methods: Sequence[str] = ()
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metric: str | None = None
    max_bytes: str | float | None = None
    processes: int | None = None
    seeds: int | None = None
    command: str = "fl-train fit"

    def __post_init__(self) -> None:
        for name in ("seeds", "processes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise WrongChoice(f"{name} is {value!r}: give a whole number of at least 1, or leave it out")
        for name in ("methods", "overrides"):
            if isinstance(getattr(self, name), str):
                raise WrongChoice(f"{name} is {getattr(self, name)!r}: give a list")
        for setting, values in self.grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise WrongChoice(f"the grid's {setting} is {values!r}: give a list of values, such as [0.01, 0.1]")
        if self.folder.exists() and not self.folder.is_dir():
            raise WrongChoice(f"{self.folder} is a file: give the search a folder")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A search that can begin.

    Attributes:
        folder: Where the study's files go.
        base: What all runs share, by group.
        candidates: The methods.
        digest: Of all that was asked for, and of the files of the user's own classes.
        seed: The configuration's.
        num_rounds: Likewise.
        evaluate_every: Likewise.
        budget: Seconds, or runs.
        in_runs: Which of the two.
        max_bytes: What a run may send; None for any number.
        later: The trainer's settings that the search does without, and the chosen configuration has again.
    """

    folder: Path
    base: Mapping[str, Any]
    candidates: Sequence[Candidate]
    digest: str
    seed: int
    num_rounds: int
    evaluate_every: int
    budget: float
    in_runs: bool
    max_bytes: float | None
    later: Mapping[str, Any]

    @cached_property
    def study(self) -> Study:
        """A method for each candidate, and one case; its files are written when it is first asked for."""
        path = self.folder / f"config-{digest_of(self.base)}.yaml"
        _write(path, self.base)
        _write(self.folder / "study.yaml", _study(path.name, self.candidates, self.seed))
        return Study(self.folder / "study.yaml")


def prepare(asked: Asked) -> Prepared:
    """Read what was asked for.

    Raises:
        WrongChoice: It is refused.
    """
    budget, in_runs = amount_of(asked.budget)
    limit = None if asked.max_bytes is None else bytes_of(asked.max_bytes)
    config = whole_config(asked)
    methods = candidates(config, asked.methods, asked.grid)
    trainer = config["trainer"]
    if asked.metric not in (None, trainer["monitor"]):
        trainer["monitor"] = asked.metric
        if direction_of(str(asked.metric)) is not None:
            trainer["monitor_mode"] = None  # which is that of the other one
    later = {name: trainer[name] for name in ("references", "logger")}
    trainer |= {"references": None, "logger": False}
    base: dict[str, Any] = {
        name: config[name] for name in ("seed_everything", "trainer", "model", "data") if name in config
    }
    rest = [[each.name, each.settings, list(each.points)] for each in methods]
    own = digest_of_files(own_files(own_names([base, rest])))
    digest = digest_of([base, rest, budget, in_runs, asked.seeds, limit, *([own] if own else [])])
    return Prepared(
        folder=asked.folder,
        base=base,
        candidates=methods,
        digest=digest,
        seed=int(config["seed_everything"]),
        num_rounds=int(trainer["num_rounds"]),
        evaluate_every=int(trainer["evaluate_every"]),
        budget=budget,
        in_runs=in_runs,
        max_bytes=limit,
        later=later,
    )


def whole_config(asked: Asked) -> dict[str, Any]:
    """Every setting with its value; without ``strategy`` and ``model`` where nothing was said of them.

    Raises:
        WrongChoice: A setting is refused.
    """
    arguments = ["fit", *(f"--config={path}" for path in asked.config), *asked.overrides]
    given = resolve(arguments)
    if has_none := "missing: --strategy" in given["error"]:
        given = resolve([*arguments, "--strategy=FedAvg"])
    if given["error"]:
        raise WrongChoice(given["error"])
    config: dict[str, Any] = parse_yaml(given["config"])
    if has_none:
        del config["strategy"]
    if _is_default(config["model"]):
        del config["model"]  # each strategy has a client of its own
    return config


def _is_default(model: Mapping[str, Any]) -> bool:
    """Whether nothing was said of the clients' module."""
    settings = {name: value for name, value in (model.get("init_args") or {}).items() if name != "running_statistics"}
    return not any(settings.values()) and str(model["class_path"]).rpartition(".")[2] == "ClientModule"


def described(
    folder: Path,
    data: FederatedDataModule,
    client: ClientModule | None,
    strategy: Strategy | None,
    trainer: FederatedTrainer | None,
) -> Path:
    """Write objects as a configuration.

    Returns:
        The file.

    Raises:
        WrongChoice: Something cannot be written, such as a graph in memory.
    """
    description = Description()
    config: dict[str, Any] = {"seed_everything": 0 if trainer is None else trainer.seed}
    if trainer is not None:
        settings = description.arguments(trainer, "trainer")
        added = {f"{type(each).__module__}.{type(each).__qualname__}" for each in defaults_beside([])}
        callbacks = [each for each in settings["callbacks"] if each["class_path"] not in added]
        settings |= {"callbacks": callbacks, "default_callbacks": True}
        config["trainer"] = {name: value for name, value in settings.items() if name != "seed"}
    if strategy is not None:
        config["strategy"] = description.of(strategy, "strategy")
    if client is not None:
        config["model"] = description.of(client, "model")
    config["data"] = description.arguments(data, "data")
    if description.unwritten:
        raise WrongChoice(
            f"{', '.join(description.unwritten)} cannot be written as a configuration, which the processes that train "
            "need: save a graph with torch.save and give fl_lightning.data.FileSource, put a class into a module"
        )
    path = folder / f"given-{digest_of(config)}.yaml"  # another search in the folder has its own
    _write(path, config)
    return path


def _study(config: str, methods: Sequence[Candidate], seed: int) -> dict[str, Any]:
    return {
        "title": "Which method",
        "seeds": [seed],
        "states_gb": _STATES_GB,
        "results": ".",
        "methods": {each.name: {"config": config, "settings": each.settings} for each in methods},
        "cases": {CASE: {}},
    }


def bytes_of(limit: str | float) -> float:
    """A size such as ``200MB`` in bytes.

    Raises:
        WrongChoice: It is none.

    Example:
        >>> bytes_of("200MB"), bytes_of(1000)
        (200000000.0, 1000.0)
    """
    text = f"{limit:.0f}" if isinstance(limit, float) and math.isfinite(limit) else str(limit).strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?B?)", text)
    unit = found[2].upper() if found else "?"
    size = _SIZES.get(unit if unit.endswith("B") or not unit else f"{unit}B")
    if found is None or size is None or not float(found[1]):
        raise WrongChoice(f"--max-bytes is {limit!r}: give a size such as 200MB")
    return float(found[1]) * size


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text(dump_yaml(dict(content), sort_keys=False))
