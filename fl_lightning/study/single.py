"""Cells one at a time: a sweep that W&B agents share out, a cell of it, and a check that figures are what they were."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fl_lightning.study.cells import Cell
from fl_lightning.study.definition import Study
from fl_lightning.study.pool import Pool
from fl_lightning.study.runner import Runner, kept_rounds, make_record, task_arguments
from fl_lightning.study.schema import Wandb
from fl_lightning.study.store import Record, Store
from fl_lightning.study.version import digest_of_sources, sources
from fl_lightning.yaml_input import dump_yaml


def sweep(study: Study, store: Store) -> str:
    """A W&B sweep, as YAML, over the cells that can be trained now: those of the tuning, then the reported ones."""
    cells = list(Runner(study, store).todo(ready=True))
    return dump_yaml(
        {
            "name": study.title,
            "program": "fl-train",
            "method": "grid",
            "command": ["fl-train", "study", "cell", str(study.path), "${args}"],
            "parameters": {"cell": {"values": [cell.key for cell in cells]}},
        },
        sort_keys=False,
    )


def train_cell(study: Study, store: Store, key: str, scratch: Path) -> Record | None:
    """Train a cell in this process, send it to W&B and keep it.

    Returns:
        Its record; None where no cell that can be trained has the key.
    """
    from fl_lightning.study.worker import train

    cell = next((cell for cell in Runner(study, store).todo(ready=True) if cell.key == key), None)
    if cell is None:
        return None
    store.keep_sources(digest_of_sources(), sources())
    found = train(task_arguments(study, cell, study.wandb or Wandb()), scratch, study.history)
    record = make_record(cell, found)
    store.add(record, kept_rounds(study, cell, found))
    return record


def check(study: Study, store: Store, pool: Pool, say: Callable[[str], None], methods: Collection[str] = ()) -> int:
    """Train one reported cell of every method again (or of some), the cheapest, and compare it with what is kept.

    Returns:
        How many came to other figures.
    """
    cells = _cheapest(Runner(study, store, methods=methods))
    num_changed = 0
    tasks = [(cell, "train", ((*cell.arguments, "--trainer.logger=false"), pool.scratch)) for cell in cells]
    for cell, found in pool.map(tasks):
        told = _difference(store.records()[cell.key], None if found is None else make_record(cell, found))
        num_changed += bool(told)
        say(f"{cell.title}: {told or 'as it was'}")
    return num_changed


def _cheapest(runner: Runner) -> list[Cell]:
    found: dict[str, tuple[float, Cell]] = {}
    for method, case in runner.groups:
        for cell in runner.progress.report(method, case):
            if runner.progress.state(cell) in ("done", "stale"):
                seconds: float = runner.progress.records[cell.key]["seconds"]
                if method not in found or seconds < found[method][0]:
                    found[method] = seconds, cell
    return [cell for _, cell in found.values()]


def _difference(then: Record, now: Record | None) -> str:
    if now is None or now["error"]:
        return f"it fails now ({'its worker died' if now is None else now['error']})"
    figures: dict[str, Any] = then["result"]
    changed = [name for name, value in figures.items() if now["result"].get(name) != value]
    shown = ", ".join(f"{name} {figures[name]} then, {now['result'].get(name)} now" for name in changed[:3])
    return f"{len(changed)} figures changed: {shown}" if changed else ""
