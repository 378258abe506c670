"""How much there is to gain on a case: the way from training alone (Local) to training on all data (Pooled)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import scipy.stats

from fl_lightning.study.column import scale_in, sign_of
from fl_lightning.study.statistics import best_baselines, by_seed
from fl_lightning.study.table import markdown

#: The method from which a way goes.
FLOOR = "Local"
NO_ROOM = "no room"


@dataclass(frozen=True, kw_only=True)
class Way:
    """That of a case, in the metric's unit; differences are positive where the ceiling is better.

    Attributes:
        ceiling: The method that is the ceiling: of several the one that validation ranks first.
        floor_mean: Mean metric of the floor, over the seeds that both ends have.
        ceiling_mean: Likewise of the ceiling.
        length: Mean of the differences in these seeds.
        uncertainty: Half of the 95 % interval of that mean (Student's t).
        gains: Of each other method how much better than the floor it is, mean over the seeds that both have.
    """

    ceiling: str
    floor_mean: float
    ceiling_mean: float
    length: float
    uncertainty: float
    gains: dict[str, float]

    @property
    def has_room(self) -> bool:
        """Whether the way is longer than its uncertainty."""
        return self.length > self.uncertainty

    def share(self, method: str) -> str:
        """The share of the way that a method has come, in words; empty for its ends."""
        if method not in self.gains:
            return ""
        return f"{100 * self.gains[method] / self.length:.0f} %" if self.has_room else NO_ROOM


def ways(table: pd.DataFrame, names: Sequence[str]) -> dict[str, Way]:
    """The way of each case that has both ends on at least two seeds.

    Args:
        table: The tidy table.
        names: Of the methods that are ceilings (``Progress.ceilings``).
    """
    result: dict[str, Way] = {}
    for case, ceiling in best_baselines(table, names).items():
        values = by_seed(table, case, "test")
        if not {FLOOR, ceiling} <= set(values.columns):
            continue
        ends_S = values[[FLOOR, ceiling]].dropna()
        gap_S = ends_S[ceiling] - ends_S[FLOOR]
        if len(gap_S) < 2:
            continue
        half = float(scipy.stats.t.ppf(0.975, len(gap_S) - 1)) * float(gap_S.std()) / math.sqrt(len(gap_S))
        gains = {name: float((values[name] - values[FLOOR]).mean()) for name in values.columns}
        sign = sign_of(table[table["case"] == case])
        result[case] = Way(
            ceiling=ceiling,
            floor_mean=sign * float(ends_S[FLOOR].mean()),
            ceiling_mean=sign * float(ends_S[ceiling].mean()),
            length=float(gap_S.mean()),
            uncertainty=half,
            gains={name: gain for name, gain in gains.items() if name not in (FLOOR, ceiling) and gain == gain},
        )
    return result


def with_shares(shown: pd.DataFrame, table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """A leaderboard with the share of the way beside each figure; the same without ceilings."""
    shown = shown.copy()
    for case, way in ways(table, names).items() if names else ():
        for method in shown.index:
            if shown.loc[method, case] and (share := way.share(str(method))):
                shown.loc[method, case] += f" · {share}"
    return shown


def room(table: pd.DataFrame, names: Sequence[str]) -> str:
    """A table in Markdown: of each case both ends, the way between them, and whether it tells methods apart."""
    rows = {}
    for case, way in ways(table, names).items():
        scale = scale_in(table[table["case"] == case])
        rows[case] = {
            FLOOR: f"{scale * way.floor_mean:.1f}",
            "ceiling": f"{scale * way.ceiling_mean:.1f} ({way.ceiling})",
            "way": f"{scale * way.length:.1f} ± {scale * way.uncertainty:.1f}",
            "": "" if way.has_room else NO_ROOM,
        }
    if not rows:
        return ""
    note = (
        f"From {FLOOR} to one training on all clients' data, mean over seeds with the half of its 95 % interval "
        "(Student's t); positive where the ceiling is better. Beside the figures above is the share of this way that a "
        "method has come. Where the way is no longer than its uncertainty there is no room: the case does not tell "
        "methods apart. A share above 100 % is of a method that is better than one training on all data."
    )
    return f"{note}\n\n{markdown(pd.DataFrame.from_dict(rows, orient='index'), 'case')}"
