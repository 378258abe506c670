"""What a run came to, in one file that programs can read: ``result.json``."""

import json
import math
from typing import Any

from fl_lightning.run.assembly import Run
from fl_lightning.run.folder import whole_file
from fl_lightning.run.state import versions

_WAYS = ("up", "down", "peer")


def summary(run: Run, error: BaseException | None = None) -> dict[str, Any]:
    """What the file holds.

    Args:
        run: The run, at its end.
        error: What ended it, if it did not end by itself.

    Returns:
        How it ended (``finished``, ``interrupted`` by a signal, ``failed``). Metrics of the best round under
        ``result`` (None for what is not finite); failures by client; seconds of all rounds and bytes that were
        communicated in them, where they were counted; what the run was made with.
    """
    interrupted = run.interruption.received is not None or isinstance(error, KeyboardInterrupt)
    seconds = sum(row["seconds"] for row in run.history)
    counted = [way for way in _WAYS if any(f"comm/bytes_{way}" in row for row in run.history)]
    return {
        "status": "interrupted" if interrupted else "failed" if error is not None else "finished",
        "error": "" if error is None else f"{type(error).__name__}: {error}",
        "result": {name: value if math.isfinite(value) else None for name, value in run.selection.result.items()},
        "monitor": run.selection.monitor,
        "mode": run.selection.mode,
        "num_rounds": run.round_idx,
        "num_failed_rounds": sum(row["failed_round"] for row in run.history),
        "failures": dict(sorted(run.num_failures.items())),
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


def write(run: Run, error: BaseException | None = None) -> None:
    """Write the file into the run's folder, whole."""
    with whole_file(run.folder / "result.json") as temporary:
        temporary.write_text(json.dumps(summary(run, error), indent=1, allow_nan=False) + "\n")
