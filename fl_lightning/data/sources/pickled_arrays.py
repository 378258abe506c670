"""Pickles that hold arrays, read without building anything else: a pickle could run any code otherwise."""

import codecs
import contextlib
import io
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse import csr_matrix

from fl_lightning.data.sources.array_file import reading


class ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays, SciPy's CSR matrices and Python's own values only."""

    _classes = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): np.array(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.array(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
        ("collections", "defaultdict"): defaultdict,
        ("__builtin__", "list"): list,
        ("builtins", "list"): list,
        ("scipy.sparse.csr", "csr_matrix"): csr_matrix,
        ("scipy.sparse._csr", "csr_matrix"): csr_matrix,
    }

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

    PyG unpickles whatever there is, and SciPy writes such entries beyond the memory of the dense matrix.

    Raises:
        ValueError: The file is damaged.
    """
    if path.name.endswith(".test.index"):
        return
    with reading(path, "arrays of Planetoid"), path.open("rb") as file:
        loaded = ArrayUnpickler(file, encoding="latin1").load()
        if isinstance(loaded, csr_matrix):
            loaded.check_format(full_check=True)
