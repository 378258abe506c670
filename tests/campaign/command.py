"""``fl-train`` in this process, and what it says and leaves behind."""

import contextlib
import io
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import yaml
from campaign.limits import OutOfTime, limited

from fl_lightning.cli import FederatedCLI, main
from fl_lightning.run.rounds import Rounds

ERROR = "fl-train: error: "
#: Lines that may stand beside the one of the error.
_CHATTER = ("fl-train: warning: ", "Seed set to ", "GPU available", "TPU available", "HPU available")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a command ended.

    Attributes:
        code: The exit code; None if it crashed or was stopped.
        said: Standard error.
        crash: The traceback of an error that got out, if any.
        is_long: It was stopped because it took too long: the setting was taken, and is costly.
        config: The configuration of the newest run, None if there is none.
    """

    code: int | None
    said: str
    crash: str = ""
    is_long: bool = False
    config: Any = None

    @property
    def errors(self) -> list[str]:
        """What was said beside warnings."""
        return [line for line in self.said.splitlines() if line.strip() and not line.startswith(_CHATTER)]

    @property
    def is_one_line(self) -> bool:
        """Whether it was refused with exit code 2 and one line."""
        return self.code == 2 and len(self.errors) == 1 and self.errors[0].startswith(ERROR)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, with its cache."""
    variables = {"FL_CACHE_DIR": str(folder / "cache"), "JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
    with contextlib.chdir(folder), mock.patch.dict(os.environ, variables):
        os.environ.pop("FL_DATA_ROOT", None)
        yield


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """Work in a new folder, which goes again."""
    folder = Path(tempfile.mkdtemp(prefix="campaign"))
    work = folder / "a" / "b"  # what a wrong path writes above it goes as well
    work.mkdir(parents=True)
    try:
        with inside(work):
            yield work
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def call(arguments: Sequence[str], *, seconds: float = 10, terminal: TextIO | None = None) -> Ending:
    """Run a command; one that trains ends after its first round, and no processes are started.

    Args:
        arguments: After ``fl-train``.
        seconds: After which it is stopped.
        terminal: Where it prints; None to print for nobody.
    """
    run_round = Rounds.run_round

    def only_one(rounds: Rounds) -> None:
        run_round(rounds)
        rounds.run.should_stop = True

    def only_fit() -> dict[str, set[str]]:  # parsers of the other verbs take most of the time
        return {"fit": {"client", "data", "strategy"}}

    said, code, crash, is_long = io.StringIO(), None, "", False
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(terminal or io.StringIO()),
        warnings.catch_warnings(),
        mock.patch.object(Rounds, "run_round", only_one),
        mock.patch.object(FederatedCLI, "subcommands", staticmethod(only_fit)),
        mock.patch("subprocess.Popen", side_effect=AssertionError("it starts a process")),
    ):
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: said.write(f"fl-train: warning: {message}\n")
        try:
            with limited(seconds):
                code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except OutOfTime:
            is_long = True
        except KeyboardInterrupt:
            raise
        except BaseException:
            crash = traceback.format_exc()
    configs = list(Path().absolute().parents[1].glob("**/version_*/config.yaml"))
    config = yaml.safe_load(max(configs, key=lambda path: path.stat().st_mtime).read_text()) if configs else None
    return Ending(code=code, said=said.getvalue(), crash=crash, is_long=is_long, config=config)
