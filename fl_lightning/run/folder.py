"""Where a run keeps its files: ``<root>/version_<n>/``, with its checkpoints in ``checkpoints/``."""

import warnings
from pathlib import Path


def new_run_folder(root: Path) -> Path:
    """The folder of the next version (not created)."""
    return root / f"version_{max(map(_version, root.glob('version_*')), default=-1) + 1}"


def find_checkpoint(root: Path, ckpt_path: str | None, *, required: bool) -> Path | None:
    """The checkpoint that a user means.

    Args:
        root: Folder of the run's versions.
        ckpt_path: A path, ``last`` or ``best`` (of the newest version that has one), or None for none.
        required: Whether ``last`` or ``best`` must exist.

    Raises:
        ValueError: It is required and there is none.
    """
    if ckpt_path not in ("last", "best"):
        return Path(ckpt_path) if ckpt_path is not None else None
    found = list(root.glob(f"version_*/checkpoints/{ckpt_path}.ckpt"))
    if found:
        return max(found, key=lambda path: _version(path.parent.parent))
    if required:
        raise ValueError(f"there is no {ckpt_path}.ckpt in {root}/version_*/checkpoints: train first, or give a path")
    warnings.warn(f"no {ckpt_path}.ckpt in {root}: starting from round 0", stacklevel=3)
    return None


def run_folder_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint; None for one that was moved out of it."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def _version(folder: Path) -> int:
    number = folder.name.removeprefix("version_")
    return int(number) if number.isdigit() else -1
