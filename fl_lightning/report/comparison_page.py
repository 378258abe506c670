"""The page of a comparison: what differs, what came of it, paired differences, curves, clients, all runs."""

import math

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.compared import Compared
from fl_lightning.report.comparison_tables import cell, gaps_table, settings_table, summary_table
from fl_lightning.report.configurations import UNSET, seed_of
from fl_lightning.report.document import Document, Section
from fl_lightning.report.figures import Curve, Picture, Table
from fl_lightning.report.pictures import Album
from fl_lightning.report.references import levels
from fl_lightning.report.theme import orders
from fl_lightning.report.wording import size_unit

_MOST_PAIRS = 6


def document(comparison: Compared) -> Document:
    """The page."""
    album = Album()
    colors = dict(zip(comparison.labels, orders(comparison.labels), strict=True))
    sections = [
        _settings(comparison),
        _result(comparison),
        _differences(comparison, album, colors),
        _curves(comparison, album, colors),
        _clients(comparison, album, colors),
        _runs(comparison),
    ]
    return Document(
        title=f"{count(len(comparison.recorded), 'run')} compared",
        subtitle=f"{comparison.metric} of {count(len(comparison.labels), 'configuration')}; "
        f"{'less' if comparison.less_is_better else 'more'} is better",
        verdict=comparison.verdict,
        sections=sections,
        footer=[f"Folders: {', '.join(str(run.path) for run in comparison.recorded[:50])}"],
    )


def _settings(comparison: Compared) -> Section:
    """What differs: the settings that every configuration has, and folded those that not every one has."""
    table = settings_table(comparison.settings, comparison.labels)
    shared = [row for row in table.rows if UNSET not in row]
    lone = [row for row in table.rows if UNSET in row]
    title = f"{count(len(lone), 'setting')} that not every configuration has"
    return Section(
        anchor="settings",
        title="What differs",
        tables=[Table(columns=table.columns, rows=shared, title="Settings that differ")] if shared else [],
        folded=[Table(columns=table.columns, rows=lone, title=title)] if lone else [],
        empty="" if table.rows else "The runs have the same settings, but for seeds, names and folders.",
    )


def _result(comparison: Compared) -> Section:
    text = f"{comparison.metric} at the round that validation chose: means over the runs of a configuration."
    table = summary_table(comparison.configurations, comparison.metric)
    notes = [unended] if (unended := comparison.unended) else []
    return Section(anchor="result", title="Result", text=text, tables=[table], notes=notes)


def _differences(comparison: Compared, album: Album, colors: dict[str, int]) -> Section:
    anchor, title = "differences", f"Differences from {comparison.reference}"
    if not comparison.others:
        return Section(anchor=anchor, title="Differences", empty="There is one configuration, so nothing to compare.")
    pictures, tables = [], []
    for gaps, what in ((comparison.over_seeds, "seeds"), (comparison.over_clients, "clients")):
        if not len(gaps) or not gaps[what].sum():
            continue
        known = gaps[gaps[what] > 0]
        tables.append(gaps_table(gaps))
        columns = (known[name].to_numpy(dtype=float) for name in ("mean", "low", "high"))
        names = [str(name) for name in known["configuration"]]
        pictures.append(
            album.intervals(
                names,
                *columns,
                title=f"Paired over {what}",
                x_label=f"difference of {comparison.metric}",
                orders=[colors[name] for name in names],
            )
        )
    better = "negative" if comparison.less_is_better else "positive"
    text = f"A {better} difference is better than {comparison.reference}. Intervals cover 95 % (Student's t)."
    notes = [
        *comparison.notes,
        "Clients of one federation are not independent: their interval says nothing about other seeds.",
    ]
    empty = "" if tables else "No seed and partition is common to two configurations."
    return Section(anchor=anchor, title=title, text=text, pictures=pictures, tables=tables, notes=notes, empty=empty)


def _curves(comparison: Compared, album: Album, colors: dict[str, int]) -> Section:
    validation = comparison.recorded[0].monitor
    drawn = [
        _over(comparison, album, colors, metric, "round", "round", 1.0)
        for metric in dict.fromkeys((comparison.metric, validation))
    ]
    largest = comparison.rounds["bytes"].max()
    factor, unit = size_unit(largest if math.isfinite(largest) else 0)
    for what, label, scale in (("bytes", f"sent, {unit}", factor), ("seconds", "seconds of training", 1.0)):
        drawn.append(_over(comparison, album, colors, comparison.metric, what, label, scale))
    pictures = [picture for picture in drawn if picture]
    several = any(len(comparison.members(label)) > 1 for label in comparison.labels)
    text = "Lines are means over the runs of a configuration, bands reach from the least to the largest."
    empty = "" if pictures else "No round of these runs was logged."
    return Section(anchor="curves", title="Learning", text=text if several else "", pictures=pictures, empty=empty)


def _over(
    comparison: Compared, album: Album, colors: dict[str, int], metric: str, what: str, label: str, factor: float
) -> Picture | None:
    curves = []
    for name in comparison.labels:
        mine = comparison.rounds[comparison.rounds["configuration"] == name]
        if metric not in mine or mine[metric].isna().all() or mine[what].isna().all():
            continue
        by_round = mine.groupby("round")
        x, y = (by_round["round"].first() if what == "round" else by_round[what].mean()) / factor, by_round[metric]
        alone = len(comparison.members(name)) == 1
        curves.append(
            Curve(
                label=name,
                x=x.to_numpy(dtype=float),
                y=y.mean().to_numpy(dtype=float),
                low=None if alone else y.min().to_numpy(dtype=float),
                high=None if alone else y.max().to_numpy(dtype=float),
                order=colors[name],
            )
        )
    title = {"round": "Over rounds", "bytes": "Over bytes", "seconds": "Over seconds"}[what]
    curves += levels(comparison.recorded, metric, curves, " (reference)", beside=comparison.labels)
    return album.curves(curves, title=title, x_label=label, y_label=metric) if curves else None


def _clients(comparison: Compared, album: Album, colors: dict[str, int]) -> Section:
    pictures = []
    for label in comparison.others[:_MOST_PAIRS]:
        pairs = comparison.pairs(label)
        if not pairs:
            continue
        local, theirs = (each.reported_values for each in pairs[0])
        names = sorted(set(local) & set(theirs), key=lambda name: local[name] - theirs[name])
        if names:
            pictures.append(
                album.bars(
                    names,
                    np.array([local[name] for name in names]),
                    title=f"{label} and {comparison.reference}, seed {seed_of(pairs[0][0])}",
                    x_label=comparison.metric,
                    other=np.array([theirs[name] for name in names]),
                    labels=(label, comparison.reference),
                    orders=(colors[label], colors[comparison.reference]),
                )
            )
    text = "The clients of one seed, by how much they gain or lose." if pictures else ""
    empty = "" if pictures else "No two configurations have scores of the same clients (report.json)."
    return Section(anchor="clients", title="Clients", text=text, pictures=pictures, empty=empty)


def _runs(comparison: Compared) -> Section:
    shown = comparison.runs.drop(columns=["folder"])
    rows = [[cell(value) for value in row] for row in shown.itertuples(index=False)]
    return Section(
        anchor="runs", title="Runs", folded=[Table(title="Table of the runs", columns=list(shown.columns), rows=rows)]
    )
