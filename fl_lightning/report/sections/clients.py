"""Each client's score, next to that of another run if one is given."""

import math

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.document import Section
from fl_lightning.report.figures import Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.gaps import gap
from fl_lightning.report.pictures import Album, bars_height
from fl_lightning.report.theme import orders
from fl_lightning.report.wording import number, signed


def section(run: Recorded, other: Recorded | None, album: Album) -> Section:
    """The section "Clients"."""
    metric = run.client_metric
    values = run.client_values(metric)
    record = run.record
    if record is None or not values:
        empty = "The scores of single clients were not kept."
        return Section(anchor="clients", title="Clients", empty=empty, notes=_trouble(run))
    theirs = other.client_values(other.client_metric) if other else {}
    names = sorted(values, key=lambda name: values[name], reverse=run.less_is_better)
    sizes = {record.names[index]: float(record.sizes[index]) for index in range(len(record.names))}
    varied = len(set(sizes.values())) > 1
    pictures = [
        album.bars(
            names,
            np.array([values[name] for name in names]),
            title=f"Each client against {other.strategy}" if other else "Each client, worst first",
            x_label=f"{metric}, round {record.best.round if record.best else ''}",
            other=np.array([theirs.get(name, math.nan) for name in names]) if other else None,
            labels=(run.strategy, f"{other.strategy} ({other.name})" if other else ""),
            orders=(0, 1) if other is None else _orders(run, other),
            marked=[] if other else sorted(run.malicious_names & set(names)),
            mark="malicious",
            height=3.6 if varied else 0.0,
        )
    ]
    notes = []
    if other:
        gains = [
            (-1 if run.less_is_better else 1) * gap(values[name], theirs[name]) for name in names if name in theirs
        ]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        notes.append(
            f"Beside {other.strategy}, of {count(len(gains), 'client')}: better {better}, worse {worse}, equal "
            f"{len(gains) - better - worse}; the mean gain is {signed(float(np.mean(gains)) if gains else None)}."
        )
    if varied:
        x = np.array([sizes[name] for name in names])
        y = np.array([values[name] for name in names])
        pictures.append(
            album.points(
                x,
                y,
                [0] * len(names),
                [metric],
                title=f"{metric} over size",
                x_label=f"{record.examples} of the client",
                y_label=metric,
                whole_x=True,
                radius=6,
                height=max(3.6, bars_height(len(names))),
            )
        )
    return Section(
        anchor="clients",
        title="Clients",
        pictures=pictures,
        notes=[*notes, *_unseen_clients(run), *_trouble(run)],
        folded=[_client_table(run, other)],
    )


def _orders(run: Recorded, other: Recorded) -> tuple[int, int]:
    """The colors of two methods; of two runs of one method those of two configurations of it."""
    mine, theirs = orders([run.strategy, other.strategy if other.strategy != run.strategy else f"{run.strategy}, 2"])
    return mine, theirs


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


def _unseen_clients(run: Recorded) -> list[str]:
    record = run.record
    result = record.unseen_clients.get(run.client_metric, {}) if record else {}
    if not result:
        return []
    summary = ", ".join(f"{name} {number(value)}" for name, value in list(result.items())[:20])
    return [
        f"Unseen clients, held out of training, by {run.client_metric}: {summary}{', ...' if len(result) > 20 else ''}."
    ]


def _trouble(run: Recorded) -> list[str]:
    failed = run.column("num_failures")
    quiet = not run.result.get("failures") and (failed is None or failed.max() == 0) and not run.malicious
    return ["No client failed, and nobody was malicious."] if quiet else []
