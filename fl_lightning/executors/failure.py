"""The reason why a client failed, in one line, with the line of the user's code that raised it."""

import inspect
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

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


class WrongReturn(ValueError):
    """A method of a user's client returned what it must not.

    Args:
        method: The method.
        what: What it returned, in words.
        instead: What it must return.
    """

    def __init__(self, method: Any, what: str, instead: str) -> None:
        super().__init__(f"{getattr(method, '__name__', method)} returned {what}: return {instead}")
        method = inspect.unwrap(method)
        code = getattr(method, "__code__", None)
        self.location = ""
        if code is not None and _is_users(code.co_filename, str(method.__module__)):
            self.location = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"


class WrongLoss(WrongReturn):
    """What a user's ``training_step``, ``objective`` or ``loss`` returned is no loss; the arguments are the same."""

    def __init__(self, method: Any, what: str) -> None:
        is_step = getattr(method, "__name__", "") == "training_step"
        more = ", or a mapping with it under 'loss'" if is_step else ", such as the mean over the training examples"
        super().__init__(method, what, f"the loss, a scalar tensor that depends on the parameters{more}")


def check_loss(method: Any, returned: Any) -> Tensor:
    """Check that a method returned a loss, and return it.

    Raises:
        WrongLoss: It did not.
    """
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        raise WrongLoss(method, _in_words(returned))
    return returned


def check_scores(method: Any, returned: Any) -> None:
    """Check that a method returned scores.

    Raises:
        WrongReturn: It did not.
    """
    instead = "a mapping from names, such as val/acc, to pairs of scalar tensors, numerator and denominator"
    if not isinstance(returned, Mapping):
        raise WrongReturn(method, type(returned).__name__, instead)
    for name, pair in returned.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WrongReturn(method, f"a {type(pair).__name__} for {name!r}", instead)
        for part, value in zip(("numerator", "denominator"), pair, strict=True):
            if not isinstance(value, Tensor) or value.dim():
                of = (
                    f"of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else f"that is a {type(value).__name__}"
                )
                raise WrongReturn(method, f"for {name!r} a {part} {of}", instead)


def check_tensors(method: Any, returned: Any) -> None:
    """Check that a method returned tensors by name, of which some may be None.

    Raises:
        WrongReturn: It did not.
    """
    instead = "a mapping from names of parameters to tensors, which may be empty"
    if not isinstance(returned, Mapping):
        raise WrongReturn(method, type(returned).__name__, instead)
    for name, value in returned.items():
        if value is not None and not isinstance(value, Tensor):
            raise WrongReturn(method, f"a {type(value).__name__} for {name!r}", instead)


def check_count(method: Any, returned: Any) -> None:
    """Check that a method returned a number of examples.

    Raises:
        WrongReturn: It did not.
    """
    if not isinstance(returned, Tensor) or returned.dim():
        instead = "the number of a client's examples, a scalar tensor: batch.train_mask.sum(-1)"
        raise WrongReturn(method, _in_words(returned), instead)


def _in_words(returned: Any) -> str:
    return f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__


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
