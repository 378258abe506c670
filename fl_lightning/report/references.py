"""The references of a run (``trainer.references``) in pictures: a level line each, which bound what methods come to."""

from collections.abc import Iterable, Sequence

import numpy as np

from fl_lightning.report.figures import Curve
from fl_lightning.report.folder import Recorded
from fl_lightning.report.theme import NUM_SERIES, orders


def levels(
    runs: Iterable[Recorded], metric: str, curves: Sequence[Curve], label: str, *, beside: Sequence[str] = ()
) -> list[Curve]:
    """A broken line for each reference: its metric at its own best round, mean over the runs that have it.

    Args:
        runs: The runs.
        metric: Which metric.
        curves: The other lines of the picture, which they are as long as.
        label: Goes behind the reference's name in the legend.
        beside: Configurations whose colors are taken.
    """
    if not curves:
        return []
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.reference(metric).items():
            found.setdefault(name, []).append(value)
    x = np.concatenate([curve.x for curve in curves])
    labels = list(dict.fromkeys([*beside, *found]))
    order = dict(zip(labels, orders(labels), strict=True))
    order = {
        name: place if place >= NUM_SERIES else place + NUM_SERIES for name, place in order.items()
    }  # no solid lines
    ends = np.array([x.min(), x.max()], dtype=float)
    return [
        Curve(label=f"{name}{label}", x=ends, y=np.full(2, np.mean(values)), order=order[name])
        for name, values in found.items()
    ]
