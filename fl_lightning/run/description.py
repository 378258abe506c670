"""The configuration of a run that was set up in Python, as YAML for the command line."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.files import whole_file
from fl_lightning.run.assembly import Run
from fl_lightning.yaml_input import dump_yaml, parse_yaml

_PLAIN = (bool, int, float, str)


class Description:
    """Describes objects by the parameters of their constructors, as far as the objects store them.

    Attributes:
        unwritten: Dotted names of what cannot be written as YAML.
    """

    def __init__(self) -> None:
        self.unwritten: list[str] = []
        self._open: set[int] = set()  # what is being described, since it may contain itself

    def of(self, value: Any, name: str) -> Any:
        """A value as YAML: plain values as they are, classes and functions by path, objects as ``class_path``."""
        if value is None:
            return None
        for kind in _PLAIN:  # enumerations and NumPy's numbers are subclasses
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, list | tuple):
            return [self.of(item, f"{name}.{i}") for i, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {str(key): self.of(item, f"{name}.{key}") for key, item in value.items()}
        if isinstance(value, functools.partial):
            if value.args:
                self.unwritten.append(f"{name} (arguments without names)")
            return {"class_path": self._path(value.func, name), "init_args": self.of(value.keywords, name)}
        if inspect.isclass(value) or inspect.isroutine(value):
            return self._path(value, name)
        if id(value) in self._open or isinstance(value, Tensor | np.ndarray):
            self.unwritten.append(name)
            return None
        self._open.add(id(value))
        arguments = self.arguments(value, name)
        self._open.remove(id(value))
        return {"class_path": self._path(type(value), name), "init_args": arguments}

    def arguments(self, value: Any, name: str) -> dict[str, Any]:
        """The arguments that an object was made with; ``given`` of a class names those that it stores elsewhere."""
        try:
            parameters = inspect.signature(type(value)).parameters.values()
        except ValueError:  # for a class that is not written in Python
            self.unwritten.append(name)
            return {}
        given = value.given() if hasattr(value, "given") else {}
        result = {}
        for parameter in parameters:
            inner = f"{name}.{parameter.name}"
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                self.unwritten.append(inner)
                continue
            try:
                result[parameter.name] = self.of(_kept(value, given, parameter.name), inner)
            except KeyError:
                self.unwritten.append(inner)
        return result

    def _path(self, value: Any, name: str) -> str:
        path = f"{value.__module__}.{value.__qualname__}"
        if "<" in path or value.__module__ == "__main__":
            self.unwritten.append(f"{name} ({value.__qualname__} is in no module that could be imported)")
        return path


def _kept(value: Any, given: Mapping[str, Any], name: str) -> Any:
    """An argument, from the object's attributes or from dictionaries among them."""
    attributes = getattr(value, "__dict__", {})
    for values in (given, attributes, *(part for part in attributes.values() if isinstance(part, dict))):
        if name in values:
            return values[name]
    for part in attributes.values():
        if dataclasses.is_dataclass(part) and hasattr(part, name):
            return getattr(part, name)
    raise KeyError(name)


def configuration(run: Run, trainer: Any) -> str:
    """The configuration of a run, from the command line or from the objects, with comments on what is missing."""
    if run.config:
        return run.config
    description = Description()
    settings = {
        "seed_everything": run.seed,
        "trainer": {name: value for name, value in description.arguments(trainer, "trainer").items() if name != "seed"},
        "strategy": description.of(run.strategy, "strategy"),
        "model": description.of(run.model, "model"),
        "data": description.arguments(run.datamodule, "data"),
    }
    lacking = [f"# cannot be written, give it yourself: {name}\n" for name in description.unwritten]
    return "".join(lacking) + dump_yaml(settings, sort_keys=False)


def write_configuration(run: Run, trainer: Any) -> dict[str, Any]:
    """Write config.yaml to the folder of a new run; for a run that is resumed with changes, write another file.

    Returns:
        The settings, for loggers.
    """
    text = configuration(run, trainer)
    changed = any(change.startswith(f"from round {run.round_idx} on") for change in run.changes)
    if changed:
        run.config_file = f"config_resumed_{run.round_idx}.yaml"
    elif not run.config_file or not (run.folder / run.config_file).exists():
        run.config_file = "config.yaml"
    path = run.folder / run.config_file
    if trainer.fabric.is_global_zero and (changed or not path.exists()):
        with whole_file(path) as temporary:
            temporary.write_text(text)
    settings: dict[str, Any] = parse_yaml(text)
    return settings
