"""What the validation curve of a run says of its result: whether it was still rising, diverged, and when it was near.

A mark is named, and says what was measured: ``{"still_rising": "round 97 of 100 is the best"}``. These are the marks of
a run; that a chosen setting stands at an edge of its grid is said by :mod:`fl_lightning.study.edge`.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.direction import Direction

#: What was measured, by the name of the mark; a result without marks has none.
Marks = dict[str, str]
STILL_RISING, DIVERGED, AT_EDGE = "still_rising", "diverged", "at_edge"


@dataclass(frozen=True)
class Sign:
    """How a mark is shown.

    Attributes:
        words: In a sentence.
        sign: In a table.
        plain: In a table of a terminal that has only ASCII.
    """

    words: str
    sign: str
    plain: str


SIGNS: Mapping[str, Sign] = {
    STILL_RISING: Sign("still rising", "↗", "^"),
    DIVERGED: Sign("diverged", "↯", "!"),
    AT_EDGE: Sign("at an edge of the grid", "⊣", "#"),
}
#: Metric of a round: clients that were left out since their numbers overflowed; without it none were.
NUM_OVERFLOWS = "num_overflows"
#: A fifth of the curve is compared with the one before if it has so many evaluations.
FEWEST_IN_FIFTH = 4
#: Standard deviations of the scatter within which a fall is none.
_CLEAR = 2.0
#: What a client's failure says where its numbers have overflowed.
_OVERFLOWS = ("are not finite", "too large to mix in float32")


def says_overflow(why: str) -> str:
    """The words by which a client's failure is one of overflow; empty where it is another."""
    return next((words for words in _OVERFLOWS if words in why), "")


@dataclass(frozen=True)
class Curve:
    """The monitored validation metric over the rounds that were evaluated.

    Attributes:
        rounds: Their numbers, from 0, ascending.
        values: Its values; not finite where a round has none.
        mode: Whether ``max`` or ``min`` of it is best.
    """

    rounds: Sequence[int]
    values: Sequence[float]
    mode: Direction

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]], monitor: str, mode: Direction) -> "Curve":
        """The curve in the history of a run: a row a round, with its number under ``round``."""
        evaluated = [row for row in rows if monitor in row]
        return cls([int(row["round"]) for row in evaluated], [float(row[monitor]) for row in evaluated], mode)

    @property
    def sign(self) -> float:
        """1 where more is better, else -1."""
        return 1.0 if self.mode == "max" else -1.0

    @property
    def signed(self) -> list[float]:
        """The values with more being better; what is not finite is worst."""
        return [self.sign * value if math.isfinite(value) else -math.inf for value in self.values]


def marks_of(
    curve: Curve, *, best_round: int, num_rounds: int, chance: float | None = None, num_overflows: int = 0
) -> Marks:
    """The marks of a run of which every round is known.

    Args:
        curve: Its validation curve.
        best_round: The round that validation chose, from 0; negative for none.
        num_rounds: How many rounds there were.
        chance: The metric of whoever tells the same of all examples; None where it is not known.
        num_overflows: Updates that were lost since their numbers overflowed.
    """
    marks = late(best_round, num_rounds)
    if not marks and (rise := _rise(curve)):
        marks[STILL_RISING] = rise
    lost = f"{num_overflows} update{'' if num_overflows == 1 else 's'} lost to overflow" if num_overflows else ""
    if why := "; ".join(filter(None, (_fall(curve, chance), lost))):
        marks[DIVERGED] = why
    return marks


def late(best_round: int, num_rounds: int) -> Marks:
    """Whether the best round is in the last tenth (is the last, of fewer than ten), which needs no curve."""
    if num_rounds < 2 or best_round < num_rounds - max(1, num_rounds // 10):
        return {}
    return {STILL_RISING: f"round {best_round} of {num_rounds} is the best"}


def _rise(curve: Curve) -> str:
    """Whether the last fifth of the curve is above the fifth before by more than its own standard deviation."""
    fifth = len(curve.values) // 5
    last, before = curve.signed[-fifth:], curve.signed[-2 * fifth : -fifth]
    if fifth < FEWEST_IN_FIFTH or not all(map(math.isfinite, (*last, *before))):
        return ""
    rise, scatter = statistics.fmean(last) - statistics.fmean(before), statistics.stdev(last)
    return f"the last fifth is {rise:.3g} better than the one before, scatter {scatter:.3g}" if rise > scatter else ""


def _fall(curve: Curve, chance: float | None) -> str:
    """Whether the curve ends at chance or at its first value, or below, after it was clearly better."""
    values = curve.signed
    if len(values) < 2 or not math.isfinite(best := max(values)):
        return ""
    sign = curve.sign
    summit = f"{sign * best:.3g} in round {curve.rounds[values.index(best)]}"
    end = statistics.median_high(values[-max(1, len(values) // 10) :])
    if not math.isfinite(end):
        return f"{summit}, no number at the end"
    steps = [abs(b - a) for a, b in itertools.pairwise(values) if math.isfinite(a) and math.isfinite(b)]
    scatter = 1.4826 * statistics.median(steps) / math.sqrt(2.0) if steps else 0.0  # of white noise, robustly
    floors = {"in the first round": values[0]}
    floors |= {} if chance is None or not math.isfinite(chance) else {"by chance": sign * chance}
    for name, floor in floors.items():
        if end <= floor and best - floor > _CLEAR * scatter:
            return f"{summit}, {sign * end:.3g} at the end, {sign * floor:.3g} {name}"
    return ""


def reached(curve: Curve, share: float = 0.95) -> int | None:
    """The first round within reach of the best: at ``share`` of it, or at an error of at most 1 / ``share`` times it.

    Returns:
        Its number, from 0; None without a finite value, and for a score below zero, of which no share is near.
    """
    finite = [value for value in curve.values if math.isfinite(value)]
    if not finite:
        return None
    near = share * max(finite) if curve.mode == "max" else min(finite) / share
    pairs = zip(curve.rounds, curve.values, strict=True)
    return next((number for number, value in pairs if (value >= near if curve.mode == "max" else value <= near)), None)


def in_words(marks: Mapping[str, str]) -> str:
    """Marks with what was measured, in one line.

    Example:
        >>> in_words({"still_rising": "round 97 of 100 is the best"})
        'still rising (round 97 of 100 is the best)'
    """
    return "; ".join(f"{SIGNS[name].words} ({why})" for name, why in marks.items())
