"""The checkpoint file: written atomically, read without trusting it, and refused if it belongs to another run."""

import contextlib
import json
import random
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.counts import count
from fl_lightning.data.sketch import are_alike
from fl_lightning.files import durable_file
from fl_lightning.saved_tensors import load_saved, write_saved

#: Version of the file's layout; increased with every incompatible change.
FORMAT_VERSION = 3


#: What a run's identity says of the sites that hold its clients' data: name and digest of each, as JSON.
SITES = "sites"
#: Of what a checkpoint of an earlier version says nothing.
CONTENTS = "features and relations"
#: Number of sites that a message names.
_MOST_SITES = 5


class DamagedCheckpoint(ValueError):
    """A file that differs from what was written, or is not a checkpoint at all."""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint so that the path holds either the old file or the whole new one, whatever happens.

    A checksum of all bytes is appended; ``torch.load`` ignores it.

    Args:
        path: The file; its folder is created.
        content: Tensors, primitives, and lists and dicts of them.

    Raises:
        CannotWrite: The disk is full, the folder read-only, ...
    """
    with durable_file(path, num_bytes(content)) as file:
        file.write(_trailer(write_saved(dict(content), file)))


def num_bytes(content: Any) -> int:
    """Bytes of all tensors in nested dicts and lists, which is nearly the size of the file."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, Mapping) else content
    return sum(map(num_bytes, parts)) if isinstance(content, Mapping | list | tuple) else 0


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed (``weights_only=True``).

    Raises:
        DamagedCheckpoint: A byte of it has changed, it is cut off, or it is not a checkpoint.
        ValueError: It has another format.
    """
    is_sound = _is_sound(path)
    if is_sound is False:
        raise _damaged(path, "its bytes are not those that were written")
    content = _load(path)
    if is_sound is None:
        raise _damaged(path, "its checksum is missing")
    return content


def peek(path: Path) -> dict[str, Any]:
    """As :func:`read`, but the tensors stay in the file and their bytes are not checked.

    Raises:
        DamagedCheckpoint: It cannot be read at all.
        ValueError: It has another format.
    """
    return _load(path, mmap=True)


def _load(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        content: dict[str, Any] = load_saved(path, mmap=mmap)
    except (MemoryError, PermissionError):  # which say nothing about the file
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for damaged files
        raise _damaged(path, f"torch.load: {type(error).__name__}") from error  # its text is many lines long
    result = content.get("format_version") if isinstance(content, dict) else None
    if result != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {path} has format version {result}, this version of fl_lightning reads {FORMAT_VERSION}: "
            "use the version that wrote it, or start a new training without --ckpt_path"
        )
    return content


def read_last(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint; if it is damaged, read the one with the most rounds in the same folder and warn.

    Raises:
        DamagedCheckpoint: None of them can be read.
        ValueError: The file has another format.
    """
    try:
        return path, read(path)
    except DamagedCheckpoint as error:
        sound: list[tuple[Path, dict[str, Any]]] = []
        for other in sorted(set(path.parent.glob("[!.]*.ckpt")) - {path}):
            with contextlib.suppress(ValueError):
                sound.append((other, read(other)))
        if not sound:
            raise
        result, content = max(sound, key=lambda item: item[1]["round"])
        warnings.warn(f"{error}; continuing from {result.name}, after {count(content['round'], 'round')}", stacklevel=2)
        return result, content


def _damaged(path: Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"checkpoint {path} cannot be read ({why}): it is damaged or not a checkpoint, give another file"
    )


_MARK = b"crc32:"
_CHUNK_BYTES = 2**24


def _trailer(checksum: int) -> bytes:
    return _MARK + f"{checksum:08x}".encode()


def _is_sound(path: Path) -> bool | None:
    """Whether a file's bytes are those that were written; None for a file without a checksum."""
    length = path.stat().st_size - len(_trailer(0))
    checksum = 0
    with path.open("rb") as file:
        for start in range(0, length, _CHUNK_BYTES):
            checksum = zlib.crc32(file.read(min(_CHUNK_BYTES, length - start)), checksum)
        end = file.read()
    return end == _trailer(checksum) if end.startswith(_MARK) else None


def differing(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """The differences between two runs' identities, one line each."""
    sites = differing_sites(saved, current)
    told = {SITES} | ({"data (partition hash)", "training clients"} if sites else set())
    return sites + [
        f"{name}: checkpoint {saved.get(name)!r}, this run {current[name]!r}"
        for name in current
        if saved.get(name) != current[name] and name not in told
        if name != CONTENTS or not are_alike(saved.get(name, current[name]), current[name])
    ]


def differing_sites(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Which sites are not as they were, and what to do; empty if the clients' data are not at sites."""
    try:
        then, now = (dict(json.loads(identity[SITES])) for identity in (saved, current))
    except (KeyError, TypeError, ValueError):  # of an earlier version
        return []
    gone, new = [name for name in then if name not in now], [name for name in now if name not in then]
    other = [name for name in then if name in now and then[name] != now[name]]
    lines = [f"{_listed(gone)} left since: have it take part again"] if gone else []
    lines += [f"{_listed(new)} joined since: leave it out"] if new else []
    lines += [f"{_listed(other)}'s data or folder are others than before: restore them there"] if other else []
    if [name for name in then if name in now] != [name for name in now if name in then]:
        lines.append(f"the sites were in another order: name them as {_listed(list(then))}")
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:_MOST_SITES])) + (
        f" and {len(names) - _MOST_SITES} more" * (len(names) > _MOST_SITES)
    )


def check_identity(path: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another federation.

    Args:
        path: Path of the checkpoint, for the message.
        saved: The identity in the checkpoint, by name.
        current: The identity of this run.

    Raises:
        ValueError: Entries differ; the message names all of them.
    """
    if result := differing(saved, current):
        raise ValueError(
            f"checkpoint {path} belongs to another run; {'; '.join(result)}. "
            "Use the configuration it was made with (config.yaml beside it), or start without --ckpt_path"
        )


def random_state() -> dict[str, Any]:
    """State of the global generators of torch, CUDA, NumPy and Python (the package itself draws from keys)."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "python": list(random.getstate()),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    current = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "has_gauss": current["has_gauss"],
            "gauss": current["gauss"],
            "state": {"key": current["key"].numpy().astype(np.uint32), "pos": current["pos"]},
        }
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the global generators as they were."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
