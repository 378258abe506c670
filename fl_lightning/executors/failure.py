"""The reason why a client failed, in one line, with the line of the user's code that raised it."""

import sysconfig
import traceback
from pathlib import Path

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


def failure_of(error: BaseException) -> Failure:
    """Describe an error that a client raised."""
    users = [
        f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))
    ]
    return Failure(f"{type(error).__name__}: {error}", users[-1] if users else "")


def _is_users(file: str, module: str) -> bool:
    """Whether code is neither of this package, nor of the standard library, nor of an installed package."""
    if file.startswith("<") or module.partition(".")[0] == "fl_lightning":
        return False
    path = Path(file)
    return not any(map(path.is_relative_to, _INSTALLED)) and not {"site-packages", "dist-packages"} & set(path.parts)
