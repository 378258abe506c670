"""What a submitter sends: a job, which is data and nothing else.

A job names classes by their bare names, with scalars and lists as their settings. It contains no dotted path, no file
name, no code, and no key that is not a setting of the named class. It is checked where it is submitted, on the server
and at every site, before anything is built, imported, or read by the parser of configurations.

    {"format": 1, "name": "wards", "sites": ["berlin", "rome"], "seed": 0,
     "strategy": {"class": "FedAvg", "settings": {"num_epochs": 3}},
     "model": {"class": "ClientModule", "settings": {"net": {"class": "GCN", "settings": {}}}},
     "trainer": {"num_rounds": 30}, ...}
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fl_lightning.relations.topology import Topology
from fl_lightning.remote.names import check_run_name, check_site_name
from fl_lightning.remote.registry import (
    FILE_SETTINGS,
    Registry,
    check_at_sites,
    check_no_references,
    is_the_packages,
    settings_of,
    wanted,
)
from fl_lightning.remote.secure import DEFAULT_SHARE, check_participation, check_share
from fl_lightning.round.client import ClientModule
from fl_lightning.run.settings import LARGEST_SEED
from fl_lightning.strategies import Strategy
from fl_lightning.trainer import FederatedTrainer

FORMAT = 1
#: Bounds of a job, whatever a site allows.
MAX_BYTES, MAX_DEPTH, MAX_LENGTH, MAX_TEXT, MAX_SITES = 2**20, 8, 1000, 64, 10_000
MAX_COUNT, MAX_NUMBER = 10**6, 2**53
#: The precisions in which sites train.
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
#: The trainer's settings that belong to a run, not to the machine on which it runs.
TRAINER_SETTINGS = (
    "num_rounds",
    "participation",
    "evaluate_every",
    "evaluate_union",
    "monitor",
    "monitor_mode",
    "precision",
    "callbacks",
    "default_callbacks",
    "logger",
)
_TEXT = re.compile(r"(?![/~.])(?!.*\.\.)[A-Za-z0-9_.*?!\[\]/-]*")


class NotAJob(ValueError):
    """What was sent is not a job, or contains something that a job may not contain."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run for sites.

    Attributes:
        name: Name of the run, a single folder name, under which server and sites store it.
        sites: Names of the sites, in the order of their clients.
        strategy: Class and settings.
        model: Class and settings of the client module; None for the strategy's default, with its net.
        trainer: The settings of :data:`TRAINER_SETTINGS` that are set.
        relation_graph: Class and settings of the topology that draws the client relation graph; None for none.
        seed: Seed of the run.
        data_seed: Seed of that draw.
        resume: Resume the run of this name.
        timeout_seconds: Time within which a site must respond to a message.
        num_outputs: Classes of the whole federation; None for as many as the sites have seen.
        secure: Secure aggregation.
        secure_share: More than this share of the clients that start a secure sum must complete it, in [0.5, 1].
        predict: Have each site write its predictions into its own folder, after training.
        planned_rounds: Rounds of this job and all that follow it in a search; a site whose privacy account cannot pay
            for all of them refuses the first. None for a job of its own.
    """

    name: str
    sites: Sequence[str]
    strategy: Mapping[str, Any]
    model: Mapping[str, Any] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    relation_graph: Mapping[str, Any] | None = None
    seed: int = 0
    data_seed: int = 0
    resume: bool = False
    timeout_seconds: int = 600
    num_outputs: int | None = None
    secure: bool = False
    secure_share: float = DEFAULT_SHARE
    predict: bool = False
    planned_rounds: int | None = None

    def write(self) -> str:
        """The job as JSON."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def read(cls, text: str | bytes) -> "Job":
        """Undo :meth:`write`; its settings are checked by :meth:`check`.

        Raises:
            NotAJob: The text is not a job.
        """
        if len(text) > MAX_BYTES:
            raise NotAJob(f"the job has {len(text)} bytes, at most {MAX_BYTES} are read")
        try:
            facts = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
        except NotAJob:
            raise
        except (ValueError, RecursionError) as error:
            raise NotAJob(f"the job is not valid JSON ({type(error).__name__})") from error
        if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
            raise NotAJob(f"the job is not of format {FORMAT}: use the same version of fl-lightning everywhere")
        known = {each.name: each for each in dataclasses.fields(cls)}
        if unknown := sorted(set(facts) - set(known)):
            raise NotAJob(f"the job has {_short(unknown[0])}, which no job has")
        needed = {n for n, f in known.items() if f.default is f.default_factory is dataclasses.MISSING}
        if missing := sorted(needed - set(facts)):
            raise NotAJob(f"the job has no {missing[0]}")
        return cls(**facts)

    def check(self, registry: Registry) -> None:
        """Refuse what a job may not contain; nothing is built.

        Args:
            registry: What names mean on this machine.

        Raises:
            NotAJob: It contains something else, or names a class that is not listed here.
        """
        try:
            check_run_name(self.name)
            if not isinstance(self.sites, list | tuple) or not 0 < len(self.sites) <= MAX_SITES:
                raise NotAJob(f"sites must be a list of 1 to {MAX_SITES} names")
            for site in self.sites:
                check_site_name(site)
        except ValueError as error:
            raise NotAJob(str(error)) from error
        if len(set(self.sites)) < len(self.sites):
            raise NotAJob("sites names the same site twice")
        for name, most in {"seed": LARGEST_SEED, "data_seed": LARGEST_SEED, "timeout_seconds": 10**6}.items():
            _check_whole(name, getattr(self, name), most)
        for name, most in {"num_outputs": MAX_NUMBER, "planned_rounds": MAX_COUNT}.items():
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), most, least=1)
        if isinstance(self.secure_share, bool) or not isinstance(self.secure_share, int | float):
            raise NotAJob(f"secure_share must be a number, got {_short(self.secure_share)}")
        for name in ("resume", "secure", "predict"):
            if not isinstance(getattr(self, name), bool):
                raise NotAJob(f"{name} must be true or false, got {_short(getattr(self, name))}")
        reader = _Reader(registry)
        reader.value(self.strategy, Strategy, "strategy", 0)
        hints = {name: hint for name, hint in settings_of(FederatedTrainer).items() if name in TRAINER_SETTINGS}
        reader.settings(self.trainer, hints, "trainer", "a job's trainer", 0)
        try:
            check_share(self.secure_share)
            check_participation((self.trainer.get("participation") or {}).get("settings", {}) if self.secure else {})
            check_at_sites(registry.named[self.strategy["class"]])
        except ValueError as error:
            raise NotAJob(str(error)) from error
        reader.value(self.model, ClientModule | None, "model", 0)
        reader.value(self.relation_graph, Topology | None, "relation_graph", 0)
        for name in ("num_rounds", "evaluate_every"):
            _check_whole(f"trainer.{name}", self.trainer.get(name, 1), MAX_COUNT, least=1)
        if (precision := self.trainer.get("precision", PRECISIONS[0])) not in PRECISIONS:
            raise NotAJob(f"trainer.precision is {_short(precision)}: sites train in one of {', '.join(PRECISIONS)}")

    def configuration(self, registry: Registry) -> dict[str, Any]:
        """A checked job as a configuration for the parser: ``seed_everything``, strategy, model, trainer."""
        return {
            "seed_everything": self.seed,
            "strategy": _with_paths(self.strategy, registry),
            **({} if self.model is None else {"model": _with_paths(self.model, registry)}),
            "trainer": {name: _with_paths(value, registry) for name, value in self.trainer.items()},
        }

    def relation_path(self, registry: Registry) -> Any:
        """The relation graph of a checked job, as a configuration for the parser."""
        return _with_paths(self.relation_graph, registry)


def job_of(config: Mapping[str, Any], **facts: Any) -> tuple[Job, list[str]]:
    """The job of a configuration of ``fl-train fit``, and the classes in it that are not from this package.

    Settings of the machine (``trainer.executor``, devices, folders) and the data are not part of it: the clients are at
    their sites, which have data of their own.

    Args:
        config: The parsed configuration.
        facts: Other fields of the job: ``name``, ``sites``, ...

    Raises:
        ValueError: The configuration asks for something that a job cannot do.
    """
    classes: list[str] = []
    trainer = _section(config, "trainer")
    for name in ("devices", "num_nodes"):
        if trainer.get(name, 1) not in (1, "1", "auto"):
            raise ValueError(
                f"trainer.{name} is {_short(trainer[name])}: set it to 1, the clients of a remote federation are at "
                "their sites"
            )
    check_no_references(trainer.get("references"))
    if not isinstance(trainer.get("logger", True), bool | None):
        raise ValueError(
            "trainer.logger names loggers, which a job cannot contain: set --trainer.logger true for the server's own"
        )
    if isinstance(part := trainer.get("participation"), Mapping) and "class_path" not in part:
        trainer = {**trainer, "participation": {"class_path": "Participation", "init_args": part}}
    data = _section(config, "data")
    run = {name: _bare(trainer[name], classes) for name in TRAINER_SETTINGS if trainer.get(name) is not None}
    job = Job(
        strategy=_spec(config.get("strategy"), classes),
        model=None if config.get("model") is None else _spec(config["model"], classes),
        trainer=run,
        relation_graph=None if data.get("relation_graph") is None else _spec(data["relation_graph"], classes),
        seed=config.get("seed_everything", 0),
        data_seed=data.get("seed", 0),
        **facts,
    )
    return job, classes


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    result = config.get(name) or {}
    if not isinstance(result, Mapping):
        raise ValueError(f"{name} is {_short(result)}: write its settings below it")
    return result


def _spec(value: Any, classes: list[str]) -> Any:
    """A class in a configuration, possibly only its name, in the form of a job."""
    return _named(value, {}, classes) if isinstance(value, str) else _bare(value, classes)


def _named(path: str, settings: Mapping[str, Any], classes: list[str]) -> dict[str, Any]:
    top, _, rest = path.partition(".")
    if rest and top != "fl_lightning" and not path.startswith("torch.optim."):
        classes.append(path)
    elif rest and not is_the_packages(path):
        raise ValueError(f"{path} has the name of another class that jobs may name: a job cannot contain it")
    return {"class": path.rpartition(".")[2], "settings": {n: _bare(v, classes) for n, v in settings.items()}}


def _bare(value: Any, classes: list[str]) -> Any:
    """A value of a configuration in the form of a job: classes by their bare names."""
    if isinstance(value, Mapping) and "class_path" in value:
        extra = sorted(set(value) - {"class_path", "init_args"})
        if extra or not isinstance(value["class_path"], str) or not isinstance(value.get("init_args") or {}, Mapping):
            raise ValueError(f"{_short(value['class_path'])} has {', '.join(extra) or 'no settings that can be read'}")
        return _named(value["class_path"], value.get("init_args") or {}, classes)
    if isinstance(value, Mapping):
        return {name: _bare(each, classes) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_bare(each, classes) for each in value]
    if isinstance(value, str) and re.fullmatch(r"(fl_lightning|torch\.optim)(\.\w+)+", value):
        return _named(value, {}, classes)
    return value


def _with_paths(value: Any, registry: Registry) -> Any:
    """A checked value, with the paths of its classes."""
    if isinstance(value, Mapping):
        settings = {name: _with_paths(each, registry) for name, each in value.get("settings", {}).items()}
        path = registry.path(value["class"])
        return {"class_path": path, "init_args": settings} if settings else path
    return [_with_paths(each, registry) for each in value] if isinstance(value, list | tuple) else value


class _Reader:
    """Checks settings against the annotations of their parameters."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def value(self, value: Any, annotation: Any, where: str, depth: int) -> None:
        """Refuse a value that does not fit its annotation."""
        if depth > MAX_DEPTH:
            raise NotAJob(f"{where} is nested too deeply")
        origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType):
            self._union(value, inside, where, depth)
        elif origin is Literal:
            if not any(type(value) is type(each) and value == each for each in inside):
                raise NotAJob(f"{where} is {_short(value)}: give one of {', '.join(map(str, inside))}")
        elif origin in (list, Sequence, tuple):
            self._list(value, origin, inside, where, depth)
        elif wanted(annotation)[0] is not None:
            self._object(value, annotation, where, depth)
        else:
            most = LARGEST_SEED if where.endswith("seed") else MAX_COUNT
            if not _is_scalar(value, annotation, most):
                raise NotAJob(f"{where} is {_short(value)}: a job gives {_kind(annotation, most)} here")

    def _union(self, value: Any, members: Sequence[Any], where: str, depth: int) -> None:
        if value is None and type(None) in members:
            return
        errors: list[NotAJob] = []
        fits_an_object = isinstance(value, Mapping | str)
        for member in members:
            try:
                self.value(value, member, where, depth)
                return
            except NotAJob as error:
                matters = (wanted(member)[0] is not None) == fits_an_object and member is not type(None)
                errors.insert(0 if matters else len(errors), error)
        raise errors[0]

    def _list(self, value: Any, origin: Any, inside: Sequence[Any], where: str, depth: int) -> None:
        if not isinstance(value, list | tuple) or len(value) > MAX_LENGTH:
            raise NotAJob(f"{where} is {_short(value)}: a job gives a list of at most {MAX_LENGTH} here")
        if origin is tuple and inside[-1] is not ...:
            if len(value) != len(inside):
                raise NotAJob(f"{where} is {_short(value)}: give {len(inside)} values")
            each_of: Sequence[Any] = inside
        else:
            each_of = [inside[0]] * len(value)
        for index, (item, annotation) in enumerate(zip(value, each_of, strict=True)):
            self.value(item, annotation, f"{where}[{index}]", depth + 1)

    def _object(self, value: Any, annotation: Any, where: str, depth: int) -> None:
        if not isinstance(value, Mapping) or set(value) - {"class", "settings"} or "class" not in value:
            raise NotAJob(f"{where} is {_short(value)}: a job gives the name of a class here, and its settings")
        fitting = self.registry.fitting(annotation)
        name = value["class"]
        if not isinstance(name, str) or name not in fitting:
            raise NotAJob(
                f"{where}: {_short(name)} is not a class that a job may name here: give one of "
                f"{', '.join(sorted(fitting)) or 'none'}, or have this machine's owner list it under policy.classes"
            )
        result = fitting[name]
        self.settings(value.get("settings", {}), settings_of(result, wanted(annotation)[1]), where, name, depth + 1)

    def settings(self, given: Any, hints: Mapping[str, Any], where: str, name: str, depth: int) -> None:
        """Refuse settings that a class does not have, and values that they may not have."""
        if not isinstance(given, Mapping):
            raise NotAJob(f"{where} has the settings {_short(given)}: give names and values")
        for key, value in given.items():
            if key not in hints:
                raise NotAJob(f"{where}: {name} has no setting {_short(key)} that a job may give")
            if (name, key) in FILE_SETTINGS and value is not None:
                raise NotAJob(f"{where}.{key} names a file, which no job does: leave it out")
            self.value(value, hints[key], f"{where}.{key}", depth)


def _is_scalar(value: Any, annotation: Any, most: int) -> bool:
    if annotation is type(None):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= most
    if annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (isinstance(value, int) or math.isfinite(value)) and abs(value) <= 1e300
    return annotation is str and isinstance(value, str) and len(value) <= MAX_TEXT and bool(_TEXT.fullmatch(value))


def _kind(annotation: Any, most: int) -> str:
    kinds = {
        bool: "true or false",
        int: f"an integer of at most {most}",
        float: "a finite number",
        str: f"a text of at most {MAX_TEXT} letters, digits and _.*?!-/ that is not a path",
        type(None): "nothing",
    }
    return kinds.get(annotation, "nothing: the setting is an object")


def _check_whole(name: str, value: Any, most: int, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise NotAJob(f"{name} must be an integer from {least} to {most}, got {_short(value)}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise NotAJob("the job has a key twice")
    return result


def _no_constant(name: str) -> Any:
    raise NotAJob(f"the job has {name}, which is not a number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
