"""The page of one run.

Shape legend: C clients, T training clients, K classes, R rounds.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_lightning.report.document import Document, Fact, Section
from fl_lightning.report.folder import Column, Recorded
from fl_lightning.report.pictures import Album, Curve, Picture, Table, class_colours
from fl_lightning.report.record import Chosen, Partition, RunRecord, Snapshot
from fl_lightning.report.theme import stand_in
from fl_lightning.report.wording import count, duration, number, setting, signed, size, size_unit

Matrix = NDArray[np.float64]

_STATUS = {"finished": "good", "interrupted": "warn", "failed": "bad", "unknown": "warn"}
_WAYS = {"up": "up to the server", "down": "down to the clients", "peer": "between clients"}
_SPLITS = ("train", "val", "test")
_MODELS = {
    "": "result",
    "trained/": "trained locally, before mixing",
    "gen/": "generated model",
    "benign/": "benign clients",
    "malicious/": "malicious clients",
    "new/": "new clients",
}
#: Matrices that are graphs, and drawn as such beside the heat map.
_GRAPHS = ("adjacency", "relation", "collaboration")
_MOST_CELLS = 20
_MOST_PLACED = 30


def write(run: Recorded, other: Recorded | None, path: Path) -> Path:
    """Write the page of a run, with another run (``Local``, for example) to compare each client with.

    Raises:
        ValueError: The other run is of another partition, or has no scores of single clients.
    """
    return document(run, other).write(path)


def document(run: Recorded, other: Recorded | None = None) -> Document:
    """The page of a run; the arguments are those of :func:`write`."""
    if other is not None:
        _check_partner(run, other)
    album = Album()
    sections = [
        _learning(run, album),
        _clients(run, other, album),
        _predictions(run, album),
        _partition(run, album),
        _collaboration(run, album),
        _embeddings(run, album),
        _cost(run, album),
        _failures(run, album),
        _settings(run),
    ]
    return Document(
        title=_title(run),
        subtitle=_subtitle(run),
        status=(run.status, _STATUS.get(run.status, "warn")),
        alerts=_alerts(run),
        facts=_facts(run),
        sections=sections,
        footer=_footer(run),
    )


# ---------------------------------------------------------------- head and foot


def _title(run: Recorded) -> str:
    source = str(run.flat_settings.get("data.source", ""))
    name = str(run.flat_settings.get("data.source.name", ""))
    return " on ".join(part for part in (run.strategy or "A run", name or source.removesuffix("Source")) if part)


def _subtitle(run: Recorded) -> str:
    parts = [run.name]
    if run.record is not None:
        held_out = len(run.record.names) - len(run.record.training)
        parts.append(count(len(run.record.training), "client") + (f" and {held_out} held out" if held_out else ""))
    seed = run.result.get("seed", run.record.seed if run.record else None)
    return " · ".join([*parts, *([f"seed {seed}"] if seed is not None else [])])


def _alerts(run: Recorded) -> list[str]:
    found = []
    if run.status == "failed":
        found.append(f"The run failed: {run.result.get('error', '')}")
    if run.status == "interrupted":
        found.append("A signal ended the run before its last round; it can be continued with --ckpt_path last.")
    if run.status == "unknown":
        found.append("There is no result.json: the run was killed or is still going on. The figures are those so far.")
    if run.record is None:
        found.append("There is no report.json (callback RunReport), so clients, matrices and embeddings are missing.")
    if not len(run.rounds):
        found.append(
            "There is no metrics.csv (or no round in it), so there are no curves: log with trainer.logger true."
        )
    return found + [f"Settings changed by a resume: {change}" for change in run.result.get("changes", [])]


def _facts(run: Recorded) -> list[Fact]:
    figures, test = run.figures, run.test_metric
    found = []
    if test in figures:
        found.append(
            Fact(name=f"{test}, mean over clients", value=number(figures[test]), more=_plus_minus(figures, test))
        )
    if f"{test}_worst" in figures:
        values = run.client_values(run.client_metric)
        worst = (max if run.less_is_better else min)(values, key=lambda name: values[name]) if values else ""
        found.append(Fact(name="worst client", value=number(figures[f"{test}_worst"]), more=worst))
    if run.chosen_round is not None:
        rounds = f"of {len(run.rounds)}, by {run.monitor} {number(figures.get(run.monitor))}"
        found.append(Fact(name="chosen round (from 0)", value=str(run.chosen_round), more=rounds))
    elif len(run.rounds):
        found.append(Fact(name="rounds", value=str(len(run.rounds)), more="none was evaluated"))
    total = run.column("comm/bytes_total")
    if total is not None:
        found.append(Fact(name="communication", value=size(float(np.nanmax(total))), more="in all rounds"))
    seconds = run.column("seconds")
    if seconds is not None:
        each = duration(float(np.nanmedian(seconds)))
        found.append(Fact(name="time", value=duration(float(np.nansum(seconds))), more=f"{each} a round (median)"))
    failed = sum(run.result.get("failures", {}).values())
    if failed:
        found.append(Fact(name="failures", value=str(failed), more=count(len(run.result["failures"]), "client")))
    return found


def _plus_minus(figures: dict[str, float], name: str) -> str:
    std = figures.get(f"{name}_std")
    return "" if std is None else f"± {number(std)} (standard deviation)"


def _footer(run: Recorded) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.result.get("versions", {}).items())
    partition = run.result.get("partition_hash") or (run.record.partition_hash if run.record else "")
    lines = [f"Versions: {versions}." if versions else "", f"Partition {partition[:12]}." if partition else ""]
    return [*(line for line in lines if line), f"Written anew by: fl-train report {run.path}"]


# ---------------------------------------------------------------- learning


def _learning(run: Recorded, album: Album) -> Section:
    metric = run.monitor.rpartition("/")[2]
    prefix = run.monitor.removesuffix(f"val/{metric}")
    mark = None if run.chosen_round is None else (float(run.chosen_round), f"chosen round {run.chosen_round}")
    pictures = []

    def draw(named: dict[str, Column], title: str, y_label: str, table: Table | None = None, note: str = "") -> None:
        curves = [Curve(label=label, x=run.rounds.astype(float), y=column) for label, column in named.items()]
        if curves:
            pictures.append(
                album.curves(curves, title=title, x_label="round", y_label=y_label, mark=mark, table=table, note=note)
            )

    def found(*names: str, labels: Sequence[str] = ()) -> dict[str, Column]:
        pairs = zip(names, labels or names, strict=True)
        return {label: column for name, label in pairs if (column := run.column(name)) is not None}

    draw(
        found(*(f"{prefix}{split}/{metric}" for split in _SPLITS), labels=_SPLITS),
        "Learning curves",
        f"{metric}, mean over clients",
        _rounds_table(run),
    )
    if spread := _spread(run, album, mark):
        pictures.append(spread)
    if metric != "loss":
        draw(found(*(f"{prefix}{split}/loss" for split in _SPLITS), labels=_SPLITS), "Loss", "mean over clients")
    others = [name for name in run.history if name.endswith(f"/test/{metric}") or name == "test/asr"]
    if others:
        named = [f"test/{metric}", *others]
        labels = [_model(name, f"test/{metric}") for name in named]
        draw(found(*named, labels=labels), "Models of the same rounds", f"test {metric}, mean over clients")
    server = [n for n in run.history if n.startswith("server/") and run.column(n) is not None]
    for name in server[:6]:
        draw(
            {name.removeprefix("server/"): run.history[name]}, "Server", name.removeprefix("server/").replace("_", " ")
        )
    text = "" if not pictures else "Validation alone chooses the round; the test figures are those of that round."
    return Section(
        anchor="learning",
        title="Learning",
        text=text,
        pictures=pictures,
        tables=[table] if (table := _other_figures(run)) else [],
        empty="" if pictures else "No round was evaluated, so there are no curves.",
    )


def _spread(run: Recorded, album: Album, mark: tuple[float, str] | None) -> Picture | None:
    test = run.test_metric
    mean, std, worst = (run.column(f"{test}{kind}") for kind in ("", "_std", "_worst"))
    if mean is None or std is None or worst is None:
        return None
    x = run.rounds.astype(float)
    curves = [
        Curve(label="mean ± standard deviation", x=x, y=mean, low=mean - std, high=mean + std),
        Curve(label="worst client", x=x, y=worst),
    ]
    return album.curves(curves, title="Spread over clients", x_label="round", y_label=test, mark=mark)


def _model(name: str, test: str) -> str:
    if name == "test/asr":
        return "attack success"
    prefix = name.removesuffix(test)
    return _MODELS.get(prefix, prefix.rstrip("/").replace("/", ", "))


def _rounds_table(run: Recorded) -> Table | None:
    metrics = [run.monitor, run.test_metric, f"{run.test_metric}_std", f"{run.test_metric}_worst", "seconds"]
    known = [name for name in metrics if run.column(name) is not None]
    if not known:
        return None
    last = len(run.rounds) - 1
    places = {round(step * last / 10) for step in range(11)}
    if run.chosen_round is not None:
        places |= set(np.flatnonzero(run.rounds == run.chosen_round).tolist())
    rows = [[str(run.rounds[place]), *(number(run.history[name][place]) for name in known)] for place in sorted(places)]
    return Table(title="Some of the rounds", columns=["round", *known], rows=rows)


def _other_figures(run: Recorded) -> Table | None:
    """Every model's figures at the chosen round."""
    figures = run.figures
    names = [name for name in figures if f"{name}_std" in figures and "test/" in name]
    rows = [
        [_model(name, run.test_metric) if name.endswith(run.test_metric) else name]
        + [number(figures.get(f"{name}{kind}")) for kind in ("", "_std", "_worst", "_weighted")]
        for name in names
        if not name.endswith("loss") or run.test_metric.endswith("loss")
    ]
    if not rows:
        return None
    columns = [f"{run.test_metric} at the chosen round", "mean", "std", "worst client", "weighted by size"]
    return Table(title="Figures of the chosen round", columns=columns, rows=rows)


# ---------------------------------------------------------------- clients


def _check_partner(run: Recorded, other: Recorded) -> None:
    """Refuse runs whose clients are not the same."""
    for each in (run, other):
        if not each.client_values(each.client_metric):
            raise ValueError(f"{each.path} has no scores of single clients (report.json): train it with RunReport")
    assert run.record is not None
    assert other.record is not None
    if run.record.partition_hash != other.record.partition_hash:
        raise ValueError(
            f"{other.path} is of another partition than {run.path} (or another data set or split): compare runs with "
            "the same data settings and data.seed"
        )


def _clients(run: Recorded, other: Recorded | None, album: Album) -> Section:
    metric = run.client_metric
    values = run.client_values(metric)
    record = run.record
    if record is None or not values:
        return Section(anchor="clients", title="Clients", empty="The scores of single clients were not kept.")
    theirs = other.client_values(other.client_metric) if other else {}
    names = sorted(values, key=lambda name: values[name], reverse=run.less_is_better)
    pictures = [
        album.bars(
            names,
            np.array([values[name] for name in names]),
            title=f"Each client against {other.strategy}" if other else "Each client, worst first",
            x_label=f"{metric}, round {record.chosen.round if record.chosen else ''}",
            other=np.array([theirs.get(name, math.nan) for name in names]) if other else None,
            labels=(run.strategy, f"{other.strategy} ({other.name})" if other else ""),
            marked=[] if other else sorted(_malicious(run) & set(names)),
            mark="malicious",
        )
    ]
    notes = []
    if other:
        gains = [(-1 if run.less_is_better else 1) * (values[name] - theirs[name]) for name in names if name in theirs]
        better, worse = sum(gain > 1e-9 for gain in gains), sum(gain < -1e-9 for gain in gains)
        notes.append(
            f"Of {count(len(gains), 'client')}, {better} do better than under {other.strategy}, {worse} worse, "
            f"{len(gains) - better - worse} equally; the mean gain is {signed(float(np.mean(gains)))}."
        )
    sizes = {record.names[index]: float(record.sizes[index]) for index in range(len(record.names))}
    if len(set(sizes.values())) > 1:
        x = np.array([sizes[name] for name in names])
        y = np.array([values[name] for name in names])
        pictures.append(
            album.points(
                x,
                y,
                [0] * len(names),
                [metric],
                title=f"{metric} over size",
                x_label=f"{'nodes' if record.kind == 'graphs' else 'examples'} of the client",
                y_label=metric,
                radius=6,
            )
        )
    return Section(
        anchor="clients",
        title="Clients",
        pictures=pictures,
        notes=notes + _newcomers(run),
        folded=[_client_table(run, other)],
    )


def _malicious(run: Recorded) -> set[str]:
    return {name for members in run.malicious.values() for name in members}


def _client_table(run: Recorded, other: Recorded | None) -> Table:
    record, metric = run.record, run.client_metric
    assert record is not None
    test, val = run.client_values(metric), run.client_values(metric.replace("test/", "val/"))
    theirs = other.client_values(other.client_metric) if other else {}
    extra = [f"{other.strategy} {metric}", "difference"] if other else []
    rows = []
    for index in record.training:
        name = record.names[index]
        both = name in test and name in theirs
        row = [name, number(record.sizes[index]), number(val.get(name)), number(test.get(name))]
        if other:
            row += [number(theirs.get(name)), signed(test[name] - theirs[name]) if both else "–"]
        rows.append(row)
    return Table(
        title="Table of the clients",
        columns=["client", "size", metric.replace("test/", "val/"), metric, *extra],
        rows=rows,
    )


def _newcomers(run: Recorded) -> list[str]:
    record = run.record
    found = record.newcomers.get(run.client_metric, {}) if record else {}
    if not found:
        return []
    told = ", ".join(f"{name} {number(value)}" for name, value in list(found.items())[:20])
    return [f"New clients, held out of training, by {run.client_metric}: {told}{', ...' if len(found) > 20 else ''}."]


# ---------------------------------------------------------------- predictions


def _predictions(run: Recorded, album: Album) -> Section:
    chosen = run.record.chosen if run.record else None
    title = "Predictions"
    if chosen is not None and chosen.confusion is not None:
        return _confusion(chosen, np.array(chosen.confusion, dtype=float), album)
    if chosen is not None and chosen.predicted is not None:
        target, predicted = np.array(chosen.predicted, dtype=float).reshape(-1, 2).T
        residual = float(np.mean((predicted - target) ** 2)) if len(target) else math.nan
        picture = album.points(
            target,
            predicted,
            [0] * len(target),
            ["examples"],
            title="Predicted over true values",
            x_label="true value",
            y_label="prediction",
            diagonal=True,
            note=f"A sample of {count(len(target), 'test example')} at round {chosen.round}; its mean squared error is "
            f"{number(residual)}. On the dashed line predictions are right.",
        )
        return Section(anchor="predictions", title=title, pictures=[picture])
    return Section(anchor="predictions", title=title, empty="No predictions were kept.")


def _confusion(chosen: Chosen, counts_KK: Matrix, album: Album) -> Section:
    names = [str(label) for label in range(len(counts_KK))]
    total_K = counts_KK.sum(axis=1)
    share_KK = counts_KK / np.maximum(total_K, 1)[:, None]
    right = np.diagonal(counts_KK)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall, precision = right / total_K, right / counts_KK.sum(axis=0)
        f1 = 2 * right / (total_K + counts_KK.sum(axis=0))
    few = len(names) <= _MOST_CELLS
    cells = [[f"{value:.0f}" if value else "" for value in row] for row in counts_KK] if few else None
    rows = [
        [name, number(total_K[k]), number(recall[k]), number(precision[k]), number(f1[k])]
        for k, name in enumerate(names)
    ]
    macro = float(np.nanmean(recall)) if np.isfinite(recall).any() else math.nan
    picture = album.heat(
        share_KK,
        names,
        title="Confusion matrix of the test examples",
        x_label="predicted class",
        y_label="true class",
        limits=(0.0, 1.0),
        cells=cells,
        note="The colour is the share of the true class; the numbers are test examples of all clients together.",
    )
    recalls = album.bars(
        [f"class {name}" for name in names], recall, title="Recall of the classes", x_label="share found, 0 to 1"
    )
    return Section(
        anchor="predictions",
        title="Predictions",
        text=f"The result's models at round {chosen.round}: of {number(float(total_K.sum()))} test examples of all "
        f"training clients {number(float(right.sum()))} are right; the mean recall of the classes (balanced accuracy) "
        f"is {number(macro)}.",
        pictures=[picture, recalls],
        folded=[
            Table(title="Table of the classes", columns=["class", "examples", "recall", "precision", "F1"], rows=rows)
        ],
    )


# ---------------------------------------------------------------- partition


def _partition(run: Recorded, album: Album) -> Section:
    record = run.record
    partition = record.partition if record else None
    if record is None or partition is None:
        empty = "How the data are shared out was not kept."
        return Section(anchor="partition", title="Data and partition", empty=empty)
    names = [str(row[0]) for row in partition.rows]
    what = "nodes" if record.kind == "graphs" else "examples"
    pictures = []
    if partition.labels:
        counts = np.array(partition.labels, dtype=float)
        groups = [f"class {label}" for label in range(counts.shape[1])]
        pictures.append(album.stacked(names, counts, groups, title="Labels of the clients", x_label=f"labelled {what}"))
    splits = [column for column in ("num_train", "num_val", "num_test") if column in partition.columns]
    counts = np.array([[_cell(partition, row, column) for column in splits] for row in range(len(names))])
    groups = [column.removeprefix("num_") for column in splits]
    pictures.append(album.stacked(names, counts, groups, title="Split of the clients", x_label=what))
    if record.kind == "graphs" and "edges_lost" in partition.columns:
        edges = np.array(
            [[_cell(partition, row, column) for column in ("num_edges", "edges_lost")] for row in range(len(names))]
        )
        pictures.append(
            album.stacked(names, edges, ["kept", "cut off"], title="Edges of the clients", x_label="directed edges")
        )
    facts = [Fact(name="clients", value=number(len(names))), Fact(name=what, value=number(float(sum(record.sizes))))]
    if partition.heterogeneity is not None:
        more = "median Jensen-Shannon distance of labels, 0 to 0.833"
        facts.append(Fact(name="heterogeneity", value=number(partition.heterogeneity), more=more))
    if record.kind == "graphs" and "clustering" in partition.columns:
        mean = float(np.mean([_cell(partition, row, "clustering") for row in range(len(names))]))
        facts.append(Fact(name="clustering coefficient", value=number(mean), more="mean over clients"))
    header = ["client", *(column.removeprefix("num_").replace("_", " ") for column in partition.columns[1:])]
    rows = [[name, *(number(float(cell)) for cell in row[1:])] for name, row in zip(names, partition.rows, strict=True)]
    return Section(
        anchor="partition",
        title="Data and partition",
        facts=facts,
        pictures=pictures,
        folded=[Table(title="Table of the partition", columns=header, rows=rows), *_label_table(partition, names)],
    )


def _cell(partition: Partition, row: int, column: str) -> float:
    return float(partition.rows[row][partition.columns.index(column)])


def _label_table(partition: Partition, names: Sequence[str]) -> list[Table]:
    if not partition.labels:
        return []
    rows = [[name, *(number(value) for value in row)] for name, row in zip(names, partition.labels, strict=True)]
    columns = ["client", *(str(label) for label in range(len(partition.labels[0])))]
    return [Table(title="Table of the labels", columns=columns, rows=rows)]


# ---------------------------------------------------------------- collaboration


def _collaboration(run: Recorded, album: Album) -> Section:
    record = run.record
    anchor, title = "collaboration", "Collaboration"
    if record is None or not record.snapshots:
        empty = f"{run.strategy or 'The strategy'} has no matrix over the clients, and no parameters were sent."
        if record is not None and record.unkept:
            empty = "No matrices over the clients were kept."
        return Section(anchor=anchor, title=title, empty=empty, notes=_unkept(record, "matri", "cosines"))
    names = [record.names[client] for client in record.training]
    pictures: list[Picture] = []
    by_name: dict[str, list[Snapshot]] = {}
    for snapshot in record.snapshots:
        by_name.setdefault(snapshot.name, []).append(snapshot)
    for name, kept in by_name.items():
        pictures += _matrices(name, kept, names, album, sorted(_malicious(run)))
    if placed := _placed(record, by_name, names, album, _malicious(run)):
        pictures.append(placed)
    text = (
        "Matrices over the training clients after some rounds, client i by client j; each has the scale of its entries "
        "off the diagonal, and one that did not change is shown once."
    )
    notes = _unkept(record, "matri", "cosines")
    return Section(anchor=anchor, title=title, text=text, pictures=pictures, small=True, notes=notes)


def _unkept(record: RunRecord | None, *words: str) -> list[str]:
    found = record.unkept if record else []
    return [f"Left out: {why}." for why in found if any(word in why for word in words)]


def _matrices(
    name: str, kept: Sequence[Snapshot], names: Sequence[str], album: Album, marked: Sequence[str]
) -> Iterator[Picture]:
    """Heat maps; of graphs also the last one as a graph."""
    shown = {snapshot.round: snapshot.matrix().astype(float) for snapshot in kept}
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


def _limits(matrix: Matrix) -> tuple[float, float]:
    """Smallest and largest entry off the diagonal, so that structure shows where all are nearly alike."""
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    off = off[np.isfinite(off)]
    low, high = (float(off.min()), float(off.max())) if len(off) else (0.0, 1.0)
    return (low, high) if low < high else (min(0.0, low), max(high, 1e-12))


def _pairs(matrix: Matrix, names: Sequence[str]) -> Table:
    """All entries of a small matrix, the largest ones off the diagonal of a large one."""
    if len(names) <= _MOST_CELLS:
        rows = [[name, *(number(value) for value in row)] for name, row in zip(names, matrix, strict=True)]
        return Table(title="Table", columns=["", *names], rows=rows)
    masked = np.where(np.eye(len(matrix), dtype=bool) | ~np.isfinite(matrix), -np.inf, matrix)
    order = np.argsort(masked, axis=None, kind="stable")[::-1][:20]
    found = [divmod(int(place), len(names)) for place in order]
    rows = [[f"{names[i]}, {names[j]}", number(float(matrix[i, j]))] for i, j in found if np.isfinite(masked[i, j])]
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
    centred = cosines - cosines.mean(axis=0)
    centred -= centred.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    place = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    group, groups, colours = [0] * len(names), ["clients"], list[str]()
    if malicious:
        group, groups = [int(name in malicious) for name in names], ["benign", "malicious"]
    elif record.partition and record.partition.labels:
        most = [int(np.argmax(record.partition.labels[client])) for client in record.training]
        present = sorted(set(most))
        group, groups = [present.index(label) for label in most], [f"mostly class {label}" for label in present]
        of_classes = class_colours(len(record.partition.labels[0]))
        colours = [of_classes[label] for label in present]
    return album.points(
        place[:, 0],
        place[:, 1],
        group,
        groups,
        title=f"Clients by {usable[0]} after round {last.round}",
        x_label="first coordinate",
        y_label="second coordinate",
        colours=colours,
        names=[name.rpartition("-")[2] for name in names] if len(names) <= _MOST_PLACED else [],
        note="Classical scaling of the matrix of similarities: near clients are alike. The coordinates have no unit.",
        radius=8,
    )


# ---------------------------------------------------------------- embeddings


def _embeddings(run: Recorded, album: Album) -> Section:
    record = run.record
    points = record.points if record else None
    anchor, title = "embeddings", "Embeddings"
    if record is None or points is None or not points.x:
        return Section(anchor=anchor, title=title, empty="No embeddings were kept.", notes=_unkept(record, "embedding"))
    x, y = np.array(points.x), np.array(points.y)
    what = "nodes" if record.kind == "graphs" else "examples"
    first, second = (f"{axis} principal component" for axis in ("first", "second"))
    pictures = []
    if not record.regression:
        classes = 1 + max((int(label) for label in points.label if label is not None), default=0)
        if record.partition and record.partition.labels:
            classes = len(record.partition.labels[0])
        groups, colours = [f"class {label}" for label in range(classes)], class_colours(classes)
        group = [classes if label is None else int(label) for label in points.label]
        if classes in group:
            groups, colours = [*groups, "unknown"], [*colours, stand_in("faint")]
        pictures.append(
            album.points(
                x,
                y,
                group,
                groups,
                title=f"{what.capitalize()} by class",
                x_label=first,
                y_label=second,
                colours=colours,
            )
        )
    members = sorted(set(points.client))
    pictures.append(
        album.points(
            x,
            y,
            [members.index(client) for client in points.client],
            [record.names[client] for client in members],
            title=f"{what.capitalize()} by client",
            x_label=first,
            y_label=second,
            note="" if len(members) <= 20 else f"{len(members)} clients, each with a colour of its own.",
        )
    )
    shares = " and ".join(f"{100 * share:.0f} %" for share in points.explained)
    return Section(
        anchor=anchor,
        title=title,
        text=f"The last layer before the read-out of {len(x):,} of {points.total:,} {what}, by each client's own model "
        f"as round {points.round} left it, on two principal components, which explain {shares} of the variance.",
        pictures=pictures,
    )


# ---------------------------------------------------------------- bytes and time


def _cost(run: Recorded, album: Album) -> Section:
    x = run.rounds.astype(float)
    pictures: list[Picture] = []
    ways = {
        way: column for way in _WAYS if (column := run.column(f"comm/bytes_{way}")) is not None and column.max() > 0
    }
    if ways:
        totals = {way: np.nancumsum(column) for way, column in ways.items()}
        factor, unit = size_unit(max(float(column[-1]) for column in totals.values()))
        curves = [Curve(label=_WAYS[way], x=x, y=column / factor) for way, column in totals.items()]
        rows = [[_WAYS[way], size(float(c[-1])), size(float(np.nanmedian(ways[way])))] for way, c in totals.items()]
        pictures.append(
            album.curves(
                curves,
                title="Bytes sent since the beginning",
                x_label="round",
                y_label=unit,
                from_zero=True,
                note="Of the payloads themselves, without what a network adds.",
                table=Table(title="Table", columns=["way", "all rounds", "a round (median)"], rows=rows),
            )
        )
    seconds = run.column("seconds")
    if seconds is not None:
        pictures.append(
            album.curves(
                [Curve(label="a round", x=x, y=seconds)],
                title="Time of the rounds",
                x_label="round",
                y_label="seconds",
                from_zero=True,
            )
        )
    timing = run.record.timing if run.record else None
    notes = []
    if timing is not None and timing.num_rounds:
        each = {name: 1000 * value / timing.num_rounds for name, value in timing.seconds.items()}
        whole = sum(each.values()) or 1.0
        rows = [[name, f"{value:,.3g}", f"{100 * value / whole:.1f} %"] for name, value in each.items()]
        pictures.append(
            album.shares(
                each,
                title="Where the time goes",
                x_label="milliseconds a round",
                table=Table(title="Table", columns=["part", "ms a round", "share"], rows=rows),
            )
        )
        if timing.first_round:
            notes.append(f"The parts were timed from round {timing.first_round} on, where the run was resumed.")
    if not ways and seconds is not None:
        notes.append("Nothing travelled." if run.column("comm/bytes_total") is not None else "Bytes were not counted.")
    machine = run.record.machine if run.record else {}
    facts = [Fact(name=name, value=value) for name, value in machine.items()]
    empty = "" if pictures else "Neither bytes nor seconds were logged."
    return Section(
        anchor="cost", title="Communication and time", pictures=pictures, facts=facts, notes=notes, empty=empty
    )


# ---------------------------------------------------------------- failures and attacks


def _failures(run: Recorded, album: Album) -> Section:
    x = run.rounds.astype(float)
    pictures, tables, notes = [], [], []
    columns = {"took part": "num_participants", "failed or dropped out": "num_failures"}
    found = {label: column for label, name in columns.items() if (column := run.column(name)) is not None}
    trouble = [column for name in ("num_failures", "void") if (column := run.column(name)) is not None]
    partial = found.get("took part")
    if any(column.max() > 0 for column in trouble) or (partial is not None and partial.min() < partial.max()):
        curves = [Curve(label=label, x=x, y=column) for label, column in found.items()]
        pictures.append(album.curves(curves, title="Participation", x_label="round", y_label="clients", from_zero=True))
    failures = run.result.get("failures", {})
    if failures:
        rows = [[name, number(times)] for name, times in sorted(failures.items(), key=lambda item: -item[1])]
        tables.append(Table(title="Failures", columns=["client", "failures"], rows=rows))
    causes = run.record.failures if run.record else []
    folded = []
    if causes:
        rows = [[f"{round_idx}: {name}", why] for round_idx, name, why in causes]
        folded.append(Table(title=f"The first {count(len(causes), 'failure')}", columns=["round", "cause"], rows=rows))
    void = run.column("void")
    if void is not None and void.max() > 0:
        notes.append(f"{count(int(np.nansum(void)), 'round')} had too few answers, and the server took nothing in.")
    for attack, members in run.malicious.items():
        notes.append(f"Attack {attack}: {', '.join(members) or 'nobody'} ({count(len(members), 'client')}).")
    if run.malicious and (picture := _attack(run, album)):
        pictures.append(picture)
    nothing = not (pictures or tables or notes)
    return Section(
        anchor="failures",
        title="Failures and attacks",
        pictures=pictures,
        tables=tables,
        folded=folded,
        notes=notes,
        empty="No client failed, and nobody was malicious." if nothing else "",
    )


def _attack(run: Recorded, album: Album) -> Picture | None:
    test = run.test_metric.removeprefix("benign/")
    named = {
        "all clients": test,
        "benign clients": f"benign/{test}",
        "attack success": "test/asr",
        "attack success, malicious clients": "malicious/test/asr",
    }
    x = run.rounds.astype(float)
    curves = [Curve(label=label, x=x, y=run.history[n]) for label, n in named.items() if run.column(n) is not None]
    return album.curves(curves, title="Under attack", x_label="round", y_label=test) if curves else None


# ---------------------------------------------------------------- settings


def _settings(run: Recorded) -> Section:
    flat = run.flat_settings
    if not flat:
        return Section(anchor="settings", title="Settings", empty="There is no config.yaml, and no settings were kept.")
    groups: dict[str, list[list[str]]] = {}
    for name, value in flat.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, []).append([rest or name, setting(value)])
    order = [name for name in ("strategy", "model", "data", "trainer") if name in groups]
    loose = [[name, rows[0][1]] for name, rows in groups.items() if name not in order and len(rows) == 1]
    many = [name for name, rows in groups.items() if name not in order and len(rows) > 1]
    folded = [Table(title=name, columns=["setting", "value"], rows=groups[name]) for name in [*order, *many]]
    if loose:
        folded.append(Table(title="others", columns=["setting", "value"], rows=loose))
    sources = run.result.get("config_sources") or []
    notes = [f"From {', '.join(sources)}." if sources else "", f"Saved as {run.result.get('config')}."]
    return Section(
        anchor="settings",
        title="Settings",
        folded=folded,
        notes=[note for note in notes if note and "None" not in note and note != "Saved as ."],
    )
