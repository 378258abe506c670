"""Reading files: damage becomes one line, and plain arrays (``.npz``) have the layout that their reader states."""

import contextlib
import errno
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.data.settings import is_file

#: Numbers of errors that say nothing about a file's content.
_OF_THE_MACHINE = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.EDQUOT, errno.ENOSPC, errno.EIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    }
)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether an error says that memory, disk space or rights are missing, rather than that a file is damaged."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE)


@contextlib.contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one line that names it.

    Args:
        path: The file.
        expected: What it should hold, and how to write it.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        yield
    except Exception as error:  # there is nothing that damaged pickles and archives do not raise
        if is_of_the_machine(error):
            raise ValueError(
                f"{path} cannot be read ({one_line(error)}): free memory, or let this user read it"
            ) from error
        raise ValueError(
            f"{path} cannot be read ({one_line(error)}): it is damaged, or does not hold {expected}. Fetch or write "
            "it again."
        ) from error


def one_line(error: BaseException) -> str:
    """The kind of an error and the first 200 characters of what it says."""
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
    if text.startswith("Weights only load failed"):  # the rest says how to load the file unsafely
        cause = re.search(r"WeightsUnpickler error: ([^.]+)", text)
        text = f"it holds what is not safe to load{f', {cause[1]}' if cause else ''}"
    text = text.partition(" If you trust the file")[0]  # numpy, too
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def read_arrays(
    root: Path,
    paths: Sequence[str],
    layout: Mapping[str, str],
    *,
    whole: Collection[str] = (),
    gaps: Collection[str] = (),
    alternative: str = "",
) -> dict[str, npt.NDArray[Any]]:
    """Read arrays from the first of the files that exists.

    Args:
        root: Folder of the data sets.
        paths: Relative to ``root``, in order of preference.
        layout: For each array that is read its shape and a description, such as ``"(M, 9) features"``: numbers are
            fixed, equal letters are equal lengths.
        whole: Arrays of whole numbers, which come back as int64.
        gaps: Arrays that may have values which are not finite.
        alternative: What else the caller takes, for the error message.

    Raises:
        FileNotFoundError: If none of the files exists.
        ValueError: If the file is damaged or no ``.npz``, or an array is missing, has another shape, or holds what it
            may not; names the file and the first place.
    """
    path = next((root / path for path in paths if is_file(root / path)), None)
    if path is None:
        raise FileNotFoundError(missing_files_message(root, paths, _describe(layout) + alternative))
    with (
        reading(path, f"the expected layout, {_describe(layout)}"),
        path.open("rb") as file,  # numpy leaves a file open that it opened and found damaged
        np.load(file, allow_pickle=False) as archive,
    ):
        arrays = {name: archive[name] for name in layout}
    _check_shapes(path, arrays, layout)
    for name, array in arrays.items():
        if array.dtype.kind not in "biufSU":
            raise ValueError(f"{path}: `{name}` is of type {array.dtype}; expected {_describe(layout)}.")
        if array.dtype.kind == "f" and name not in gaps:
            with np.errstate(over="ignore"):
                sound = np.isfinite(array.astype(np.float32))
            _check_everywhere(
                path, name, array, sound, "is not a finite float32: correct or leave out what it belongs to"
            )
        if name in whole:
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{path}: `{name}` holds texts; expected {_describe(layout)}.")
            _check_everywhere(path, name, array, array == np.floor(array), "is not a whole number: correct it")
            arrays[name] = array.astype(np.int64)
    return arrays


def missing_files_message(root: Path, paths: Sequence[str], layout: str) -> str:
    """Return what to say where no file is found: the paths, the expected layout and the remedy."""
    looked_for = " nor ".join(str(root / path) for path in paths)
    return (
        f"There is no {looked_for}; expected {layout}. Set FL_DATA_ROOT or data.root to the folder that holds "
        f"{paths[0]}, or place the file there."
    )


def _check_shapes(path: Path, arrays: Mapping[str, npt.NDArray[Any]], layout: Mapping[str, str]) -> None:
    """Compare the arrays with the shapes that their descriptions begin with."""
    lengths: dict[str, int] = {}
    for name, array in arrays.items():
        shape = re.findall(r"\w+", layout[name].partition(")")[0])
        fits = array.ndim == len(shape) and 0 not in array.shape
        for letter, length in zip(shape, array.shape, strict=False):
            fits &= length == (int(letter) if letter.isdigit() else lengths.setdefault(letter, length))
        if not fits:
            result = ", ".join(f"`{name}` {array.shape}" for name, array in arrays.items())
            raise ValueError(f"{path}: the arrays are {result}; expected {_describe(layout)}, none of them empty.")


def _check_everywhere(
    path: Path, name: str, array: npt.NDArray[Any], sound: npt.NDArray[np.bool_], problem: str
) -> None:
    if not sound.all():
        location = ", ".join(map(str, np.argwhere(~sound)[0]))
        raise ValueError(f"{path}: `{name}`[{location}] is {array[~sound][0]}, which {problem}.")


def _describe(layout: Mapping[str, str]) -> str:
    return "an .npz file with " + ", ".join(f"`{name}` {meaning}" for name, meaning in layout.items())
