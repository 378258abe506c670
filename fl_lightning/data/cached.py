"""Files of the cache: written in one step, read if they are whole."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fl_lightning.data.sources.array_file import one_line
from fl_lightning.data.sources.folders import unwritable_cache_message
from fl_lightning.files import durable_file
from fl_lightning.saved_tensors import load_saved, write_saved

Content = TypeVar("Content")


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a file in one step, so that no reader ever sees half of it.

    Raises:
        ValueError: The cache folder cannot be written.
    """
    try:
        with durable_file(path) as file:
            write_saved(dict(state), file)
    except OSError as error:
        raise ValueError(unwritable_cache_message(path.parent, error.__cause__ or error)) from error


def load(path: Path, what: str, check: Callable[[Any], Content]) -> Content | None:
    """Read a file; None if there is none, and None with a warning if it is damaged.

    Args:
        path: The file.
        what: What the warning calls it.
        check: Makes the result of what the file holds; it raises if that is not what was written.
    """
    if not path.exists():
        return None
    try:
        return check(load_saved(path))
    except Exception as error:  # there is nothing that a damaged file does not raise
        warnings.warn(f"{what} {path} is damaged and is regenerated ({one_line(error)}).", stacklevel=3)
        return None
