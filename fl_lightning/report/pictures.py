"""Pictures of the pages: Matplotlib draws them, as SVG with text as text, in the page's colors.

Every picture is made for a column of some 300 to 480 pixels, so that it can be read on a phone, and comes with words
for those who do not see it. Shape legend: C clients, K classes, P points.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.axes import (
    class_colors,
    draw_boxes,
    draw_dots,
    draw_rows,
    draw_scales,
    new_axes,
)
from fl_lightning.report.drawing import MOST_BARS, fitting, in_lines, margin
from fl_lightning.report.figures import Curve, Key, Picture, Table, Values
from fl_lightning.report.graph_pictures import GraphPictures
from fl_lightning.report.matrix_pictures import MatrixPictures
from fl_lightning.report.theme import as_css, dash, series, stand_in
from fl_lightning.report.wording import number


class Album(MatrixPictures, GraphPictures):
    """The pictures of one page."""

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
                axes.axvline(mark[0], color=stand_in("ink"), lw=1, ls=(0, (3, 2)))
                keys.append(Key(label=mark[1], color=as_css(stand_in("ink")), dash="|"))
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
        orders: tuple[int, int] = (0, 1),
        marked: Sequence[str] = (),
        mark: str = "marked",
        height: float = 0.0,
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
            orders: Of their colors.
            marked: Names whose bars have another color.
            mark: What those are.
            height: At least so high, in inches, as the picture beside it is.
            table: Its numbers.
        """
        keys = [Key(label=mark, color=as_css(series(1)))] if marked else []
        with self._drawing():
            beside = fitting(names) if len(names) <= MOST_BARS else [""] * len(names)
            few = len(names) <= MOST_BARS
            figure, axes = new_axes(max(bars_height(len(names)), height), left=margin(beside))
            position = np.arange(len(names), dtype=np.float64)
            colors = [series(1) if name in marked else series(0) for name in names]
            if other is None:
                for color in dict.fromkeys(colors):
                    mine = np.array([each == color for each in colors])
                    length = np.nan_to_num(values[mine])
                    draw_boxes(axes, np.zeros(len(length)), length, position[mine], 0.62 if few else 1.0, color)
            else:
                axes.hlines(position, np.fmin(values, other), np.fmax(values, other), color=stand_in("line"), lw=2)
                axes.plot(other, position, "o", ms=5, mfc="none", mec=series(orders[1]), mew=1.4)
                axes.plot(values, position, "o", ms=5, color=series(orders[0]))
                keys = [
                    Key(label=name, color=as_css(series(order))) for order, name in zip(orders, labels, strict=True)
                ]
            if not np.nan_to_num(values).any():  # an axis around 0 would be of no metric's range
                axes.update_datalim([(0.0, 0.0), (1.0, 0.0)])
            draw_rows(axes, beside, x_label)
            known = np.isfinite(values)
            alt = f"{title}: {x_label} of {count(len(names), 'client')}"
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
        orders: Sequence[int] = (),
        note: str = "",
        height: float = 0.0,
    ) -> Picture:
        """A dot and an interval for each row, relative to zero; unknown intervals are left out.

        The picture has ``height`` inches, for names of clients; if that is 0 as many as its rows with whole names need.
        """
        colors = [series(order) for order in orders or [0] * len(names)]
        with self._drawing():
            if height:
                beside = fitting(names) if len(names) <= MOST_BARS else [""] * len(names)
                left = margin(beside)
            else:
                beside, height, left = in_lines(names)
            figure, axes = new_axes(height, left=left)
            position = np.arange(len(names), dtype=np.float64)
            axes.axvline(0, color=stand_in("faint"), lw=1)
            axes.hlines(position, np.where(np.isfinite(low), low, middle), np.where(np.isfinite(high), high, middle))
            axes.collections[0].set(color=colors, lw=2.4)
            axes.scatter(middle, position, s=36, color=colors, zorder=3)
            draw_rows(axes, beside, x_label)
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
        orders: Sequence[int] = (),
        note: str = "",
        table: Table | None = None,
    ) -> Picture:
        """Bars of parts, classes of every client (C, K), in the colors of ``orders`` or in those of classes."""
        with self._drawing():
            few = len(names) <= MOST_BARS
            beside = fitting(names) if few else [""] * len(names)
            figure, axes = new_axes(bars_height(len(names)), left=margin(beside))
            colors = [series(order) for order in orders] if orders else class_colors(len(groups))
            left = np.cumsum(counts, axis=1) - counts
            position = np.arange(len(names), dtype=np.float64)
            for group, color in enumerate(colors):
                ends = left[:, group] + counts[:, group]
                draw_boxes(axes, left[:, group], ends, position, 0.78 if few else 1.0, color)
            draw_rows(axes, beside, x_label)
            largest = [groups[int(row.argmax())] for row in counts]
            alt = f"{title}: {x_label} of {count(len(names), 'client')} in {count(len(groups), 'group')}; the largest "
            alt += "group of each is "
            svg = self._finish(figure, alt + ", ".join(largest[:12]) + (", ..." if len(largest) > 12 else "") + ".")
        keys = [Key(label=group, color=as_css(color)) for group, color in zip(groups, colors, strict=True)]
        return Picture(title=title, svg=svg, note=note, keys=keys if len(keys) <= 20 else [], table=table)

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
        whole_x: bool = False,
        note: str = "",
        table: Table | None = None,
        radius: float = 4.0,
        height: float = 3.6,
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
            whole_x: Whether the first coordinate counts something.
            note: A line beneath.
            table: Its numbers.
            radius: Width of a point.
            height: Of the picture, in inches.
        """
        colors = colors or class_colors(len(groups))
        with self._drawing():
            figure, axes = new_axes(height, left=0.16)
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
            draw_scales(axes, x_label, y_label=y_label, whole_x=whole_x)
            alt = f"{title}: {count(len(x), 'point')} in {count(len(groups), 'group')}, {y_label} over {x_label}."
            svg = self._finish(figure, alt)
        keys = [Key(label=name, color=as_css(color)) for name, color in zip(groups, colors, strict=True)]
        return Picture(title=title, svg=svg, note=note, keys=keys if 1 < len(keys) <= 20 else [], table=table)

    def shares(self, parts: Mapping[str, float], *, title: str, x_label: str, table: Table | None = None) -> Picture:
        """A bar for each part of a whole."""
        names, values = list(parts), np.array(list(parts.values()))
        with self._drawing():
            figure, axes = new_axes(
                max(2.75, 0.7 + 0.24 * len(names)), left=0.05 + 0.021 * max(map(len, names), default=0)
            )
            draw_boxes(axes, np.zeros(len(names)), values, np.arange(len(names), dtype=np.float64), 0.6, series(0))
            draw_rows(axes, names, x_label)
            summary = ", ".join(f"{name} {number(value)}" for name, value in parts.items())
            svg = self._finish(figure, f"{title}, {x_label}: {summary}.")
        return Picture(title=title, svg=svg, table=table)


def bars_height(number_of: int) -> float:
    """Inches that so many bars take."""
    return 0.75 + (max(0.165 * number_of, 1.65) if number_of <= MOST_BARS else 2.4)
