"""The display of a trainer in a notebook."""

from typing import TYPE_CHECKING, Any

from rich import box

from fl_lightning.run.assembly import Run
from fl_lightning.terminal import PlainTable

if TYPE_CHECKING:
    from pandas import DataFrame


def table(trainer: Any, run: Run | None) -> PlainTable:
    """A trainer's settings, or the results of its run."""
    rows: dict[str, Any] = {
        "num_rounds": trainer.num_rounds,
        "seed": trainer.seed,
        "device": str(trainer.fabric.device),
    }
    if run is not None:
        result = run.selection.result
        chosen = {name: f"{value:.4g}" for name, value in result.items() if f"{name}_weighted" in result}
        rows = {"rounds": run.round_idx, **chosen, "folder": run.folder}
    made = PlainTable(title="FederatedTrainer" if run is None else type(run.strategy).__name__, box=box.SIMPLE)
    made.add_column("")
    made.add_column("", justify="right")
    for row in rows.items():
        made.add_row(*map(str, row))
    return made


def history(run: Run) -> "DataFrame":
    """The metrics of each finished round: one row per round, indexed by its number."""
    from pandas import DataFrame

    return DataFrame(run.history, columns=None if run.history else ["round"]).set_index("round")
