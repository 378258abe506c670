"""What the settings of the data layer may be; what is refused is named with its value and the remedy."""

import hashlib
import math
from pathlib import Path
from typing import Any

MAX_SEED = 2**32 - 1
"""The greatest seed that numpy and ``--seed_everything`` take as well."""

MAX_COUNT = 10**9
"""No data set here has more of anything."""


def check_count(name: str, value: Any, *, least: int = 1, most: int = MAX_COUNT) -> None:
    """Refuse what is not a whole number in [least, most].

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {_short(value)}")
    if not least <= value <= most:
        limit = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, got {_short(value)}")


def check_seed(name: str, value: Any) -> None:
    """Refuse what is not a whole number from 0 to :data:`MAX_SEED`.

    Raises:
        ValueError: It is not.
    """
    check_count(name, value, least=0, most=MAX_SEED)


def check_number(name: str, value: Any, *, most: float = MAX_COUNT, above_0: bool = False) -> None:
    """Refuse what is not a finite number in [0, most], or in (0, most] if ``above_0``.

    Raises:
        ValueError: It is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 <= value <= most or (above_0 and value == 0):
        raise ValueError(f"{name} must be a number in {'(' if above_0 else '['}0, {most:g}], got {_short(value)}")


def check_shares(train: float, val: float) -> None:
    """Refuse what are no shares of one whole.

    Raises:
        ValueError: One is no number in [0, 1], nothing trains, or they are more than 1 together.
    """
    check_number("train", train, most=1, above_0=True)
    check_number("val", val, most=1)
    if train + val > 1 + 1e-9:
        raise ValueError(f"train={train} and val={val} are together more than 1: lower one of them (the rest tests).")


def check_size(num_values: int, *names: str) -> None:
    """Refuse settings that ask for more values than memory holds.

    Raises:
        ValueError: They ask for more than 2**33, 32 GiB.
    """
    if num_values > 2**33:
        raise ValueError(f"{' and '.join(names)} ask for {num_values:.1e} numbers, more than memory holds: lower them.")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False: the text ``"false"`` would count as true.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {_short(value)}")


def check_text(name: str, value: Any, example: str) -> None:
    """Refuse what is not a text, or empty.

    Raises:
        ValueError: It is not a text.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{name} must be a text such as {example!r}, got {_short(value)}")


def user_path(name: str, value: Any) -> Path:
    """Return a path with the user's folder instead of ``~``.

    Raises:
        ValueError: It is not a text, or names a user that is not.
    """
    check_text(name, str(value) if isinstance(value, Path) else value, "folder/file")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name}={_short(value)}: {error}; write the whole path.") from error


def check_is_file(path: Path, saved: str) -> None:
    """Refuse the path of a source that is not a file.

    Args:
        path: The setting ``path``.
        saved: What is to be saved there, as code.

    Raises:
        FileNotFoundError: There is none.
    """
    if not is_file(path):
        raise FileNotFoundError(
            f"path={str(path)!r}: {path.absolute()} is not a file. Write one with `torch.save({saved}, path)` or "
            "correct the source's path."
        )


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_file(path: Path) -> bool:
    """Whether a file exists; a name too long for the file system does not."""
    try:
        return path.is_file()
    except OSError:
        return False


def check_folder(name: str, path: Path, remedy: str) -> None:
    """Refuse a path that is a file, is inside one, or whose name is too long; it need not exist.

    Raises:
        ValueError: It cannot be a folder.
    """
    try:
        path.stat()
        problem = "" if path.is_dir() else "it is a file"
    except FileNotFoundError:
        problem = ""
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        raise ValueError(f"{name}={_short(str(path))} is not a folder that can be written ({problem}). {remedy}")


def _short(value: Any) -> str:
    """One line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
