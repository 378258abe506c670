"""How links are told from pairs without a link: the distribution of scores, and the ROC curve."""

import math

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.document import Section
from fl_lightning.report.figures import Curve, Values
from fl_lightning.report.pictures import Album
from fl_lightning.report.record import BestRound
from fl_lightning.report.wording import number

#: Intervals of the distribution, and points of the ROC curve.
_INTERVALS, _POINTS = 20, 101


def section(chosen: BestRound, scored_P2: Values, album: Album) -> Section:
    """The section "Predictions" of link prediction."""
    linked_P, score_P = scored_P2[:, 0] > 0.5, scored_P2[:, 1]
    links, others = np.sort(score_P[linked_P]), np.sort(score_P[~linked_P])
    if not len(links) or not len(others):
        return Section(anchor="predictions", title="Predictions", empty="No test links, or none to compare them with.")
    edges = np.linspace(0, 1, _INTERVALS + 1)
    shares = [np.histogram(each, edges)[0] / len(each) for each in (links, others)]
    middle = (edges[1:] + edges[:-1]) / 2
    distribution = album.curves(
        [Curve(label=label, x=middle, y=share) for label, share in zip(("links", "no links"), shares, strict=True)],
        title="Scores of the test pairs",
        x_label="score, the probability of a link",
        y_label=f"share in {_INTERVALS} intervals",
        from_zero=True,
        note=f"A sample of {count(len(links), 'test link')} and {count(len(others), 'pair')} without a link, of all "
        "clients.",
    )
    false_T, true_T = roc(links, others)
    area = float(np.sum(np.diff(false_T) * (true_T[1:] + true_T[:-1]) / 2))
    level = np.linspace(0, 1, _POINTS)
    curves = [Curve(label="ROC", x=level, y=np.interp(level, false_T, true_T)), Curve(label="chance", x=level, y=level)]
    picture = album.curves(
        curves,
        title="ROC curve",
        x_label="share of pairs without a link that pass the threshold",
        y_label="share of links that pass",
        from_zero=True,
        note="Of all clients together; the metric is the mean of each client's own area.",
    )
    return Section(
        anchor="predictions",
        title="Predictions",
        text=f"The result's models at round {chosen.round} on the pairs of the fixed test pools: the area under the "
        f"ROC curve of all clients together is {number(area if math.isfinite(area) else None)}.",
        pictures=[distribution, picture],
    )


def roc(links: Values, others: Values) -> tuple[Values, Values]:
    """Shares of the pairs without a link and of the links that score at least as high as each threshold, ascending.

    Args:
        links: Scores of the links, ascending.
        others: Scores of the other pairs, ascending.

    Example:
        >>> false, true = roc(np.array([0.4, 0.9]), np.array([0.1, 0.4]))
        >>> false.tolist(), true.tolist()
        ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    threshold_T = np.unique(np.concatenate([links, others]))[::-1]
    passed = [1 - np.searchsorted(each, threshold_T) / len(each) for each in (others, links)]
    false_T, true_T = (np.concatenate([[0.0], each]) for each in passed)
    return false_T, true_T
