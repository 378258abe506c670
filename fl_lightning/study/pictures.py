"""The pictures of a study: lines over its cases, curves over rounds or bytes, average ranks."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fl_lightning.files import whole_file
from fl_lightning.report.gaps import half_width
from fl_lightning.report.theme import COLORS, NUM_SERIES, dash, orders
from fl_lightning.study.column import scale_in, unit_of
from fl_lightning.study.progress import Progress
from fl_lightning.study.schema import Picture
from fl_lightning.study.statistics import average_ranks, case_means, nemenyi
from fl_lightning.study.table import by_round

_WIDTH, _HEIGHT = 4.6, 3.8
#: Width of a legend for which there is room beside the panels, in inches; a wider one widens the picture.
_LEGEND = 1.3
#: Least space between the labels of two ticks, in pixels.
_GAP = 3
_MARKERS = "os^Dv<>Pp*Xh"


def draw(progress: Progress, table: pd.DataFrame, folder: Path) -> list[str]:
    """Draw every picture of the study that has data; returns the names of the files."""
    kinds: Mapping[str, Callable[[Progress, pd.DataFrame, Picture], Figure | None]] = {
        "lines": _lines,
        "curves": _curves,
        "ranks": _ranks,
    }
    drawn = []
    for name, picture in progress.study.pictures.items():
        with matplotlib.rc_context({"text.parse_math": False}):  # names are names, with a $ in them too
            figure = kinds[picture.kind](progress, table, picture)
            if figure is not None:
                with whole_file(folder / f"{name}.png") as temporary:
                    figure.savefig(temporary, dpi=130)
                drawn.append(f"{name}.png")
    return drawn


def _lines(progress: Progress, table: pd.DataFrame, picture: Picture) -> Figure | None:
    """A metric, or its change, against the cases' ``x``: mean and spread over seeds, in panels."""
    if picture.metric not in table:
        return None
    study = progress.study
    run = set(table[table[picture.metric].notna()]["case"])
    placed = {name: case for name, case in study.cases.items() if case.x is not None and name in run}
    panels = list(dict.fromkeys(case.panel for case in placed.values()))
    if not panels:
        return None
    one_unit = table[table["case"].isin(list(placed))]["metric"].dropna().nunique() == 1
    figure, all_axes = _panels(len(panels), share_y=one_unit)
    label, y_labels = picture.y_label or picture.metric, []
    for axes, panel in zip(all_axes, panels, strict=True):
        cases = {name: case.x for name, case in study.cases.items() if case.panel == panel and case.x is not None}
        for index, method in zip(orders(list(study.methods)), study.methods, strict=True):
            rows = table[(table["method"] == method) & table["case"].isin(list(cases)) & table[picture.metric].notna()]
            if not len(rows):
                continue
            scale, unit = _unit(rows, picture.metric)
            by_seed = scale * rows.assign(x=rows["case"].map(cases)).pivot_table(picture.metric, "seed", "x")
            if picture.change:
                unit, first = unit.replace("%", "points"), min(cases.values())
                if by_seed.shape[1] == 1 or first not in by_seed:
                    continue
                by_seed = by_seed.sub(by_seed[first], axis=0)
            mean, spread = by_seed.mean(), by_seed.std().fillna(0.0)
            if len(mean) == 1:  # what the axis does not touch
                axes.axhline(float(mean.iloc[0]), linestyle="--", color=_color(index), label=method)
                continue
            style: dict[str, Any] = {"linewidth": 1.3, "label": method, "color": _color(index)}
            if picture.band:
                half = by_seed.apply(lambda column: half_width(column.dropna().to_numpy())).fillna(0.0)
                axes.fill_between(mean.index, mean - half, mean + half, color=_color(index), alpha=0.1, linewidth=0)
                [line] = axes.plot(mean.index, mean, **style)
            else:
                line = axes.errorbar(mean.index, mean, spread, capsize=2, **style).lines[0]
            line.set(marker=_MARKERS[index % len(_MARKERS)], markersize=4, ls=dash(index))
        _dress(axes, panel, picture, ticks=sorted(set(cases.values())))
        y_labels.append(f"{label}{unit}")
    return _without_overlap(_finish(figure, all_axes, y_labels[:1] if one_unit else y_labels), all_axes)


def _curves(progress: Progress, table: pd.DataFrame, picture: Picture) -> Figure | None:
    """A metric of every round against the rounds or another metric, mean over seeds, a panel for each case."""
    study, history = progress.study, progress.store.history()
    pairs = {
        (case, method): result
        for case in study.cases
        for method in study.methods
        if (result := by_round(progress, history, method, case, (picture.x, picture.metric))) is not None
    }
    shown = list(dict.fromkeys(case for case, _ in pairs))
    if not shown:
        return None
    figure, all_axes = _panels(len(shown), share_y=False)
    unit = ""
    for axes, case in zip(all_axes, shown, strict=True):
        for index, method in zip(orders(list(study.methods)), study.methods, strict=True):
            if (case, method) not in pairs:
                continue
            x, y = pairs[case, method]
            rows = table[(table["method"] == method) & (table["case"] == case)]
            is_score = picture.metric.rpartition("/")[2] in set(rows["metric"])
            scale, unit = _unit(rows) if is_score else (1.0, "")
            if picture.x != "round" and not x.any():
                axes.axhline(scale * y[-1], linestyle="--", color=_color(index), label=method)
            else:
                axes.plot(
                    picture.x_scale * x, scale * y, color=_color(index), ls=dash(index), linewidth=1.3, label=method
                )
        _dress(axes, case, picture)
    return _finish(figure, all_axes, [f"{picture.y_label or picture.metric}{unit}"])


def _ranks(progress: Progress, table: pd.DataFrame, picture: Picture) -> Figure | None:
    """Average ranks over the cases common to all methods; those that Nemenyi's test cannot distinguish share a bar."""
    import scikit_posthocs

    means = case_means(table[~table["method"].isin(progress.ceilings)], picture.metric)
    if min(means.shape) < 3:
        return None
    figure = Figure(figsize=(9, 1.6 + 0.24 * means.shape[1]), layout="constrained")
    axes = figure.subplots()
    drawn = scikit_posthocs.critical_difference_diagram(
        average_ranks(means),
        nemenyi(means),
        ax=axes,
        label_fmt_left="{label} ({rank:.1f}) ",
        label_fmt_right=" ({rank:.1f}) {label}",
    )
    for (bar,) in drawn["crossbars"]:  # whose points are a set: the file would differ from one drawing to the next
        bar.set_xdata(sorted(bar.get_xdata()))
    axes.set_title(f"average rank over {len(means)} cases", loc="left", fontsize="medium")
    return figure


# ---------------------------------------------------------------- how they look


def _panels(count: int, *, share_y: bool) -> tuple[Figure, list[Axes]]:
    columns = min(max(count, 1), 3)
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    all_axes = list(grid.flat)
    for spare in all_axes[count:]:
        spare.set_visible(False)
    return figure, all_axes[:count]


def _dress(axes: Axes, title: str, picture: Picture, ticks: list[float] | None = None) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel(picture.x_label or picture.x)
    if picture.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())  # both are else written as math, which is not parsed here
    if ticks:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def _finish(figure: Figure, all_axes: list[Axes], y_labels: list[str]) -> Figure:
    entries: dict[str, Artist] = {}
    for axes in all_axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
    for axes, y_label in zip(all_axes, y_labels, strict=False):
        axes.set_ylabel(y_label)
    legend = figure.legend(
        list(entries.values()), list(entries), loc="outside right upper", frameon=False, fontsize="small"
    )
    width = figure.get_figwidth()
    figure.set_figwidth(10 * width)  # until it is drawn, it is not known how wide the legend is
    figure.draw_without_rendering()
    figure.set_figwidth(width + max(legend.get_window_extent().width / figure.dpi - _LEGEND, 0.0))
    return figure


def _without_overlap(figure: Figure, all_axes: list[Axes]) -> Figure:
    """Leave out the labels of ticks that would run into the one to their left."""
    figure.draw_without_rendering()  # only then it is known where they come to be
    for axes in all_axes:
        end = -math.inf
        for label in axes.get_xticklabels():
            box = label.get_window_extent()
            if box.x0 < end + _GAP:
                label.set_visible(False)
            else:
                end = box.x1
    return figure


def _unit(rows: pd.DataFrame, metric: str = "test") -> tuple[float, str]:
    return scale_in(rows, metric), f", {unit_of(rows, metric).replace('in percent', '%')}"


def _color(index: int) -> str:
    """The color that the method has on the pages of runs, too."""
    return COLORS[f"series-{index % NUM_SERIES}"][0]
