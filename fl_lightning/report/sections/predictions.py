"""What was predicted: a confusion matrix, or predictions over true values. Shape legend: K classes."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_lightning.counts import count
from fl_lightning.report.document import Section
from fl_lightning.report.figures import Picture, Table, Values
from fl_lightning.report.folder import Recorded
from fl_lightning.report.matrix_pictures import HEIGHT, MOST_RUNS
from fl_lightning.report.pictures import Album
from fl_lightning.report.record import BestRound, RunRecord
from fl_lightning.report.sections import links
from fl_lightning.report.wording import number

#: Clients whose own classes are drawn.
_MOST_OWN = 12


def section(run: Recorded, album: Album) -> Section:
    """The section "Predictions"."""
    record = run.record
    chosen = record.best if record else None
    title = "Predictions"
    if record is not None and chosen is not None and chosen.confusion is not None:
        return _confusion(record, chosen, np.array(chosen.confusion, dtype=float), album)
    if record is not None and chosen is not None and chosen.own:
        return _own(record, chosen, album)
    if chosen is not None and chosen.label_counts is not None:
        return _labels(chosen, np.array(chosen.label_counts, dtype=float), album)
    if chosen is not None and chosen.scored is not None:
        return links.section(chosen, _finite(chosen.scored), album)
    if chosen is not None and chosen.predicted is not None and len(pairs_P2 := _finite(chosen.predicted)):
        target, predicted = pairs_P2.T
        residual = float(np.mean((predicted - target) ** 2))
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


def _finite(pairs: Sequence[Sequence[float | None]]) -> Values:
    """Targets with their predictions, (P, 2), without those that overflowed."""
    pairs_P2 = np.array(pairs, dtype=float).reshape(-1, 2)
    finite: Values = pairs_P2[np.isfinite(pairs_P2).all(axis=1)]
    return finite


def _confusion(record: RunRecord, chosen: BestRound, counts_KK: Values, album: Album) -> Section:
    names = [record.class_name(label) for label in range(len(counts_KK))]
    total_K = counts_KK.sum(axis=1)
    right = np.diagonal(counts_KK)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall, precision = right / total_K, right / counts_KK.sum(axis=0)
        f1 = 2 * right / (total_K + counts_KK.sum(axis=0))
    rows = [
        [name, number(total_K[k]), number(recall[k]), number(precision[k]), number(f1[k])]
        for k, name in enumerate(names)
    ]
    macro = float(np.nanmean(recall)) if np.isfinite(recall).any() else math.nan
    note = "The color is the share of the true class; the numbers are test examples of all clients together."
    picture = _matrix(record, counts_KK, album, title="Confusion matrix of the test examples", note=note)
    recalls = album.bars(
        names,
        recall,
        title="Recall of the classes",
        x_label="share found, 0 to 1",
        height=HEIGHT,
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


def _matrix(
    record: RunRecord, counts_KK: Values, album: Album, *, title: str, note: str = "", height: float = HEIGHT
) -> Picture:
    """Test examples of each class (row) that were taken for each class (column)."""
    few = len(counts_KK) <= MOST_RUNS
    return album.heat(
        counts_KK / np.maximum(counts_KK.sum(axis=1), 1)[:, None],
        record.class_names or [str(label) for label in range(len(counts_KK))],
        title=title,
        x_label="predicted class",
        y_label="true class",
        limits=(0.0, 1.0),
        cells=[[f"{value:.0f}" if value else "" for value in row] for row in counts_KK] if few else None,
        note=note,
        height=height,
    )


def _own(record: RunRecord, chosen: BestRound, album: Album) -> Section:
    """Classes or labels that mean something else for each client: none are added up."""
    of_clients = {name: np.array(counts, dtype=float) for name, counts in chosen.own.items()}
    drawn = list(of_clients.items())[:_MOST_OWN]
    more = f" The first {_MOST_OWN} of {len(of_clients)} clients are drawn." if len(of_clients) > _MOST_OWN else ""
    text = f"The result's models at round {chosen.round} on the test examples of each client."
    if next(iter(of_clients.values())).ndim == 2:
        text += " Classes are each client's own. The color is the share of the true class, the numbers are examples."
        height = min(HEIGHT, 1.2 + 0.5 * max(len(counts_KK) for _, counts_KK in drawn))
        pictures = [_matrix(record, counts_KK, album, title=name, height=height) for name, counts_KK in drawn]
    else:
        text += " Labels are each client's own; one is predicted if its probability is above one half."
        pictures = [
            album.bars(
                [f"label {label}" for label in range(len(counts_K22))],
                _f1(counts_K22),
                title=name,
                x_label="F1, 0 to 1",
            )
            for name, counts_K22 in drawn
        ]
    return Section(anchor="predictions", title="Predictions", text=text + more, pictures=pictures)


def _f1(counts_K22: Values) -> Values:
    """Of each label; nan where no example has it and none is said to."""
    right_K = counts_K22[:, 1, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(2 * right_K / (counts_K22[:, 1].sum(axis=1) + counts_K22[:, :, 1].sum(axis=1)))


def _labels(chosen: BestRound, counts_K22: NDArray[np.float64], album: Album) -> Section:
    """For each label, which examples have it (row) and for which it is predicted (column)."""
    names = [str(label) for label in range(len(counts_K22))]
    have_K, said_K, right_K = counts_K22[:, 1].sum(axis=1), counts_K22[:, :, 1].sum(axis=1), counts_K22[:, 1, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        recall, precision, f1 = right_K / have_K, right_K / said_K, _f1(counts_K22)
    rows = [
        [name, *(number(values[k]) for values in (counts_K22.sum(axis=(1, 2)), have_K, recall, precision, f1))]
        for k, name in enumerate(names)
    ]
    bars = album.bars([f"label {name}" for name in names], f1, title="F1 of the labels", x_label="F1, 0 to 1")
    return Section(
        anchor="predictions",
        title="Predictions",
        text=f"The result's models at round {chosen.round} on the test examples of all training clients; a label is "
        "predicted if its probability is above one half.",
        pictures=[bars],
        folded=[
            Table(
                title="Table of the labels",
                columns=["label", "examples", "have it", "recall", "precision", "F1"],
                rows=rows,
            )
        ],
    )
