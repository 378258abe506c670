"""The answer to which method is taken: a sentence, a table, a page, and a configuration that trains the method."""

import dataclasses
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fl_lightning.choice.candidates import CEILING
from fl_lightning.choice.outcome import Found
from fl_lightning.choice.verdict import Interval, Standing, Verdict, decide, difference
from fl_lightning.counts import count
from fl_lightning.report.figures import Table
from fl_lightning.report.wording import duration, number, signed, size
from fl_lightning.study.store import is_less_better, metric_tested


def columns_of(table: Table, width: int) -> list[str]:
    r"""A table as lines of text; columns that do not fit side by side follow below, beside the first one.

    Example:
        >>> table = Table(columns=["method", "test/acc", "sent"], rows=[["Local", "0.8", "0 B"]])
        >>> print("\n".join(columns_of(table, 20)))
        method  test/acc
        Local   0.8
        <BLANKLINE>
        method  sent
        Local   0 B
    """
    rows = [list(table.columns), *map(list, table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    parts: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        needed = sum(widths[other] + 2 for other in (0, *parts[-1])) + widths[column]
        if needed > width and parts[-1]:
            parts.append([])
        parts[-1].append(column)
    blocks = [
        ["  ".join(row[column].ljust(widths[column]) for column in (0, *part)).rstrip() for row in rows]
        for part in parts
    ]
    return [line for block in blocks for line in ("", *block)][1:]


@dataclass
class Answer:
    """Which method, and why; prints as text.

    Attributes:
        found: What the search came to.
        folder: Its folder.
        command: What trains a configuration.
        data_seed: The configuration's ``data.seed``, which ``chosen.yaml`` has again; None for an unknown one.

    Raises:
        ValueError: With new seeds every method but the ceiling failed.
    """

    found: Found
    folder: Path
    command: str = "fl-train fit"
    data_seed: int | None = None
    standings: Sequence[Standing] = field(init=False)

    def __post_init__(self) -> None:
        """Judge the finalists."""
        self.standings = [
            Standing.of(method, label, self.found.records.get(method, {}))
            for method, (label, _) in self.found.finalists.items()
        ]
        runs = [run for name, each in self.found.records.items() if name != CEILING for run in each.values()]
        records = [record for record in runs if not record["error"]]
        if not records:
            first = runs[0]
            raise ValueError(
                f"with new seeds no method can be trained: {first['method']} with seed {first['seed']}: "
                f"{first['error']}"
            )
        self.metric = metric_tested(records[0])
        self.less_is_better = is_less_better(records[0])
        if not any(each.test for each in self.standings):  # there are no test examples
            self.metric = records[0]["monitor"]
            self.standings = [dataclasses.replace(each, test=each.val) for each in self.standings]

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict."""
        return decide(
            self.standings,
            self.metric,
            less_is_better=self.less_is_better,
            num_rounds=self.found.num_rounds,
            has_new_seeds=self.found.has_new_seeds,
        )

    @property
    def notes(self) -> list[str]:
        """What has to be known beside it."""
        edge, seeds = self.found.edges.get(self.method), sorted(self.found.records[self.method])
        more = [f"Of the settings of {self.method} that were tried {edge}: --grid may give others."] if edge else []
        if self.found.has_new_seeds and self.data_seed is not None and self.data_seed not in seeds:
            more.append(
                f"These figures are of data.seed {', '.join(map(str, seeds))}; {self.config.name} has your data.seed "
                f"{self.data_seed}, with which no run of them was trained."
            )
        return [*self.verdict.notes, *more]

    @property
    def method(self) -> str:
        """The method that is taken."""
        return self.verdict.method

    @property
    def sentence(self) -> str:
        """The answer with its evidence."""
        return self.verdict.sentence

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the method was chosen with, by dotted name."""
        return dict(self.found.finalists[self.method][1])

    @property
    def config(self) -> Path:
        """A whole configuration: ``fl-train fit --config`` trains the method."""
        return self.folder / "chosen.yaml"

    @property
    def page(self) -> Path:
        """The page."""
        return self.folder / "choice.html"

    def test_of(self, standing: Standing) -> Interval:
        """The test metric of a finalist over its seeds, as it was measured."""
        sign = -1.0 if self.less_is_better else 1.0
        return Interval.of([sign * value for value in standing.test.values()])

    @cached_property
    def results(self) -> pd.DataFrame:
        """A row for each finalist: its metrics, what it sends and takes, and how it stands to the one that is taken."""
        chosen = next(each for each in self.standings if each.method == self.method)
        rows = []
        for each in self.standings:
            test, gap = self.test_of(each), difference(each.test, chosen.test)
            rows.append(
                {
                    "method": each.method,
                    "setting": each.label,
                    "seeds": test.seeds,
                    self.metric: test.mean,
                    "low": test.low,
                    "high": test.high,
                    "worst_client": each.worst,
                    "better_by": gap.mean if each is not chosen else math.nan,
                    "better_by_low": gap.low if each is not chosen else math.nan,
                    "better_by_high": gap.high if each is not chosen else math.nan,
                    "bytes": each.sent,
                    "seconds": each.seconds,
                    "still_rising": each.is_rising,
                    "errors": "; ".join(each.errors),
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def table(self) -> Table:
        """The same in words; differences are those of the metric, whichever way is better."""
        columns = ["method", "setting", self.metric, "95 % interval", "worst client", f"beside {self.method}", "sent"]
        rows = []
        for row in self.results.to_dict("records"):
            gap, low, high = row["better_by"], row["better_by_low"], row["better_by_high"]
            if self.less_is_better:
                gap, low, high = -gap, -high, -low
            rows.append(
                [
                    f"{row['method']} (has all data)" if row["method"] == CEILING else row["method"],
                    row["setting"] or "–",
                    number(row[self.metric]),
                    f"{number(row['low'])} to {number(row['high'])}" if math.isfinite(row["low"]) else "–",
                    number(row["worst_client"]),
                    signed(gap) + (f" ({signed(low)} to {signed(high)})" if math.isfinite(low) else ""),
                    size(row["bytes"]) if math.isfinite(row["bytes"]) else "–",
                    duration(row["seconds"]) if math.isfinite(row["seconds"]) else "–",
                    "yes" if row["still_rising"] else "",
                ]
            )
        return Table(title="Finalists", columns=[*columns, "time", "still rising"], rows=rows)

    @property
    def lines(self) -> list[str]:
        """Which methods did not take part, or did not go on with any setting, and when."""
        left_out = [f"{name} is left out: {why}" for name, why in self.found.left_out.items()]
        last = {each.arm.method: each for each in self.found.dropped if each.arm.method not in self.found.finalists}
        others = len(self.found.dropped) - len(last)
        more = [f"{count(others, 'other setting')} of these and of the finalists: see the page"] if others else []
        return [*left_out, *map(str, last.values()), *more]

    def __str__(self) -> str:
        shown = columns_of(self.table, shutil.get_terminal_size(fallback=(120, 24)).columns)
        dropped = [f"  {line}" for line in self.lines]
        return "\n".join(
            [
                self.sentence,
                *self.notes,
                "",
                *shown,
                "",
                *(["What was dropped:", *dropped, ""] if dropped else []),
                f"{self.config} trains {self.method}: {self.command} --config {self.config}",
                f"{self.page} shows it.",
            ]
        )
