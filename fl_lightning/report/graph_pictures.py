"""Pictures of graphs that are examples. Shape legend: N nodes."""

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.collections import LineCollection

from fl_lightning.counts import count
from fl_lightning.report.axes import class_colors, draw_dots, new_axes
from fl_lightning.report.drawing import Drawing
from fl_lightning.report.figures import Picture, Values
from fl_lightning.report.record import ExampleGraph
from fl_lightning.report.theme import stand_in

#: Kinds of nodes that have a color of their own; the others share the last one.
_MOST_KINDS = 8


class GraphPictures(Drawing):
    """Graphs side by side."""

    def graphs(self, graphs: Sequence[ExampleGraph], *, title: str) -> Picture:
        """Some of a client's graphs, with their targets beneath; nodes of one kind have one color."""
        colors = class_colors(_MOST_KINDS)
        with self._drawing():
            figure, axes = new_axes(1.7, left=0.02, bottom=0.02, right=0.98)
            for column, each in enumerate(graphs):
                graph: Any = nx.empty_graph(each.num_nodes)
                graph.add_edges_from(map(tuple, each.edges))
                place_N2 = _places(graph) + np.array([2.4 * column, 0.0])
                ends = [(place_N2[i], place_N2[j]) for i, j in graph.edges]
                lines = LineCollection(ends, colors=stand_in("faint"), linewidths=1.1, zorder=1)
                axes.add_collection(lines, autolim=False)
                kind_N = np.minimum(each.kinds, _MOST_KINDS - 1)
                width = float(np.clip(26 / np.sqrt(max(each.num_nodes, 1)), 3, 9))
                for kind in np.unique(kind_N):
                    x_N, y_N = place_N2[kind_N == kind].T
                    draw_dots(axes, x_N, y_N, colors[kind], width)
                axes.text(2.4 * column, -1.2, each.target, ha="center", va="top", fontsize=11)
            axes.set(xlim=(-1.2, 2.4 * max(len(graphs), 3) - 1.2), ylim=(-1.62, 1.08))
            axes.set_axis_off()
            told = "; ".join(
                f"{count(each.num_nodes, 'node')} and {count(len(each.edges), 'edge')}, {each.target}"
                for each in graphs
            )
            svg = self._finish(figure, f"{title}: {told}.")
        return Picture(title=title, svg=svg)


def _places(graph: Any) -> Values:
    """Places in [-1, 1]², (N, 2); the same for the same graph."""
    if len(graph) > 1 and nx.is_connected(graph):
        found = nx.kamada_kawai_layout(graph)
    else:
        found = nx.spring_layout(graph, seed=0)
    return np.array([found[node] for node in graph], dtype=np.float64).reshape(-1, 2)
