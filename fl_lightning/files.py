"""Files that are written whole or not at all, secret ones, and errors that say what could not be written and where."""

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

#: Seconds after which a file that was begun is taken to be abandoned.
_STALE = 3600.0
#: Numbers of errors where space may be missing; that of some file systems has none.
_NO_SPACE = (None, errno.ENOSPC, errno.EDQUOT)


class CannotWrite(OSError):
    """A file or folder that cannot be written; the message has its name, its size and the reason."""


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an ``OSError`` into a message about what could not be written, and where.

    Args:
        path: The file.
        num_bytes: Its size, if known.

    Raises:
        CannotWrite: Instead of any other ``OSError``.
    """
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        is_full = error.errno in _NO_SPACE
        free = free_bytes(path.parent) if is_full else None
        needed = "" if num_bytes is None else f" of {num_bytes:,} bytes"
        left = "" if free is None else f", where {free:,} bytes are free"
        raise CannotWrite(
            f"{path.name}{needed} cannot be written into {path.parent.absolute()}{left}: {error.strerror or error}; "
            f"{'free space there, or ' * is_full}choose another folder, for runs by trainer.default_root_dir"
        ) from error


def free_bytes(folder: Path) -> int | None:
    """Free bytes of the file system of a folder or its nearest existing parent; None if unknown."""
    for above in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(above).free
        except OSError:
            continue
    return None


@contextmanager
def whole_file(path: Path, num_bytes: int | None = None, *, secret: bool = False) -> Iterator[Path]:
    """Write a file so that its path holds either the old content or the whole new one, whatever happens.

    Args:
        path: The file; its folder is created.
        num_bytes: Its size, if known, for the message.
        secret: Whether only the owner may read it, and its folder if that is created here.

    Yields:
        The temporary file to write to: an empty file in the same folder, with the same suffix and an unpredictable
        name, which replaces the file at the end. Temporary files of killed processes are deleted by a later write.

    Raises:
        CannotWrite: The disk is full, the folder read-only, ...
    """
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.new{path.suffix}")
    with writing(path, num_bytes):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if secret else 0o777)
        _sweep(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        os.close(os.open(temporary, flags, 0o600 if secret else 0o666))
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def durable_file(path: Path, num_bytes: int | None = None, *, secret: bool = False) -> Iterator[IO[bytes]]:
    """As :func:`whole_file`, opened for bytes; once this ends, the file survives a power failure."""
    with whole_file(path, num_bytes, secret=secret) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sweep(path: Path) -> None:
    """Delete abandoned temporary files of a file."""
    pattern = re.compile(rf"\.{re.escape(path.stem)}\.[0-9a-f]{{16}}\.new{re.escape(path.suffix)}")
    with suppress(OSError):
        for entry in os.scandir(path.parent):
            if pattern.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE:
                os.unlink(entry)


def secret_file(path: Path, make: Callable[[], bytes], *, num_bytes: int | None = None) -> bytes:
    """The content of a file that only its owner may read; the file is created if it does not exist.

    Args:
        path: The file.
        make: Makes the content.
        num_bytes: How many bytes it must have; None for any number above 0.

    Raises:
        ValueError: It has another number of bytes, so it is damaged.
    """
    if not path.exists():
        with whole_file(path, secret=True) as temporary:
            temporary.write_bytes(make())
    content = path.read_bytes()
    if not content or len(content) != (num_bytes or len(content)):
        raise damaged_secret(path, content)
    return content


def damaged_secret(path: Path, content: bytes) -> ValueError:
    """The error for a secret that is not as it was written."""
    return ValueError(
        f"{path.name} is damaged, it has {len(content)} bytes: restore it from a copy, or move its folder away to "
        "start over"
    )


def private_folder(folder: Path) -> Path:
    """A folder that only its owner may open, created if it does not exist; its content and parents are unchanged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
