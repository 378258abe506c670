"""Runs a study: chooses the next cell, records its result and reports progress."""

import dataclasses
import json
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.study.cells import Cell
from fl_lightning.study.definition import Study
from fl_lightning.study.pool import Pool
from fl_lightning.study.progress import Progress
from fl_lightning.study.schema import Wandb, WrongStudy
from fl_lightning.study.store import Record, Store
from fl_lightning.study.version import digest_of_sources, sources

#: Figures of the chosen round that say nothing about accuracy.
_LEFT_OUT = ("comm/", "num_", "seconds", "void")


@dataclass(kw_only=True)
class Tally:
    """The summary of one call of ``fl-train study run``.

    Attributes:
        trained: Cells that were trained.
        failed: Cells that failed, with the reason.
        waiting: Method and case without a chosen setting: another study has not tuned it, or every setting failed.
        missing: Cells that are still to do.
    """

    trained: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    missing: int = 0


class Runner:
    """Trains what is missing.

    Args:
        study: The study.
        store: Where its records go.
        methods: Those to run; all if empty.
        cases: Likewise.
        retry: Whether cells that failed are tried again.
        minutes: No cell begins after so many; None for no limit.
        say: Takes a line for the user.
    """

    def __init__(
        self,
        study: Study,
        store: Store,
        *,
        methods: Collection[str] = (),
        cases: Collection[str] = (),
        retry: bool = False,
        minutes: float | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.study, self.store, self.say = study, store, say
        self.retry, self.minutes = retry, minutes
        self.progress = Progress(study, store)
        self.groups = list(self.progress.groups(methods or study.methods, cases or study.cases))
        self.tally = Tally()
        self.processes = study.processes
        self._under_way: set[str] = set()
        self._lost: set[str] = set()
        self._tried: set[str] = set()

    def run(self, pool: Pool) -> Tally:
        """Train until nothing is left that can be done.

        Raises:
            WrongStudy: Settings that are refused; nothing was trained then.
        """
        self._start = time.monotonic()
        self.processes = pool.processes
        self.store.keep_sources(digest_of_sources(), sources())
        self._look_at_data(pool)
        self._check_settings(pool)
        while True:
            while pool.num_idle and not self._time_is_up() and (cell := self._next()) is not None:
                self._under_way.add(cell.key)
                pool.submit(cell, "train", *self._task(cell, pool.scratch))
            if not pool.num_busy:
                break
            for cell, found in pool.finished():
                self._take(cell, found)
        self.tally.missing = sum(1 for _ in self.todo())
        self.tally.waiting = [f"{method} on {case}" for method, case in self.groups if self._waits(method, case)]
        return self.tally

    # ------------------------------------------------------------------ what is next

    def _next(self) -> Cell | None:
        return next((cell for cell in self.todo(ready=True) if cell.key not in self._under_way), None)

    def todo(self, *, ready: bool = False) -> Iterator[Cell]:
        """What is left to do; also what a choice that is open stands for, unless only what is ready is asked for."""
        seen: set[str] = set()
        for method, case in self.groups:
            tuning = [cell for cell in self.progress.tuning(method, case) if self._is_open(cell)]
            report = self.progress.report(method, case)
            cells = tuning if tuning and ready else [*tuning, *(cell for cell in report if self._is_open(cell))]
            for cell in cells:
                if cell.key not in seen:
                    seen.add(cell.key)
                    yield cell
            if tuning and not report and not ready:
                yield from (_any_of(tuning[0], method, case, seed) for seed in self.study.seeds)

    def _is_open(self, cell: Cell) -> bool:
        if cell.key in self._tried:
            return False
        state = self.progress.state(cell)
        again = self.retry or self.progress.records.get(cell.key, {}).get("killed", False)
        return state in ("missing", "stale") or (state == "failed" and again)

    def _waits(self, method: str, case: str) -> bool:
        return not any(map(self._is_open, self.progress.tuning(method, case))) and not self.progress.report(
            method, case
        )

    def _time_is_up(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._start > 60 * self.minutes

    def _task(self, cell: Cell, scratch: Path) -> tuple[Any, ...]:
        """The arguments of :func:`fl_lightning.study.worker.train`."""
        arguments = task_arguments(self.study, cell)
        if cell.purpose == "tuning":
            return arguments, scratch
        folder = self.store.files({"method": cell.method, "case": cell.case, "seed": cell.seed})
        return arguments, scratch, self.study.history, self.study.keep, folder

    def _check_settings(self, pool: Pool) -> None:
        """Build, before anything is trained, a cell of every method and case, and of a method and every grid value.

        What was trained before is in order.

        Raises:
            WrongStudy: Settings that are refused; a line for each message.
        """
        candidates: list[Cell] = []
        for method, case in self.groups:
            report = self.progress.report(method, case)
            report = report or self.progress.reported(method, case, self.progress.first_label(method, case))
            candidates += [*self.progress.tuning(method, case), *report]
        cells: list[Cell] = []
        seen: set[tuple[str, str]] = set()
        for cell in sorted(candidates, key=lambda cell: self.progress.state(cell) != "done"):
            parts = {(cell.method, part) for part in (cell.case, *cell.setting.split(", "))}
            if self.progress.state(cell) != "done" and not parts <= seen:
                cells.append(cell)
            seen |= parts
        refused: dict[str, list[Cell]] = {}
        died: list[Cell] = []
        for cell, found in pool.map([(cell, "build", (cell.arguments,)) for cell in cells]):
            if found is None:
                died.append(cell)
            elif found["error"]:
                refused.setdefault(found["error"], []).append(cell)
        for cell, found in pool.map([(cell, "build", (cell.arguments,)) for cell in died]):
            if found is None:
                self.say(
                    f"the settings of {cell.title} were not checked: the worker was killed, twice (out of memory?)"
                )
            elif found["error"]:
                refused.setdefault(found["error"], []).append(cell)
        if refused:
            told = [
                f"{of[0].title}{f' and {count_of(len(of) - 1)} more' if of[1:] else ''}: {why}"
                for why, of in refused.items()
            ]
            raise WrongStudy(f"{self.study.path}: {'; '.join(told)}")

    # ------------------------------------------------------------------ what is done

    def _look_at_data(self, pool: Pool) -> None:
        """Find the hash of every partition that cells were computed on, as it is made now."""
        cells: dict[str, Cell] = {}
        for method, case in self.groups:
            for cell in [*self.progress.tuning(method, case), *self.progress.report(method, case)]:
                if self.progress.state(cell) == "done":
                    cells.setdefault(cell.data, cell)
        for cell, found in pool.map([(cell, "partition", (cell.arguments,)) for cell in cells.values()]):
            if found is not None and not found["error"]:
                self.progress.partitions[cell.data] = found["partition"]
            else:
                why = "its worker died" if found is None else found["error"]
                self.say(f"the data of {cell.case}, seed {cell.seed}, cannot be compared with the cells': {why}")

    def _take(self, cell: Cell, found: Record | None) -> None:
        self._under_way.discard(cell.key)
        if found is None and cell.key not in self._lost:
            self._lost.add(cell.key)
            self.say(f"the worker of {cell.title} was killed: once more")
            return
        self._tried.add(cell.key)
        if found is None:
            found = {"error": "its worker was killed, twice (out of memory?)", "killed": True}
        if found.get("interrupted"):
            return
        record = make_record(cell, found)
        self.store.add(record, kept_rounds(self.study, cell, found))
        self.progress.records[cell.key] = record
        self.tally.trained += 1
        if record["error"]:
            self.tally.failed[cell.title] = record["error"]
        self.say(self._line(cell, record))

    def _line(self, cell: Cell, record: Record) -> str:
        left = list(self.todo())
        done = f"[{self.tally.trained}/{self.tally.trained + len(left)}] {cell.title}: "
        done += f"failed: {record['error']}" if record["error"] else f"{record['monitor']} {record['val']:.4g}"
        return f"{done}, {record['seconds']:.1f} s{self._left(left)}"

    def _left(self, left: Sequence[Cell]) -> str:
        seconds = self.estimate(left) / self.processes
        return f"; about {duration(seconds)} left" if seconds else ""

    def estimate(self, cells: Sequence[Cell]) -> float:
        """Seconds that one process would need for these cells, by what like ones took."""
        known: dict[tuple[str, ...], list[float]] = {}
        for record in self.progress.records.values():
            if not record["error"]:
                for like in ((record["method"], record["case"]), (record["method"],), ()):
                    known.setdefault(like, []).append(record["seconds"])
        mean = {like: statistics.fmean(found) for like, found in known.items()}
        total = 0.0
        for cell in cells:
            likes = ((cell.method, cell.case), (cell.method,), ())
            total += next((mean[like] for like in likes if like in mean), 0.0)
        return total


def task_arguments(study: Study, cell: Cell, wandb: Wandb | None = None) -> tuple[str, ...]:
    """A cell's arguments and where it logs to, which is no part of its key: to W&B if the study says so, or we do."""
    wandb = wandb or study.wandb
    if wandb is None:
        return (*cell.arguments, "--trainer.logger=false")
    logger = {
        "class_path": "fl_lightning.run.loggers.WandbLogger",
        "init_args": {
            **wandb.model_dump(),
            "name": f"{cell.method} {cell.case} {cell.setting} {cell.seed}",
            "group": f"{cell.method} {cell.case} {cell.setting}",
            "tags": [study.name, cell.purpose, cell.method, cell.case],
        },
    }
    return (*cell.arguments, f"--trainer.logger={json.dumps(logger)}")


def kept_rounds(study: Study, cell: Cell, found: Record) -> Record | None:
    """The figures of every round that are kept; none of tuning."""
    return found.get("rounds") if study.history and cell.purpose == "report" else None


def make_record(cell: Cell, found: Record) -> Record:
    """The record of a cell; that of a tuning cell contains nothing about test examples."""
    error = found["error"]
    if not error and found["result"][found["monitor"]] is None:
        error = f"{found['monitor']} is no finite number in any round"
    record: Record = {
        "key": cell.key,
        "purpose": cell.purpose,
        "method": cell.method,
        "case": cell.case,
        "seed": cell.seed,
        "setting": cell.setting,
        "error": error,
        "val": None,
        "monitor": found.get("monitor", ""),
        "mode": found.get("mode", ""),
        "seconds": found.get("seconds", 0.0),
        "cpu_seconds": found.get("cpu_seconds", 0.0),
        "partition": found.get("partition", ""),
        "version": cell.version,
        "sources": digest_of_sources(),
        "command": shlex.join(["fl-train", *cell.arguments]),
    }
    if found.get("killed"):
        record["killed"] = True
    if found.get("warnings"):
        record["warnings"] = found["warnings"]
    if record["error"]:
        return record
    record["val"] = found["result"][found["monitor"]]
    if cell.purpose == "report":
        figures = {name: value for name, value in found["result"].items() if not name.startswith(_LEFT_OUT)}
        kept = ("kinds", "clients", "malicious", "num_rounds", "bytes", "training_seconds", "failures")
        record |= {"result": figures, **{name: found[name] for name in kept}}
    return record


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(42), duration(4000), duration(100000)
        ('42 s', '67 min', '27.8 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def count_of(number: int) -> str:
    """So many cells.

    Example:
        >>> count_of(1), count_of(12)
        ('1 cell', '12 cells')
    """
    return f"{number} cell{'' if number == 1 else 's'}"


def _any_of(cell: Cell, method: str, case: str, seed: int) -> Cell:
    """Stands for a reported cell whose setting is not chosen yet."""
    return dataclasses.replace(cell, method=method, case=case, seed=seed, purpose="report", key="")
