"""The arguments of ``fl-train``: its verbs, their options, and the settings files that the options name.

Nothing here imports torch or anything else that would delay the report of a mistake.
"""

import difflib
import os
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fl_lightning.yaml_input import WrongYaml, parse_yaml, read_yaml

#: Line breaks, and what joins and separates letters.
_KEPT = "\n\u200c\u200d"
#: What the name of a configuration of the package begins with.
SHIPPED = "fl://"

#: The verbs outside :mod:`fl_lightning.cli`, and the modules whose ``main(arguments) -> exit code`` runs them.
#: The first line of a module's docstring is the verb's description in ``--help``.
VERBS: dict[str, str] = {
    "choose": "fl_lightning.choice.command",
    "compare": "fl_lightning.report.compare_command",
    "completion": "fl_lightning.completion_command",
    "export": "fl_lightning.trained.export_command",
    "provision": "fl_lightning.remote.provision_command",
    "report": "fl_lightning.report.report_command",
    "site": "fl_lightning.remote.site_command",
    "sites": "fl_lightning.remote.sites_command",
    "study": "fl_lightning.study.command",
    "submit": "fl_lightning.remote.submit_command",
}

#: The verbs that need NVIDIA FLARE.
OVER_THE_NETWORK = ("provision", "site", "sites", "submit")

#: The verbs that only read files, which anybody may have written (docs/how-to/whose-files.md).
OPENS_FILES = ("compare", "completion", "provision", "report", "site")

#: The verbs of :mod:`fl_lightning.cli`, which are methods of the trainer.
TRAINER_VERBS = {
    "fit": "Train the federation.",
    "validate": "Evaluate a checkpoint on the validation examples.",
    "test": "Evaluate a checkpoint on the test examples; unseen clients are onboarded first.",
    "predict": "Predict every node or example of every training client with a checkpoint.",
    "data": "Describe the clients: sizes, classes, heterogeneity; for graphs also edges, clustering, non-IIDness.",
}

#: The options of ``fl-train predict RUN`` that say whose model predicts, one of which it needs.
WHOSE_MODEL = ("--client", "--global", "--onboard")

#: What ``fl-train`` prints without arguments.
EXAMPLES = """Personalized federated learning on graphs. For example:

  fl-train fit --config fl://quickstart
      train on a generated graph, in seconds
  fl-train data --config fl://fedavg_cora
      look at the clients before training
  fl-train choose --config mine.yaml --budget 30m
      which method, with which settings, for my data
  fl-train compare runs/mine/version_0 runs/mine/version_1
      two runs side by side
  fl-train export runs/mine/version_0 --client client-03
      write a trained model for another program

fl-train --help lists every verb. fl://NAME is a configuration
of the package, and FILE.yaml is yours.
"""

DESCRIPTION = """Personalized federated learning on graphs.

  fl-train fit  --config fl://quickstart                    train
  fl-train fit  --config fl://quickstart --ckpt_path last   continue a stopped run
  fl-train test --config fl://quickstart                    evaluate its best model
  fl-train data --config fl://quickstart                    look at the clients
  fl-train predict RUN --data FILE --client NAME            predict new data
  fl-train fit  --config FILE.yaml --profile                where the time goes
  fl-train fit  --config FILE.yaml --print_config           all settings
  fl-train fit  --strategy.help FedSheafHN                  those of one strategy

fl://NAME is a configuration of the package (configs/NAME.yaml). Any setting can
be overridden: --trainer.num_rounds 20 --data.partitioner.num_clients 20
"""


def predicts_new_data(words: Sequence[str]) -> bool:
    """Whether a command line is ``fl-train predict RUN ...``, in any order, which has a module of its own."""
    if words[0] != "predict" or len(words) == 1:
        return False
    return not words[1].startswith("-") or any(option in WHOSE_MODEL for option, _ in options(words))


def printable(text: str) -> str:
    r"""A text whose characters only stand for themselves: those that steer a terminal are written as escapes.

    Example:
        >>> printable("a" + chr(27) + "[31m")
        'a\\x1b[31m'
    """
    return "".join(map(_escaped, text))


def warning_line(message: Warning | str) -> str:
    """A warning as the program prints it."""
    return printable(f"fl-train: warning: {message}\n")


def warn_in_one_line() -> None:
    """Let warnings of this process be lines of ``fl-train``; after the import of Lightning, which sets its own form."""
    warnings.formatwarning = lambda message, *_, **__: warning_line(message)


def _escaped(char: str) -> str:
    is_kept = char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return char if is_kept else char.encode("unicode_escape").decode()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def mistake(verb: str, error: Exception) -> int:
    """Name a mistake of the user's in a verb; returns the exit code that stands for one."""
    sys.stderr.write(printable(f"fl-train {verb}: error: {error}\n"))
    return 2


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with a one-line message; exit code 2 stands for a mistake of the user."""
    sys.stderr.write(f"fl-train: error: {printable(' '.join(message.split()))}\n")
    raise SystemExit(code)


def with_shipped_configs(words: Sequence[str]) -> list[str]:
    """Replace each ``fl://NAME`` by the path of that configuration of the package; an unknown name ends the program."""
    return [f"{start}{_shipped(name)}" if is_shipped else start for start, is_shipped, name in map(_parted, words)]


def with_home_folder(words: Sequence[str]) -> list[str]:
    """Replace ``~`` in ``--option=~/path``, which shells leave as it is."""
    home = os.path.expanduser("~")
    return [word.replace("=~/", f"={home}/", 1) if word.startswith("--") else word for word in words]


def _parted(word: str) -> tuple[str, str, str]:
    start, is_shipped, name = word.partition(SHIPPED)
    return (start, is_shipped, name) if start in ("", "--config=", "-c=") else (word, "", "")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent
    folder = package / "configs"
    if not folder.is_dir():  # of a clone
        folder = package.parent / "configs"
    files = (path for pattern in ("*.yaml", "papers/*.yaml") for path in folder.glob(pattern))
    known = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in files)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {SHIPPED}{near[0]}? " if near else ""
        fail(f"--config {SHIPPED}{name}: there is no such configuration. {advice}There are {', '.join(known)}")
    return folder / f"{name}.yaml"


def check_output(option: str, file: str, inputs: Iterable[str]) -> None:
    """Refuse to write where something is read from.

    Args:
        option: The option that names what is written.
        file: Its value.
        inputs: What is read: values of other options, of which some are files.

    Raises:
        ValueError: The file is one of them.
    """
    if any(_is_same(file, each) for each in inputs):
        raise ValueError(f"{option} {file} would replace what is read: give {option} another name")


def _is_same(file: str, other: str) -> bool:
    try:
        return os.path.samefile(file, other)
    except (OSError, ValueError):  # one of them is not there, or no name of a file
        return False


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with its value, which follows = or is the next word."""
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        yield option, value if equals else following


def settings_in(config: str) -> dict[str, Any]:
    """The settings in a configuration file; a file that cannot be one is the user's mistake."""
    try:
        settings = read_yaml(Path(config))
    except WrongYaml as error:
        fail(f"--config {error}")
    if not isinstance(settings, dict):
        fail(f"--config {config} has no settings (name: value), but {'nothing' if settings is None else 'other text'}")
    return settings


def named(words: Sequence[str], path: str) -> str:
    """The class that the arguments and their files name last for a path such as ``model.net``; empty for none."""
    result, parts = "", path.split(".")
    for option, value in options(words):
        if option in (f"--{path}.class_path", f"--{path}+"):
            result = _class_at(read(value), (), Path())
        elif option in ("-c", "--config") and value:
            result = _class_at(settings_for(words[0], value), parts, Path(value).parent) or result
        elif option.startswith("--") and parts[: len(group := option[2:].split("."))] == group:
            result = _class_at(read(value), parts[len(group) :], Path()) or ("" if option == f"--{path}" else result)
    return result


def settings_for(verb: str, config: str) -> Any:
    """The settings in a file, which may have them for each verb; ``data`` is a group of settings, too."""
    settings = settings_in(config)
    return settings if verb == "data" else settings.get(verb, settings)


def is_file_of_settings(value: str, folder: Path = Path()) -> bool:
    """Whether a value is the name of a file that stands for the settings in it."""
    return value.endswith((".yaml", ".yml", ".json")) and (folder / value).is_file()


def _class_at(settings: Any, path: Sequence[str], folder: Path) -> str:
    """The class that settings name at a path; empty if there is none.

    Args:
        settings: From a file or the command line, in which files can stand for the settings in them.
        path: The names on the way.
        folder: What the names of files are relative to.
    """
    if isinstance(settings, str) and is_file_of_settings(settings, folder):
        file = folder / settings
        settings, folder = settings_in(str(file)), file.parent
    if path and isinstance(settings, dict):
        inner = settings.get("init_args")
        found = settings.get(path[0], inner.get(path[0]) if isinstance(inner, dict) else None)
        return _class_at(found[-1] if isinstance(found, list) and found else found, path[1:], folder)
    result = settings.get("class_path") if isinstance(settings, dict) else settings
    return result if isinstance(result, str) and not path else ""


def read(word: str) -> Any:
    """A word of the command line parsed as YAML; None if it is not YAML."""
    try:
        return parse_yaml(word)
    except yaml.YAMLError:
        return None
