"""Files of ``torch.save``: written with the errors of their disk, read without running or trusting what is in them."""

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

_NUMBERS = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def write_saved(content: Any, file: IO[bytes]) -> int:
    """Write as ``torch.save`` does, which by itself does not say why a file cannot be written.

    Args:
        content: Tensors, primitives, and lists and dicts of them.
        file: Where to.

    Returns:
        CRC-32 of the bytes.

    Raises:
        OSError: The disk is full, ...
    """
    written = _Written(file)
    try:
        torch.save(content, written)  # type: ignore[arg-type]
    except RuntimeError as error:  # raised by torch if its file is shorter than it should be
        raise written.error or error from None
    return written.checksum


class _Written:
    """A file that computes a checksum of what is written to it, and remembers what it raised."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.checksum = 0
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self.file.write(data)
        except BaseException as error:  # an interruption too: torch makes an error of its own of what is raised here
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def load_saved(path: Path, *, mmap: bool = False) -> Any:
    """Read what ``torch.save`` wrote, on the CPU: tensors and plain values, no classes that are not allowed.

    The indices of sparse tensors are checked, which PyTorch does not do by itself: others are written to wherever they
    point as soon as such a tensor is made dense.

    Args:
        path: The file.
        mmap: Leave the tensors in the file until they are used.

    Raises:
        Exception: There is nothing that a damaged file does not raise.
    """
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def load_data(path: Path) -> Any:
    """As :func:`load_saved`, of data: tensors hold numbers that are in the file.

    Raises:
        ValueError: A tensor does not; the message names it.
        Exception: There is nothing that a damaged file does not raise.
    """
    saved = load_saved(path)
    for name, tensor in _tensors(saved):
        check_holds_numbers(tensor, name)
    return saved


def check_holds_numbers(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that holds no real numbers, or fewer than it seems to have.

    Args:
        tensor: The tensor.
        name: What messages call it.

    Raises:
        ValueError: It is such a tensor.
    """
    if tensor.is_meta:
        raise ValueError(f"{name} is a meta tensor, which holds no numbers: save it with its values")
    if tensor.is_quantized:
        raise ValueError(f"{name} is quantized: save numbers, as {name}.dequantize()")
    if tensor.is_nested or tensor.layout not in _LAYOUTS:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name} is {layout}: save it as a dense tensor, which is padded if rows differ in length")
    if tensor.dtype not in _NUMBERS:
        raise ValueError(
            f"{name} is {tensor.dtype}: save real numbers of a usual type, as {name}.float() or {name}.long()"
        )
    if tensor.is_neg():
        raise ValueError(f"{name} is a view that negates another tensor: save {name}.resolve_neg()")
    if tensor.layout == torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} repeats the same numbers (it is expanded): save {name}.contiguous()")


def _tensors(saved: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested values and graphs, each with its name."""
    left, seen = [("", saved)], set()
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor):
            yield name or "the tensor", value
        elif id(value) not in seen:
            seen.add(id(value))
            value = value.to_dict() if hasattr(value, "to_dict") else value
            parts = value.items() if isinstance(value, Mapping) else enumerate(value if _is_list(value) else ())
            left += [(f"{name}.{key}".lstrip("."), part) for key, part in parts]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset)
