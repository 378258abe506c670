"""The outcome of a run in one file that programs can read: ``result.json``."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fl_lightning.files import whole_file
from fl_lightning.round.inspection import ServerDiverged
from fl_lightning.run.assembly import Run
from fl_lightning.run.curve import DIVERGED, NUM_OVERFLOWS, Curve, Marks, marks_of
from fl_lightning.run.state import versions

_WAYS = ("up", "down", "peer")


def summary(run: Run, error: BaseException | None = None) -> dict[str, Any]:
    """The content of the file.

    Args:
        run: The run, at its end.
        error: The error that ended it, if any.

    Returns:
        How it ended (``finished``, ``interrupted`` by a signal, ``failed``); the metrics of the best round under
        ``result`` (None for values that are not finite), and those of the references under ``references``, if there
        are any; its marks (:mod:`fl_lightning.run.curve`); failures by client; the seconds of all rounds and the bytes
        communicated in them, if counted; and the settings and versions of the run.
    """
    interrupted = run.interrupted or isinstance(error, KeyboardInterrupt)
    seconds = sum(row["seconds"] for row in run.history)
    counted = [way for way in _WAYS if any(f"comm/bytes_{way}" in row for row in run.history)]
    return {
        "status": "interrupted" if interrupted else "failed" if error is not None else "finished",
        "error": "" if error is None else f"{type(error).__name__}: {error}",
        "result": _finite(run.selection.result),
        **({"references": {name: _finite(each) for name, each in run.references.items()}} if run.references else {}),
        "marks": marks(run, error),
        **run.registry.task.notes,
        "monitor": run.selection.monitor,
        "mode": run.selection.mode,
        "num_rounds": run.round_idx,
        "num_failed_rounds": sum(row["failed_round"] for row in run.history),
        "failures": dict(sorted(run.num_failures.items())),
        "num_unusual_clients": len(run.unusual),
        "seconds": seconds,
        "bytes": {way: int(sum(row.get(f"comm/bytes_{way}", 0) for row in run.history)) for way in counted},
        "strategy": type(run.strategy).__name__,
        "seed": run.seed,
        "partition_hash": run.registry.partition_hash,
        "config": run.config_file,
        "config_sources": list(run.config_sources),
        "changes": run.changes,
        "versions": versions(),
    }


def marks(run: Run, error: BaseException | None = None) -> Marks:
    """Whether a run was still rising or diverged, judged by its rounds; the arguments are those of :func:`summary`."""
    selection = run.selection
    found = marks_of(
        Curve.of_rows(run.history, selection.monitor, selection.mode),
        best_round=selection.best_round,
        num_rounds=run.round_idx,
        chance=_chance(run),
        num_overflows=int(sum(row.get(NUM_OVERFLOWS, 0) for row in run.history)),
    )
    return {**found, DIVERGED: str(error)} if isinstance(error, ServerDiverged) else found


def _chance(run: Run) -> float | None:
    """The validation metric if every client predicted the same for all its examples; None if the data are elsewhere."""
    clients = getattr(run.datamodule, "clients", None)
    if not run.history or clients is None:
        return None
    mine = [clients[client] for client in run.evaluated_clients]
    if any(client is None for client in mine):
        return None
    try:
        reference = run.registry.task.reference(mine, run.registry.num_outputs)
    except Exception:  # of a user's own target; the report says so, and the run has its result
        return None
    return reference.get(f"val/{run.selection.monitor.rpartition('/')[2]}")


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def write(run: Run, error: BaseException | None = None) -> None:
    """Write the file to the run's folder, atomically."""
    with whole_file(run.folder / "result.json") as temporary:
        temporary.write_text(json.dumps(summary(run, error), indent=1, allow_nan=False) + "\n")
