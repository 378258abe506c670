"""Runs a study: chooses the next run, records its result and reports progress."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.counts import count
from fl_lightning.run.interruption import uninterrupted
from fl_lightning.run.version import digest_of_sources, sources
from fl_lightning.study.definition import Study
from fl_lightning.study.leases import Leases
from fl_lightning.study.pool import Pool
from fl_lightning.study.progress import Progress
from fl_lightning.study.record import kept_rounds, make_record, task_arguments
from fl_lightning.study.runs import StudyRun
from fl_lightning.study.schema import WrongStudy
from fl_lightning.study.store import Record, Store

#: After so many deaths of its worker in a row without progress a run has failed.
_MOST_DEATHS = 3


@dataclass(kw_only=True)
class Tally:
    """The summary of one call of ``fl-train study run``.

    Attributes:
        trained: Runs that were trained.
        failed: Runs that failed, with the reason.
        waiting: Method and case without a chosen setting: another study has not tuned it, or every setting failed.
        missing: Runs that are still to do.
        failed_before: Runs that failed in an earlier call, and were not tried again.
    """

    trained: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    missing: int = 0
    failed_before: int = 0


class Runner:
    """Trains what is missing, as far as no other process trains it: any number of them may work on a study.

    Args:
        study: The study.
        store: Where its records go.
        methods: Those to run; all if empty.
        cases: Likewise.
        retry: Whether runs that failed are tried again.
        minutes: No run begins after so many; None for no limit.
        say: Takes a line for the user.
        silence_seconds: After how many seconds without a sign of life another process is taken to be dead, and its runs
            are trained here.
        state_seconds: How often, at most, the state of a run is written, from which it continues then.
        look_seconds: How often the records of other processes are read as long as they train what is missing.
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
        silence_seconds: float = 120.0,
        state_seconds: float = 60.0,
        look_seconds: float = 2.0,
    ) -> None:
        self.study, self.store, self.say = study, store, say
        self.state_seconds, self.look_seconds = state_seconds, look_seconds
        self.leases = Leases(store.folder / "leases", silence_seconds=silence_seconds)
        self.retry, self.minutes = retry, minutes
        self.progress = Progress(study, store)
        self.groups = list(self.progress.groups(methods or study.methods, cases or study.cases))
        self.tally = Tally()
        self.processes = study.processes
        self._under_way: set[str] = set()
        self._lost: set[str] = set()
        self._tried: set[str] = set()
        self._stopped: set[str] = set()
        self._others_train = False

    def run(self, pool: Pool) -> Tally:
        """Train until nothing is left that can be done.

        Raises:
            WrongStudy: Settings that are refused; nothing was trained then.
        """
        self.prepare(pool)
        return self.work(pool)

    def prepare(self, pool: Pool) -> None:
        """Record the sources, and look at the data and at the settings of what is to be trained.

        Raises:
            WrongStudy: Settings that are refused.
        """
        self.store.keep_sources(digest_of_sources(), sources())
        self.store.bound_states(self.study.states_gb)
        self._look_at_data(pool)
        self._check_settings(pool)

    def work(self, pool: Pool) -> Tally:
        """Train, after :meth:`prepare`, until nothing is left that can be done, here or by another process."""
        self._start = time.monotonic()
        self.processes = pool.processes
        with self.leases:
            try:
                while self._work(pool):
                    pass
            except (KeyboardInterrupt, SystemExit):  # the latter where a cluster takes a machine back
                for study_run, result in pool.finished(0.0):  # what was computed is recorded
                    self._take(study_run, result)
                raise
        return self.summary()

    def _work(self, pool: Pool) -> bool:
        """Begin what can be begun and wait for what ends; whether there is more to do."""
        while pool.num_idle and not self._time_is_up() and (study_run := self._next()) is not None:
            self._under_way.add(study_run.key)
            pool.submit(study_run, "train", *self._task(study_run, pool.scratch))
        if pool.num_busy:
            for study_run, result in pool.finished(self.look_seconds if self._others_train else math.inf):
                self._take(study_run, result)
            return True
        if self._others_train and not self._time_is_up():
            time.sleep(self.look_seconds)
            return True
        return False

    def summary(self) -> Tally:
        """What was done here, and what is left."""
        self.read_others()
        self._tried -= self._stopped
        self.tally.missing = sum(1 for _ in self.todo())
        left = {run.key for run in self._all_runs() if self.progress.state(run) == "failed"} - self._tried
        self.tally.failed_before = len(left)
        self.tally.waiting = [f"{method} on {case}" for method, case in self.groups if self._waits(method, case)]
        return self.tally

    def read_others(self) -> list[Record]:
        """Read what other processes have recorded since the last time; their runs count as tried."""
        new = [(key, each) for key, each in self.store.new_records().items() if self.progress.records.get(key) != each]
        self.progress.take(dict(new))
        self._tried.update(key for key, _ in new)
        return [record for _, record in new]

    def report_others(self) -> None:
        """Count what other processes have recorded since the last time as trained, and say it."""
        new = {record["key"]: record for record in self.read_others()}
        runs = {run.key: run for run in self._all_runs() if run.key in new}
        for index, (key, record) in enumerate((key, new[key]) for key in new if key in runs):
            self._count(runs[key], record, len(runs) - 1 - index)

    def count_as_tried(self, keys: Iterable[str]) -> None:
        """Do not train these runs, whatever came of them."""
        self._tried.update(keys)

    # ------------------------------------------------------------------ what is next

    def _next(self) -> StudyRun | None:
        """The next run that can be trained now; this process has its lease."""
        self._others_train = False
        self.read_others()
        for run in self.todo(ready=True):
            if run.key in self._under_way:
                continue
            deaths = self.leases.claim(run.key, self.store.partial_state(run))
            self.read_others()  # maybe its former holder was done
            if deaths is None:
                self._others_train = True
            elif not self._is_open(run):
                self.leases.release(run.key)
            elif deaths >= _MOST_DEATHS:
                self._finish(run, {"error": f"its worker died {deaths} times (out of memory?)", "killed": True})
            else:
                return run
        return None

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

    def _all_runs(self) -> Iterator[StudyRun]:
        for method, case in self.groups:
            yield from (*self.progress.tuning(method, case), *self.progress.report(method, case))

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
        state = self.store.state(run) if self.study.states_gb else None
        states = state, self.store.partial_state(run), self.state_seconds
        if run.purpose == "tuning":
            return arguments, scratch, (), (), None, *states
        folder = self.store.files({"method": run.method, "case": run.case, "seed": run.seed})
        return arguments, scratch, self.study.history, self.study.keep, folder, *states

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
                f"{of[0].title}{' and ' + count(len(of) - 1, 'run') + ' more' if of[1:] else ''}: {why}"
                for why, of in refused.items()
            ]
            raise WrongStudy(f"{self.study.path}: {'; '.join(summary)}")

    # ------------------------------------------------------------------ what is done

    def _look_at_data(self, pool: Pool) -> None:
        """Find the hash of every partition that runs were computed on, as it is made now."""
        runs: dict[str, StudyRun] = {}
        for run in self._all_runs():
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
            self.leases.release(run.key)
            self.say(f"the worker of {run.title} was killed: trying once more")
            return
        if result is None:
            result = {"error": "its worker was killed, twice (out of memory?)", "killed": True}
        self._finish(run, result)

    def _finish(self, run: StudyRun, result: Record) -> None:
        """Record a result, unless another process has taken the run over in the meantime, and return its lease."""
        self._tried.add(run.key)
        record = make_record(run, result) if not result.get("interrupted") else None
        with uninterrupted():
            with self.leases.held(run.key) as is_mine:
                if record is not None and is_mine:
                    self.store.keep_own_sources(run)
                    self.store.add(record, kept_rounds(self.study, run, result))
                    self.store.forget_partial(run)
            self.leases.release(run.key)
        if record is None:
            self._stopped.add(run.key)
            self.say(f"{run.title} was {result['error']}: it is still to do")
            return
        if not is_mine:
            self._tried.discard(run.key)
            self.say(f"{run.title} was taken over by another process, since this one showed no sign of life")
            return
        self.store.bound_states(self.study.states_gb)
        self.progress.take({run.key: record})
        self._count(run, record)

    def _count(self, run: StudyRun, record: Record, unsaid: int = 0) -> None:
        self.tally.trained += 1
        if record["error"]:
            self.tally.failed[run.title] = record["error"]
        self.say(self._line(run, record, unsaid))

    def _line(self, run: StudyRun, record: Record, unsaid: int) -> str:
        """How a run ended, and how many have, by whichever process, but for those of which lines follow."""
        left = list(self.todo())
        tried = {each.key for each in self._all_runs()} & self._tried
        done = f"[{len(tried - self._stopped) - unsaid}/{len(tried) + len(left)}] {run.title}: "
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


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(42), duration(119.7), duration(4000), duration(100000)
        ('42 s', '2 min', '67 min', '27.8 h')
    """
    if round(seconds) < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if round(seconds / 60) < 120 else f"{seconds / 3600:.1f} h"


def _any_of(run: StudyRun, method: str, case: str, seed: int) -> StudyRun:
    """Stands for a reported run whose setting is not chosen yet."""
    return dataclasses.replace(run, method=method, case=case, seed=seed, purpose="report", key="")
