"""How the data are shared out among the clients."""

import math
from collections.abc import Sequence

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.document import Fact, Section
from fl_lightning.report.figures import Picture, Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import Album, bars_height
from fl_lightning.report.record import Partition, RunRecord
from fl_lightning.report.sections.learning import SPLITS
from fl_lightning.report.wording import number


def section(run: Recorded, album: Album) -> Section:
    """The section "Data and partition"."""
    record = run.record
    partition = record.partition if record else None
    if record is None or partition is None:
        empty = "How the data are shared out was not kept."
        return Section(anchor="partition", title="Data and partition", empty=empty)
    names = [str(row[0]) for row in partition.rows]
    what = record.examples
    pictures = []
    if partition.labels:
        counts = np.array(partition.labels, dtype=float)
        groups = [record.class_name(label) for label in range(counts.shape[1])]
        note = "Classes mean something else for each client." if record.own_outputs else ""
        x_label = f"labeled {what}"
        pictures.append(album.stacked(names, counts, groups, title="Labels of the clients", x_label=x_label, note=note))
    splits = [column for column in ("num_train", "num_val", "num_test") if column in partition.columns]
    counts = np.array([[_cell(partition, row, column) for column in splits] for row in range(len(names))])
    groups = [column.removeprefix("num_") for column in splits]
    orders = [SPLITS[group] for group in groups]
    pictures.append(album.stacked(names, counts, groups, title="Split of the clients", x_label=what, orders=orders))
    if "edges_lost" in partition.columns:
        edges = np.array(
            [[_cell(partition, row, column) for column in ("num_edges", "edges_lost")] for row in range(len(names))]
        )
        pictures.append(
            album.stacked(names, edges, ["kept", "cut off"], title="Edges of the clients", x_label="directed edges")
        )
    pictures += _graph_pictures(partition, names, album)
    facts = [Fact(name="clients", value=number(len(names))), Fact(name=what, value=number(float(sum(record.sizes))))]
    if partition.heterogeneity is not None:
        more = "median Jensen-Shannon distance of labels, 0 to 0.833"
        facts.append(Fact(name="heterogeneity", value=number(partition.heterogeneity), more=more))
    if "clustering" in partition.columns:
        mean = float(np.mean([_cell(partition, row, "clustering") for row in range(len(names))]))
        facts.append(Fact(name="clustering coefficient", value=number(mean), more="mean over clients"))
    for kind, chosen in partition.simulated:
        what = f"{len(chosen)} of {count(len(names), 'client')}"
        facts.append(Fact(name=f"simulated: {kind}", value=what, more=", ".join(chosen)))
    header = ["client", *(column.removeprefix("num_").replace("_", " ") for column in partition.columns[1:])]
    rows = [
        [name, *(number(_float(cell)) for cell in row[1:])] for name, row in zip(names, partition.rows, strict=True)
    ]
    return Section(
        anchor="partition",
        title="Data and partition",
        facts=facts,
        pictures=pictures,
        folded=[
            Table(title="Table of the partition", columns=header, rows=rows),
            *_label_table(record, partition, names),
        ],
    )


def _graph_pictures(partition: Partition, names: Sequence[str], album: Album) -> list[Picture]:
    """Sizes of the clients' graphs, and the numbers that are predicted of them."""
    columns = [column for column in ("mean_nodes", "mean_target", "std_target") if column in partition.columns]
    values = {column: np.array([_cell(partition, row, column) for row in range(len(names))]) for column in columns}
    pictures = []
    if "mean_nodes" in values:
        title, x_label = "Graphs of the clients", "nodes of a graph, mean"
        pictures.append(album.bars(names, values["mean_nodes"], title=title, x_label=x_label))
    if "mean_target" in values:
        mean, std = values["mean_target"], values["std_target"]
        title, x_label = "Targets of the clients", "target, mean and one standard deviation either way"
        low, high, height = mean - std, mean + std, bars_height(len(names))
        pictures.append(album.intervals(names, mean, low, high, title=title, x_label=x_label, height=height))
    return pictures


def _cell(partition: Partition, row: int, column: str) -> float:
    return _float(partition.rows[row][partition.columns.index(column)])


def _float(cell: str | float | None) -> float:
    return math.nan if cell is None else float(cell)


def _label_table(record: RunRecord, partition: Partition, names: Sequence[str]) -> list[Table]:
    if not partition.labels:
        return []
    rows = [[name, *(number(value) for value in row)] for name, row in zip(names, partition.labels, strict=True)]
    columns = ["client", *map(record.class_name, range(len(partition.labels[0])))]
    return [Table(title="Table of the labels", columns=columns, rows=rows)]
