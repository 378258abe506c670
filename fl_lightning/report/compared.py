"""What runs say side by side: what differs in their settings, and paired differences over seeds and clients.

Runs that differ in nothing but seeds, names and folders are of one configuration. A difference is paired where two
configurations have runs of the same seed on the same partition.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fl_lightning.counts import count
from fl_lightning.report.configurations import UNSET, configuration_of, grouped, partition_of, seed_of, total_of
from fl_lightning.report.folder import Recorded
from fl_lightning.report.gaps import client_gaps, columns_of, gap, summary
from fl_lightning.report.wording import listed
from fl_lightning.run.curve import AT_EDGE, SIGNS, STILL_RISING, in_words

#: Fewer pairs have no p-value below 0.05.
_FEWEST_FOR_RANKS = 6
#: How a run that did not finish ended, before its number of rounds.
_ENDS = {"interrupted": "interrupted after", "failed": "failed after", "unknown": "killed or still running, at"}
_MOST_NAMED = 10
#: Marks that runs have by themselves, without a study.
_MARKS = [name for name in SIGNS if name != AT_EDGE]


class Compared:
    """Runs side by side.

    Args:
        runs: The runs.
        reference: The label of the configuration that the others are compared with; None for the first.

    Attributes:
        runs: The runs.
        metric: The test metric that all of them report.
        labels: Names of the configurations, in the order of their first runs.
        reference: The one that the others are compared with.
        notes: What could not be compared, and why.

    Raises:
        ValueError: The runs report different metrics, or the configuration does not exist.
    """

    def __init__(self, runs: Sequence[Recorded], *, reference: str | None = None) -> None:
        metrics = list(dict.fromkeys(run.test_metric for run in runs))
        if len(metrics) > 1:
            raise ValueError(f"the runs report {' and '.join(metrics)}: compare runs of one metric")
        self.recorded = list(runs)
        self.metric = metrics[0]
        self.less_is_better = runs[0].less_is_better
        self.notes: list[str] = []
        self._group_of, self.labels = grouped(self.recorded)
        if reference is not None and reference not in self.labels:
            raise ValueError(f"there is no configuration {reference!r} among {', '.join(map(repr, self.labels))}")
        self.reference = reference or self.labels[0]

    def members(self, label: str) -> list[Recorded]:
        """The runs of a configuration."""
        return [run for run, local in zip(self.recorded, self._group_of, strict=True) if local == label]

    # ------------------------------------------------------------------ tables

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each run: its metrics at the best round, bytes and seconds of all rounds."""
        rows = []
        for run, label in zip(self.recorded, self._group_of, strict=True):
            metrics = run.figures
            rows.append(
                {
                    "run": run.name,
                    "configuration": label,
                    "seed": seed_of(run),
                    "status": run.status,
                    "rounds": len(run.rounds),
                    "best_round": run.best_round,
                    run.monitor: metrics.get(run.monitor, math.nan),
                    self.metric: metrics.get(self.metric, math.nan),
                    f"{self.metric}_std": metrics.get(f"{self.metric}_std", math.nan),
                    f"{self.metric}_worst": metrics.get(f"{self.metric}_worst", math.nan),
                    "bytes": total_of(run, "comm/bytes_total", last=True),
                    "seconds": total_of(run, "seconds", last=False),
                    "marks": in_words(run.marks),
                    "folder": str(run.path),
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def configurations(self) -> pd.DataFrame:
        """A row for each configuration: means over its runs, and the standard deviation of the metric over them."""
        rows = []
        for label in self.labels:
            mine = self.runs[self.runs["configuration"] == label]
            rows.append(
                {
                    "configuration": label,
                    "runs": len(mine),
                    **{name: sum(name in run.marks for run in self.members(label)) for name in _MARKS},
                    self.metric: mine[self.metric].mean(),
                    "std_over_runs": mine[self.metric].std(ddof=1),
                    "std_over_clients": mine[f"{self.metric}_std"].mean(),
                    "worst_client": mine[f"{self.metric}_worst"].mean(),
                    "bytes": mine["bytes"].mean(),
                    "seconds": mine["seconds"].mean(),
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def settings(self) -> pd.DataFrame:
        """The settings that differ: a row for each, a column for each configuration; those that all have come first."""
        firsts = {label: configuration_of(self.members(label)[0]) for label in self.labels}
        names = dict.fromkeys(name for settings in firsts.values() for name in settings)
        rows = {
            name: [settings.get(name, UNSET) for settings in firsts.values()]
            for name in names
            if len({str(settings.get(name, UNSET)) for settings in firsts.values()}) > 1
        }
        order = sorted(rows, key=lambda name: rows[name].count(UNSET) > 0)
        rows = {name: rows[name] for name in order}
        return pd.DataFrame.from_dict(rows, orient="index", columns=self.labels, dtype=object).rename_axis("setting")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round of each run: the metrics, bytes and seconds since the beginning."""
        parts = []
        for run, label in zip(self.recorded, self._group_of, strict=True):
            nothing = np.full(len(run.rounds), math.nan)
            seconds = run.column("seconds")
            columns = {
                "run": run.name,
                "configuration": label,
                "seed": seed_of(run),
                "round": run.rounds,
                run.monitor: run.history.get(run.monitor, nothing),
                self.metric: run.history.get(self.metric, nothing),
                "bytes": run.history.get("comm/bytes_total", nothing),
                "seconds": nothing if seconds is None else np.nancumsum(seconds),
            }
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row for each client of each run: its value of the metric at the best round."""
        rows = [
            {"run": run.name, "configuration": label, "seed": seed_of(run), "client": client, self.metric: value}
            for run, label in zip(self.recorded, self._group_of, strict=True)
            for client, value in run.reported_values.items()
        ]
        return pd.DataFrame(rows, columns=["run", "configuration", "seed", "client", self.metric])

    @cached_property
    def over_seeds(self) -> pd.DataFrame:
        """Each configuration minus the reference, paired over seeds: mean, its 95 % interval (Student's t), wins.

        Pairs in which a run was still rising are in the mean, and counted as neither better nor worse.
        """
        rows = []
        for label in self.others:
            pairs = self.pairs(label)
            values = [[run.figures.get(self.metric, math.nan) for run in pair] for pair in pairs]
            gaps = np.array([gap(*each) for each in values])
            ended = np.array([all(STILL_RISING not in run.marks for run in pair) for pair in pairs], dtype=bool)
            whole, finished = (
                summary(part, "seeds", less_is_better=self.less_is_better) for part in (gaps, gaps[ended])
            )
            wins = {name: finished[name] for name in ("better", "worse")}
            unfinished = int((~ended).sum())
            rows.append({"configuration": label, **whole, **wins, "unfinished": unfinished})
            if unfinished:
                both, has = f"{label} and {self.reference}", "has" if unfinished == 1 else "have"
                several = f"Of {count(len(pairs), 'pair')} of {both} {unfinished} {has}"
                subject = several if len(pairs) > 1 else f"The only pair of {both} has"
                self._note(f"{subject} a run that was still rising: more rounds may change the difference.")
        return pd.DataFrame(rows, columns=["configuration", *columns_of("seeds"), "unfinished"])

    @cached_property
    def over_clients(self) -> pd.DataFrame:
        """Each configuration minus the reference, paired over the clients of all paired seeds.

        The p-value is of Wilcoxon's signed-rank test. Clients of one federation are not independent of each other: the
        interval and the p-value describe these clients and say nothing of other seeds.
        """
        rows = []
        for label in self.others:
            gaps = np.array([each for a, b in self.pairs(label) for each in client_gaps(a, b)])
            described = summary(gaps, "clients", less_is_better=self.less_is_better)
            differing = gaps[np.abs(gaps) > 0]
            p_value = float(stats.wilcoxon(differing).pvalue) if len(differing) >= _FEWEST_FOR_RANKS else math.nan
            rows.append({"configuration": label, **described, "p_value": p_value})
        return pd.DataFrame(rows, columns=["configuration", *columns_of("clients"), "p_value"])

    @property
    def others(self) -> list[str]:
        """The configurations but the reference."""
        return [label for label in self.labels if label != self.reference]

    def pairs(self, label: str) -> list[tuple[Recorded, Recorded]]:
        """Runs of a configuration and of the reference with one seed and one partition."""
        mine, theirs = self._by_seed(label), self._by_seed(self.reference)
        pairs = []
        for seed, run in mine.items():
            if seed not in theirs:
                continue
            first, second = (partition_of(each) for each in (run, theirs[seed]))
            if first and second and first != second:
                self._note(
                    f"{label} and {self.reference} are not paired at seed {seed}: their partitions differ "
                    "(data.seed, or other settings of the data)."
                )
            else:
                pairs.append((run, theirs[seed]))
        if not pairs:
            self._note(f"{label} and {self.reference} have no seed in common on one partition, so nothing is paired.")
        return pairs

    def _by_seed(self, label: str) -> dict[Any, Recorded]:
        result: dict[Any, Recorded] = {}
        for run in self.members(label):
            if seed_of(run) in result:
                self._note(f"{label} has several runs of seed {seed_of(run)}: the last one is paired.")
            result[seed_of(run)] = run
        return result

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def unended(self) -> str:
        """Which runs did not come to their last round, in words; empty for none."""
        left = [run for run in self.recorded if run.status != "finished"]
        ends = [f"{run.name} ({_ENDS.get(run.status, run.status)} {count(len(run.rounds), 'round')})" for run in left]
        named = ", ".join([*ends[:_MOST_NAMED], *(["..."] if len(ends) > _MOST_NAMED else [])])
        return f"Not finished, with the metrics of the rounds that there are: {named}." if ends else ""

    @cached_property
    def verdict(self) -> str:
        """What the comparison decides, in words: over seeds, and nothing where there is only one."""
        if not self.others:
            return "There is one configuration, so there is nothing to compare."
        if self.runs[self.metric].isna().all():
            return (
                f"No run has a value of {self.metric}, as where there are no test examples, so this comparison decides "
                "nothing."
            )
        gaps = self.over_seeds.set_index("configuration")
        most = int(gaps["seeds"].max())
        if most < 2:
            return (
                f"{'No seed is' if most == 0 else 'Only one seed is'} common to these configurations on one partition, "
                "so this comparison decides nothing: train each with several seeds (seed_everything; "
                "data.seed draws the partition)."
            )
        sign = -1 if self.less_is_better else 1
        better = [label for label in self.others if min(sign * gaps.loc[label, ["low", "high"]]) > 0]
        worse = [label for label in self.others if max(sign * gaps.loc[label, ["low", "high"]]) < 0]
        apart = [label for label in self.others if gaps.loc[label, "seeds"] < 2]
        level = [label for label in self.others if label not in (*better, *worse, *apart)]
        few_pairs = f"{self.metric} of fewer than two common seeds on one partition"
        parts = [
            f"{listed(labels)} {words if len(labels) == 1 else words.replace('is ', 'are ', 1)}"
            for labels, words in (
                (better, f"is better than {self.reference}"),
                (worse, f"is worse than {self.reference}"),
                (level, f"is not distinguishable from {self.reference}"),
                (apart, f"cannot be compared with {self.reference} ({few_pairs})"),
            )
            if labels
        ]
        few = " Few seeds leave wide intervals." if most < _FEWEST_FOR_RANKS else ""
        rising = " Runs that were still rising may change this." if gaps["unfinished"].any() else ""
        return f"Over {count(most, 'seed')}, by 95 % intervals of paired differences: {'; '.join(parts)}.{few}{rising}"
