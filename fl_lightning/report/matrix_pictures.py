"""Pictures of square matrices over clients or classes: as heat maps, and as graphs."""

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.collections import LineCollection

from fl_lightning.counts import count
from fl_lightning.report.axes import draw_dots, new_axes, node_places
from fl_lightning.report.drawing import Drawing, fitting
from fl_lightning.report.figures import Picture, Table, Values
from fl_lightning.report.theme import series, stand_in
from fl_lightning.report.wording import number, short_names

#: A matrix of more rows is shown without its numbers.
MOST_RUNS = 20
#: Inches of a heat map.
HEIGHT = 4.1

_FILL = (47 / 255, 131 / 255, 197 / 255)  # between the schemes: its opacity is what a heat map shows
_UNKNOWN = (0.5, 0.5, 0.5, 0.25)
_MOST_OPAQUE = 0.7  # so that numbers can be read on it
_LETTER = 5.0  # units of a name's letter, of which the width has 324


class MatrixPictures(Drawing):
    """Heat maps and graphs."""

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
        height: float = HEIGHT,
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
            height: Of the picture, in inches.
        """
        low, high = limits
        with self._drawing():
            short = fitting(short_names(names))
            longest = max(map(len, short), default=0)
            turned = longest > 3
            below = (32 + (_LETTER * longest if turned else 9)) / (72 * height)
            figure, axes = new_axes(height, left=0.08 + _LETTER * longest / 324, bottom=below)
            share = np.clip((matrix - low) / max(high - low, 1e-12), 0, 1)
            image = np.empty((*matrix.shape, 4))
            image[..., :3] = _FILL
            image[..., 3] = np.nan_to_num(share) * (_MOST_OPAQUE if cells else 1.0)
            image[np.isnan(matrix)] = _UNKNOWN
            axes.imshow(image, interpolation="none", aspect="auto")
            step = max(1, -(-len(names) // 20))
            ticks = list(range(0, len(names), step))
            axes.set_axis_off()
            faint: dict[str, Any] = {"color": stand_in("faint"), "fontsize": 8.5}
            outside: dict[str, Any] = {"textcoords": "offset points", **faint}
            edge, rotation = len(names) - 0.5, 90 if turned else 0
            for tick in ticks:
                axes.annotate(short[tick], (-0.5, tick), (-4, 0), ha="right", va="center", **outside)
                axes.annotate(short[tick], (tick, edge), (0, -4), ha="center", va="top", rotation=rotation, **outside)
            center = axes.get_position().x0 + axes.get_position().width / 2
            figure.text(center, 0.012, x_label, ha="center", va="bottom", **faint)
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
            longest = max(map(len, short_names(names)), default=0)
            width = 15.0 if few else 7.0
            for row, name in enumerate(names):
                color = series(1) if name in marked else series(0)
                draw_dots(axes, position[row : row + 1, 0], position[row : row + 1, 1], color, width)
            for row, name in enumerate(short_names(names)) if few else ():
                inside = longest <= 3
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
                f"{count(len(names), 'client')}, {count(graph.number_of_edges(), 'edge')}, {min(degrees)} to "
                f"{count(max(degrees), 'neighbor')}"
            )
            svg = self._finish(figure, f"{title}: {summary}.")
        return Picture(title=title, svg=svg, note=note or summary)
