"""How far a study is: which runs are done, failed, stale or missing, and which setting was chosen."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from fl_lightning.study.definition import Study
from fl_lightning.study.edge import Point, at_edge
from fl_lightning.study.runs import StudyRun, make_run
from fl_lightning.study.store import Record, Store, is_less_better

State = Literal["missing", "failed", "stale", "done"]


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting that a method tries on a case, and its runs, one for each tuning seed."""

    point: Point
    runs: Sequence[StudyRun]

    @property
    def label(self) -> str:
        """The setting's labels."""
        return self.point[0]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The result of tuning a method on a case.

    Attributes:
        point: The chosen setting.
        validation: Its validation metric, mean over the tuning seeds; nan if nothing was tuned.
        tried: Mean validation metric of every setting, by its labels; nan for one that failed.
    """

    point: Point
    validation: float
    tried: Mapping[str, float]


class Progress:
    """A study together with its records.

    Args:
        study: The study.
        store: Where its records are.
        partitions: Hash of the partition that the current code makes, by ``StudyRun.data``, as far as it is known.
    """

    def __init__(self, study: Study, store: Store, partitions: Mapping[str, str] | None = None) -> None:
        self.study = study
        self.store = store
        self.partitions = dict(partitions or {})
        self.records = store.records()
        self._newest: dict[str, str] | None = None
        self.grid = cache(self._grid)
        self.beyond = cache(self._beyond)
        self.reported = cache(self._reported)

    @cached_property
    def source(self) -> "Progress":
        """The progress of the study whose choices are used; usually this one."""
        other = self.study.other
        return self if other is None else Progress(other, Store(other.results))

    def state(self, run: StudyRun) -> State:
        """What is known about a run."""
        record = self.records.get(run.key)
        if record is None:
            return "missing"
        if record["version"] != run.version or self.has_other_data(run):
            return "stale"
        return "failed" if record["error"] else "done"

    def take(self, records: Mapping[str, Record]) -> None:
        """Add records that are newer than those that are known, by key."""
        for key, record in records.items():
            self.records.pop(key, None)  # the newest is the last
            self.records[key] = record
        self._newest = None

    def has_other_data(self, run: StudyRun) -> bool:
        """Whether a run was computed on a partition that is not the current one of its settings.

        That is the one that the current code makes, where it is known; otherwise that of the newest run with the same
        settings of the data, so that no two runs on different ones count as current.
        """
        record = self.records.get(run.key)
        if record is None or not record["partition"]:
            return False
        now = self.partitions.get(run.data) or self._newest_partitions().get(run.data)
        return now is not None and record["partition"] != now

    def _newest_partitions(self) -> dict[str, str]:
        """Hash of the partition of the newest record, by ``StudyRun.data``."""
        if self._newest is None:
            groups = list(self.groups(self.study.methods, self.study.cases))
            data = {run.key: run.data for group in groups for run in (*self.tuning(*group), *self.report(*group))}
            self._newest = {
                data[key]: record["partition"]
                for key, record in self.records.items()
                if key in data and record["partition"]
            }
        return self._newest

    def tuning(self, method: str, case: str) -> list[StudyRun]:
        """The runs whose validation chooses the setting of a method on a case; empty if another study has them."""
        if self.study.other is not None:
            return []
        return [run for trial in self.trials(*self.study.tuned_on(method, case)) for run in trial.runs]

    def trials(self, method: str, case: str) -> list[Trial]:
        """What a method tries on a case: the grid, then values beyond its ends as long as these are best."""
        trials = list(self.grid(method, case))
        further = trials if self.study.tuning.beyond and len(self.scores(trials)) == len(trials) else []
        while further and (best := self._best(trials)) is not None:
            known = {trial.label for trial in trials}
            further = [trial for trial in self.beyond(method, case, best) if trial.label not in known]
            trials += further
        return trials

    def _grid(self, method: str, case: str) -> list[Trial]:
        return [self._trial(method, case, point) for point in self.study.grid_of(method, case)]

    def _beyond(self, method: str, case: str, trial: Trial) -> list[Trial]:
        return [self._trial(method, case, point) for point in self.study.beyond(method, case, trial.point)]

    def _trial(self, method: str, case: str, point: Point) -> Trial:
        seeds = self.study.tuning.seeds
        return Trial(point, [make_run(self.study, method, case, seed, point, "tuning") for seed in seeds])

    def scores(self, trials: Sequence[Trial]) -> dict[str, float]:
        """Mean validation metric of each setting without missing runs; nan for one that failed."""
        scores: dict[str, float] = {}
        for trial in trials:
            records = [self.records.get(run.key) for run in trial.runs]
            result = [math.nan if record["val"] is None else record["val"] for record in records if record is not None]
            if len(result) == len(trial.runs):
                scores[trial.label] = statistics.fmean(result)
        return scores

    def _best(self, trials: Sequence[Trial]) -> Trial | None:
        """The first of the best; None if all failed."""
        scores = self.scores(trials)
        finite = [trial for trial in trials if math.isfinite(scores.get(trial.label, math.nan))]
        records = [self.records[run.key] for trial in finite for run in trial.runs]
        sign = -1.0 if any(is_less_better(record) for record in records) else 1.0
        return max(finite, key=lambda trial: sign * scores[trial.label], default=None)

    def choice(self, method: str, case: str) -> Choice | None:
        """The chosen setting: best mean validation over the tuning seeds, the first of equals.

        Settings beyond the ends of the grid count as soon as they have been tried.

        Returns:
            None as long as a run of the grid is missing, or if every setting failed.
        """
        source, tuned = self.source, self.study.tuned_on(method, case)
        trials = source.trials(*tuned)
        if not trials:
            return Choice(point=("", {}), validation=math.nan, tried={})
        tried = source.scores(trials)
        best = source._best(trials)
        if best is None or any(trial.label not in tried for trial in source.grid(*tuned)):
            return None
        return Choice(point=best.point, validation=tried[best.label], tried=tried)

    def tuned(self) -> list[tuple[str, str]]:
        """Each method and case that a choice of this study is made on, once."""
        groups = self.groups(self.study.methods, self.study.cases)
        return list(dict.fromkeys(self.study.tuned_on(*group) for group in groups))

    def at_edge(self, method: str, case: str) -> str:
        """At which edges of the ordered axes of what was tried the chosen setting stands; empty for none."""
        chosen, source, tuned = self.choice(method, case), self.source, self.study.tuned_on(method, case)
        if chosen is None or not chosen.tried:
            return ""
        tried = [trial.point for trial in source.trials(*tuned) if trial.label in chosen.tried]
        return at_edge(source.study.axes_of(*tuned), chosen.point, tried, source.study.tuning.beyond)

    def _reported(self, method: str, case: str, label: str) -> list[StudyRun]:
        trials = self.source.trials(*self.study.tuned_on(method, case))
        point = next((trial.point for trial in trials if trial.label == label), ("", {}))
        return [make_run(self.study, method, case, seed, point, "report") for seed in self.study.seeds]

    def first_label(self, method: str, case: str) -> str:
        """The first setting of the grid that a method's choice on a case is made from; empty without one."""
        grid = self.source.grid(*self.study.tuned_on(method, case))
        return grid[0].label if grid else ""

    def report(self, method: str, case: str) -> list[StudyRun]:
        """The reported runs of a method on a case, one for each seed; empty as long as no setting is chosen."""
        chosen = self.choice(method, case)
        return [] if chosen is None else self.reported(method, case, chosen.point[0])

    @cached_property
    def ceilings(self) -> list[str]:
        """Methods that train on all clients' data together; they are no competitors of the others."""
        methods = self.study.methods
        firsts = {name: self.study.cases_of(name)[0] for name in methods}
        runs = {name: self.reported(name, case, self.first_label(name, case)) for name, case in firsts.items()}
        return [name for name, reported in runs.items() if reported[0].strategy == "Pooled"]

    def groups(self, methods: Collection[str], cases: Collection[str]) -> Iterator[tuple[str, str]]:
        """Method and case, in the order of work: by tier, then by case, so that a part is already a table."""
        tiers = sorted({self.study.methods[method].tier for method in methods})
        for tier in tiers:
            for case in (case for case in self.study.cases if case in cases):
                for method in (name for name in self.study.methods if name in methods):
                    if self.study.methods[method].tier == tier and case in self.study.cases_of(method):
                        yield method, case
