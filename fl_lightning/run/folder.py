"""The folder of a run: ``<root>/version_<n>/``, with its checkpoints in ``checkpoints/``."""

import os
import warnings
from pathlib import Path

from fl_lightning.files import writing


def new_run_folder(root: Path) -> Path:
    """Make the folder of the next version; runs that begin at the same time get one each.

    Raises:
        CannotWrite: No folder can be made there.
    """
    with writing(root / "version_0"):
        return _new_version(root)


def _new_version(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = max(map(_version, root.glob("version_*")), default=-1) + 1
    while True:
        folder = root / f"version_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def checkpoints_of(root: Path, name: str) -> list[Path]:
    """``<name>.ckpt`` of every version that has one, the newest version first."""
    result = root.glob(f"version_*/checkpoints/{name}.ckpt")
    return sorted(result, key=lambda path: _version(path.parent.parent), reverse=True)


def find_checkpoint(root: Path, ckpt_path: str | None, *, required: bool) -> Path | str | None:
    """What a user means by ``ckpt_path``, as far as it is known before the run is set up.

    Args:
        root: Folder of the run's versions.
        ckpt_path: A path, ``last`` or ``best``, or None for none.
        required: Whether ``last`` or ``best`` must exist.

    Returns:
        The path; ``last`` or ``best`` if a version has one (:func:`fl_lightning.run.choice.choose_checkpoint` then
        chooses one); None for none.

    Raises:
        ValueError: It is a path or required, and does not exist.
    """
    if ckpt_path is None:
        return None
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path).expanduser()
        if not os.path.isfile(path):  # false for impossible names too
            what = "is no file" if os.path.exists(path) else "does not exist"
            raise ValueError(
                f"ckpt_path: checkpoint {ckpt_path} {what}: give the path of a .ckpt file, or 'last' or 'best'"
            )
        return path
    if checkpoints_of(root, ckpt_path):
        return ckpt_path
    if required:
        trained = any(root.glob("version_*"))
        remedy = "train with default_callbacks, or FederatedCheckpoint among them" if trained else "train first"
        raise ValueError(f"there is no {ckpt_path}.ckpt in {root}/version_*/checkpoints: {remedy}, or give a path")
    warnings.warn(f"no {ckpt_path}.ckpt in {root}: starting from round 0", stacklevel=3)
    return None


def run_folder_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote a checkpoint; None if the checkpoint was moved out of it."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def _version(folder: Path) -> int:
    number = folder.name.removeprefix("version_")
    return int(number) if number.isdigit() else -1
