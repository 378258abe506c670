"""Which clients exchange messages, how strongly they are coupled, and the common objective: pictures, files, a metric.

Shape legend: C training clients.
"""

import csv
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.files import whole_file
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.strategies import Strategy

from .pictures import publish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from networkx import Graph

Matrix = NDArray[np.float64]
_INK, _FAINT, _EDGE, _EMPTY = "#22272e", "#6b7280", "#9ca3af", "#eef0f3"
_MOST_LABELS = 60


def short_names(names: Sequence[str]) -> list[str]:
    """Omit what precedes the last hyphen, if it is the same in all names.

    Example:
        >>> short_names(["sensor-00", "sensor-01"]), short_names(["front-2009", "rear-2009"])
        (['00', '01'], ['front-2009', 'rear-2009'])
    """
    kinds = {name.rpartition("-")[0] for name in names}
    return [name.rpartition("-")[2] for name in names] if len(kinds) == 1 else list(names)


def draw_topology(
    adjacency_CC: Matrix, names: Sequence[str], num_examples: Sequence[int], *, title: str = "Topology"
) -> "Figure":
    """The graph of the clients.

    Args:
        adjacency_CC: Above 0 if two clients are neighbors.
        names: Names of the clients.
        num_examples: Numbers of examples of the clients, shown as colors.
        title: Title of the picture; sizes are added to it.
    """
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
    from networkx import from_numpy_array

    graph = from_numpy_array(adjacency_CC > 0)
    place_C2, labels, count = _layout(graph), short_names(names), len(names)
    inches = float(np.clip(3.2 + 0.13 * count, 5.0, 11.0))
    figure, axes = _new_figure(inches, inches)
    ends = [(place_C2[i], place_C2[j]) for i, j in graph.edges]
    axes.add_collection(LineCollection(ends, colors=_EDGE, linewidths=0.9, alpha=0.8, zorder=1))

    light = ListedColormap(colormaps["YlGnBu"](np.linspace(0, 0.55, 256)))  # dark labels stay readable on all of it
    outside = max(map(len, labels)) > 4
    points = float(np.clip(72 * inches / (2.6 * np.sqrt(count) + 6), 11.0, 28.0)) * (0.6 if outside else 1.0)
    discs = axes.scatter(
        place_C2[:, 0],
        place_C2[:, 1],
        s=points**2,
        c=num_examples,
        cmap=light,
        norm=_scale(np.array(num_examples)),
        zorder=2,
    )
    discs.set(edgecolors=_INK, linewidths=0.7)
    for position, label in zip(place_C2, labels, strict=True):
        text = axes.annotate(label, position, (0, 0.6 * points + 1 if outside else 0), textcoords="offset points")
        text.set(fontsize=float(np.clip(0.42 * points, 5.5, 9.0)) if not outside else 7.5, color=_INK, zorder=3)
        text.set(ha="center", va="bottom" if outside else "center_baseline")
        if outside:
            text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
    axes.set_axis_off()

    degrees = {degree for _, degree in graph.degree}
    neighbors = f"{min(degrees)} to {max(degrees)}" if len(degrees) > 1 else f"{min(degrees)}"
    _head(axes, title, f"clients: {count}, edges: {graph.number_of_edges()}, neighbors of each: {neighbors}")
    bar = figure.colorbar(discs, ax=axes, orientation="horizontal", shrink=0.6, fraction=0.03, pad=0.02, aspect=35)
    bar.locator = MaxNLocator(integer=True, nbins=6)
    _finish_bar(bar, "labeled training examples of the client")
    return figure


def draw_norms(norms_CC: Matrix, names: Sequence[str], *, title: str = "Restriction maps") -> "Figure":
    """Heat map of ‖P_ij‖, row i and column j; pairs without an edge stay empty.

    Args:
        norms_CC: Norms, 0 where there is no edge.
        names: Names of the clients.
        title: Title of the picture.
    """
    count, labels = len(names), short_names(names)
    inches = float(np.clip(2.4 + 0.155 * count, 4.6, 11.0))
    figure, axes = _new_figure(inches + 0.9, inches + 0.3)
    norm = _scale(norms_CC[norms_CC > 0])
    image = axes.imshow(np.ma.masked_less_equal(norms_CC, 0), cmap="viridis", norm=norm, interpolation="nearest")
    axes.set_facecolor(_EMPTY)
    ticks = list(range(0, count, -(-count // _MOST_LABELS)))
    chosen = [labels[tick] for tick in ticks]
    axes.set_xticks(ticks, chosen, rotation=90 if max(map(len, chosen)) > 2 else 0)
    axes.set_yticks(ticks, chosen)
    axes.tick_params(labelsize=6.5, length=0, labelcolor=_INK, pad=2)
    axes.set_xlabel("neighbor j", fontsize=8, color=_FAINT)
    axes.set_ylabel("client i, whose model is projected", fontsize=8, color=_FAINT)
    axes.spines[:].set_visible(False)
    _head(axes, title, "empty: not neighbors")
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=30)
    _finish_bar(bar, "Frobenius norm of the map, $\\|P_{ij}\\|_F$ (no unit)")
    return figure


def _layout(graph: "Graph") -> Matrix:
    """Positions in [-1, 1]² with distances like those along the edges, (C, 2); unconnected parts are set apart."""
    import networkx as nx

    paths = dict(nx.all_pairs_shortest_path_length(graph))
    far = 1 + max(max(lengths.values()) for lengths in paths.values())
    distances = {i: {j: paths[i].get(j, far) for j in graph} for i in graph}
    position = nx.kamada_kawai_layout(graph, dist=distances)
    return np.array([position[client] for client in graph])


def _new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    return figure, figure.add_subplot()


def _scale(values: NDArray[Any]) -> "Normalize":
    """From the smallest to the largest value; if all are equal, the width is a thousandth."""
    from matplotlib.colors import Normalize

    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return Normalize(low, max(high, low + 1e-3 * abs(low)) or 1.0)


def _head(axes: "Axes", title: str, caption: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK, pad=18)
    line = axes.annotate(caption, (0, 1), (0, 6), "axes fraction", "offset points")
    line.set(fontsize=8, color=_FAINT, in_layout=False)


def _finish_bar(bar: "Colorbar", label: str) -> None:
    bar.set_label(label, fontsize=8, color=_FAINT)
    bar.ax.tick_params(labelsize=7, length=2, color=_FAINT, labelcolor=_INK)
    bar.outline.set_visible(False)


class TopologyLogger(Callback):
    """Draws the graph of the clients and how strongly its edges couple them, and logs the common objective.

    - ``topology.png`` in the run's folder: the strategy's ``adjacency`` when training begins, drawn again when it has
      changed (FedSheafHN's collaboration graph, which exists from round 0 on).
    - ``map_norms/round_0099.png`` and ``.csv``: the norms of the restriction maps, if the strategy has any.
    - ``server/objective`` among the metrics: Σ_i f_i(θ_i), the mean training losses of the evaluated models, plus the
      strategy's coupling term ``server/coupling`` if it has one. The term of weight decay, which belongs to the
      optimizer, is not included.

    Pictures are also sent to the loggers that accept them.

    Args:
        every_n_rounds: Rounds between logs; None for the last round only.

    Raises:
        ValueError: The strategy has no ``adjacency``.
    """

    needs_data = True

    def __init__(self, *, every_n_rounds: int | None = None) -> None:
        if every_n_rounds is not None and every_n_rounds < 1:
            raise ValueError(f"TopologyLogger.every_n_rounds must be at least 1, got {every_n_rounds}")
        self.every_n_rounds = every_n_rounds
        self._drawn: Matrix | None = None
        self._last_round = -1

    def on_fit_start(self, trainer: Trainer) -> None:
        """Draw the topology; one that has not been computed yet is drawn after a round."""
        self._drawn, self._last_round = None, -1
        can_wait = not trainer.run.strategy.matrices() and type(trainer.run.strategy).matrices is not Strategy.matrices
        if not can_wait:
            self._draw_topology(trainer, trainer.run.round_idx)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float], prefix: str) -> None:
        """Add the objective."""
        losses = trainer.run.scores[prefix].extras.get("train/loss")
        if prefix or losses is None:
            return
        total_C, count_C = losses.double().unbind(dim=1)
        loss = float((total_C / count_C.clamp(min=1)).sum())
        metrics["server/objective"] = loss + trainer.run.strategy.metrics().get("server/coupling", 0.0)

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Draw and log the topology, if the round is due."""
        every = self.every_n_rounds
        if self._drawn is None or (every is not None and (trainer.run.round_idx + 1) % every == 0):
            self._draw_topology(trainer, trainer.run.round_idx)
        if every is not None and (trainer.run.round_idx + 1) % every == 0:
            self._draw_norms(trainer, trainer.run.round_idx)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Draw and log the final topology."""
        last = trainer.run.round_idx - 1
        if self._last_round != last:
            self._draw_topology(trainer, last)
            self._draw_norms(trainer, last)

    def _draw_topology(self, trainer: Trainer, round_idx: int) -> None:
        adjacency = trainer.run.strategy.matrices().get("adjacency")
        if adjacency is None:
            raise ValueError(
                f"TopologyLogger: {type(trainer.run.strategy).__name__} has no graph of its clients (its matrices "
                "have no 'adjacency'): drop the callback, or use a decentralized strategy or FedSheafHN"
            )
        result = _numpy(adjacency)
        if not trainer.fabric.is_global_zero or (self._drawn is not None and np.array_equal(result, self._drawn)):
            return
        self._drawn = result
        clients = trainer.run.training_clients
        examples = [trainer.run.datamodule.clients[client].num_examples for client in clients]
        title = f"{type(trainer.run.strategy).__name__}, round {round_idx}"
        figure = draw_topology(
            result, [trainer.run.registry.names[client] for client in clients], examples, title=title
        )
        publish(trainer, figure, trainer.run.folder / "topology.png", "topology", round_idx)

    def _draw_norms(self, trainer: Trainer, round_idx: int) -> None:
        self._last_round = round_idx
        norms = trainer.run.strategy.matrices().get("map_norms")
        if norms is None or not trainer.fabric.is_global_zero:
            return
        result = _numpy(norms)
        names = [trainer.run.registry.names[client] for client in trainer.run.training_clients]
        path = trainer.run.folder / "map_norms" / f"round_{round_idx:04d}.png"
        title = f"Restriction maps of {type(trainer.run.strategy).__name__}, round {round_idx}"
        publish(trainer, draw_norms(result, names, title=title), path, "map_norms", round_idx)
        with whole_file(path.with_suffix(".csv")) as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows(
                [["client", *names], *([name, *row] for name, row in zip(names, result.tolist(), strict=True))]
            )


def _numpy(matrix: Tensor) -> Matrix:
    result: Matrix = matrix.detach().double().cpu().numpy()
    return result
