"""Files of plain arrays (``.npz``): read safely, or with an error that says which layout is expected where."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def read_arrays(
    root: Path, paths: Sequence[str], layout: Mapping[str, str], alternative: str = ""
) -> dict[str, npt.NDArray[Any]]:
    """Read arrays from the first of the files that exists.

    Args:
        root: Folder of the data sets.
        paths: Relative to ``root``, in order of preference.
        layout: For each array that is read a description, for error messages.
        alternative: What else the caller takes, for the error message.

    Raises:
        FileNotFoundError: If none of the files exists.
        ValueError: If the file is no ``.npz`` or lacks an array.
    """
    path = next((root / path for path in paths if (root / path).is_file()), None)
    if path is None:
        raise FileNotFoundError(missing_files_message(root, paths, _describe(layout) + alternative))
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in layout}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise ValueError(f"{path} does not have the expected layout ({error}): {_describe(layout)}.") from error


def missing_files_message(root: Path, paths: Sequence[str], layout: str) -> str:
    """Return what to say where no file is found: the paths, the expected layout and the remedy."""
    looked_for = " nor ".join(str(root / path) for path in paths)
    return (
        f"There is no {looked_for}; expected is {layout}. Set FL_DATA_ROOT or data.root to the folder that holds "
        f"{paths[0]}, or place the file there."
    )


def _describe(layout: Mapping[str, str]) -> str:
    return "an .npz file with " + ", ".join(f"`{name}` {meaning}" for name, meaning in layout.items())
