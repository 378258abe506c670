"""Where data sets are read from and where derived files are kept."""

import os
import stat
import tempfile
from pathlib import Path

from fl_lightning.data.settings import user_path


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the data sets: the argument, else ``$FL_DATA_ROOT``, else ``./data``."""
    return _chosen("data.root", root, "FL_DATA_ROOT", "data")


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of derived files: the argument, else ``$FL_CACHE_DIR``, else ``~/.cache/fl_lightning``."""
    return _chosen("cache_dir", cache_dir, "FL_CACHE_DIR", "~/.cache/fl_lightning")


def _chosen(name: str, folder: str | Path | None, variable: str, default: str) -> Path:
    return user_path(name, (os.environ.get(variable) or default) if folder in (None, "") else folder).absolute()


def unwritable_cache_message(folder: Path, problem: object) -> str:
    """The error message, with the remedy, if derived files cannot be written."""
    return (
        f"cache_dir={str(folder)!r} cannot be written ({problem}). Set FL_CACHE_DIR or data.cache_dir to a folder of "
        "yours."
    )


def is_writable(folder: Path) -> bool:
    """Whether files may be written in ``folder`` or, where it does not exist yet, in its nearest parent.

    A folder without any write permission bit is respected even by a superuser, to whom the system would grant the
    write; on a read-only file system the bits say nothing, so a file is tried as well.
    """
    while not folder.exists():
        folder = folder.parent
    if not folder.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        return False
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
