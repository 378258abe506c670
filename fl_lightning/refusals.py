"""Error messages of the command line: one line, with the option's name and the names that are allowed."""

import difflib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.loggers.logger import Logger
from torch import nn

import fl_lightning.callbacks
import fl_lightning.models
import fl_lightning.run.loggers
from fl_lightning.arguments import TRAINER_VERBS, is_file_of_settings, named, options, settings_for, settings_in
from fl_lightning.data import FederatedDataModule, Partitioner, Source, Splitter
from fl_lightning.executors import Executor
from fl_lightning.renamed import CLASSES, LIGHTNINGS_OWN, MODULES, OF_LIGHTNING, SETTINGS, present_name
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.run.callback import Callback, in_place_of
from fl_lightning.strategies import Strategy
from fl_lightning.strategies.former_settings import FORMER_SETTINGS
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.trainer import FederatedTrainer


def summary_of(error: Exception) -> str:
    """The message of an error; for errors of the operating system, with the file first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


#: What the parser says about types that a value does not have, whatever is wrong with it.
_NO_CAUSE = re.compile(
    r"Expected a (<class|path)|Not a valid subclass|Does not validate|a class path \(|a dict with"
    r"|Import path \S+ does not"
)
#: The verb that the parser puts before the name of a setting.
_VERB = re.compile(rf"\b(?:{'|'.join(TRAINER_VERBS)})\.(?=(?:trainer|strategy|model|data|seed_everything|ckpt_path)\b)")
#: A callback of Lightning's in a configuration.
_OF_LIGHTNING = re.compile(r"'class_path': '(?:pytorch_)?lightning\.[\w.]*callbacks\.(?:\w+\.)*(\w+)'")
#: What stands where a class and its settings are given.
_OF_A_CLASS = {"class_path", "init_args", "dict_kwargs"}
_KEY = re.compile(r'Parser key "([^"]+)":?\s*')


def plain(message: str, words: Sequence[str] = ()) -> str:
    """The parser's message without its lists of types and parsed objects, and with the names that are allowed.

    Args:
        message: The parser's message.
        words: The command line, whose options name the settings.
    """
    text = _VERB.sub("", _cause(_VERB.sub("", message), words))
    text = _KEY.sub(lambda key: f"{_option_of(key[1], words) or _path_of(key[1], words, message)}: ", text)
    return re.sub(r"Expected an? <class '([\w.]+)'>\. Got value: (.*)", r"expected \1, got \2", text)


def _option_of(setting: str, words: Sequence[str]) -> str:
    """The command-line option of a setting, which may be named by its last parts alone; empty if there is none."""
    given = (option.rstrip("+") for option, _ in options(words) if option.startswith("--"))
    return next((option for option in given if option[2:] == setting or option.endswith(f".{setting}")), "")


def _path_of(setting: str, words: Sequence[str], message: str = "") -> str:
    """The whole name of a setting that a configuration file gives, as the setting itself if it is not clear which.

    Args:
        setting: Its last parts.
        words: The command line, which names the files.
        message: What was said, which has the value.
    """
    parts = setting.split(".")
    ending = {path: value for path, value in _in_files(words).items() if path[-len(parts) :] == tuple(parts)}
    if len(ending) > 1:  # such as num_clients of a source and of a partitioner
        ending = {path: value for path, value in ending.items() if message.endswith(f" {value}")}
    return ".".join(next(iter(ending))) if len(ending) == 1 else setting


def _in_files(words: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """The settings in the configuration files that the command line names, with their paths."""
    result: dict[tuple[str, ...], Any] = {}
    for option, value in options(words):
        if option in ("-c", "--config") and value:
            result |= _leaves(settings_for(words[0], value), ())
        elif option in ("--trainer", "--strategy", "--model", "--data") and is_file_of_settings(value):
            result |= _leaves(settings_in(value), (option[2:],))
    return result


def _leaves(settings: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting of a configuration with its path."""
    for name, value in settings.items() if isinstance(settings, dict) else ():
        yield (*path, str(name)), value
        yield from _leaves(value, (*path, str(name)))


def _cause(message: str, words: Sequence[str]) -> str:
    if "Callback" in message and (given := _OF_LIGHTNING.search(message)):
        return f"trainer.callbacks: {given[1]} is not a fl_lightning.Callback: {in_place_of(given[1])}"
    given = re.search(r"Problem with given class_path '([^']+)'", message)
    if "source" in message and (path := named(words, "data.source")).endswith((".pt", ".csv", ".npz")):
        return f"data.source is a file: give --data.source FileSource --data.source.path {path}"
    if given and given[1].rpartition(".")[2] in CLASSES:
        return _unknown_class(given[1], message)
    if former := next((each for each in MODULES if f"{each}." in message), ""):
        return f"{former} was renamed to {MODULES[former]}"
    if (lacking := re.search(r"has no attribute '(\w+)'", message)) and lacking[1] in CLASSES:
        return f"{lacking[1]} was renamed to {CLASSES[lacking[1]]}"
    if given and "." in given[1] and (why := why_not_imported(given[1])):
        key = _KEY.match(message)
        return f"{f'{key[1]}: ' if key else ''}{given[1]!r} cannot be imported: {why}"
    if "expects a function or a callable class" in message and (key := _KEY.match(message)):
        path = named(words, f"model.{key[1].rpartition('.')[2]}")
        if "." in path and (why := why_not_imported(path)):
            return f"model.{key[1]}: {path!r} cannot be imported: {why}"
    if abstract := re.search(
        r"Expected an instantiatable class, but (?:([\w.]+) )?is abstract"
        r"|Not a valid subclass of (\w+).*(?:Got|Given) value: {'init_args'",
        message,
        flags=re.DOTALL,
    ):
        return _without_class(key[1] if (key := _KEY.match(message)) else "", abstract[1] or abstract[2] or "", words)
    if unknown := re.search(r"Expected a dot import path string: (\S+)", message):
        return _unknown_class(unknown[1], message)
    if unknown := re.fullmatch(r"Option '(\S+)' is not accepted", message):
        return _not_accepted(unknown[1], words)
    if unknown := re.match(
        r"(?:unrecognized arguments: --|Subcommand '\w+' does not accept option ')([^\s=']+)", message
    ):
        return _unknown_option(_option_of(unknown[1], words)[2:] or unknown[1])
    if message == "the following arguments are required: defaults":  # of torch's Optimizer, of which all are kinds
        return _lacks_class("model.optimizer")
    if missing := re.fullmatch(r"the following arguments are required: ([\w., ]+)", message):
        names = [_whole_name(name, words) for name in missing[1].split(", ")]
        known = {"data.source": "--config fl://quickstart", "strategy": "--strategy FedAvg"}
        hint = next((f" (for example {known[name]})" for name in names if name in known), "")
        return f"missing: {', '.join(f'--{name}' for name in names)}{hint}"
    if unknown := re.search(r"Dict must include a class_path .*NestedArg\(key='([^']+)'", message, flags=re.DOTALL):
        key = _KEY.match(message)
        name = f"model.{key[1]}" if key and key[1] == "optimizer" else key[1] if key else "it"
        example = "torch.optim.Adam" if name == "model.optimizer" else "a class path"
        return f"{name}.{unknown[1]} is given, but not its class: give --{name} {example} before it"
    causes = re.findall(r"^ +- (.+(?:\n {5,}(?!- ).+)*)$", message, flags=re.MULTILINE)
    causes = [" ".join(cause.split()) for cause in causes if not _NO_CAUSE.match(cause)]
    if "Does not validate against any of the Union" in message:
        key = _KEY.match(message)
        kinds = re.findall(r"- (?:Expected an? |Not a valid subclass of )(?:<class ')?([\w.]+)", message)
        given = re.search(r"Given value: (.*)", message)
        if not causes and kinds and given:
            causes = [f"expected {' or '.join(kinds)}, got {given[1] or 'nothing'}"]
        if causes:
            return f"{key[0] if key else ''}{causes[-1]}"
    elif wrong := re.search(r"- (Not a valid subclass of \w+)\. Got value: (.*)", message):
        return f"{message.partition(chr(10))[0]} expected a class path, got {wrong[2]}"
    return message


def why_not_imported(path: str) -> str:
    """Why a class path cannot be imported; empty if it can be."""
    try:
        pkgutil.resolve_name(path)
    except Exception as error:  # a user's module can raise anything
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ""


def _not_accepted(setting: str, words: Sequence[str]) -> str:
    """What is wrong with a setting that its class does not have."""
    if option := _option_of(setting, words):
        return _unknown_argument(option[2:], words)
    if setting == "class_path":
        for place, value in _in_files(words).items():
            if isinstance(value, dict) and "class_path" in value and not value.keys() <= _OF_A_CLASS:
                return _beside_init_args(".".join(place), value["class_path"])
    path = _path_of(setting, words)
    holder = path.rpartition(".init_args.")[0]
    if holder and not named(words, holder):
        return _lacks_class(holder, "give its class_path beside init_args")
    return f"{path}: " * (path != setting) + _unknown_setting(setting, words)


def _without_class(setting: str, name: str, words: Sequence[str]) -> str:
    """What is wrong where a class would have to be made that only says what its kinds have in common."""
    given = named(words, setting).rpartition(".")[2]
    name = (name or given).rpartition(".")[2]
    if not given:
        return _lacks_class(setting, _kinds_of(name))
    if given != name:
        return _beside_init_args(setting, given)
    return f"{setting}: {name} only says what such classes have in common: {_kinds_of(name)}"


def _lacks_class(setting: str, advice: str = "") -> str:
    """Advice to give the class, too; by default one of the examples."""
    return f"{setting} has settings, but no class: {advice or f'give --{setting} {_EXAMPLES[setting]} before them'}"


def _beside_init_args(setting: str, name: str) -> str:
    return f"{setting}: {name} has its settings under init_args; beside it and class_path there can be no others"


def _kinds_of(name: str) -> str:
    """Advice to give one of the kinds of a class."""
    known = known_classes()
    kinds = sorted(n for n, kind in known.items() if name in known and issubclass(kind, known[name]))
    return f"give one of {', '.join(n for n in kinds if not inspect.isabstract(known[n]))}" if kinds else "give another"


def _unknown_class(name: str, message: str) -> str:
    key = re.match(r'Parser key "([^"]+)"', message)
    if (bare := name.rpartition(".")[2]) in CLASSES:
        return f"{key[1] if key else 'model'}: {bare} was renamed to {CLASSES[bare]}"
    if key is not None and key[1].endswith("net"):
        return _unknown_net(key[1], name)
    known = known_classes()
    named = re.findall(r"subclass of (\w+)", message)
    family = [
        base
        for base in known.values()
        if f"'{base.__module__}.{base.__qualname__}'" in message or base.__name__ in named
    ]
    names = sorted(
        n
        for n, cls in known.items()
        if not inspect.isabstract(cls) and cls not in family and (not family or issubclass(cls, family[0]))
    )
    near = difflib.get_close_matches(name, names, n=1)
    where = f"{key[1]}: " if key else ""
    if not family and not near:
        return f"{where}{name!r} is not accepted: see --print_config for the settings and --help for their meaning"
    advice = f"did you mean {near[0]}?" if near else f"give a class path, or one of {', '.join(names)}"
    return f"{where}there is no class {name!r}: {advice}"


def known_nets() -> list[str]:
    """Class paths of this package's nets and layers."""
    models = fl_lightning.models
    return [f"{models.__name__}.{net}" for net in models.__all__ if issubclass(getattr(models, net), nn.Module)]


def _unknown_net(key: str, name: str) -> str:
    paths = known_nets()
    nets = [path.rpartition(".")[2] for path in paths]
    near = difflib.get_close_matches(name.rpartition(".")[2], nets, n=1)
    why = f" ({why_not_imported(name)})" if "." in name else ""
    advice = (
        f"did you mean fl_lightning.models.{near[0]}?" if near else f"give a class path, or one of {', '.join(paths)}"
    )
    return f"{key}: there is no net {name!r}{why}: {advice}"


#: Settings that users of other trainers look for.
_OTHER_NAMES = {
    "data.num_clients": "data.partitioner.num_clients",
    "lr_scheduler": "model.lr_scheduler",
    "optimizer": "model.optimizer",
    **{f"trainer.{name}": setting for name, setting in OF_LIGHTNING.items()},
}
#: Settings of Lightning's trainer that have no counterpart, and what to do.
_WITHOUT_COUNTERPART = {f"trainer.{name}": advice for name, advice in LIGHTNINGS_OWN.items()}


#: Options of the verbs themselves.
_OF_VERBS = ("config", "ckpt_path", "print_config", "profile", "resume_with_changes", "seed_everything", "help")

#: Names that other trainers use for settings.
_OTHER_SETTINGS = {"mu": "proximal_weight", "epochs": "num_epochs", "local_epochs": "num_epochs"}


def _unknown_argument(option: str, words: Sequence[str]) -> str:
    """The message for an option that its class does not have."""
    prefix, _, name = option.replace(".init_args.", ".").rpartition(".")
    cls = _class_of(prefix, words)
    if prefix in _EXAMPLES and not named(words, prefix):
        return _lacks_class(prefix)
    if cls is None:
        return f"there is no option --{option}: {_unknown_setting(name)}"
    if former := FORMER_SETTINGS.get(cls.__name__, {}).get(name):
        return f"there is no option --{option}: {cls.__name__}'s {name} {former}"
    if now := present_name(cls, name):
        return f"there is no option --{option}: {name} was renamed to {now}"
    settings = list(inspect.signature(cls).parameters)
    near = difflib.get_close_matches(_OTHER_SETTINGS.get(name, name), settings, n=1)
    others = sorted(_owners().get(name, ()))
    where = f" (it is one of {', '.join(others)})" if others else ""
    advice = f"did you mean --{prefix}.{near[0]}?" if near else f"its settings are {', '.join(settings)}"
    return f"there is no option --{option}: {cls.__name__} has no setting {name!r}{where}; {advice}"


#: Parts of a run whose class is the same in all.
_ALWAYS = {"trainer.participation": Participation, "model.privacy": RecordPrivacy}
#: Parts of a run that have no class by default.
_EXAMPLES = {"model.optimizer": "torch.optim.Adam", "model.lr_scheduler": "torch.optim.lr_scheduler.CosineAnnealingLR"}
#: Parts of a run that have settings.
_PARTS = (
    *_ALWAYS,
    "data.source",
    "data.partitioner",
    "data.splitter",
    "data.sampler",
    "strategy",
    "model",
    "model.net",
)


def _class_of(part: str, words: Sequence[str]) -> type | None:
    """The class of a part of a run that the arguments and their files name; None if it is not known."""
    path = named(words, part)
    cls = known_classes().get(path) or vars(fl_lightning.models).get(path)
    if cls is None and "." in path and not why_not_imported(path):
        cls = pkgutil.resolve_name(path)
    cls = cls or _ALWAYS.get(part)
    return cls if inspect.isclass(cls) else None


def _whole_name(setting: str, words: Sequence[str]) -> str:
    """A setting that is missing, after the part of a run whose class requires it."""
    for part in _PARTS if "." not in setting else ():
        parameter = inspect.signature(_class_of(part, words) or object).parameters.get(setting)
        if parameter is not None and parameter.default is parameter.empty:
            return f"{part}.{setting}"
    return setting


def _unknown_option(option: str) -> str:
    """The message for an option that no parser has."""
    if option in _OTHER_NAMES:
        return f"there is no option --{option}: did you mean --{_OTHER_NAMES[option]}?"
    if option in _WITHOUT_COUNTERPART:
        return f"there is no option --{option}: {_WITHOUT_COUNTERPART[option]}"
    sections: dict[str, type] = {"trainer": FederatedTrainer, "data": FederatedDataModule, "model": ClientModule}
    names = [f"{section}.{name}" for section, cls in sections.items() for name in inspect.signature(cls).parameters]
    names += _OF_VERBS
    parts = option.split(".")
    first = ".".join(parts[:2])
    if first not in names and (near := difflib.get_close_matches(first, names, n=1)):
        return f"there is no option --{option}: did you mean --{'.'.join([near[0], *parts[2:]])}?"
    return f"there is no option --{option}: {_unknown_setting(parts[-1])}"


def _unknown_setting(name: str, words: Sequence[str] = ()) -> str:
    strategy = named(words, "strategy").rpartition(".")[2] if words else ""
    if former := FORMER_SETTINGS.get(strategy, {}).get(name):
        return f"{strategy}'s {name} {former}"
    owners = _owners()
    if (now := SETTINGS.get(name, "")) and name not in owners:
        return f"{name} was renamed to {now}"
    near = difflib.get_close_matches(name, sorted(owners), n=1)
    advice = f"did you mean {near[0]}? " if near else ""
    if name in owners:
        advice = f"it is one of {', '.join(sorted(owners[name]))}; "
    return f"there is no setting {name!r} here: {advice}--print_config shows the available ones"


def _owners() -> dict[str, list[str]]:
    """The classes that have each setting, by its name."""
    owners: dict[str, list[str]] = {}
    for owner, cls in known_classes().items():
        if owner.startswith("_") or inspect.isabstract(cls):
            continue
        for setting in inspect.signature(cls).parameters:
            owners.setdefault(setting, []).append(owner)
    return owners


def known_classes() -> dict[str, type]:
    """Classes that settings can name, and their base classes, by bare name."""
    bases = (Strategy, Aggregation, Source, Partitioner, Splitter, Callback, Executor, ClientModule, Logger)
    result = [cls for base in bases for cls in _subclasses(base)]
    named = (cls for cls in result if cls is Logger or not cls.__module__.startswith("lightning."))
    return {cls.__name__: cls for cls in named if not cls.__name__.startswith("_")}


def _subclasses(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [base, *(below for child in children for below in _subclasses(child))]
