"""The classes that a job may name: this package's own, and those that the owner of a machine adds.

A job names a class by its bare name, and nothing is imported for it: the name is looked up in a table. Classes that
import or read what their settings name are not in the table.
"""

import collections.abc
import functools
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from fl_lightning import callbacks, models, optimizers, relations, strategies
from fl_lightning.relations.topology import Topology
from fl_lightning.round import client as clients
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import Pooled, Strategy, decentralized, hypernetwork, mixing
from fl_lightning.strategies.decentralized import map_initialization
from fl_lightning.strategies.hypernetwork import sheaf_ridge

#: Not for jobs: they import or read what their settings name (``PyGNet``, ``EdgeListFile``), take objects, or are
#: bases.
NOT_FOR_JOBS = frozenset(
    {"PyGNet", "PlainNet", "PlainExampleNet", "Twin", "Pretrained", "EdgeListFile", "Optimizer", "Module"}
)
#: Settings that name files; a job may leave them at None.
FILE_SETTINGS = frozenset({("RunReport", "against"), ("Participation", "availability")})
#: What modules of torch import for type checkers alone; an iterable comes as a list.
_ONLY_FOR_TYPES = {"Iterable": collections.abc.Sequence}
#: The kinds of objects that settings ask for.
KINDS: tuple[type, ...] = (
    *(Strategy, ClientModule, nn.Module, Callback, Topology, Participation, RecordPrivacy),
    *(torch.optim.Optimizer, lr_scheduler.LRScheduler),
    *(mixing.Aggregation, decentralized.RestrictionMaps, map_initialization.MapInitialization),
)
_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
_SCHEDULERS = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LinearLR", "MultiStepLR"),
    *("OneCycleLR", "PolynomialLR", "StepLR"),
)


@functools.cache
def _package() -> Mapping[str, Any]:
    """Classes and factories of the package, by bare name."""
    result = [each for each in _homes() if any(_makes(each, kind) for kind in KINDS)]
    result += [
        default for each in result for default in _defaults(each) if any(_makes(default, kind) for kind in KINDS)
    ]
    return {each.__name__: each for each in result if each.__name__ not in NOT_FOR_JOBS}


def _defaults(result: Any) -> Iterable[Any]:
    """The default settings of a class, which a full configuration names."""
    return (parameter.default for parameter in inspect.signature(result).parameters.values())


def _homes() -> Iterable[Any]:
    """Everything in the modules that define such classes."""
    for strategy in vars(strategies).values():
        yield strategy
        yield getattr(strategy, "client_class", ClientModule)
    for home in (models, relations, hypernetwork, decentralized, mixing):
        yield from (getattr(home, name) for name in home.__all__)
    yield sheaf_ridge.sheaf_beside
    yield from (getattr(torch.optim, name) for name in _OPTIMIZERS)
    yield from (getattr(lr_scheduler, name) for name in _SCHEDULERS)
    for home in (optimizers, clients, map_initialization):
        yield from vars(home).values()
    yield Participation
    yield RecordPrivacy
    for name in callbacks.__all__:
        result = getattr(callbacks, name)
        if (
            inspect.isclass(result)
            and issubclass(result, Callback)
            and not (result.needs_data or result.invents_stages)
        ):
            yield result


def _makes(value: Any, kind: type) -> bool:
    """Whether a value is a public class of a kind, or a function that says it returns one."""
    if inspect.isclass(value):
        return issubclass(value, kind) and not inspect.isabstract(value) and not value.__name__.startswith("_")
    if not inspect.isfunction(value) or value.__name__.startswith("_"):
        return False
    returned = typing.get_type_hints(value).get("return")
    return inspect.isclass(returned) and issubclass(returned, kind)


def check_at_sites(strategy: type) -> None:
    """Refuse a strategy that has all data in one place.

    Raises:
        ValueError: It is :class:`~fl_lightning.strategies.Pooled`, or a kind of it.
    """
    if issubclass(strategy, Pooled):
        raise ValueError(
            f"strategy {strategy.__name__} trains on the data of all clients together, which sites do not give away: "
            "choose another strategy (Pooled is for clients of one machine)"
        )


def check_no_references(references: Any) -> None:
    """Refuse references of a run, which are trained where it is.

    Raises:
        ValueError: There are some.
    """
    if references:
        raise ValueError(
            f"trainer.references is {list(references)}, but the clients' data are at their sites: leave it out"
        )


class Registry:
    """What names mean on this machine.

    Args:
        classes: Classes that the machine's owner adds, ``module.Class``; they are imported.

    Raises:
        ValueError: One cannot be imported, is not of a kind that a job names, or has the name of another class.
    """

    def __init__(self, classes: Iterable[str] = ()) -> None:
        self.named = dict(_package())
        self.classes: dict[str, str] = {}
        for path in classes:
            result = _imported(path)
            if result.__name__ in self.named and self.named[result.__name__] is not result:
                raise ValueError(
                    f"policy.classes: {path} has the name of another class that jobs may name, "
                    f"{result.__name__}: rename it"
                )
            self.named[result.__name__] = result
            self.classes[result.__name__] = path

    def fitting(self, annotation: Any) -> "dict[str, Any]":
        """The classes that fit an annotation which asks for an object, or for a factory of one; by name."""
        kind, _ = wanted(annotation)
        return {} if kind is None else {name: each for name, each in self.named.items() if _makes(each, kind)}

    def path(self, name: str) -> str:
        """The dotted path of a name."""
        result = self.named[name]
        return f"{result.__module__}.{result.__qualname__}"


def is_the_packages(path: str) -> bool:
    """Whether a dotted path of this package, or of ``torch.optim``, means what a job means by its last part.

    This distinguishes, for example, two functions with the same name. What no job may name is refused by the check.
    """
    known = _package()
    name = path.rpartition(".")[2]
    return name not in known or pkgutil.resolve_name(path) is known[name]


def wanted(annotation: Any) -> "tuple[type | None, int | frozenset[str]]":
    """The kind of object that an annotation asks for, and which of its parameters a job cannot set.

    Returns:
        The kind, or None if it does not ask for an object; and how many of the first parameters, or which parameters,
        are not for a job to set.
    """
    if typing.get_origin(annotation) is collections.abc.Callable:
        given, kind = typing.get_args(annotation)
        return (kind, len(given)) if inspect.isclass(kind) and given is not ... else (None, 0)
    if not inspect.isclass(annotation) or isinstance(annotation, types.GenericAlias):
        return None, 0
    if getattr(annotation, "_is_protocol", False):
        hints = dict(typing.get_type_hints(annotation.__call__))
        kind = hints.pop("return", None)
        return (kind, frozenset(hints)) if inspect.isclass(kind) else (None, 0)
    return (annotation, 0) if issubclass(annotation, KINDS) else (None, 0)


def settings_of(result: Any, given: "int | frozenset[str]" = 0) -> Mapping[str, Any]:
    """The settings that a job may give a class or factory, with their annotations.

    Args:
        result: The class or factory.
        given: As :func:`wanted` returns it.
    """
    hints = typing.get_type_hints(result.__init__ if inspect.isclass(result) else result, localns=_ONLY_FOR_TYPES)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p for p in inspect.signature(result).parameters.values() if p.kind not in kinds]
    if isinstance(given, int):
        parameters = parameters[given:]
    else:
        parameters = [p for p in parameters if p.name not in given and p.kind is p.KEYWORD_ONLY]
    return {p.name: hints.get(p.name, Any) for p in parameters}


def _imported(path: Any) -> Any:
    """A class that an owner lists.

    Raises:
        ValueError: It is not a class that jobs may name.
    """
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module:
        raise ValueError(f"policy.classes: {path!r} is not a class in a module, such as my_package.MyStrategy")
    try:
        result = getattr(importlib.import_module(module), name)
    except Exception as error:  # the owner's module can raise anything
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"policy.classes: {path} cannot be imported ({why}): install it, or set PYTHONPATH") from error
    if not any(_makes(result, kind) for kind in KINDS):
        raise ValueError(
            f"policy.classes: {path} is not a strategy, client, net, optimizer, aggregation, topology or "
            "callback: list one of these"
        )
    return result
