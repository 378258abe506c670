"""Matrices over the clients: as heat maps, as graphs, and as places in the plane."""

from collections.abc import Iterator, Sequence

import numpy as np

from fl_lightning.report.axes import class_colors
from fl_lightning.report.document import Section
from fl_lightning.report.figures import Picture, Table, Values
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import MOST_RUNS, Album
from fl_lightning.report.record import RunRecord, Snapshot
from fl_lightning.report.wording import number

#: Matrices that are graphs, which are also drawn as such.
_GRAPHS = ("adjacency", "relation", "collaboration")
_MOST_PLACED = 30


def section(run: Recorded, album: Album) -> Section:
    """The section "Collaboration"."""
    record = run.record
    anchor, title = "collaboration", "Collaboration"
    if record is None or not record.snapshots:
        empty = f"{run.strategy or 'The strategy'} has no matrix over the clients, and no parameters were sent."
        if record is not None and record.unkept:
            empty = "No matrices over the clients were kept."
        notes = record.left_out("matri", "cosines") if record else []
        return Section(anchor=anchor, title=title, empty=empty, notes=notes)
    names = [record.names[client] for client in record.training]
    pictures: list[Picture] = []
    by_name: dict[str, list[Snapshot]] = {}
    for snapshot in record.snapshots:
        by_name.setdefault(snapshot.name, []).append(snapshot)
    for name, snapshots in by_name.items():
        pictures += _matrices(name, snapshots, names, album, sorted(run.malicious_names))
    if placed := _placed(record, by_name, names, album, run.malicious_names):
        pictures.append(placed)
    text = (
        "Matrices over the training clients after some rounds, client i by client j; each has the scale of its entries "
        "off the diagonal, and one that did not change is shown once."
    )
    notes = record.left_out("matri", "cosines")
    return Section(anchor=anchor, title=title, text=text, pictures=pictures, small=True, notes=notes)


def _matrices(
    name: str, snapshots: Sequence[Snapshot], names: Sequence[str], album: Album, marked: Sequence[str]
) -> Iterator[Picture]:
    """Heat maps; of graphs also the last one as a graph."""
    shown = {snapshot.round: snapshot.matrix().astype(float) for snapshot in snapshots}
    is_graph = any(word in name for word in _GRAPHS)
    for round_idx, matrix in shown.items():
        yield album.heat(
            matrix,
            names,
            title=f"{name.replace('_', ' ').capitalize()} after round {round_idx}",
            x_label="client j",
            y_label="client i",
            limits=_limits(matrix),
            table=_pairs(matrix, names),
        )
    if is_graph and len(names) > 1:
        last = list(shown)[-1]
        title = f"{name.replace('_', ' ').capitalize()} after round {last}, as a graph"
        yield album.network(shown[last], names, title=title, marked=marked)


def _limits(matrix: Values) -> tuple[float, float]:
    """Smallest and largest off-diagonal entry, so that structure is visible even if all entries are nearly equal."""
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    off = off[np.isfinite(off)]
    low, high = (float(off.min()), float(off.max())) if len(off) else (0.0, 1.0)
    return (low, high) if low < high else (min(0.0, low), max(high, 1e-12))


def _pairs(matrix: Values, names: Sequence[str]) -> Table:
    """All entries of a small matrix, the largest ones off the diagonal of a large one."""
    if len(names) <= MOST_RUNS:
        rows = [[name, *(number(value) for value in row)] for name, row in zip(names, matrix, strict=True)]
        return Table(title="Table", columns=["", *names], rows=rows)
    masked = np.where(np.eye(len(matrix), dtype=bool) | ~np.isfinite(matrix), -np.inf, matrix)
    order = np.argsort(masked, axis=None, kind="stable")[::-1][:20]
    result = [divmod(int(position), len(names)) for position in order]
    rows = [[f"{names[i]}, {names[j]}", number(float(matrix[i, j]))] for i, j in result if np.isfinite(masked[i, j])]
    return Table(title="The 20 largest entries", columns=["clients i, j", "value"], rows=rows)


def _placed(
    record: RunRecord, by_name: dict[str, list[Snapshot]], names: Sequence[str], album: Album, malicious: set[str]
) -> Picture | None:
    """Clients in the plane, at distances like their dissimilarity in the last matrix of cosines."""
    usable = [name for name in by_name if not any(word in name for word in (*_GRAPHS, "norms", "mixing"))]
    if not usable or len(names) < 3:
        return None
    last = by_name[usable[0]][-1]
    cosines = last.matrix().astype(float)
    if not np.isfinite(cosines).all():
        return None
    centered = cosines - cosines.mean(axis=0)
    centered -= centered.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh((centered + centered.T) / 2)
    position = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    group, groups, colors = [0] * len(names), ["clients"], list[str]()
    if malicious:
        group, groups = [int(name in malicious) for name in names], ["benign", "malicious"]
    elif record.partition and record.partition.labels:
        most = [int(np.argmax(record.partition.labels[client])) for client in record.training]
        present = sorted(set(most))
        group, groups = [present.index(label) for label in most], [f"mostly class {label}" for label in present]
        of_classes = class_colors(len(record.partition.labels[0]))
        colors = [of_classes[label] for label in present]
    return album.points(
        position[:, 0],
        position[:, 1],
        group,
        groups,
        title=f"Clients by {usable[0]} after round {last.round}",
        x_label="first coordinate",
        y_label="second coordinate",
        colors=colors,
        names=[name.rpartition("-")[2] for name in names] if len(names) <= _MOST_PLACED else [],
        note="Classical scaling of the similarity matrix: nearby clients are similar. The coordinates have no unit.",
        radius=8,
    )
