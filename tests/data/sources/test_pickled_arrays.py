"""Pickles of arrays: those that numpy and SciPy wrote are read, and forged ones touch no memory but their own."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from fl_lightning.data.sources.pickled_arrays import ArrayUnpickler, check_planetoid_file


class Call:
    """What a pickle calls, and what it then sets."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], *state: Any) -> None:
        self.result = function, arguments, *state

    def __reduce__(self) -> tuple[Any, ...]:
        return self.result


BLANK, ARGUMENTS = np.zeros(1).__reduce__()[:2]


def array(shape: Any, dtype: Any, content: Any) -> Call:
    return Call(BLANK, ARGUMENTS, (1, shape, dtype, False, content))


def load(given: Any, protocol: int = 4) -> Any:
    return ArrayUnpickler(io.BytesIO(pickle.dumps(given, protocol)), encoding="latin1").load()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "written",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["a", "bc"]),
        np.array([b"a"]),
        np.array([True]),
        np.arange(3, dtype=">i4"),
    ],
    ids=str,
)
def test_arrays_are_read(written: Any, protocol: int) -> None:
    read = load({"a": [written]}, protocol)["a"][0]
    assert read.dtype.kind == written.dtype.kind
    assert np.array_equal(read, written)


def test_matrices_are_read() -> None:
    matrix = csr_matrix(np.eye(3))
    assert (load(matrix, 2) != matrix).nnz == 0


FLOATS = np.dtype("f8")
FORGED = {
    "array from a buffer": Call(np.ndarray, ((1,), np.dtype("O"), b"A" * 8)),
    "objects": array((1,), np.dtype("O"), b"A" * 8),
    "objects in a list": array((1,), np.dtype("O"), ["a"]),
    "objects within a record": array((1,), np.dtype([("a", "O")]), b"A" * 8),
    "a type that is another": array((1,), Call(np.dtype, ("i8,O",)), b"A" * 16),
    "a forged type": array((1,), Call(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": 0}, 8, 1, 27)), b""),
    "too few bytes": array((10**6,), FLOATS, b"A" * 8),
    "a negative length": array((-1, -1), FLOATS, b"A" * 8),
    "no shape": array(5, FLOATS, b"A" * 8),
    "no bytes": array((1,), FLOATS, [1.0]),
    "an index beyond": csr_matrix((np.ones(1), np.array([0]), np.array([0, 1])), shape=(1, 1)),
}
FORGED["an index beyond"].indices[0] = 10**9  # type: ignore[union-attr]


@pytest.mark.parametrize("given", FORGED.values(), ids=FORGED)
def test_forged_ones_are_refused(given: Any, tmp_path: Path) -> None:
    for nested in (given, {"a": [given]}):
        with pytest.raises((pickle.UnpicklingError, TypeError, ValueError)):
            load(nested)
    (tmp_path / "ind.cora.x").write_bytes(pickle.dumps(given))
    with pytest.raises(ValueError, match=r"ind\.cora\.x cannot be read"):
        check_planetoid_file(tmp_path / "ind.cora.x")


def test_an_array_is_filled_once() -> None:
    """A second filling would free memory that a matrix made of it still reads."""
    filled = pickle.dumps(np.ones(4), 2)[:-1]
    state = pickle.dumps((1, (1,), FLOATS, False, b"A" * 8), 2)[2:-1]
    with pytest.raises(pickle.UnpicklingError, match="numpy did not write"):
        ArrayUnpickler(io.BytesIO(filled + state + b"b.")).load()
