"""The checkpoint file: written atomically, read without trusting it, refused where it does not belong."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Of the file's layout; raised with every change that older files do not have.
FORMAT_VERSION = 2


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint so that the path holds either the old file or the whole new one, whatever happens.

    Args:
        path: Where to; its folder is created.
        content: Tensors, primitives, and lists and dicts of them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # one name: what a killed run leaves is written over by the next
    try:
        with temporary.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed (``weights_only=True``).

    Raises:
        ValueError: The file is missing, damaged, or of another format.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint {path} does not exist: give the path of a .ckpt file, or 'last' or 'best'")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for damaged files
        raise ValueError(f"checkpoint {path} cannot be read ({error}): it is damaged or no checkpoint") from error
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version") if isinstance(content, dict) else None
        raise ValueError(
            f"checkpoint {path} has format version {found}, this version of fl_lightning reads {FORMAT_VERSION}: use "
            "the version that wrote it, or train anew, without --ckpt_path"
        )
    return content


def check_identity(path: Path, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another federation.

    Args:
        path: For the message.
        saved: What the checkpoint was made with, by setting.
        own: What this run has.

    Raises:
        ValueError: Some entry differs; all that differ are named.
    """
    differing = [
        f"{name}: checkpoint {saved.get(name)!r}, this run {own[name]!r}"
        for name in own
        if saved.get(name) != own[name]
    ]
    if differing:
        raise ValueError(
            f"checkpoint {path} belongs to another run; {'; '.join(differing)}. "
            "Use the configuration it was made with (config.yaml beside it), or start without --ckpt_path"
        )


def random_state() -> dict[str, Any]:
    """State of the global generators of torch, CUDA, NumPy and Python (the engine draws from keys, not from them)."""
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
    own = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "has_gauss": own["has_gauss"],
            "gauss": own["gauss"],
            "state": {"key": own["key"].numpy().astype(np.uint32), "pos": own["pos"]},
        }
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
