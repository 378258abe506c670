"""Statistics of a partition: a row for each client, and means and heterogeneity over the federation."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich import box

from fl_lightning.arguments import printable
from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.data.adjacency import adjacency_matrix, clustering_coefficient
from fl_lightning.data.partition.graph_statistics import GraphSetStatistics, graph_spreads, rows_of
from fl_lightning.data.partition.heterogeneity import (
    label_divergence,
    label_heterogeneity,
    label_histograms,
    neighborhood_discrepancy,
)
from fl_lightning.data.partition.link_statistics import LinkStatistics, link_rows
from fl_lightning.data.partition.pictures import clients_down, draw_labels, draw_spread
from fl_lightning.data.partition.spreads import Spreads, link_spreads
from fl_lightning.data.preparation import Dropped
from fl_lightning.terminal import PlainTable


@dataclass(frozen=True, kw_only=True)
class ClientStatistics:
    """One client and its subgraph.

    Attributes:
        client: Its name.
        num_nodes: Nodes.
        num_edges: Directed edges.
        edges_lost: Directed edges of the global graph to its nodes from nodes it does not hold: messages they miss.
        num_classes: Classes that occur in it; 0 where nodes have labels or numbers, and no column.
        clustering: Average local clustering coefficient, in [0, 1]; of directed graphs Fagiolo's.
        num_train: Training nodes.
        num_val: Validation nodes.
        num_test: Test nodes.
    """

    client: str
    num_nodes: int
    num_edges: int
    edges_lost: int
    num_classes: int
    clustering: float
    num_train: int
    num_val: int
    num_test: int


@dataclass(frozen=True, kw_only=True)
class ExampleStatistics:
    """One client and its examples.

    Attributes:
        client: Its name.
        num_examples: Examples.
        num_classes: Classes that occur in it; 0 in a regression, and no column.
        num_train: Training examples.
        num_val: Validation examples.
        num_test: Test examples.
    """

    client: str
    num_examples: int
    num_classes: int
    num_train: int
    num_val: int
    num_test: int


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Statistics of a federation.

    Attributes:
        rows: The clients.
        label_counts: For each client the number of labeled nodes or examples of every class; empty in a regression.
        heterogeneity: Median over client pairs of the Jensen-Shannon distance of label histograms, in [0, 0.833]; nan
            in a regression, and where classes mean something else for each client.
        dropped: What the source's graph has beyond the clients, since only its largest component was kept.
        non_iidness: Mean label divergence from the pooled prior plus mean squared MMD of neighborhoods (FedAux); nan
            without graphs, or where it was not measured.
        class_names: What the classes are called; empty for their numbers.
        measure_spreads: Computes :attr:`spreads`; None if there are none.
        simulated: What ``data.heterogeneity`` has changed, and the names of the clients that it chose.
    """

    rows: (
        tuple[ClientStatistics, ...]
        | tuple[ExampleStatistics, ...]
        | tuple[GraphSetStatistics, ...]
        | tuple[LinkStatistics, ...]
    )
    label_counts: tuple[tuple[int, ...], ...]
    heterogeneity: float
    non_iidness: float = float("nan")
    dropped: Dropped = field(default_factory=Dropped)
    class_names: tuple[str, ...] = ()
    measure_spreads: Callable[[], Spreads] | None = field(default=None, repr=False, compare=False)
    simulated: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def from_graphs(
        cls,
        clients: Sequence[ClientGraph],
        *,
        edges_lost: Sequence[int],
        num_classes: int,
        seed: int = 0,
        dropped: Dropped | None = None,
        non_iidness: bool = True,
        class_names: Sequence[str] | None = None,
    ) -> "PartitionTable":
        """Measure clients that hold subgraphs.

        Args:
            clients: The clients.
            edges_lost: For each client the directed edges that the partition cut off.
            num_classes: Classes of the global graph.
            seed: Of the nodes that large graphs are represented by (see ``neighborhood_discrepancy``).
            dropped: What the preparation of the graph left out; None for nothing.
            non_iidness: Whether to measure it, which takes seconds on wide features.
            class_names: What the classes are called; None for their numbers.
        """
        histogram_CK = _histograms(clients, num_classes)
        rows = tuple(
            ClientStatistics(
                client=client.name,
                num_nodes=client.num_nodes,
                num_edges=client.num_edges,
                edges_lost=lost,
                num_classes=0 if histogram_CK is None else int(np.count_nonzero(histogram_CK[idx])),
                clustering=clustering_coefficient(
                    adjacency_matrix(client.edge_index_2E, client.num_nodes), directed=client.is_directed
                ),
                num_train=client.num_examples,
                num_val=int(client.val_mask_N.sum()),
                num_test=int(client.test_mask_N.sum()),
            )
            for idx, (client, lost) in enumerate(zip(clients, edges_lost, strict=True))
        )
        if histogram_CK is None:
            return cls(rows=rows, label_counts=(), heterogeneity=float("nan"), dropped=dropped or Dropped())
        unlikeness = float("nan")
        if non_iidness:
            unlikeness = label_divergence(histogram_CK) + neighborhood_discrepancy(clients, seed=seed)
        return cls(
            rows=rows,
            label_counts=tuple(map(tuple, histogram_CK.tolist())),
            heterogeneity=label_heterogeneity(histogram_CK),
            non_iidness=unlikeness,
            dropped=dropped or Dropped(),
            class_names=tuple(class_names or ()),
        )

    @classmethod
    def from_examples(
        cls, clients: Sequence[ClientData], *, num_classes: int, class_names: Sequence[str] | None = None
    ) -> "PartitionTable":
        """Measure clients by their examples; what is said of classes is not read where these have none."""
        histogram_CK = _histograms(clients, num_classes)
        rows = tuple(
            ExampleStatistics(
                client=client.name,
                num_examples=client.size,
                num_classes=0 if histogram_CK is None else int(np.count_nonzero(histogram_CK[idx])),
                num_train=client.num_examples,
                num_val=int(client.val_mask_N.sum()),
                num_test=int(client.test_mask_N.sum()),
            )
            for idx, client in enumerate(clients)
        )
        if histogram_CK is None:
            return cls(rows=rows, label_counts=(), heterogeneity=float("nan"))
        counts = tuple(map(tuple, histogram_CK.tolist()))
        return cls(
            rows=rows,
            label_counts=counts,
            heterogeneity=label_heterogeneity(histogram_CK),
            class_names=tuple(class_names or ()),
        )

    @classmethod
    def from_graph_sets(
        cls,
        clients: Sequence[ClientGraphs],
        *,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        numbers: bool = False,
    ) -> "PartitionTable":
        """Measure clients that hold many graphs.

        Args:
            clients: The clients.
            num_classes: Classes of the federation; of labels and numbers, any.
            class_names: What the classes are called; None for their numbers.
            numbers: Whether targets are numbers.
        """
        of_examples = cls.from_examples(clients, num_classes=num_classes, class_names=class_names)
        counts = [sum(map(bool, count_K)) for count_K in of_examples.label_counts] or [0] * len(clients)
        rows = rows_of(clients, counts, numbers=numbers)
        return replace(of_examples, rows=rows, measure_spreads=partial(graph_spreads, clients, numbers=numbers))

    @classmethod
    def from_links(
        cls, clients: Sequence[ClientPairs], *, edges_lost: Sequence[int], dropped: Dropped
    ) -> "PartitionTable":
        """Count the links of clients, and the pairs that they are compared with."""
        rows = link_rows(clients, edges_lost)
        measure = partial(link_spreads, clients)
        return cls(rows=rows, label_counts=(), heterogeneity=float("nan"), dropped=dropped, measure_spreads=measure)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns; the first is the client. Classes are counted where there are some."""
        names = (column.name for column in fields(self.rows[0]))
        return tuple(name for name in names if name != "num_classes" or self.label_counts)

    @property
    def cells(self) -> list[list[Any]]:
        """The values of every row, by the columns."""
        columns = self.columns
        return [[getattr(row, name) for name in columns] for row in self.rows]

    @cached_property
    def spreads(self) -> Spreads:
        """For each client the least, the quartiles and the greatest of what its examples have, by what that is.

        Targets that are numbers, labels, links, and of many graphs nodes and mean degrees; none of classes alone. They
        are computed when they are asked for, as only a picture needs them.
        """
        return {} if self.measure_spreads is None else self.measure_spreads()

    @property
    def means(self) -> dict[str, float]:
        """Mean over the clients of every numeric column."""
        return {name: fmean(getattr(row, name) for row in self.rows) for name in self.columns[1:]}

    def to_csv(self, path: str | Path) -> None:
        """Write a row for each client and one named ``mean``.

        The latter also has the heterogeneity, the non-IIDness and how many nodes, edges and classes were dropped. Where
        ``data.heterogeneity`` changes clients, the last column has the kinds that change each.
        """
        with Path(path).open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file)
            names = ["heterogeneity", "non_iidness", "nodes_dropped", "edges_dropped", "classes_dropped"]
            writer.writerow([*self.columns, *names, *(["simulated"] if self.simulated else [])])
            writer.writerows([*row, *[""] * len(names), *self._changes_of(row[0])] for row in self.cells)
            writer.writerow(
                ["mean", *self.means.values(), self.heterogeneity, self.non_iidness, *astuple(self.dropped)]
            )

    def _changes_of(self, client: str) -> list[str]:
        """What changes a client, in one cell; no cell where nothing is simulated."""
        return ["; ".join(kind for kind, names in self.simulated if client in names)] if self.simulated else []

    def rich_table(self) -> PlainTable:
        """Return the table for a terminal."""
        unlikeness = {"heterogeneity": self.heterogeneity, "non-IIDness": self.non_iidness}
        caption = ", ".join(f"{name} {value:.3f}" for name, value in unlikeness.items() if not math.isnan(value))
        if self.dropped.num_nodes:
            nodes, edges, classes = astuple(self.dropped)
            caption += f"\noutside the largest component, dropped: {nodes:,} nodes, {edges:,} edges, {classes} classes"
        for kind, names in self.simulated:
            caption += f"\nsimulated: {kind} at {len(names)} of {len(self.rows)} clients ({', '.join(names) or 'none'})"
        table = PlainTable(
            title=f"{len(self.rows)} clients",
            caption=caption,
            show_footer=True,
            box=box.SIMPLE,
            padding=(0, 1, 0, 0),
        )
        means = self.means
        table.add_column("client", footer="mean", no_wrap=True)
        for name in self.columns[1:]:
            header = (
                name.removeprefix("num_").removeprefix("edges_").removeprefix("mean_").replace("std_target", "its std")
            )
            table.add_column(header.replace("_", "\n"), _short(means[name]), justify="right", no_wrap=True)
        for client, *values in self.cells:
            table.add_row(client, *map(_short, values))
        return table

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """What a notebook shows."""
        return self.rich_table()._repr_mimebundle_((), ())

    def plot_labels(self, path: str | Path) -> None:
        """Draw how many examples of each class a client has, or how its numbers, labels, links and graphs are spread.

        Args:
            path: Its ending sets the format, e.g. ``labels.png`` or ``labels.pdf``.
        """
        import matplotlib

        with matplotlib.rc_context({"text.parse_math": False}):  # names are names, with a $ in them too
            self._plot_labels(path)

    def _plot_labels(self, path: str | Path) -> None:
        from matplotlib.figure import Figure

        num_classes = len(self.label_counts[0]) if self.label_counts else 0
        names = [str(k) if k >= len(self.class_names) else printable(self.class_names[k]) for k in range(num_classes)]
        clients = [printable(row.client) for row in self.rows]
        longest = max(map(len, names), default=0)
        legend_columns = -(-num_classes // 20)
        legend_rows = -(-num_classes // legend_columns) if num_classes else 0
        height = max(1.4 + 0.24 * len(self.rows), 0.8 + 0.18 * legend_rows)
        panels = len(self.spreads) + bool(num_classes)
        width = 7.5 + 3.5 * (panels - 1) + (0.4 + 0.075 * longest) * legend_columns
        figure = Figure(figsize=(width, height), layout="constrained")
        (every,) = figure.subplots(1, panels, squeeze=False, sharey=True)
        for axes, (what, five_numbers) in zip(every[bool(num_classes) :], self.spreads.items(), strict=True):
            draw_spread(axes, five_numbers, what)
            clients_down(axes, clients)
        if num_classes:
            draw_labels(every[0], self.label_counts, names, self.columns[1].removeprefix("num_"))
            clients_down(every[0], clients)
            known = not math.isnan(self.heterogeneity)
            how = f"heterogeneity {self.heterogeneity:.3f}" if known else "classes of their own"
            every[0].set_title(f"Labels of the clients ({how})", loc="left")
            beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0, "frameon": False}
            small = {"fontsize": "small", "columnspacing": 1.0, "handlelength": 1.0}
            every[-1].legend(
                *every[0].get_legend_handles_labels(), title="class", ncols=legend_columns, **beside, **small
            )
        figure.savefig(path, dpi=150)


def _histograms(
    clients: Sequence[ClientData], num_classes: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]] | None:
    """How many examples of each class every client has, (C, K); None where these have labels or numbers."""
    return None if clients[0].y_N.is_floating_point() else label_histograms(clients, num_classes)


def _short(value: float) -> str:
    """Return three to five digits: 0.259, 17.3, 8,467."""
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"
