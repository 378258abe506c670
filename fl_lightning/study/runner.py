"""Runs a study: chooses the next run, records its result and reports progress."""

import dataclasses
import json
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.run.version import digest_of_sources, sources
from fl_lightning.study.definition import Study
from fl_lightning.study.pool import Pool
from fl_lightning.study.progress import Progress
from fl_lightning.study.runs import StudyRun
from fl_lightning.study.schema import Wandb, WrongStudy
from fl_lightning.study.store import Record, Store

#: Metrics of the best round that are not about accuracy.
_LEFT_OUT = ("comm/", "num_", "seconds", "failed_round")


@dataclass(kw_only=True)
class Tally:
    """The summary of one call of ``fl-train study run``.

    Attributes:
        trained: Runs that were trained.
        failed: Runs that failed, with the reason.
        waiting: Method and case without a chosen setting: another study has not tuned it, or every setting failed.
        missing: Runs that are still to do.
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
        retry: Whether runs that failed are tried again.
        minutes: No run begins after so many; None for no limit.
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
            while pool.num_idle and not self._time_is_up() and (study_run := self._next()) is not None:
                self._under_way.add(study_run.key)
                pool.submit(study_run, "train", *self._task(study_run, pool.scratch))
            if not pool.num_busy:
                break
            for study_run, result in pool.finished():
                self._take(study_run, result)
        self.tally.missing = sum(1 for _ in self.todo())
        self.tally.waiting = [f"{method} on {case}" for method, case in self.groups if self._waits(method, case)]
        return self.tally

    # ------------------------------------------------------------------ what is next

    def _next(self) -> StudyRun | None:
        return next((run for run in self.todo(ready=True) if run.key not in self._under_way), None)

    def todo(self, *, ready: bool = False) -> Iterator[StudyRun]:
        """The runs that are left; with ``ready`` only those that can be trained now, not those that await a choice."""
        seen: set[str] = set()
        for method, case in self.groups:
            tuning = [run for run in self.progress.tuning(method, case) if self._is_open(run)]
            report = self.progress.report(method, case)
            runs = tuning if tuning and ready else [*tuning, *(run for run in report if self._is_open(run))]
            for run in runs:
                if run.key not in seen:
                    seen.add(run.key)
                    yield run
            if tuning and not report and not ready:
                yield from (_any_of(tuning[0], method, case, seed) for seed in self.study.seeds)

    def _is_open(self, run: StudyRun) -> bool:
        if run.key in self._tried:
            return False
        state = self.progress.state(run)
        again = self.retry or self.progress.records.get(run.key, {}).get("killed", False)
        return state in ("missing", "stale") or (state == "failed" and again)

    def _waits(self, method: str, case: str) -> bool:
        return not any(map(self._is_open, self.progress.tuning(method, case))) and not self.progress.report(
            method, case
        )

    def _time_is_up(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._start > 60 * self.minutes

    def _task(self, run: StudyRun, scratch: Path) -> tuple[Any, ...]:
        """The arguments of :func:`fl_lightning.study.worker.train`."""
        arguments = task_arguments(self.study, run)
        if run.purpose == "tuning":
            return arguments, scratch
        folder = self.store.files({"method": run.method, "case": run.case, "seed": run.seed})
        return arguments, scratch, self.study.history, self.study.keep, folder

    def _check_settings(self, pool: Pool) -> None:
        """Build, before anything is trained, a run of every method and case, and of a method and every grid value.

        What was trained before is in order.

        Raises:
            WrongStudy: Settings that are refused; a line for each message.
        """
        candidates: list[StudyRun] = []
        for method, case in self.groups:
            report = self.progress.report(method, case)
            report = report or self.progress.reported(method, case, self.progress.first_label(method, case))
            candidates += [*self.progress.tuning(method, case), *report]
        runs: list[StudyRun] = []
        seen: set[tuple[str, str]] = set()
        for run in sorted(candidates, key=lambda run: self.progress.state(run) != "done"):
            parts = {(run.method, part) for part in (run.case, *run.setting.split(", "))}
            if self.progress.state(run) != "done" and not parts <= seen:
                runs.append(run)
            seen |= parts
        refused: dict[str, list[StudyRun]] = {}
        died: list[StudyRun] = []
        for run, result in pool.map([(run, "build", (run.arguments,)) for run in runs]):
            if result is None:
                died.append(run)
            elif result["error"]:
                refused.setdefault(result["error"], []).append(run)
        for run, result in pool.map([(run, "build", (run.arguments,)) for run in died]):
            if result is None:
                self.say(f"the settings of {run.title} were not checked: the worker was killed, twice (out of memory?)")
            elif result["error"]:
                refused.setdefault(result["error"], []).append(run)
        if refused:
            summary = [
                f"{of[0].title}{f' and {count_of(len(of) - 1)} more' if of[1:] else ''}: {why}"
                for why, of in refused.items()
            ]
            raise WrongStudy(f"{self.study.path}: {'; '.join(summary)}")

    # ------------------------------------------------------------------ what is done

    def _look_at_data(self, pool: Pool) -> None:
        """Find the hash of every partition that runs were computed on, as it is made now."""
        runs: dict[str, StudyRun] = {}
        for method, case in self.groups:
            for run in [*self.progress.tuning(method, case), *self.progress.report(method, case)]:
                if self.progress.state(run) == "done":
                    runs.setdefault(run.data, run)
        for run, result in pool.map([(run, "partition", (run.arguments,)) for run in runs.values()]):
            if result is not None and not result["error"]:
                self.progress.partitions[run.data] = result["partition"]
            else:
                why = "its worker died" if result is None else result["error"]
                self.say(f"the data of {run.case}, seed {run.seed}, cannot be compared with the runs': {why}")

    def _take(self, run: StudyRun, result: Record | None) -> None:
        self._under_way.discard(run.key)
        if result is None and run.key not in self._lost:
            self._lost.add(run.key)
            self.say(f"the worker of {run.title} was killed: trying once more")
            return
        self._tried.add(run.key)
        if result is None:
            result = {"error": "its worker was killed, twice (out of memory?)", "killed": True}
        if result.get("interrupted"):
            return
        record = make_record(run, result)
        self.store.add(record, kept_rounds(self.study, run, result))
        self.progress.records[run.key] = record
        self.tally.trained += 1
        if record["error"]:
            self.tally.failed[run.title] = record["error"]
        self.say(self._line(run, record))

    def _line(self, run: StudyRun, record: Record) -> str:
        left = list(self.todo())
        done = f"[{self.tally.trained}/{self.tally.trained + len(left)}] {run.title}: "
        done += f"failed: {record['error']}" if record["error"] else f"{record['monitor']} {record['val']:.4g}"
        return f"{done}, {record['seconds']:.1f} s{self._left(left)}"

    def _left(self, left: Sequence[StudyRun]) -> str:
        seconds = self.estimate(left) / self.processes
        return f"; about {duration(seconds)} left" if seconds else ""

    def estimate(self, runs: Sequence[StudyRun]) -> float:
        """Seconds that one process would need for these runs, by what like ones took."""
        known: dict[tuple[str, ...], list[float]] = {}
        for record in self.progress.records.values():
            if not record["error"]:
                for like in ((record["method"], record["case"]), (record["method"],), ()):
                    known.setdefault(like, []).append(record["seconds"])
        mean = {like: statistics.fmean(result) for like, result in known.items()}
        total = 0.0
        for run in runs:
            likes = ((run.method, run.case), (run.method,), ())
            total += next((mean[like] for like in likes if like in mean), 0.0)
        return total


def task_arguments(study: Study, run: StudyRun, wandb: Wandb | None = None) -> tuple[str, ...]:
    """A run's arguments and its logger, which is not part of its key: W&B if the study, or the caller, asks for it."""
    wandb = wandb or study.wandb
    if wandb is None:
        return (*run.arguments, "--trainer.logger=false")
    logger = {
        "class_path": "fl_lightning.run.loggers.WandbLogger",
        "init_args": {
            **wandb.model_dump(),
            "name": f"{run.method} {run.case} {run.setting} {run.seed}",
            "group": f"{run.method} {run.case} {run.setting}",
            "tags": [study.name, run.purpose, run.method, run.case],
        },
    }
    return (*run.arguments, f"--trainer.logger={json.dumps(logger)}")


def kept_rounds(study: Study, run: StudyRun, result: Record) -> Record | None:
    """The metrics of every round that are kept; none of tuning."""
    return result.get("rounds") if study.history and run.purpose == "report" else None


def make_record(run: StudyRun, result: Record) -> Record:
    """The record of a run; that of a tuning run contains nothing about test examples."""
    error = result["error"]
    if not error and result["result"][result["monitor"]] is None:
        error = f"{result['monitor']} is not finite in any round"
    record: Record = {
        "key": run.key,
        "purpose": run.purpose,
        "method": run.method,
        "case": run.case,
        "seed": run.seed,
        "setting": run.setting,
        "error": error,
        "val": None,
        "monitor": result.get("monitor", ""),
        "mode": result.get("mode", ""),
        "seconds": result.get("seconds", 0.0),
        "cpu_seconds": result.get("cpu_seconds", 0.0),
        "partition": result.get("partition", ""),
        "version": run.version,
        "sources": digest_of_sources(),
        "command": shlex.join(["fl-train", *run.arguments]),
    }
    if result.get("killed"):
        record["killed"] = True
    if result.get("warnings"):
        record["warnings"] = result["warnings"]
    if record["error"]:
        return record
    record["val"] = result["result"][result["monitor"]]
    if run.purpose == "report":
        metrics = {name: value for name, value in result["result"].items() if not name.startswith(_LEFT_OUT)}
        selected = ("kinds", "clients", "malicious", "num_rounds", "bytes", "training_seconds", "failures")
        record |= {"result": metrics, **{name: result[name] for name in selected}}
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
    """So many runs.

    Example:
        >>> count_of(1), count_of(12)
        ('1 run', '12 runs')
    """
    return f"{number} run{'' if number == 1 else 's'}"


def _any_of(run: StudyRun, method: str, case: str, seed: int) -> StudyRun:
    """Stands for a reported run whose setting is not chosen yet."""
    return dataclasses.replace(run, method=method, case=case, seed=seed, purpose="report", key="")
