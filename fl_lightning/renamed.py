"""Renamed arguments, settings and classes: using the old name raises an error with the new one."""

import functools
import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")

#: Current names of settings by their former ones; they apply to classes that have a setting of the current name.
SETTINGS: Mapping[str, str] = {
    "max_void_rounds": "max_failed_rounds",
    "mix_only_moved": "masked_averaging",
    "new_embedding": "unseen_embedding",
    "personalised": "personalized",
    "shared_start": "shared_initialization",
    "signals": "client_outputs",
    "start": "initialization",
}
#: Current names of classes by their former ones.
CLASSES: Mapping[str, str] = {
    "GaussianStart": "GaussianInitialization",
    "IdentityStart": "IdentityInitialization",
    "MendingClient": "NeighborGenerationClient",
    "NeighbourIds": "NeighborIds",
    "NormalisedGCN": "NormalizedGCN",
    "OrthogonalStart": "OrthogonalInitialization",
    "RegressionClient": "ClientModule, which takes its task from the data",
    "UniformStart": "UniformInitialization",
}
#: Current names of packages and modules by their former dotted names.
MODULES: Mapping[str, str] = {
    "fl_lightning.strategies.decentralised": "fl_lightning.strategies.decentralized",
}

#: Settings that do what those of Lightning's trainer do, by the names of these.
OF_LIGHTNING: Mapping[str, str] = {
    "epochs": "trainer.num_rounds",
    "max_epochs": "trainer.num_rounds",
    "max_steps": "trainer.num_rounds",
    "max_time": "trainer.num_rounds",
    "check_val_every_n_epoch": "trainer.evaluate_every",
    "val_check_interval": "trainer.evaluate_every",
    "gradient_clip_val": "model.gradient_clip_val",
    "enable_checkpointing": "trainer.default_callbacks",
    "enable_progress_bar": "trainer.default_callbacks",
}
#: Settings of Lightning's trainer that have no counterpart, and what to do.
LIGHTNINGS_OWN: Mapping[str, str] = {
    "accumulate_grad_batches": "a step has data.batch_size examples",
    "fast_dev_run": "set trainer.num_rounds to 1",
    "limit_train_batches": "data.steps_per_epoch is the number of mini-batches of an epoch",
    "log_every_n_steps": "every round is logged",
    "profiler": "fit has profile (--profile)",
    "deterministic": "all that is drawn follows from the seed (seed_everything)",
    "sync_batchnorm": "model.running_statistics 'shared' averages running statistics",
}


def present_name(cls: type, name: str) -> str:
    """The current name of a class's former setting; empty if it had no setting of that name.

    Example:
        >>> from fl_lightning.strategies import FedAvg
        >>> present_name(FedAvg, "mix_only_moved")
        'masked_averaging'
    """
    now = SETTINGS.get(name, "")
    return now if now in inspect.signature(cls).parameters else ""


def refuse_former_names(cls: type[_Class]) -> type[_Class]:
    """Make a class with an ``__init__`` of its own refuse the former names of its settings, naming the current ones.

    Raises:
        TypeError: The class is called with a former name.
    """

    def why(name: str) -> str:
        now = present_name(cls, name)
        return f"which was renamed to {now}: call {cls.__name__}({now}=...)" if now else ""

    return _refusing(cls, SETTINGS.keys(), why)


def refuse_lightnings_names(cls: type[_Class]) -> type[_Class]:
    """Make a trainer refuse the settings of Lightning's by name, and say what there is instead.

    Raises:
        TypeError: The class is called with one that it does not have.
    """
    names = {*OF_LIGHTNING, *LIGHTNINGS_OWN} - inspect.signature(cls).parameters.keys()

    def why(name: str) -> str:
        return f"a setting of Lightning's Trainer: {LIGHTNINGS_OWN.get(name) or f'give {OF_LIGHTNING[name]}'}"

    return _refusing(cls, names, why)


def _refusing(cls: type[_Class], names: Set[str], why: Callable[[str], str]) -> type[_Class]:
    """Make a class refuse settings of these names for which there is a reason."""
    create: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(create)
    def init(self: _Class, *args: Any, **settings: Any) -> None:
        for name in settings.keys() & names:
            if reason := why(name):
                raise TypeError(f"{cls.__name__}() got {name!r}, {reason}")
        create(self, *args, **settings)

    setattr(cls, "__init__", init)  # noqa: B010 (a type checker refuses the assignment)
    return cls


def renamed(**names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Make a function refuse its former keywords, naming the current ones.

    Args:
        names: The current name of each former one.

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
    """A ``__getattr__`` for a module, which gives the current names of its former classes.

    Args:
        module: Name of the module.
    """

    def get(name: str) -> Any:
        if name in CLASSES:
            raise ImportError(f"{module}.{name} was renamed to {CLASSES[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
