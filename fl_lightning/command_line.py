"""The entry point of ``fl-train``: handles what needs no training, and passes a verb to the module that runs it.

Nothing here imports torch: ``--help``, ``--version``, a mistyped verb and a wrong file name are handled in a fraction
of the time that the import takes.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import io
import os
import signal
import stat
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fl_lightning
import fl_lightning.deferred
from fl_lightning.arguments import (
    DESCRIPTION,
    EXAMPLES,
    OPENS_FILES,
    OVER_THE_NETWORK,
    TRAINER_VERBS,
    VERBS,
    check_output,
    fail,
    options,
    predicts_new_data,
    settings_in,
    with_home_folder,
    with_shipped_configs,
)
from fl_lightning.extras import MissingExtra, require
from fl_lightning.yaml_input import MOST_DIGITS

#: The options of ``fl-train data`` that name files which are written.
_WRITTEN = ("--csv", "--picture")
#: The folder that is searched for modules.
_searched: list[str] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the given command line, or that of the process; returns the exit code."""
    words = with_home_folder(with_shipped_configs(sys.argv[1:] if arguments is None else arguments))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without ± must not end a run
    verbs = [*TRAINER_VERBS, *VERBS]
    if not words:
        sys.stdout.write(EXAMPLES)
        return 0
    first = words[0]
    if first in ("-h", "--help"):
        _parser().print_help()
        return 0
    if first == "--version":
        sys.stdout.write(f"fl-train {fl_lightning.__version__}\n")
        return 0
    if not first.startswith("-") and first not in verbs:
        near = difflib.get_close_matches(first, verbs, n=1)
        advice = f"did you mean {near[0]}?" if near else f"give one of {', '.join(verbs)}"
        fail(f"there is no verb {first!r}: {advice}")
    _search_current_folder(runs_settings=first not in OPENS_FILES)
    fl_lightning.deferred.install()
    # of torch-geometric's import; of which category depends on the version of torch
    warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated.*")
    try:
        if first in OVER_THE_NETWORK:
            require("flare", f"fl-train {first}")
        if first in VERBS:
            return int(importlib.import_module(VERBS[first]).main(words[1:]))
        if predicts_new_data(words):
            return int(importlib.import_module("fl_lightning.trained.predict_command").main(words[1:]))
        check_files(words)
        return int(importlib.import_module("fl_lightning.cli").main(words))
    except MissingExtra as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=128 + signal.SIGINT)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 128 + signal.SIGPIPE


def _search_current_folder(*, runs_settings: bool) -> None:
    """Find strategies, nets and callbacks of the current folder, for a verb that runs the user's settings.

    The folder is the last, so that it hides nothing, and named by its whole path, as a configuration in another folder
    is read from there. Other verbs may be run in a folder of somebody else's, whose modules and entry points run as
    soon as it is searched.
    """
    while _searched:
        with contextlib.suppress(ValueError):
            sys.path.remove(_searched.pop())
    if not runs_settings:
        return
    with contextlib.suppress(FileNotFoundError):  # the folder was deleted
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
            _searched.append(here)


def _parser() -> argparse.ArgumentParser:
    """The parser of ``--help``; each verb's module has a parser of its own."""
    parser = argparse.ArgumentParser(
        prog="fl-train", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", description="fl-train VERB --help says more of one.")
    for name, purpose in {**TRAINER_VERBS, **{name: _purpose(module) for name, module in VERBS.items()}}.items():
        verbs.add_parser(name, help=purpose)
    return parser


def _purpose(module: str) -> str:
    """The first line of a module's docstring, without the command line in it; the module is not imported."""
    path = Path(fl_lightning.__path__[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return first.partition(": ``")[0].rstrip(".") + "."


def check_files(words: Sequence[str]) -> None:
    """End the program if a file cannot be one of settings, a checkpoint does not exist, or what is read is written."""
    given = list(options(words))
    for option, value in given:
        if len(value) > MOST_DIGITS and value.lstrip("+-").isdigit():
            fail(f"{option} is a number of {len(value)} characters: use at most {MOST_DIGITS}")
        if option in ("-c", "--config") and value:
            _check_endless(f"--config {value}", settings_in(value))
        elif option not in _WRITTEN:
            _check_endless(option, value)
        if option == "--ckpt_path" and value not in ("", "last", "best", "null") and not Path(value).exists():
            fail(f"--ckpt_path {value} does not exist: give a .ckpt file, or last, or best")
    for option, value in given:
        if option in _WRITTEN and value:
            others = [each for other, each in given if other.startswith("-") and other != option]
            named = [text for other, each in given if other in ("-c", "--config") for text in _texts(settings_in(each))]
            try:
                check_output(option, value, [*others, *named])
            except ValueError as error:
                fail(str(error))


def _texts(settings: Any) -> list[str]:
    """All texts in settings, some of which may be names of files."""
    parts = settings.values() if isinstance(settings, dict) else settings if isinstance(settings, list) else ()
    return [settings] if isinstance(settings, str) else [text for part in parts for text in _texts(part)]


def _check_endless(path: str, value: Any) -> None:
    """End the program if a value names something that the parser would read from forever: a pipe or a device."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_endless(path, part)
    if isinstance(value, str):
        with contextlib.suppress(OSError, ValueError):  # not a file name
            mode = os.stat(value).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                fail(f"{path}: {value} cannot be read (it is not a regular file): give a YAML file of settings")


if __name__ == "__main__":
    sys.exit(main())
