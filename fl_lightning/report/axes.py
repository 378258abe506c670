"""Axes, ticks, marks and colors of the pictures, by hand: Matplotlib's own ticks take half of a picture's time."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from fl_lightning.report.figures import Values
from fl_lightning.report.theme import NUM_SERIES, series, stand_in

_WIDTH = 4.5  # inches of 72 units


def new_axes(
    height: float, *, left: float = 0.125, right: float = 0.985, bottom: float | None = None
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; margins are shares of the width, and half an inch below."""
    figure = Figure(figsize=(_WIDTH, height))
    below = 0.5 / height if bottom is None else bottom
    left = min(left, 0.4)
    axes = figure.add_axes((left, below, right - left, 0.97 - below))
    return figure, axes


def draw_scales(axes: Axes, x_label: str, *, y_label: str = "", grid: str = "y", whole_x: bool = False) -> None:
    """Few numbers, faint lines, no frame: drawn by hand, for Matplotlib's ticks take half of a picture's time."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.set(xlim=(left, right), ylim=(bottom, top))
    levels = _ticks(bottom, top, whole=False) if grid == "y" else []
    if levels:  # their labels need space
        index = axes.get_position()
        margin = 0.035 + 0.0195 * max(len(_tick(tick)) for tick in levels) + (0.04 if y_label else 0)
        axes.set_position((margin, index.y0, index.x1 - margin, index.height))
    axes.set_axis_off()
    below, beside = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    faint: dict[str, Any] = {"color": stand_in("faint")}
    upright = _ticks(left, right, whole=whole_x)
    inches = axes.get_window_extent().height / axes.figure.dpi
    for tick in upright:
        axes.text(tick, -0.07 / inches, _tick(tick), ha="center", va="top", transform=below, **faint)
    lines = [((tick, 0), (tick, 1)) for tick in upright] if grid == "x" or y_label else []
    axes.add_artist(_lines(lines, below))
    for tick in levels:
        axes.text(-0.012, tick, _tick(tick), ha="right", va="center", transform=beside, **faint)
    axes.add_artist(_lines([((0, tick), (1, tick)) for tick in levels], beside))
    axes.text(0.5, -0.44 / inches, x_label, ha="center", va="bottom", transform=axes.transAxes, **faint)
    if y_label:
        axes.figure.text(0.012, 0.55, y_label, ha="left", va="center", rotation=90, **faint)


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    steps = [1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10]
    result = MaxNLocator(5, integer=whole, steps=steps).tick_values(min(low, high), max(low, high))
    slack = 1e-9 * abs(high - low)
    return [float(tick) for tick in result if min(low, high) - slack <= tick <= max(low, high) + slack]


def _lines(ends: Sequence[Any], transform: Any) -> LineCollection:
    return LineCollection(ends, colors=stand_in("line"), linewidths=0.7, zorder=0.5, transform=transform)


def _tick(value: float) -> str:
    rounded = round(value, 10)
    return f"{rounded:,.6g}".replace("-", "−")


def draw_dots(axes: Axes, x: Values, y: Values, color: str, width: float) -> None:
    """Points as one path of lines without length, whose round ends are what is seen: a tenth of the bytes."""
    ends = np.repeat(np.stack([x, y], axis=1), 2, axis=0)
    codes = np.tile([Outline.MOVETO, Outline.LINETO], len(x))
    dots = PathPatch(Outline(ends, codes), edgecolor=color, facecolor="none", lw=width, capstyle="round", zorder=2)
    add_patch(axes, dots)


def draw_boxes(axes: Axes, left: Values, right: Values, index: Values, height: float, color: str) -> None:
    """Horizontal bars, as one path."""
    low, high = index - height / 2, index + height / 2
    corners = np.stack([left, low, right, low, right, high, left, high, left, low], axis=1).reshape(-1, 2)
    codes = np.tile([Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY], len(index))
    axes.update_datalim(corners)
    add_patch(axes, PathPatch(Outline(corners, codes), facecolor=color, lw=0, zorder=2))


def add_patch(axes: Axes, patch: PathPatch) -> None:
    """Add a patch whose extent is known: Matplotlib would look for that of every curve in it."""
    patch.set_transform(axes.transData)
    axes.add_artist(patch)


def draw_rows(axes: Axes, names: Sequence[str], x_label: str) -> None:
    """Finish a picture of rows: the first above, names to the left."""
    axes.autoscale_view(scaley=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    draw_scales(axes, x_label, grid="x")
    beside = axes.get_yaxis_transform()
    own: dict[str, Any] = {"ha": "right", "va": "center", "color": stand_in("faint"), "fontsize": 9}
    for row, name in enumerate(names):
        lines = name.split("\n") if name else []
        for place, line in enumerate(lines):  # each for itself, since the page's letters are not Matplotlib's
            shift = (0, 10.8 * ((len(lines) - 1) / 2 - place))
            axes.annotate(line, (-0.012, row), shift, xycoords=beside, textcoords="offset points", **own)


def class_colors(number_of: int) -> list[str]:
    """A color for each class: the page's own while they last, then those of Matplotlib's maps."""
    if number_of <= NUM_SERIES:
        return [series(index) for index in range(number_of)]
    if number_of <= 20:  # the darker ones of its pairs first
        pairs = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
        return [matplotlib.colors.to_hex(color) for color in (*pairs[::2], *pairs[1::2])[:number_of]]
    steps = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, number_of))
    return [matplotlib.colors.to_hex(color) for color in steps]


def node_places(graph: nx.Graph) -> Values:
    """Places in [-1, 1]², (C, 2)."""
    if len(graph) > 40 or graph.number_of_edges() == 0 or not nx.is_connected(graph):
        index = nx.circular_layout(graph)
    else:
        index = nx.kamada_kawai_layout(graph)
    return np.array([index[client] for client in graph], dtype=np.float64)
