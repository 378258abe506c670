"""Where a run keeps its files: ``<root>/version_<n>/``, with its checkpoints in ``checkpoints/``."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def new_run_folder(root: Path) -> Path:
    """Make the folder of the next version; runs that begin at the same time get one each."""
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
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file so that its path holds either the old content or the whole new one, whatever happens.

    Args:
        path: The file; its folder is created.

    Yields:
        What to write in its place: a file beside it, of the same suffix, which takes its place in the end. There is one
        name for it, so that what a killed process leaves is written over by the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def find_checkpoint(root: Path, ckpt_path: str | None, *, required: bool) -> Path | None:
    """The checkpoint that a user means.

    Args:
        root: Folder of the run's versions.
        ckpt_path: A path, ``last`` or ``best`` (of the newest version that has one), or None for none.
        required: Whether ``last`` or ``best`` must exist.

    Raises:
        ValueError: It is a path, or required, and there is none.
    """
    if ckpt_path is None:
        return None
    if ckpt_path not in ("last", "best"):
        if not Path(ckpt_path).is_file():
            raise ValueError(
                f"ckpt_path: checkpoint {ckpt_path} does not exist: give the path of a .ckpt file, or 'last' or 'best'"
            )
        return Path(ckpt_path)
    found = list(root.glob(f"version_*/checkpoints/{ckpt_path}.ckpt"))
    if found:
        return max(found, key=lambda path: _version(path.parent.parent))
    if required:
        raise ValueError(f"there is no {ckpt_path}.ckpt in {root}/version_*/checkpoints: train first, or give a path")
    warnings.warn(f"no {ckpt_path}.ckpt in {root}: starting from round 0", stacklevel=3)
    return None


def run_folder_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint; None for one that was moved out of it."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def _version(folder: Path) -> int:
    number = folder.name.removeprefix("version_")
    return int(number) if number.isdigit() else -1
