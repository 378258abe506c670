"""The runs of a study: each is one run of ``fl-train fit``, with a key of everything that determines it."""

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_lightning.run.version import version_of
from fl_lightning.study.definition import Point, Study
from fl_lightning.study.schema import Settings, read_yaml


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
        version: The current version of the code's mathematics.
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

    @property
    def title(self) -> str:
        """The run in words."""
        how = f", tuning {self.setting}" if self.purpose == "tuning" else ""
        return f"{self.method} on {self.case}, seed {self.seed}{how}"


def make_run(
    study: Study, method: str, case: str, seed: int, point: Point, purpose: Literal["tuning", "report"]
) -> StudyRun:
    """A method's run on a case with a setting of the grid."""
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
    contents = [_content(path) for path in configs]
    strategy, data = _strategy(contents, settings), _data_settings(contents, settings)
    return StudyRun(
        purpose=purpose,
        method=method,
        case=case,
        seed=seed,
        setting=label,
        arguments=(
            "fit",
            *(f"--config={os.path.relpath(path)}" for path in configs),
            *(f"--{name}={_text(value)}" for name, value in settings.items()),
        ),
        strategy=strategy,
        key=_digest([contents, list(settings.items())]),
        data=_digest(data),
        version=version_of(strategy, data),
    )


@functools.cache
def _content(config: Path) -> dict[str, Any]:
    content = read_yaml(config)
    (content.get("trainer") or {}).pop("run_name", None)
    return content


def _text(value: Any) -> str:
    """A value in the form of the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def _digest(value: Any) -> str:
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
        if name.startswith("data."):
            result |= dict(_leaves(name, value))
    return result


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name.replace(".init_args", "").removesuffix(".class_path"), value
