"""The reason why a client failed, in one line, with the line of the user's code that raised it."""

import inspect
import sysconfig
import traceback
from pathlib import Path
from typing import Any

#: Folders of code that is not the user's.
_INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


class Failure(str):
    """Why a client failed: the kind of error, its message, and where the user's code raised it.

    Attributes:
        location: File, line and function of the user's code; empty if none was running.
    """

    location: str

    def __new__(cls, why: str, location: str = "") -> "Failure":
        """Join both in one line."""
        made = super().__new__(cls, f"{why} ({location})" if location else why)
        made.location = location
        return made

    def __reduce__(self) -> tuple[type["Failure"], tuple[str, str]]:
        """Support pickling, for the other processes."""
        why = str(self).removesuffix(f" ({self.location})") if self.location else str(self)
        return Failure, (why, self.location)


class WrongLoss(TypeError):
    """What a user's ``training_step`` returned is no loss.

    Args:
        step: The method.
        what: What it returned, in words.
    """

    def __init__(self, step: Any, what: str) -> None:
        super().__init__(
            f"training_step returned {what}: return the loss, a scalar tensor that depends on the parameters, or a "
            "mapping with it under 'loss'"
        )
        step = inspect.unwrap(step)
        code = getattr(step, "__code__", None)
        self.location = ""
        if code is not None and _is_users(code.co_filename, str(step.__module__)):
            self.location = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"


def failure_of(error: BaseException) -> Failure:
    """Describe an error that a client raised."""
    users = [
        f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))
    ]
    return Failure(f"{type(error).__name__}: {error}", users[-1] if users else getattr(error, "location", ""))


def _is_users(file: str, module: str) -> bool:
    """Whether code is neither of this package, nor of the standard library, nor of an installed package."""
    if file.startswith("<") or module.partition(".")[0] == "fl_lightning":
        return False
    path = Path(file)
    return not any(map(path.is_relative_to, _INSTALLED)) and not {"site-packages", "dist-packages"} & set(path.parts)
