"""Pictures of the pages: Matplotlib draws them, as SVG with text as text, in the page's colors.

Every picture is made for a column of some 300 to 480 pixels, so that it can be read on a phone, and comes with words
for those who do not see it. Shape legend: C clients, K classes, P points.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from fl_lightning.report.axes import (
    class_colors,
    draw_boxes,
    draw_dots,
    draw_rows,
    draw_scales,
    new_axes,
    node_places,
)
from fl_lightning.report.figures import Curve, Key, Picture, Table, Values
from fl_lightning.report.theme import as_css, dash, inline, series, stand_in
from fl_lightning.report.wording import number, short_names

#: A matrix of more rows is shown without its numbers.
MOST_RUNS = 20

_MOST_BARS = 60
_FILL = (47 / 255, 131 / 255, 197 / 255)  # between the schemes: its opacity is what a heat map shows
_UNKNOWN = (0.5, 0.5, 0.5, 0.25)
_MOST_OPAQUE = 0.7  # so that numbers can be read on it
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fl_lightning",
    "path.simplify": False,
    "font.size": 10,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": stand_in("ink"),
    "text.parse_math": False,  # names are names, with a $ in them too
    "lines.linewidth": 1.7,
}


@dataclass
class Album:
    """Makes the pictures of one page, whose ids differ.

    Attributes:
        count: Pictures so far.
    """

    count: int = field(default=0)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
            yield

    def _finish(self, figure: Figure, alt: str) -> str:
        self.count += 1
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # type: ignore[no-untyped-call]
        return inline(text.getvalue(), f"p{self.count}", escape(alt, quote=False))

    def curves(
        self,
        curves: Sequence[Curve],
        *,
        title: str,
        x_label: str,
        y_label: str,
        mark: tuple[float, str] | None = None,
        note: str = "",
        table: Table | None = None,
        from_zero: bool = False,
    ) -> Picture:
        """Lines over rounds, bytes or seconds.

        Args:
            curves: The lines.
            title: Of the picture.
            x_label: What is counted, with its unit.
            y_label: What is measured, with its unit.
            mark: A place to mark by an upright line, and what it is.
            note: A line beneath.
            table: Its numbers.
            from_zero: Whether the upright axis begins at zero.
        """
        keys, summary = [], []
        with self._drawing():
            figure, axes = new_axes(2.75)
            for order, curve in enumerate(curves):
                position = order if curve.order is None else curve.order
                known = np.isfinite(curve.y)
                if curve.low is not None and curve.high is not None:
                    axes.fill_between(
                        curve.x[known], curve.low[known], curve.high[known], color=series(position), alpha=0.15, lw=0
                    )
                lone = "o" if known.sum() == 1 else ""
                axes.plot(curve.x[known], curve.y[known], color=series(position), ls=dash(position), marker=lone, ms=4)
                keys.append(Key(label=curve.label, color=as_css(series(position)), dash=dash(position)))
                if known.any():
                    summary.append(f"{curve.label} from {number(curve.y[known][0])} to {number(curve.y[known][-1])}")
            if mark is not None:
                axes.axvline(mark[0], color=stand_in("faint"), lw=1, ls=(0, (3, 2)))
                keys.append(Key(label=mark[1], color=as_css(stand_in("faint")), dash="--"))
            axes.margins(x=0.02)
            if from_zero:
                axes.set_ylim(bottom=0)
            whole = all(np.array_equal(curve.x, np.round(curve.x)) for curve in curves)
            draw_scales(axes, x_label, whole_x=whole)
            alt = f"{title}: {y_label} over {x_label}; {'; '.join(summary) or 'nothing is known'}."
            svg = self._finish(figure, alt)
        full_title = f"{title}" if y_label in title else f"{title}: {y_label}"
        return Picture(title=full_title, svg=svg, note=note, keys=keys, table=table)

    def bars(
        self,
        names: Sequence[str],
        values: Values,
        *,
        title: str,
        x_label: str,
        note: str = "",
        other: Values | None = None,
        labels: tuple[str, str] = ("this run", "the other run"),
        marked: Sequence[str] = (),
        mark: str = "marked",
        table: Table | None = None,
    ) -> Picture:
        """A bar for each client, or where there is another run a dot for either.

        Args:
            names: Of the bars, (C,).
            values: Their lengths, (C,).
            title: Of the picture.
            x_label: What is measured, with its unit.
            note: A line beneath.
            other: Values of another run, (C,).
            labels: What ``values`` and ``other`` are.
            marked: Names whose bars have another color.
            mark: What those are.
            table: Its numbers.
        """
        keys = [Key(label=mark, color=as_css(series(1)))] if marked else []
        with self._drawing():
            few = len(names) <= _MOST_BARS
            figure, axes = new_axes(0.75 + (0.165 * len(names) if few else 2.2), left=0.05 + 0.02 * _longest(names))
            position = np.arange(len(names), dtype=np.float64)
            colors = [series(1) if name in marked else series(0) for name in names]
            if other is None:
                for color in dict.fromkeys(colors):
                    mine = np.array([each == color for each in colors])
                    length = np.nan_to_num(values[mine])
                    draw_boxes(axes, np.zeros(len(length)), length, position[mine], 0.62 if few else 1.0, color)
            else:
                axes.hlines(position, np.fmin(values, other), np.fmax(values, other), color=stand_in("line"), lw=2)
                axes.plot(other, position, "o", ms=5, mfc="none", mec=series(1), mew=1.4)
                axes.plot(values, position, "o", ms=5, color=series(0))
                keys = [Key(label=label, color=as_css(series(order))) for order, label in enumerate(labels)]
            draw_rows(axes, short_names(names) if few else [""] * len(names), x_label)
            known = np.isfinite(values)
            alt = f"{title}: {x_label} of {len(names)} clients"
            if known.any():
                alt += f", from {number(float(values[known].min()))} to {number(float(values[known].max()))}"
            svg = self._finish(figure, f"{alt}.")
        return Picture(title=title, svg=svg, note=note, keys=keys, table=table)

    def intervals(
        self,
        names: Sequence[str],
        middle: Values,
        low: Values,
        high: Values,
        *,
        title: str,
        x_label: str,
        note: str = "",
    ) -> Picture:
        """A dot and an interval for each row, relative to zero; unknown intervals are left out."""
        with self._drawing():
            figure, axes = new_axes(0.8 + 0.3 * len(names), left=0.05 + 0.017 * max(map(len, names)))
            position = np.arange(len(names), dtype=np.float64)
            axes.axvline(0, color=stand_in("faint"), lw=1)
            axes.hlines(position, np.where(np.isfinite(low), low, middle), np.where(np.isfinite(high), high, middle))
            axes.collections[0].set(color=series(0), lw=2.4)
            axes.plot(middle, position, "o", ms=6, color=series(0))
            draw_rows(axes, names, x_label)
            summary = "; ".join(
                f"{name} {number(m)}, {number(lo)} to {number(hi)}"
                for name, m, lo, hi in zip(names, middle, low, high, strict=True)
            )
            svg = self._finish(figure, f"{title}, {x_label}: {summary}.")
        return Picture(title=title, svg=svg, note=note)

    def stacked(
        self,
        names: Sequence[str],
        counts: Values,
        groups: Sequence[str],
        *,
        title: str,
        x_label: str,
        note: str = "",
        table: Table | None = None,
    ) -> Picture:
        """Bars of parts: classes of every client, (C, K)."""
        with self._drawing():
            few = len(names) <= _MOST_BARS
            figure, axes = new_axes(0.75 + (0.165 * len(names) if few else 2.6), left=0.05 + 0.02 * _longest(names))
            colors = class_colors(len(groups))
            left = np.cumsum(counts, axis=1) - counts
            position = np.arange(len(names), dtype=np.float64)
            for group, color in enumerate(colors):
                ends = left[:, group] + counts[:, group]
                draw_boxes(axes, left[:, group], ends, position, 0.78 if few else 1.0, color)
            draw_rows(axes, short_names(names) if few else [""] * len(names), x_label)
            largest = [groups[int(row.argmax())] for row in counts]
            alt = f"{title}: {x_label} of {len(names)} clients in {len(groups)} groups; the largest group of each is "
            svg = self._finish(figure, alt + ", ".join(largest[:12]) + (", ..." if len(largest) > 12 else "") + ".")
        keys = [Key(label=group, color=as_css(color)) for group, color in zip(groups, colors, strict=True)]
        return Picture(title=title, svg=svg, note=note, keys=keys if len(keys) <= 20 else [], table=table)

    def heat(
        self,
        matrix: Values,
        names: Sequence[str],
        *,
        title: str,
        x_label: str,
        y_label: str,
        limits: tuple[float, float],
        cells: Sequence[Sequence[str]] | None = None,
        note: str = "",
        table: Table | None = None,
    ) -> Picture:
        """A square matrix, the more opaque the larger.

        Args:
            matrix: Values, nan where there is none.
            names: Of rows and columns.
            title: Of the picture.
            x_label: What the columns are.
            y_label: What the rows are.
            limits: Values of the emptiest and of the fullest color.
            cells: Words for the cells.
            note: A line beneath.
            table: Its numbers.
        """
        low, high = limits
        with self._drawing():
            figure, axes = new_axes(4.1, left=0.095 + 0.018 * min(_longest(names), 9), bottom=0.12)
            share = np.clip((matrix - low) / max(high - low, 1e-12), 0, 1)
            image = np.empty((*matrix.shape, 4))
            image[..., :3] = _FILL
            image[..., 3] = np.nan_to_num(share) * (_MOST_OPAQUE if cells else 1.0)
            image[np.isnan(matrix)] = _UNKNOWN
            axes.imshow(image, interpolation="none", aspect="auto")
            step = max(1, -(-len(names) // 20))
            ticks = list(range(0, len(names), step))
            short = [name if len(name) < 10 else f"{name[:8]}…" for name in short_names(names)]
            axes.set_axis_off()
            turned = max(map(len, short), default=0) > 3
            faint: dict[str, Any] = {"color": stand_in("faint"), "fontsize": 8.5}
            for tick in ticks:
                axes.text(-0.7, tick, short[tick], ha="right", va="center", **faint)
                rotation = 90 if turned else 0
                axes.text(tick, len(names) - 0.4, short[tick], ha="center", va="top", rotation=rotation, **faint)
            axes.text(0.5, -0.1, x_label, ha="center", va="bottom", transform=axes.transAxes, **faint)
            figure.text(0.012, 0.55, y_label, ha="left", va="center", rotation=90, **faint)
            for row, column in np.ndindex(*matrix.shape) if cells else ():
                if cells and cells[row][column]:
                    size = 9 if len(names) <= 12 else 7
                    axes.text(column, row, cells[row][column], ha="center", va="center", fontsize=size)
            known = matrix[np.isfinite(matrix)]
            alt = f"{title}: a matrix of {len(names)} rows ({y_label}) and columns ({x_label})"
            alt += f", values from {number(float(known.min()))} to {number(float(known.max()))}." if len(known) else "."
            svg = self._finish(figure, alt)
        return Picture(title=title, svg=svg, note=note, table=table, scale=(number(low), number(high)))

    def points(
        self,
        x: Values,
        y: Values,
        group: Sequence[int],
        groups: Sequence[str],
        *,
        title: str,
        x_label: str,
        y_label: str,
        colors: Sequence[str] = (),
        names: Sequence[str] = (),
        diagonal: bool = False,
        note: str = "",
        table: Table | None = None,
        radius: float = 4.0,
    ) -> Picture:
        """A cloud of points.

        Args:
            x: First coordinate, (P,).
            y: Second coordinate, (P,).
            group: Index of each point's group, (P,).
            groups: Names of the groups; a single one has no legend.
            title: Of the picture.
            x_label: What the first coordinate is.
            y_label: What the second is.
            colors: Of the groups; the page's own if there are none.
            names: Words beside the points.
            diagonal: Whether to draw the line x = y.
            note: A line beneath.
            table: Its numbers.
            radius: Width of a point.
        """
        colors = colors or class_colors(len(groups))
        with self._drawing():
            figure, axes = new_axes(3.6, left=0.16)
            if diagonal:
                ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))]
                axes.plot(ends, ends, color=stand_in("faint"), lw=1, ls=(0, (3, 2)))
            member = np.array(group)
            for position, color in enumerate(colors):
                chosen = np.flatnonzero(member == position)
                if len(chosen):
                    draw_dots(axes, x[chosen], y[chosen], color, radius)
            if len(x):
                axes.update_datalim(np.stack([x, y], axis=1))
            axes.margins(0.06)
            axes.autoscale_view()
            for position, word in enumerate(names):
                axes.annotate(word, (x[position], y[position]), (5, 2), textcoords="offset points", fontsize=8.5)
            draw_scales(axes, x_label, y_label=y_label)
            alt = f"{title}: {len(x)} points in {len(groups)} groups, {y_label} over {x_label}."
            svg = self._finish(figure, alt)
        keys = [Key(label=name, color=as_css(color)) for name, color in zip(groups, colors, strict=True)]
        return Picture(title=title, svg=svg, note=note, keys=keys if 1 < len(keys) <= 20 else [], table=table)

    def network(
        self, adjacency: Values, names: Sequence[str], *, title: str, note: str = "", marked: Sequence[str] = ()
    ) -> Picture:
        """The graph of the clients; if there are many, they are drawn on a circle."""
        graph = nx.from_numpy_array(np.nan_to_num(adjacency) > 0)
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
        position = node_places(graph)
        with self._drawing():
            figure, axes = new_axes(3.6, left=0.02, bottom=0.02, right=0.98)
            ends = [(position[i], position[j]) for i, j in graph.edges]
            axes.add_collection(LineCollection(ends, colors=stand_in("line"), linewidths=1.1, zorder=1))
            few = len(names) <= 40
            width = 15.0 if few else 7.0
            for row, name in enumerate(names):
                color = series(1) if name in marked else series(0)
                draw_dots(axes, position[row : row + 1, 0], position[row : row + 1, 1], color, width)
            for row, name in enumerate(short_names(names)) if few else ():
                inside = _longest(names) <= 3
                shift = (0, 0) if inside else (0, 9)
                axes.annotate(
                    name,
                    position[row],
                    shift,
                    textcoords="offset points",
                    fontsize=7,
                    color=stand_in("card") if inside else stand_in("ink"),
                    ha="center",
                    va="center",
                )
            axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))
            axes.set_axis_off()
            degrees = [degree for _, degree in graph.degree] or [0]
            summary = (
                f"{len(names)} clients, {graph.number_of_edges()} edges, {min(degrees)} to {max(degrees)} neighbors"
            )
            svg = self._finish(figure, f"{title}: {summary}.")
        return Picture(title=title, svg=svg, note=note or summary)

    def shares(self, parts: Mapping[str, float], *, title: str, x_label: str, table: Table | None = None) -> Picture:
        """A bar for each part of a whole."""
        names, values = list(parts), np.array(list(parts.values()))
        with self._drawing():
            figure, axes = new_axes(0.7 + 0.24 * len(names), left=0.05 + 0.021 * max(map(len, names), default=0))
            draw_boxes(axes, np.zeros(len(names)), values, np.arange(len(names), dtype=np.float64), 0.6, series(0))
            draw_rows(axes, names, x_label)
            summary = ", ".join(f"{name} {number(value)}" for name, value in parts.items())
            svg = self._finish(figure, f"{title}, {x_label}: {summary}.")
        return Picture(title=title, svg=svg, table=table)


def _longest(names: Sequence[str]) -> int:
    return max(map(len, short_names(names)), default=0) if len(names) <= _MOST_BARS else 0
