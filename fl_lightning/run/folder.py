"""The folder of a run: ``<root>/version_<n>/``, with its checkpoints in ``checkpoints/``."""

import errno
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def new_run_folder(root: Path) -> Path:
    """Make the folder of the next version; runs that begin at the same time get one each.

    Raises:
        CannotWrite: No folder can be made there.
    """
    with writing(root / "version_0"):
        return _new_version(root)


def _new_version(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = max(map(_version, root.glob("version_*")), default=-1) + 1
    while True:
        folder = root / f"version_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


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


def checkpoints_of(root: Path, name: str) -> list[Path]:
    """``<name>.ckpt`` of every version that has one, the newest version first."""
    result = root.glob(f"version_*/checkpoints/{name}.ckpt")
    return sorted(result, key=lambda path: _version(path.parent.parent), reverse=True)


def find_checkpoint(root: Path, ckpt_path: str | None, *, required: bool) -> Path | str | None:
    """What a user means by ``ckpt_path``, as far as it is known before the run is set up.

    Args:
        root: Folder of the run's versions.
        ckpt_path: A path, ``last`` or ``best``, or None for none.
        required: Whether ``last`` or ``best`` must exist.

    Returns:
        The path; ``last`` or ``best`` if a version has one (:func:`fl_lightning.run.choice.choose_checkpoint` then
        chooses one); None for none.

    Raises:
        ValueError: It is a path or required, and does not exist.
    """
    if ckpt_path is None:
        return None
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path).expanduser()
        if not os.path.isfile(path):  # false for impossible names too
            what = "is no file" if os.path.exists(path) else "does not exist"
            raise ValueError(
                f"ckpt_path: checkpoint {ckpt_path} {what}: give the path of a .ckpt file, or 'last' or 'best'"
            )
        return path
    if checkpoints_of(root, ckpt_path):
        return ckpt_path
    if required:
        trained = any(root.glob("version_*"))
        remedy = "train with default_callbacks, or FederatedCheckpoint among them" if trained else "train first"
        raise ValueError(f"there is no {ckpt_path}.ckpt in {root}/version_*/checkpoints: {remedy}, or give a path")
    warnings.warn(f"no {ckpt_path}.ckpt in {root}: starting from round 0", stacklevel=3)
    return None


def run_folder_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint; None if the checkpoint was moved out of it."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def _version(folder: Path) -> int:
    number = folder.name.removeprefix("version_")
    return int(number) if number.isdigit() else -1
