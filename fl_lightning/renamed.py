"""Arguments, settings and classes that have another name now: who uses the old one is told the new one."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")

#: Settings by their former names; said of the classes that have a setting of the present name.
SETTINGS: Mapping[str, str] = {
    "max_void_rounds": "max_failed_rounds",
    "mix_only_moved": "masked_averaging",
    "new_embedding": "unseen_embedding",
    "personalised": "personalized",
    "shared_start": "shared_initialization",
    "signals": "client_outputs",
    "start": "initialization",
}
#: Classes by their former names.
CLASSES: Mapping[str, str] = {
    "GaussianStart": "GaussianInitialization",
    "IdentityStart": "IdentityInitialization",
    "MendingClient": "NeighborGenerationClient",
    "NeighbourIds": "NeighborIds",
    "NormalisedGCN": "NormalizedGCN",
    "OrthogonalStart": "OrthogonalInitialization",
    "RegressionClient": "ClientModule, which does what the data ask for",
    "UniformStart": "UniformInitialization",
}
#: Packages and modules by their former dotted names.
MODULES: Mapping[str, str] = {
    "fl_lightning.strategies.decentralised": "fl_lightning.strategies.decentralized",
}


def present_name(cls: type, name: str) -> str:
    """What a class's former setting is called now; empty where it had none of that name.

    Example:
        >>> from fl_lightning.strategies import FedAvg
        >>> present_name(FedAvg, "mix_only_moved")
        'masked_averaging'
    """
    now = SETTINGS.get(name, "")
    return now if now in inspect.signature(cls).parameters else ""


def refuse_former_names(cls: type[_Class]) -> type[_Class]:
    """Have a class with an ``__init__`` of its own refuse the former names of its settings by the present ones.

    Raises:
        TypeError: The class is called with a former name.
    """
    create: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(create)
    def init(self: _Class, *args: Any, **settings: Any) -> None:
        for name in settings.keys() & SETTINGS.keys():
            if now := present_name(cls, name):
                raise TypeError(
                    f"{cls.__name__}() got {name!r}, which was renamed to {now}: call {cls.__name__}({now}=...)"
                )
        create(self, *args, **settings)

    setattr(cls, "__init__", init)  # noqa: B010 (a type checker refuses the assignment)
    return cls


def renamed(**names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Refuse keywords that a function had, by the name that they have now.

    Args:
        names: The present name of each former one.

    Raises:
        TypeError: The function is called with a former name.

    Example:
        >>> @renamed(algorithm="strategy")
        ... def fit(strategy): ...
        >>> fit(algorithm=1)
        Traceback (most recent call last):
        TypeError: fit() got 'algorithm', which was renamed to strategy: call fit(strategy=...)
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for name in kwargs.keys() & names.keys():
                verb, now = function.__name__, names[name]
                raise TypeError(f"{verb}() got {name!r}, which was renamed to {now}: call {verb}({now}=...)")
            return function(*args, **kwargs)

        return call

    return decorate


def former_classes(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``, which says what its former classes are called now.

    Args:
        module: Name of the module.
    """

    def get(name: str) -> Any:
        if name in CLASSES:
            raise ImportError(f"{module}.{name} was renamed to {CLASSES[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
