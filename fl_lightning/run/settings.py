"""The settings of a run, and which of them a resumed run may change without changing the mathematics."""

import dataclasses
import functools
import inspect
import numbers
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.data import FederatedDataModule
from fl_lightning.round.availability import digest_of
from fl_lightning.round.client import ClientModule
from fl_lightning.run.callback import Callback
from fl_lightning.yaml_input import parse_yaml

#: Settings that concern where and how fast a run computes, not what: a resumed run may change them. Data, partition and
#: split are compared by their hash, and the seed separately.
_NEUTRAL = (
    "ckpt_path",
    "config",
    "profile",
    "resume_with_changes",
    "seed_everything",
    "data.cache_dir",
    "data.heterogeneity",
    "data.partitioner",
    "data.root",
    "data.source",
    "data.splitter",
    "model.init_args.metrics",
    "model.metrics",
    "trainer.accelerator",
    "trainer.default_callbacks",
    "trainer.default_root_dir",
    "trainer.devices",
    "trainer.evaluate_union",
    "trainer.executor",
    "trainer.logger",
    "trainer.num_nodes",
    "trainer.references",
    "trainer.run_name",
    "trainer.strategy",
)


#: The largest seed that NumPy accepts, too.
LARGEST_SEED = 2**32 - 1


def check_trainer(*, num_rounds: int, evaluate_every: int, monitor_mode: str | None, seed: int, run_name: str) -> None:
    """Check settings of a trainer.

    Raises:
        ValueError: One is out of range.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed_everything (the trainer's seed) must be in [0, {LARGEST_SEED}], got {seed}")
    for name, value in {"num_rounds": num_rounds, "evaluate_every": evaluate_every}.items():
        if value < 1:
            raise ValueError(f"trainer.{name} must be at least 1, got {value}")
    if monitor_mode not in ("max", "min", None):
        raise ValueError(f"trainer.monitor_mode must be 'max' or 'min', got {monitor_mode!r}")
    if Path(run_name).is_absolute() or ".." in Path(run_name).parts:
        raise ValueError(f"trainer.run_name is {run_name!r}: give the name of a folder in trainer.default_root_dir")


def listed(items: list[Any] | Any) -> list[Any]:
    """A new list of one or several items; empty for None and False."""
    return [*items] if isinstance(items, list | tuple) else [items] if items else []


def of_run(trainer: Any, client: ClientModule, strategy: Any, data: FederatedDataModule) -> dict[str, Any]:
    """The known settings of a trainer, a client, a strategy and the data's batches on which results depend."""
    local = {
        "num_rounds": trainer.num_rounds,
        "evaluate_every": trainer.evaluate_every,
        "precision": trainer.precision,
        "monitor": {"name": trainer.monitor or client.monitor, "mode": trainer.monitor_mode},
    }
    more: dict[str, Any] = {} if client.privacy is None else {"privacy": client.privacy}
    if trainer.participation.availability is not None:
        more["availability"] = digest_of(trainer.participation.availability)
    more["trainer.callbacks"] = [callback for callback in trainer.callbacks if callback.changes_training]
    return of_objects(
        strategy=strategy,
        participation=trainer.participation,
        trainer=local,
        model={
            "class": type(client),
            "net": client.net_factories if client.has_own_net else None,
            "optimizer": client.optimizer_factory if client.has_own_optimizer else None,
            **{name: getattr(client, name) for name in _OF_CLIENTS},
        },
        data={name: getattr(data, name, None) for name in _OF_BATCHES},
        **more,
    )


#: Of a client, beside its net and optimizer.
_OF_CLIENTS = ("gradient_clip_val", "running_statistics", "lr_scheduler")
#: What is drawn from the data; the data themselves are compared by their hash.
_OF_BATCHES = ("batch_size", "steps_per_epoch", "drop_last", "sampler")


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """The differences, one line each; a setting that one of the two lacks has its class's default there.

    Args:
        saved: Settings of the checkpoint, as :func:`of_config` or :func:`of_objects` makes them.
        present: Settings of the run that loads it.

    Example:
        >>> differences({"strategy": {"mu": 0.1}, "trainer.num_rounds": 9}, {"strategy.mu": 1, "trainer.num_rounds": 9})
        ['strategy.mu: 0.1 then, 1 now']
    """
    return [line for name, line in _compare(saved, present).items() if name != _LENGTH]


def extension(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """A line as in :func:`differences` if the current run has more rounds; else none."""
    return [line for name, line in _compare(saved, present).items() if name == _LENGTH]


#: More rounds do not count as a difference.
_LENGTH = "longer"


def _compare(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, str]:
    then, now = _flat(saved), _flat(present)
    result = {}
    for name in [*then, *(name for name in now if name not in then)]:
        old, new = then.get(name, "not set"), now.get(name, "not set")
        one_lacks_it = name not in then or name not in now
        if old != new and not (one_lacks_it and _is_default(name, now.get(name, old), now)):
            is_length = name == "trainer.num_rounds"
            if is_length and "not set" in (old, new):  # an older version wrote this for a run from Python
                continue
            result[_LENGTH if is_length and new > old else name] = f"{name}: {old} then, {new} now"
    return result


def _is_default(name: str, value: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a value is what a setting's class gives it where it is not set: what a version without it computes with.

    Args:
        name: Dotted name of the setting.
        value: The value.
        settings: Those of the present run, which name the classes.
    """
    parent, _, own = name.rpartition(".")
    owner = parent.removesuffix(".init_args")
    path = _OWNERS.get(owner) or settings.get(f"{owner}.class_path") or settings.get(f"{owner}.class")
    return any(_describe(default) == value for default in _defaults(_loaded(str(path)), own))


#: Groups of settings whose class a configuration does not name.
_OWNERS = {"trainer": "fl_lightning.trainer.FederatedTrainer", "data": "fl_lightning.data.FederatedDataModule"}


def _loaded(path: str) -> type | None:
    """A class by its dotted name, or one of this package by its bare name; nothing is imported for it."""
    module, _, name = path.rpartition(".")
    places = [module] if module else [each for each in sys.modules if each.startswith("fl_lightning")]
    found = (getattr(sys.modules.get(place), "__dict__", {}).get(name) for place in places)
    return next((each for each in found if isinstance(each, type)), None)


def _defaults(cls: type | None, name: str) -> list[Any]:
    """The default of a setting, of the class itself or of that which defines it; empty where it has none."""
    for each in () if cls is None else cls.__mro__:
        fields = {field.name: field for field in dataclasses.fields(each)} if dataclasses.is_dataclass(each) else {}
        if name in fields and callable(factory := fields[name].default_factory):
            return [factory()]
        parameter = inspect.signature(each).parameters.get(name) if "__init__" in vars(each) else None
        if parameter is not None:
            return [] if parameter.default is parameter.empty else [parameter.default]
    return []


def config_differences(saved: str, present: str) -> list[str]:
    """The settings, including those of the data, in which two YAML configurations differ and that change the run."""
    if not saved or not present:
        return []
    then, now = (_flat(parse_yaml(text) or {}) for text in (saved, present))
    return [line for line in differences(then, now) if not line.startswith(_WHERE)]


#: Settings of a run's location and of what only observes it.
_WHERE = (
    "ckpt_path",
    "config",
    "profile",
    "resume_with_changes",
    "trainer.callbacks",
    "trainer.default_",
    "trainer.logger",
    "trainer.run_name",
)


def of_config(config: str) -> dict[str, Any]:
    """The settings of a YAML configuration that matter, without neutral ones and callbacks that only observe."""
    settings: dict[str, Any] = parse_yaml(config) or {}
    callbacks = (settings.get("trainer") or {}).pop("callbacks", None) or []
    acting = [each for each in (callbacks if isinstance(callbacks, list) else [callbacks]) if not _only_watches(each)]
    flat = {name: value for name, value in _flat(settings).items() if not _is_neutral(name)}
    return {**flat, **({"trainer.callbacks": acting} if acting else {})}


def of_objects(**objects: Any) -> dict[str, Any]:
    """The values of the objects' constructor parameters, as far as the objects store them."""
    return {name: _describe(each) for name, each in objects.items()}


def _is_neutral(name: str) -> bool:
    return any(name == neutral or name.startswith(f"{neutral}.") for neutral in _NEUTRAL)


def _only_watches(callback: Any) -> bool:
    """Whether an entry of the configuration's callbacks is known not to change the training."""
    path = callback.get("class_path", "") if isinstance(callback, dict) else str(callback)
    kinds = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _subclasses(Callback)}
    kinds |= {kind.__qualname__: kind for kind in kinds.values()}
    result = kinds.get(path) or kinds.get(path.rpartition(".")[2])
    return result is not None and not result.changes_training


def _subclasses(base: type[Callback]) -> list[type[Callback]]:
    return [base, *(below for child in base.__subclasses__() for below in _subclasses(child))]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists, by dotted path."""
    if isinstance(value, Mapping) and value:
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple) and value:
        items = list(enumerate(value))
    else:
        return {path: value}
    dot = f"{path}." if path else ""
    return {name: leaf for key, item in items for name, leaf in _flat(item, f"{dot}{key}").items()}


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):  # NumPy's, too
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return {"class": _describe(value.func), "args": _describe(value.args), **_describe(value.keywords)}
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__qualname__
    try:
        parameters = inspect.signature(type(value)).parameters
    except ValueError:  # for a class that is not written in Python
        return type(value).__qualname__
    selected = {name: getattr(value, name) for name in parameters if name in getattr(value, "__dict__", {})}
    return {"class": type(value).__qualname__, **{name: _describe(item) for name, item in selected.items()}}
