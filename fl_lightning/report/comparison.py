"""Runs side by side: what differs in their settings, how they learn, and paired differences over seeds and clients.

Runs that differ in nothing but seeds, names and folders are of one configuration. A difference is paired where two
configurations have runs of the same seed on the same partition.
"""

import html
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group
from rich.table import Table as RichTable
from scipy import stats

from fl_lightning.report.comparison_tables import gaps_table, rich_table, settings_table, summary_table
from fl_lightning.report.configurations import UNSET, configuration_of, grouped, partition_of, seed_of, total_of
from fl_lightning.report.document import Document, Section
from fl_lightning.report.figures import Curve, Picture, Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import Album
from fl_lightning.report.references import levels
from fl_lightning.report.wording import count, number, size_unit

#: Fewer pairs have no p-value below 0.05.
_FEWEST_FOR_RANKS = 6
_TIE = 1e-9


class Comparison:
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
            for client, value in run.client_values(run.client_metric).items()
        ]
        return pd.DataFrame(rows, columns=["run", "configuration", "seed", "client", self.metric])

    @cached_property
    def over_seeds(self) -> pd.DataFrame:
        """Each configuration minus the reference, paired over seeds: mean, its 95 % interval (Student's t), wins."""
        rows = []
        for label in self._others:
            pairs = self._pairs(label)
            gaps = np.array(
                [a.figures.get(self.metric, math.nan) - b.figures.get(self.metric, math.nan) for a, b in pairs]
            )
            rows.append({"configuration": label, **self._summary(gaps, "seeds")})
        return pd.DataFrame(rows, columns=["configuration", *_columns("seeds")])

    @cached_property
    def over_clients(self) -> pd.DataFrame:
        """Each configuration minus the reference, paired over the clients of all paired seeds.

        The p-value is of Wilcoxon's signed-rank test. Clients of one federation are not independent of each other: the
        interval and the p-value describe these clients and say nothing of other seeds.
        """
        rows = []
        for label in self._others:
            gaps = np.array([gap for a, b in self._pairs(label) for gap in _client_gaps(a, b)])
            summary = self._summary(gaps, "clients")
            differing = gaps[np.abs(gaps) > _TIE]
            p_value = float(stats.wilcoxon(differing).pvalue) if len(differing) >= _FEWEST_FOR_RANKS else math.nan
            rows.append({"configuration": label, **summary, "p_value": p_value})
        return pd.DataFrame(rows, columns=["configuration", *_columns("clients"), "p_value"])

    @property
    def _others(self) -> list[str]:
        return [label for label in self.labels if label != self.reference]

    def _pairs(self, label: str) -> list[tuple[Recorded, Recorded]]:
        """Runs of a configuration and of the reference with one seed and one partition."""
        mine, theirs = self._by_seed(label), self._by_seed(self.reference)
        pairs = []
        for seed, run in mine.items():
            if seed not in theirs:
                continue
            first, second = (partition_of(each) for each in (run, theirs[seed]))
            if first and second and first != second:
                self._note(f"{label} and {self.reference} are not paired at seed {seed}: their partitions differ.")
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

    def _summary(self, gaps: np.ndarray[Any, Any], what: str) -> dict[str, float]:
        gaps = gaps[np.isfinite(gaps)]
        total = len(gaps)
        mean = float(gaps.mean()) if total else math.nan
        spread = float(gaps.std(ddof=1)) if total > 1 else math.nan
        half = float(stats.t.ppf(0.975, total - 1)) * spread / math.sqrt(total) if total > 1 else math.nan
        sign = -1 if self.less_is_better else 1
        better, worse = int((sign * gaps > _TIE).sum()), int((sign * gaps < -_TIE).sum())
        return dict(zip(_columns(what), (total, mean, spread, mean - half, mean + half, better, worse), strict=True))

    # ------------------------------------------------------------------ to look at

    def __rich__(self) -> Group:
        """Tables for a terminal."""
        tables: list[RichTable | str] = [
            rich_table(
                f"{count(len(self.recorded), 'run')}, {self.metric} at the best round",
                summary_table(self.configurations, self.metric),
            ),
            *(
                [rich_table("Settings that differ", settings_table(self.settings, self.labels, shared=True))]
                if len(self.settings)
                else []
            ),
        ]
        if lone := sum((self.settings == UNSET).any(axis=1)):
            tables.append(
                f"(and {count(int(lone), 'setting')} that not every configuration has: they are on the page)\n"
            )
        if self._others:
            paired = gaps_table(self.over_seeds)
            tables.append(rich_table(f"Differences from {self.reference}, paired over seeds", paired))
            if len(self.clients):
                paired = gaps_table(self.over_clients)
                tables.append(rich_table(f"Differences from {self.reference}, paired over clients", paired))
        return Group(*tables, *self.notes)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        page = html.escape(self.document().html(), quote=True)
        return f'<iframe title="Comparison of runs" srcdoc="{page}" style="width:100%;height:45rem;border:0"></iframe>'

    def write(self, path: str | Path) -> Path:
        """Write the page.

        Raises:
            CannotWrite: The disk is full, the folder read-only, ...
        """
        return self.document().write(Path(path))

    def document(self) -> Document:
        """The page."""
        album = Album()
        differences = self._differences(album)
        return Document(
            title=f"{count(len(self.recorded), 'run')} compared",
            subtitle=f"{self.metric} of {count(len(self.labels), 'configuration')}; "
            f"{'less' if self.less_is_better else 'more'} is better",
            sections=[self._overview(), self._curves(album), differences, self._clients(album), self._all_runs()],
            footer=[f"Folders: {', '.join(str(run.path) for run in self.recorded[:50])}"],
        )

    def _overview(self) -> Section:
        empty = "" if len(self.settings) else "The runs have the same settings, but for seeds, names and folders."
        tables = [
            summary_table(self.configurations, self.metric),
            *([settings_table(self.settings, self.labels)] if len(self.settings) else []),
        ]
        text = f"{self.metric} at the round that validation chose: means over the runs of a configuration."
        return Section(anchor="overview", title="Overview", text=text, tables=tables, empty=empty)

    def _curves(self, album: Album) -> Section:
        validation = self.recorded[0].monitor
        pictures = []
        for metric in dict.fromkeys((self.metric, validation)):
            drawn = self._over(album, metric, "round", "round", 1.0)
            pictures += [drawn] if drawn else []
        largest = self.rounds["bytes"].max()
        factor, unit = size_unit(largest if math.isfinite(largest) else 0)
        for what, label, scale in (("bytes", f"sent, {unit}", factor), ("seconds", "seconds of training", 1.0)):
            drawn = self._over(album, self.metric, what, label, scale)
            pictures += [drawn] if drawn else []
        several = any(len(self.members(label)) > 1 for label in self.labels)
        text = (
            "Lines are means over the runs of a configuration, bands reach from the least to the largest."
            if several
            else ""
        )
        empty = "" if pictures else "No round of these runs was logged."
        return Section(anchor="curves", title="Learning", text=text, pictures=pictures, empty=empty)

    def _over(self, album: Album, metric: str, what: str, label: str, factor: float) -> Picture | None:
        curves = []
        for index, name in enumerate(self.labels):
            mine = self.rounds[self.rounds["configuration"] == name]
            if metric not in mine or mine[metric].isna().all() or mine[what].isna().all():
                continue
            by_round = mine.groupby("round")
            x, y = (by_round["round"].first() if what == "round" else by_round[what].mean()) / factor, by_round[metric]
            alone = len(self.members(name)) == 1
            curves.append(
                Curve(
                    label=name,
                    x=x.to_numpy(dtype=float),
                    y=y.mean().to_numpy(dtype=float),
                    low=None if alone else y.min().to_numpy(dtype=float),
                    high=None if alone else y.max().to_numpy(dtype=float),
                    order=index,
                )
            )
        title = {"round": "Over rounds", "bytes": "Over bytes", "seconds": "Over seconds"}[what]
        curves += levels(self.recorded, metric, curves, " (reference)", first=len(self.labels))
        return album.curves(curves, title=title, x_label=label, y_label=metric) if curves else None

    def _differences(self, album: Album) -> Section:
        anchor, title = "differences", f"Differences from {self.reference}"
        if not self._others:
            return Section(
                anchor=anchor, title="Differences", empty="There is one configuration, so nothing to compare."
            )
        pictures, tables = [], []
        for gaps, what in ((self.over_seeds, "seeds"), (self.over_clients, "clients")):
            if not len(gaps) or not gaps[what].sum():
                continue
            known = gaps[gaps[what] > 0]
            tables.append(gaps_table(gaps))
            columns = (known[name].to_numpy(dtype=float) for name in ("mean", "low", "high"))
            names = [str(name) for name in known["configuration"]]
            heading = f"Paired over {what}"
            pictures.append(album.intervals(names, *columns, title=heading, x_label=f"difference of {self.metric}"))
        better = "negative" if self.less_is_better else "positive"
        text = f"A {better} difference is better than {self.reference}. Intervals cover 95 % (Student's t)."
        notes = [
            *self.notes,
            "Clients of one federation are not independent: their interval says nothing about other seeds.",
        ]
        empty = "" if tables else "No seed and partition is common to two configurations."
        return Section(
            anchor=anchor, title=title, text=text, pictures=pictures, tables=tables, notes=notes, empty=empty
        )

    def _clients(self, album: Album) -> Section:
        pictures = []
        for label in self._others[:6]:
            pairs = self._pairs(label)
            if not pairs:
                continue
            local, theirs = (each.client_values(each.client_metric) for each in pairs[0])
            names = sorted(set(local) & set(theirs), key=lambda name: local[name] - theirs[name])
            if names:
                pictures.append(
                    album.bars(
                        names,
                        np.array([local[name] for name in names]),
                        title=f"{label} and {self.reference}, seed {seed_of(pairs[0][0])}",
                        x_label=self.metric,
                        other=np.array([theirs[name] for name in names]),
                        labels=(label, self.reference),
                    )
                )
        empty = "" if pictures else "No two configurations have scores of the same clients (report.json)."
        return Section(anchor="clients", title="Clients", pictures=pictures, empty=empty)

    def _all_runs(self) -> Section:
        shown = self.runs.drop(columns=["folder"])
        rows = [[_cell(value) for value in row] for row in shown.itertuples(index=False)]
        table = Table(title="Table of the runs", columns=list(shown.columns), rows=rows)
        return Section(anchor="runs", title="Runs", folded=[table])


def _client_gaps(first: Recorded, second: Recorded) -> list[float]:
    local, other = first.client_values(first.client_metric), second.client_values(second.client_metric)
    return [local[name] - other[name] for name in local if name in other]


def _columns(what: str) -> list[str]:
    return [what, "mean", "std", "low", "high", "better", "worse"]


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)
