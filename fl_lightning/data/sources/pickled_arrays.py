"""Pickles that hold arrays, read without building anything else: a pickle could run any code otherwise."""

import contextlib
import io
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse import csr_matrix

from fl_lightning.data.sources.array_file import reading


class _Dtype:
    """A type of numbers or texts, of which a pickle may set the order of bytes and nothing else."""

    def __init__(self, text: str | bytes, *_: Any) -> None:
        name = text.decode() if isinstance(text, bytes) else text
        if not re.fullmatch(r"[biufSU]\d+", name):
            raise pickle.UnpicklingError(f"it holds an array of {name[:20]!r}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = state[1].decode() if isinstance(state[1], bytes) else state[1]
        self.dtype = self.dtype.newbyteorder(order)


class _Array(np.ndarray):
    """An array that a pickle fills once, with as many bytes as it needs: numpy takes what the pickle says."""

    _is_filled = False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        raw = content.encode("latin1") if isinstance(content, str) else content  # of Python 2
        if self._is_filled or not isinstance(kind, _Dtype) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array that numpy did not write")
        if not all(isinstance(length, int) and length >= 0 for length in shape):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape}")
        if len(raw) != math.prod(shape) * kind.dtype.itemsize:
            raise pickle.UnpicklingError(f"it holds {len(raw)} bytes for an array of shape {shape}")
        self._is_filled = True
        super().__setstate__((1, tuple(shape), kind.dtype, bool(is_fortran), raw))  # type: ignore[arg-type]


class _Matrix:
    """A matrix of SciPy's, whose entries are within its bounds: SciPy writes others wherever they point."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = tuple(np.array(state[name]) for name in ("data", "indices", "indptr"))
        self.matrix = csr_matrix(parts, shape=state["_shape"])
        self.matrix.check_format(full_check=True)


def _blank_array(*_: Any) -> _Array:
    return np.ndarray.__new__(_Array, (0,), np.int8)


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


class ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays of numbers and texts, SciPy's CSR matrices and Python's own values only.

    Nothing in a pickle reaches numpy unchecked: numpy would take a forged type or shape for what it says, and read or
    write memory that is not the array's. A matrix stands alone in a pickle.
    """

    _classes = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _blank_array,
        ("numpy._core.multiarray", "_reconstruct"): _blank_array,
        ("numpy", "ndarray"): "an argument of the above",
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encoded,
        ("collections", "defaultdict"): defaultdict,
        ("__builtin__", "list"): list,
        ("builtins", "list"): list,
        ("scipy.sparse.csr", "csr_matrix"): _Matrix,
        ("scipy.sparse._csr", "csr_matrix"): _Matrix,
    }

    def load(self) -> Any:
        """What is in the pickle."""
        result = super().load()
        return result.matrix if isinstance(result, _Matrix) else result

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name in the pickle.

        Raises:
            UnpicklingError: It is not allowed.
        """
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return self._classes[module, name]


@contextlib.contextmanager
def nothing_unpickled() -> Iterator[None]:
    """Have whatever reads data files build arrays and tensors only, for the length of the context.

    PyG reads ``processed/pre_transform.pt`` with ``weights_only=False``, falls back on it where a converted file holds
    classes, and has data sets whose raw files are pickles. Otherwise anyone who can write into a data folder could run
    code here.
    """
    load = torch.load

    def load_weights(*arguments: Any, **settings: Any) -> Any:
        with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
            return load(*arguments, **{**settings, "weights_only": True, "pickle_module": None})

    def load_arrays(file: Any, *, encoding: str = "ASCII", **_: Any) -> Any:
        return ArrayUnpickler(file, encoding=encoding).load()

    def loads_arrays(content: bytes, **settings: Any) -> Any:
        return load_arrays(io.BytesIO(content), **settings)

    with (
        mock.patch.object(torch, "load", load_weights),
        mock.patch.object(pickle, "load", load_arrays),
        mock.patch.object(pickle, "loads", loads_arrays),
    ):
        yield


def check_planetoid_file(path: Path) -> None:
    """Refuse a raw file of Planetoid's that holds more than arrays, or a matrix with entries out of bounds.

    PyG unpickles whatever there is.

    Raises:
        ValueError: The file is damaged.
    """
    if path.name.endswith(".test.index"):
        return
    with reading(path, "arrays of Planetoid"), path.open("rb") as file:
        ArrayUnpickler(file, encoding="latin1").load()
