"""How far a study is: which cells are done, failed, stale or missing, and which setting was chosen."""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from fl_lightning.round.goal import less_is_better
from fl_lightning.study.cells import Cell, make_cell, tuning_cells
from fl_lightning.study.definition import Point, Study
from fl_lightning.study.store import Record, Store

State = Literal["missing", "failed", "stale", "done"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What tuning came to for a method on a case.

    Attributes:
        point: The chosen setting.
        validation: Its validation figure, mean over the tuning seeds; nan where nothing was tuned.
        tried: Mean validation figure of every setting, by its labels; nan for one that failed.
    """

    point: Point
    validation: float
    tried: Mapping[str, float]


class Progress:
    """A study beside its records.

    Args:
        study: The study.
        store: Where its records are.
        partitions: Hash of the partition that is made now, by ``Cell.data``, as far as it was looked at.
    """

    def __init__(self, study: Study, store: Store, partitions: Mapping[str, str] | None = None) -> None:
        self.study = study
        self.store = store
        self.partitions = dict(partitions or {})
        self.records = store.records()
        self.cells_of_tuning = cache(tuning_cells)
        self.reported = cache(self._reported)

    @cached_property
    def source(self) -> "Progress":
        """The progress of the study whose choices are taken; this one, as a rule."""
        other = self.study.other
        return self if other is None else Progress(other, Store(other.results))

    def state(self, cell: Cell) -> State:
        """What is known of a cell."""
        record = self.records.get(cell.key)
        if record is None:
            return "missing"
        if record["version"] != cell.version or self._has_other_data(cell, record):
            return "stale"
        return "failed" if record["error"] else "done"

    def _has_other_data(self, cell: Cell, record: Record) -> bool:
        now = self.partitions.get(cell.data)
        return now is not None and record["partition"] not in ("", now)

    def tuning(self, method: str, case: str) -> list[Cell]:
        """The cells whose validation chooses the setting of a method on a case; none where another study has them."""
        if self.study.other is not None:
            return []
        return self.cells_of_tuning(self.study, *self.study.tuned_on(method, case))

    def choice(self, method: str, case: str) -> Choice | None:
        """The chosen setting: best mean validation over the tuning seeds, the first of equals.

        Returns:
            None as long as a cell is missing, and where every setting failed.
        """
        source, (tuned_as, tuned_on) = self.source, self.study.tuned_on(method, case)
        grid = source.study.grid_of(tuned_as, tuned_on)
        if not grid:
            return Choice(point=("", {}), validation=math.nan, tried={})
        values: dict[str, list[float]] = {label: [] for label, _ in grid}
        sign = 1.0
        for cell in source.cells_of_tuning(source.study, tuned_as, tuned_on):
            record = source.records.get(cell.key)
            if record is None:
                return None
            values[cell.setting].append(math.nan if record["val"] is None else record["val"])
            sign = -1.0 if record["monitor"] and less_is_better(record["monitor"]) else sign
        tried = {label: statistics.fmean(found) for label, found in values.items()}
        finite = [label for label, value in tried.items() if math.isfinite(value)]
        if not finite:
            return None
        best = max(finite, key=lambda label: sign * tried[label])
        return Choice(point=next(point for point in grid if point[0] == best), validation=tried[best], tried=tried)

    def _reported(self, method: str, case: str, label: str) -> list[Cell]:
        grid = self.source.study.grid_of(*self.study.tuned_on(method, case))
        point = next((point for point in grid if point[0] == label), ("", {}))
        return [make_cell(self.study, method, case, seed, point, "report") for seed in self.study.seeds]

    def first_label(self, method: str, case: str) -> str:
        """The first setting of the grid that a method's choice on a case is made from; empty without one."""
        grid = self.source.study.grid_of(*self.study.tuned_on(method, case))
        return grid[0][0] if grid else ""

    def report(self, method: str, case: str) -> list[Cell]:
        """The reported cells of a method on a case, one a seed; none as long as no setting is chosen."""
        chosen = self.choice(method, case)
        return [] if chosen is None else self.reported(method, case, chosen.point[0])

    def groups(self, methods: Collection[str], cases: Collection[str]) -> Iterator[tuple[str, str]]:
        """Method and case, in the order of work: by tier, then by case, so that a part is already a table."""
        tiers = sorted({self.study.methods[method].tier for method in methods})
        for tier in tiers:
            for case in (case for case in self.study.cases if case in cases):
                for method in (name for name in self.study.methods if name in methods):
                    if self.study.methods[method].tier == tier and case in self.study.cases_of(method):
                        yield method, case
