"""What an evaluation computes, as JSON: functions are named, and a site compares them with its own.

A stage of training is not sent: its address is, and a site makes it from its own settings. Evaluations have no address,
since ``Strategy.evaluations`` is called with the server's state. So the prediction rule and the fine-tuning are
described: methods of the strategy by their name, other functions and classes by the module that defines them, which
must be one of the strategies' modules, that of the strategy's own class, or ``torch.optim``.
"""

import dataclasses
import functools
import importlib
import inspect
from contextlib import suppress
from typing import Any

from fl_lightning.round.program import LocalProgram
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.base import Strategy

#: Fields of a stage that concern the response, which fine-tuning does not have.
_OF_RESPONSE = {"upload", "as_update", "client_outputs", "rows", "client_state", "send_anchor", "rewrite"}
_MODULES = ("fl_lightning.strategies", "fl_lightning.round.stage", "fl_lightning.round.program", "torch.optim")


def describe(evaluation: Evaluation, strategy: Strategy) -> dict[str, Any]:
    """An evaluation without its payload, as JSON.

    Raises:
        ValueError: It contains a function that a site could not find by name.
    """
    return {name: _described(getattr(evaluation, name), strategy) for name in ("tuning", "output")}


def _described(value: Any, strategy: Strategy) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return {"list": [_described(each, strategy) for each in value]}
    if isinstance(value, dict):
        return {"named": {name: _described(each, strategy) for name, each in value.items()}}
    if isinstance(value, functools.partial):
        settings = {name: _described(each, strategy) for name, each in value.keywords.items()}
        return {"partial": _described(value.func, strategy), "settings": settings}
    if inspect.ismethod(value) and value.__self__ is strategy:
        return {"method": value.__name__}
    if inspect.isfunction(value) or inspect.isclass(value):
        name = {"module": value.__module__, "name": value.__qualname__}
        with suppress(ValueError):
            _import(name, strategy)
            return name
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        selected = [field.name for field in dataclasses.fields(value) if field.init]
        if isinstance(value, Stage | LocalProgram):
            selected = [name for name in selected if name not in _OF_RESPONSE]
        settings = {name: _described(getattr(value, name), strategy) for name in selected}
        return {"made": _described(type(value), strategy), "settings": settings}
    raise ValueError(
        f"{type(strategy).__name__} evaluates with {value!r}, which a site cannot find by a name: make it a method of "
        "the strategy, or a function or frozen dataclass of the strategy's file"
    )


def _import(name: dict[str, Any], strategy: Strategy) -> Any:
    """A function or class of an allowed module."""
    module, path = str(name["module"]), str(name["name"])
    modules = {cls.__module__ for cls in type(strategy).__mro__} - {"builtins", "abc"}
    if module in modules or any(module == each or module.startswith(f"{each}.") for each in _MODULES):
        result = getattr(importlib.import_module(module), path, None)  # a name with a dot is none: nothing nested
        if getattr(result, "__module__", None) == module:
            return result
    raise ValueError(f"{type(strategy).__name__} may not use {module}.{path} in an evaluation on a site")
