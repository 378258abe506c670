"""Marks of hand-made curves."""

import math
from collections.abc import Sequence

import pytest

from fl_lightning.run.curve import Curve, in_words, late, marks_of, reached, says_overflow

NAN = math.nan


def marks(values: Sequence[float], mode: str = "max", **known: float) -> dict[str, str]:
    """Of a run that is evaluated in every round, and whose best round is the first with the best value."""
    finite = [value for value in values if math.isfinite(value)]
    best = values.index(max(finite) if mode == "max" else min(finite)) if finite else -1
    curve = Curve(range(len(values)), values, mode)  # type: ignore[arg-type]
    return marks_of(curve, best_round=best, num_rounds=len(values), **known)  # type: ignore[arg-type]


def saturated(length: int = 100) -> list[float]:
    """Level from its fortieth round on, which is the best, with a scatter of 0.01."""
    rise = [0.2 + 0.015 * index for index in range(40)]
    return [*rise, 0.83, *(0.80 + 0.01 * (-1) ** index for index in range(length - 41))]


def test_a_level_curve_has_no_mark() -> None:
    assert marks(saturated()) == {}
    assert marks([-value for value in saturated()], "min") == {}


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_round_in_the_last_tenth(mode: str) -> None:
    sign = 1 if mode == "max" else -1
    rising = [sign * 0.001 * index for index in range(100)]
    assert marks(rising, mode) == {"still_rising": "round 99 of 100 is the best"}


@pytest.mark.parametrize(("best", "is_late"), [(89, False), (90, True), (99, True)])
def test_where_the_last_tenth_begins(best: int, is_late: bool) -> None:
    assert bool(late(best, 100)) == is_late


@pytest.mark.parametrize(("best", "rounds", "is_late"), [(0, 1, False), (1, 2, True), (0, 2, False), (4, 5, True)])
def test_of_a_few_rounds_the_last_is_late(best: int, rounds: int, is_late: bool) -> None:
    assert bool(late(best, rounds)) == is_late


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_last_fifth_above_the_one_before(mode: str) -> None:
    sign = 1 if mode == "max" else -1
    values = [0.5] * 80 + [0.6 + 0.01 * (-1) ** index for index in range(20)]
    values[82] = 0.7  # the best, and not in the last tenth
    (why,) = marks([sign * value for value in values], mode).values()
    assert why.startswith("the last fifth is 0.105 better than the one before, scatter 0.0")


def test_a_rise_within_the_scatter_is_none() -> None:
    values = [0.9, *(0.5 + 0.1 * (-1) ** index for index in range(79)), *(0.55 + 0.1 * (-1) ** i for i in range(20))]
    assert marks(values) == {}


def test_a_fifth_of_three_evaluations_tells_nothing() -> None:
    assert marks([0.9, *[0.5] * 10, 0.6, 0.6, 0.6]) == {}
    assert "still_rising" in marks([0.9, *[0.5] * 15, *[0.6] * 4])


def test_fallen_below_the_first_round() -> None:
    values = [0.2, 0.3, 0.38, 0.4, 0.35, *[0.1] * 15]
    assert marks(values) == {"diverged": "0.4 in round 3, 0.1 at the end, 0.2 in the first round"}
    errors = [2.0, 1.5, 1.0, *[1e9] * 17]
    assert marks(errors, "min") == {"diverged": "1 in round 2, 1e+09 at the end, 2 in the first round"}


def test_fallen_to_chance() -> None:
    values = [0.05, 0.3, 0.4, *[0.1] * 17]
    assert marks(values) == {}
    assert marks(values, chance=0.1) == {"diverged": "0.4 in round 2, 0.1 at the end, 0.1 by chance"}


def test_a_curve_that_ends_without_numbers() -> None:
    assert marks([0.2, 0.3, 0.4, *[NAN] * 17]) == {"diverged": "0.4 in round 2, no number at the end"}


def test_noise_around_the_first_round_is_no_fall() -> None:
    values = [0.80 + 0.01 * (-1) ** index for index in range(40)]
    assert "diverged" not in marks([0.80, *values])


def test_never_better_is_not_diverged() -> None:
    assert marks([0.5, *[0.3] * 19]) == {}
    assert marks([NAN] * 5) == {}


def test_updates_lost_to_overflow() -> None:
    assert marks(saturated(), num_overflows=1) == {"diverged": "1 update lost to overflow"}
    both = marks([0.2, 0.4, *[0.1] * 18], num_overflows=3)
    assert both["diverged"] == "0.4 in round 1, 0.1 at the end, 0.2 in the first round; 3 updates lost to overflow"


def test_curves_of_a_history() -> None:
    rows = [{"round": 0, "x": 1.0}, {"round": 1, "val/acc": 0.5}, {"round": 3, "val/acc": 0.6}]
    assert Curve.of_rows(rows, "val/acc", "max") == Curve([1, 3], [0.5, 0.6], "max")


def test_reached() -> None:
    assert reached(Curve([4, 9, 14], [0.5, 0.96, 1.0], "max")) == 9
    assert reached(Curve([4, 9, 14], [2.0, 1.05, 1.0], "min")) == 9
    assert reached(Curve([4, 9], [NAN, NAN], "max")) is None
    assert reached(Curve([4], [-1.0], "max")) is None


def test_words() -> None:
    assert in_words({"diverged": "a", "at_edge": "b"}) == "diverged (a); at an edge of the grid (b)"
    assert says_overflow("FloatingPointError: its update are not finite after local training") == "are not finite"
    assert not says_overflow("RuntimeError: out of memory")
