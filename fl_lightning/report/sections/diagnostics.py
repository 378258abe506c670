"""What the method logs about itself, and matrices over the clients: as heat maps, as graphs, as places in the plane."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.report import meanings
from fl_lightning.report.axes import class_colors
from fl_lightning.report.document import Group, Section
from fl_lightning.report.figures import Curve, Picture, Table, Values
from fl_lightning.report.folder import Recorded
from fl_lightning.report.matrix_pictures import MOST_RUNS
from fl_lightning.report.pictures import Album
from fl_lightning.report.record import RunRecord
from fl_lightning.report.wording import number, short_names

#: Matrices that are graphs, which are also drawn as such.
_GRAPHS = ("adjacency", "relation", "collaboration")
_MOST_PLACED = 30
_MOST_METRICS = 12


def section(run: Recorded, album: Album) -> Section:
    """The section "Diagnostics"."""
    record = run.record
    anchor, title = "diagnostics", f"Diagnostics of {run.strategy}" if run.strategy else "Diagnostics"
    groups = [*_metrics(run, album), *(_matrices(run, record, album) if record else [])]
    notes = record.left_out("matri", "cosines") if record else []
    empty = ""
    if not groups:
        empty = f"{run.strategy or 'The strategy'} logs no metrics of its own and has no matrix over the clients."
        if notes:
            empty = "No matrices over the clients were kept."
    text = "What the method says about itself, which decides nothing and may explain the result." if groups else ""
    return Section(anchor=anchor, title=title, text=text, groups=groups, notes=notes, empty=empty)


def _metrics(run: Recorded, album: Album) -> list[Group]:
    """The curves of the server's metrics that changed; those that did not are told in words."""
    x = run.rounds.astype(float)
    mark = None if run.best_round is None else (float(run.best_round), f"best round {run.best_round}")
    pictures, constant = list[Picture](), list[str]()
    for full in run.history:
        column = run.column(full) if full.startswith("server/") else None
        if column is None:
            continue
        title, text = meanings.metric(full.removeprefix("server/"))
        known = column[np.isfinite(column)]
        if known.min() == known.max():
            constant.append(f"{title} {number(float(known[0]))}")
        elif len(pictures) < _MOST_METRICS:
            curves = [Curve(label=full, x=x, y=column)]
            pictures.append(album.curves(curves, title=title, x_label="round", y_label=title, mark=mark, note=text))
    if not pictures and not constant:
        return []
    text = "Logged by the server after each round."
    text += f" The same in all rounds: {'; '.join(constant)}." if constant else ""
    return [Group(title="The server's metrics", text=text, pictures=pictures)]


def _matrices(run: Recorded, record: RunRecord, album: Album) -> list[Group]:
    names = [record.names[client] for client in record.training]
    by_name: dict[str, dict[int, Values]] = {}
    for snapshot in record.snapshots:
        shown = by_name.setdefault(snapshot.name, {})
        matrix = snapshot.matrix().astype(float)
        if not shown or not np.array_equal(shown[max(shown)], matrix, equal_nan=True):
            shown[snapshot.round] = matrix
    groups = []
    for name, shown in by_name.items():
        title = name.replace("_", " ").capitalize()
        is_graph = any(word in name for word in _GRAPHS) and len(names) > 1
        rounds = _some(list(shown), 2 if is_graph else 3)
        pictures = [_heat(f"{title} after round {each}", shown[each], names, album) for each in rounds]
        if is_graph:
            last, marked = rounds[-1], sorted(run.malicious_names)
            pictures.append(
                album.network(shown[last], names, title=f"{title} after round {last}, as a graph", marked=marked)
            )
        text = f"{meanings.matrix(name)} Client i by client j; the color has the scale of the entries off the diagonal."
        if len(shown) == 1:
            text += " It did not change."
        groups.append(Group(title=title, text=text.strip(), pictures=pictures))
    if placed := _placed(record, by_name, names, album, run.malicious_names):
        text = "Classical scaling of the similarity matrix: nearby clients are similar. The coordinates have no unit."
        groups.append(Group(title="The clients in the plane", text=text, pictures=[placed]))
    return groups


def _some(rounds: Sequence[int], number_of: int) -> list[int]:
    """The first, the last, and those evenly between them."""
    steps = min(number_of, len(rounds))
    return [rounds[round(step * (len(rounds) - 1) / max(1, steps - 1))] for step in range(steps)]


def _heat(title: str, matrix: Values, names: Sequence[str], album: Album) -> Picture:
    limits, table = _limits(matrix), _pairs(matrix, names)
    return album.heat(matrix, names, title=title, x_label="client j", y_label="client i", limits=limits, table=table)


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
    record: RunRecord, by_name: dict[str, dict[int, Values]], names: Sequence[str], album: Album, malicious: set[str]
) -> Picture | None:
    """Clients in the plane, at distances like their dissimilarity in the last matrix of cosines."""
    usable = [name for name in by_name if not any(word in name for word in (*_GRAPHS, "norms", "mixing"))]
    if not usable or len(names) < 3:
        return None
    last, cosines = max(by_name[usable[0]].items())
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
        group, groups = (
            [present.index(label) for label in most],
            [f"mostly {record.class_name(label)}" for label in present],
        )
        of_classes = class_colors(len(record.partition.labels[0]))
        colors = [of_classes[label] for label in present]
    return album.points(
        position[:, 0],
        position[:, 1],
        group,
        groups,
        title=f"Clients by {usable[0]} after round {last}",
        x_label="first coordinate",
        y_label="second coordinate",
        colors=colors,
        names=short_names(names) if len(names) <= _MOST_PLACED else [],
        radius=8,
    )
