"""Pages to look at: one for a run (``report.html``), and one for several runs side by side.

What draws them (Matplotlib, Jinja2, pandas) is imported when it is first used.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.report.comparison import Comparison


def write(
    run: str | Path,
    *,
    against: str | Path | None = None,
    result: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
) -> Path:
    """Write a run's page from the files of its folder.

    Args:
        run: The folder.
        against: Folder of another run on the same partition, with which each client is compared.
        result: What the run came to, in place of its ``result.json``.
        path: The page; None for ``report.html`` in the folder.

    Returns:
        The page.

    Raises:
        ValueError: The folder is not that of a run, a file is damaged, or the other run has another partition.
        CannotWrite: The disk is full, the folder read-only, ...
    """
    from fl_lightning.report import folder, page

    recorded = folder.read(Path(run), result=result)
    other = None if against is None else folder.read(Path(against))
    return page.write(recorded, other, Path(run) / "report.html" if path is None else Path(path))


def compare(runs: Sequence[str | Path] | str | Path, *, reference: str | None = None) -> "Comparison":
    """Set runs side by side.

    Args:
        runs: Folders, shell-style patterns of folders, and ``wandb:entity/project/run``.
        reference: The configuration, by its label, that the others are compared with; None for the first.

    Returns:
        Tables, and a display for terminals and notebooks; ``write(path)`` makes a page.

    Raises:
        ValueError: There is no such run, or one of its files is damaged.
    """
    from fl_lightning.report.comparison import Comparison
    from fl_lightning.report.folder import telling
    from fl_lightning.report.sources import find

    result = find([runs] if isinstance(runs, str | Path) else runs)
    with telling(Path(*(run.name for run in result[:1]))):
        return Comparison(result, reference=reference)


def folders(runs: Sequence[str | Path]) -> list[Path]:
    """The folders of runs that are meant: the runs themselves, those below a folder, or those that a pattern matches.

    Raises:
        ValueError: One of them is not a run, and contains none.
    """
    from fl_lightning.report.sources import folders_of

    return list(dict.fromkeys(folder for run in runs for folder in folders_of(str(run))))
