"""The choice of the run that is continued; ``last`` and ``best`` mean those of the newest run with its settings."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.run import checkpoint, settings, state
from fl_lightning.run.assembly import Run
from fl_lightning.run.folder import checkpoints_of, new_run_folder, run_folder_of

_MOST_RUNS, _MOST_DIFFERENCES = 5, 3


def open_folder(run: Run, root: Path, meant: Path | str | None, *, trains: bool = True) -> Path | None:
    """Give a run the folder of the chosen checkpoint, or a new one; collective.

    Args:
        run: The run, set up.
        root: Folder of the versions.
        meant: A path, ``last`` or ``best``, or None for a new run (:func:`~.folder.find_checkpoint`).
        trains: Whether the run trains; one that does not needs no new folder, but has that of a checkpoint that was
            moved.

    Returns:
        The checkpoint.
    """
    path = choose_checkpoint(run, root, meant) if isinstance(meant, str) else meant
    if run.fabric.is_global_zero:
        moved_to = path.parent if path and not trains else None
        run.folder = (run_folder_of(path) if path else None) or moved_to or new_run_folder(root)
    run.folder = run.fabric.broadcast(run.folder)
    return path


def read_checkpoint(path: Path, ckpt_path: str | None) -> tuple[Path, dict[str, Any]]:
    """A checkpoint's path and content; a damaged ``last`` is replaced by an older one."""
    return checkpoint.read_last(path) if ckpt_path == "last" else (path, checkpoint.read(path))


def choose_checkpoint(run: Run, root: Path, name: str) -> Path:
    """The newest checkpoint of a name that has the run's data, partition, strategy, net, clients and seed.

    Checkpoints whose other settings are also the same are preferred. One that cannot be read is passed over, unless it
    is the newest.

    Args:
        run: The run, set up.
        root: Folder of the versions, at least one of which has the checkpoint.
        name: ``last`` or ``best``.

    Raises:
        ValueError: There is none, and the message lists the others and their differences; or the newest has another
            format.
        DamagedCheckpoint: The newest cannot be read.
    """
    others, alike = list[str](), list[tuple[Path, list[str]]]()
    newest, *_ = paths = checkpoints_of(root, name)
    for path in paths:
        try:
            content = _peek(path)
        except ValueError as error:
            if path == newest:
                raise
            others.append(f"{path.parent.parent.name} ({error})")
            continue
        saved, current = content["identity"], state.identity(run)
        if differing := checkpoint.differing(saved, current):
            sites = checkpoint.differing_sites(saved, current)
            known = sites or settings.config_differences(content["config"], run.config) or differing
            others.append(f"{path.parent.parent.name} ({_summary(known)})")
            continue
        alike.append((path, state.setting_differences(run, content)))
        if not alike[-1][1]:
            break
    if not alike:
        more = f"; and {len(others) - _MOST_RUNS} more" if len(others) > _MOST_RUNS else ""
        raise ValueError(
            f"no {name}.ckpt in {root} is of a run of these settings: {'; '.join(others[:_MOST_RUNS])}{more}. Use the "
            "configuration that it was made with, give the path of a checkpoint, or leave out --ckpt_path for a new run"
        )
    path, differences = next((result for result in alike if not result[1]), alike[0])
    other = f", which had other settings: {_summary(differences)}" if differences else ""
    rank_zero_info(f"--ckpt_path {name}: {path}{other}")
    return path


def _peek(path: Path) -> dict[str, Any]:
    """The content of a checkpoint without its tensors; for a damaged ``last``, that of another one of its run."""
    try:
        return checkpoint.peek(path)
    except checkpoint.DamagedCheckpoint:
        for other in path.parent.glob("[!.]*.ckpt") if path.stem == "last" else ():
            with suppress(ValueError):
                return checkpoint.peek(other)
        raise


def _summary(differences: list[str]) -> str:
    more = f", and {len(differences) - _MOST_DIFFERENCES} more" if len(differences) > _MOST_DIFFERENCES else ""
    return ", ".join(each if len(each) < 120 else f"{each[:117]}..." for each in differences[:_MOST_DIFFERENCES]) + more
