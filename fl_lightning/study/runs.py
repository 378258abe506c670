"""The runs of a study: each is one run of ``fl-train fit``, with a key of everything that determines it."""

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_lightning.run.own_code import digest_of_files, own_files, own_names
from fl_lightning.run.version import own_digest, version_of
from fl_lightning.study.definition import Study
from fl_lightning.study.edge import Point
from fl_lightning.study.schema import Settings, Until, WrongStudy, read_yaml
from fl_lightning.yaml_input import dump_yaml

_LENGTH = "trainer.num_rounds"
_CONFIG = "--config="


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One training.

    Attributes:
        purpose: ``tuning``, of which only validation metrics are stored, or ``report``.
        method: Name of the method.
        case: Name of the case.
        seed: Seed of data and training.
        setting: The grid's labels; empty if nothing is tuned.
        arguments: Of ``fl-train``.
        strategy: Bare name of the strategy's class.
        key: Digest of the settings: those of the configuration files, and the arguments after them.
        data: Digest of the settings that determine the partition.
        version: The current version of the code's mathematics, and of the user's own classes.
        lineage: Digest of the settings except for the length, and of the version: of runs that share it, a longer one
            can continue from the last state of a shorter one.
        own: Dotted names of the user's own classes.
    """

    purpose: Literal["tuning", "report"]
    method: str
    case: str
    seed: int
    setting: str
    arguments: tuple[str, ...]
    strategy: str
    key: str
    data: str
    version: str
    lineage: str
    own: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The run in words."""
        how = f", tuning {self.setting}" if self.purpose == "tuning" else ""
        return f"{self.method} on {self.case}, seed {self.seed}{how}"

    @property
    def own_files_now(self) -> dict[str, str] | None:
        """The files of the user's own classes; None if one has changed since the run was made."""
        files = own_files(self.own)
        return files if not files or own_digest(self.version) == digest_of_files(files) else None


def make_run(
    study: Study,
    method: str,
    case: str,
    seed: int,
    point: Point,
    purpose: Literal["tuning", "report"],
    num_rounds: int | None = None,
) -> StudyRun:
    """A method's run on a case with a setting of the grid.

    Args:
        study: The study.
        method: Name of the method.
        case: Name of the case.
        seed: Of data and training.
        point: The setting.
        purpose: What the run is for.
        num_rounds: Its length, in place of the study's and of ``until``; None for what the study says.

    Raises:
        WrongStudy: Callbacks are given in a way that ``until`` cannot add its own to.
    """
    label, chosen = point
    method_settings, theirs = study.methods[method], study.cases[case]
    layers = (
        study.settings,
        method_settings.settings,
        theirs.settings,
        theirs.methods.get(method, {}),
        chosen,
        method_settings.final,
        theirs.final,
    )
    settings: Settings = {}
    for layer in layers:
        for name, value in layer.items():
            settings.pop(name, None)  # the last value is given last
            settings[name] = value
    settings |= {"data.seed": seed, "seed_everything": seed}
    configs = study.configs_of(method, case)
    contents = [_content(os.path.abspath(path)) for path in configs]
    strategy, data = _strategy(contents, settings), _data_settings(contents, settings)
    own = own_names([contents, settings])
    version = version_of(strategy, data, digest_of_files(study.own_files(own)))
    lineage = _lineage(contents, settings, version) if study.states_gb or num_rounds else ""
    if num_rounds is not None:
        settings[_LENGTH] = num_rounds
    elif (until := study.until_of(case)) is not None:
        settings |= _until(contents, settings, until)
    return StudyRun(
        purpose=purpose,
        method=method,
        case=case,
        seed=seed,
        setting=label,
        arguments=(
            "fit",
            *(f"{_CONFIG}{os.path.relpath(path)}" for path in configs),
            *(f"--{name}={argument(value)}" for name, value in settings.items()),
        ),
        strategy=strategy,
        key=digest_of([contents, list(settings.items())]),
        data=digest_of(data),
        version=version,
        lineage=lineage,
        own=own,
    )


def as_read(arguments: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Arguments of a run with copies of its configuration files, as they were when the run's key was made of them.

    So a file that is edited while a study runs changes none of its runs.

    Args:
        arguments: Of the run.
        folder: Where the copies are written.
    """
    result = []
    for argument in arguments:
        if argument.startswith(_CONFIG):
            content = _content(os.path.abspath(argument.removeprefix(_CONFIG)))
            path = folder / f"config-{digest_of(content)}.yaml"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(dump_yaml(content, sort_keys=False), encoding="utf-8")
            argument = f"{_CONFIG}{path}"
        result.append(argument)
    return tuple(result)


@functools.cache
def _content(config: str) -> dict[str, Any]:
    """What a configuration file holds when it is first read."""
    content = read_yaml(Path(config))
    (content.get("trainer") or {}).pop("run_name", None)
    return content


def _until(contents: list[dict[str, Any]], settings: Settings, until: Until) -> Settings:
    """The number of rounds, and an ``EarlyStopping`` after the other callbacks; its patience counts evaluations."""
    given = [*settings, *(f"trainer.{name}" for content in contents for name in content.get("trainer") or {})]
    for name in given:
        if name == "trainer" or (name.startswith("trainer.callbacks") and name != "trainer.callbacks"):
            raise WrongStudy(f"{name} beside until: give all callbacks as one list, in the setting trainer.callbacks")
    callbacks = _trainer_setting(contents, settings, "callbacks") or []
    every = int(_trainer_setting(contents, settings, "evaluate_every") or 1)
    stop = {
        "class_path": "fl_lightning.callbacks.EarlyStopping",
        "init_args": {"patience": -(-until.patience // every)},
    }
    listed = list(callbacks) if isinstance(callbacks, list) else [callbacks]
    return {_LENGTH: until.at_most, "trainer.callbacks": [*listed, stop]}


def _trainer_setting(contents: list[dict[str, Any]], settings: Settings, name: str) -> Any:
    """A setting of the trainer; the last word counts."""
    value = None
    for content in contents:
        value = (content.get("trainer") or {}).get(name, value)
    return settings.get(f"trainer.{name}", value)


def _lineage(contents: list[dict[str, Any]], settings: Settings, version: str) -> str:
    trainers = [{k: v for k, v in (content.get("trainer") or {}).items() if k != "num_rounds"} for content in contents]
    others = [{**content, "trainer": trainer} for content, trainer in zip(contents, trainers, strict=True)]
    return digest_of([others, [pair for pair in settings.items() if pair[0] != _LENGTH], version])


def argument(value: Any) -> str:
    """A value in the form of the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, repr(value))
    return json.dumps(value)


def digest_of(value: Any) -> str:
    """A short digest of settings, 20 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _strategy(contents: list[dict[str, Any]], settings: Settings) -> str:
    result: Any = ""
    for content in contents:
        result = content.get("strategy", result)
    for name in ("strategy", "strategy.class_path"):
        result = settings.get(name, result)
    path = result.get("class_path", "") if isinstance(result, dict) else result
    return str(path).rpartition(".")[2]


def _data_settings(contents: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The settings that determine the partition, by name without ``init_args`` and ``class_path``; later layers win."""
    result: dict[str, Any] = {}
    for content in contents:
        result |= dict(_leaves("data", content.get("data") or {}))
    for name, value in settings.items():
        if name.partition(".")[0] == "data":
            result |= dict(_leaves(name, value))
    return result


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name.replace(".init_args", "").removesuffix(".class_path"), value
