"""What a partition looks like: a row for each client, means and heterogeneity over the federation."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from fl_lightning.data.adjacency import adjacency_matrix, clustering_coefficient
from fl_lightning.data.client_graph import ClientGraph
from fl_lightning.data.heterogeneity import (
    label_divergence,
    label_heterogeneity,
    label_histograms,
    neighbourhood_discrepancy,
)


@dataclass(frozen=True, kw_only=True)
class ClientStatistics:
    """One client.

    Attributes:
        client: Its name.
        num_nodes: Nodes.
        num_edges: Directed edges.
        edges_lost: Directed edges of the global graph from its nodes to nodes it does not hold.
        num_classes: Classes that occur in it.
        clustering: Average local clustering coefficient, in [0, 1].
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
class PartitionTable:
    """Statistics of a federation.

    Attributes:
        rows: The clients.
        label_counts: For each client the number of labelled nodes of every class.
        heterogeneity: Median over client pairs of the Jensen-Shannon distance of label histograms, in [0, 0.833].
        non_iidness: Mean label divergence from the pooled prior plus mean squared MMD of neighbourhoods (FedAux).
    """

    rows: tuple[ClientStatistics, ...]
    label_counts: tuple[tuple[int, ...], ...]
    heterogeneity: float
    non_iidness: float

    @classmethod
    def from_clients(
        cls, clients: tuple[ClientGraph, ...], *, edges_lost: Sequence[int], num_classes: int, seed: int = 0
    ) -> "PartitionTable":
        """Measure the clients.

        Args:
            clients: The clients.
            edges_lost: For each client the directed edges that the partition cut off.
            num_classes: Classes of the global graph.
            seed: Of the nodes that large graphs are represented by (see ``neighbourhood_discrepancy``).
        """
        histogram_CK = label_histograms(clients, num_classes)
        rows = tuple(
            ClientStatistics(
                client=client.name,
                num_nodes=client.num_nodes,
                num_edges=client.num_edges,
                edges_lost=lost,
                num_classes=int(np.count_nonzero(histogram_K)),
                clustering=clustering_coefficient(adjacency_matrix(client.edge_index_2E, client.num_nodes)),
                num_train=client.num_examples,
                num_val=int(client.val_mask_N.sum()),
                num_test=int(client.test_mask_N.sum()),
            )
            for client, lost, histogram_K in zip(clients, edges_lost, histogram_CK, strict=True)
        )
        return cls(
            rows=rows,
            label_counts=tuple(map(tuple, histogram_CK.tolist())),
            heterogeneity=label_heterogeneity(histogram_CK),
            non_iidness=label_divergence(histogram_CK) + neighbourhood_discrepancy(clients, seed=seed),
        )

    @property
    def means(self) -> dict[str, float]:
        """Mean over the clients of every numeric column."""
        return {name: fmean(getattr(row, name) for row in self.rows) for name in _COLUMNS[1:]}

    def to_csv(self, path: str | Path) -> None:
        """Write a row for each client and one named ``mean``, which also has the heterogeneity and non-IIDness."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*_COLUMNS, "heterogeneity", "non_iidness"])
            writer.writerows([*astuple(row), "", ""] for row in self.rows)
            writer.writerow(["mean", *self.means.values(), self.heterogeneity, self.non_iidness])

    def rich_table(self) -> Table:
        """Return the table for a terminal."""
        table = Table(
            title=f"{len(self.rows)} clients",
            caption=f"heterogeneity {self.heterogeneity:.3f}, non-IIDness {self.non_iidness:.3f}",
            show_footer=True,
            box=box.SIMPLE,
            padding=(0, 1, 0, 0),
        )
        means = self.means
        table.add_column("client", footer="mean", no_wrap=True)
        for name in _COLUMNS[1:]:
            header = name.removeprefix("num_").removeprefix("edges_")
            table.add_column(header, _short(means[name]), justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(row.client, *(_short(getattr(row, name)) for name in _COLUMNS[1:]))
        return table

    def plot_labels(self, path: str | Path) -> None:
        """Draw how many nodes of each class every client holds, and save the picture.

        Args:
            path: Its ending sets the format, e.g. ``labels.png`` or ``labels.pdf``.
        """
        count_CK = np.array(self.label_counts)
        num_clients, num_classes = count_CK.shape
        colors = _class_colors(num_classes)
        legend_columns = -(-num_classes // 20)
        legend_rows = -(-num_classes // legend_columns)
        height = max(1.4 + 0.24 * num_clients, 0.8 + 0.18 * legend_rows)
        figure = Figure(figsize=(7.5 + 0.5 * legend_columns, height), layout="constrained")
        axes = figure.subplots()
        left_CK = count_CK.cumsum(axis=1) - count_CK
        for k in range(num_classes):
            axes.barh(
                range(num_clients), count_CK[:, k], left=left_CK[:, k], height=0.78, color=colors[k], label=str(k)
            )
        axes.set_yticks(range(num_clients), [row.client for row in self.rows])
        axes.set_ylim(num_clients - 0.4, -0.6)
        axes.set_xlabel("nodes")
        axes.set_title(f"Labels of the clients (heterogeneity {self.heterogeneity:.3f})", loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(
            title="class",
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            borderaxespad=0.0,
            ncols=legend_columns,
            columnspacing=1.0,
            handlelength=1.0,
            fontsize="small",
            frameon=False,
        )
        figure.savefig(path, dpi=150)


_COLUMNS = tuple(field.name for field in fields(ClientStatistics))


def _short(value: float) -> str:
    """Return three to five digits: 0.259, 17.3, 8,467."""
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def _class_colors(num_classes: int) -> list[tuple[float, float, float, float]]:
    """Return distinct colours: qualitative maps while they suffice, else steps through a continuous one."""
    if num_classes <= 10:
        return [colormaps["tab10"](k) for k in range(num_classes)]
    qualitative = [colormaps[name](k) for name in ("tab20", "tab20b", "tab20c") for k in range(20)]
    if num_classes <= len(qualitative):
        return qualitative[:num_classes]
    return [colormaps["turbo"](k / (num_classes - 1)) for k in range(num_classes)]
