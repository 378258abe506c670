"""Which settings go on, and what a budget is enough for."""

import dataclasses
import math

import pytest

from fl_lightning.choice.halving import FEWEST_SEEDS, Arm, Cost, Planner, lengths, survivors

REFERENCES = ("Local", "Pooled")
BESIDE = ("Local", "FedAvg", "Pooled")


def arms(**scores: list[float]) -> dict[Arm, float]:
    return {
        Arm(method=method, label=f"lr={number}"): score
        for method, values in scores.items()
        for number, score in enumerate(values)
    }


def going(scores: dict[Arm, float], *, keep_methods: bool, share: int = 3, finalists: int = 1) -> list[str]:
    chosen = survivors(
        scores, share=share, references=REFERENCES, beside=BESIDE, keep_methods=keep_methods, finalists=finalists
    )
    return [f"{arm.method} {arm.label}" for arm in chosen]


def test_a_ninth_a_third_and_all_of_the_rounds() -> None:
    assert lengths(90, 1) == [2, 10, 30, 90]
    assert lengths(100, 5) == [10, 15, 35, 100]
    assert lengths(6, 1) == [1, 1, 2, 6]
    assert lengths(1, 1) == [1, 1]


def test_every_method_keeps_its_best_setting_after_the_first_rung() -> None:
    scores = arms(Local=[0.5, 0.6], Slow=[0.1, 0.2, 0.3], Fast=[0.8, 0.7, math.nan], Pooled=[0.95, 0.9])
    assert going(scores, keep_methods=True) == ["Pooled lr=0", "Fast lr=0", "Local lr=1", "Slow lr=2"]
    assert going(scores, keep_methods=True, share=2) == [
        "Pooled lr=0",
        "Fast lr=0",
        "Fast lr=1",
        "Local lr=1",
        "Slow lr=2",
    ]


def test_then_the_best_go_on_and_what_all_are_measured_by() -> None:
    scores = arms(Local=[0.1], FedAvg=[0.2], Good=[0.9, 0.8], Middling=[0.5], Bad=[0.3], Pooled=[0.95])
    assert going(scores, keep_methods=False) == ["Pooled lr=0", "Good lr=0", "FedAvg lr=0", "Local lr=0"]
    assert "Middling lr=0" in going(scores, keep_methods=False, finalists=2)


def test_of_equals_the_first_goes_on() -> None:
    assert going(arms(Good=[0.5, 0.5, 0.5]), keep_methods=True) == ["Good lr=0"]


@pytest.fixture
def planner() -> Planner:
    methods = ("Local", "FedAvg", "Good", "Bad", "Pooled")
    return Planner(
        costs={name: Cost(start=1.0, each=0.5) for name in methods},
        sizes=dict.fromkeys(methods, 6),
        rungs=lengths(90, 1),
        processes=1,
        beside=BESIDE,
        references=REFERENCES,
    )


def test_more_time_is_for_more_settings_then_for_more_that_go_on(planner: Planner) -> None:
    plans = [planner.plan(seconds) for seconds in (1e6, 1900.0, 1500.0, 500.0)]
    shown = [plan and (plan.points, plan.share, plan.finalists) for plan in plans]
    assert shown[0] == (6, 2, 3)
    assert shown[-1] is None
    assert sorted((each for each in shown if each), reverse=True) == [each for each in shown if each]
    for plan, seconds in zip(plans, (1e6, 1900.0, 1500.0), strict=False):
        assert plan is not None
        assert plan.seconds <= seconds


def test_a_plan_counts_what_the_search_trains(planner: Planner) -> None:
    """Of one setting each: all for a ninth and a third, four to the end, and four with each of the seeds."""
    ninth, third, whole = 5 * (1 + 0.5 * 10), 5 * (1 + 0.5 * 20), 4 * (1 + 0.5 * 60)
    assert planner.needed() == pytest.approx(ninth + third + whole + FEWEST_SEEDS * 4 * (1 + 0.5 * 90))


def test_a_plan_expects_as_many_settings_as_survive(planner: Planner) -> None:
    """Eight rivals, of which one in three goes on: FedAvg and two others, beside Local and Pooled."""
    methods = [*planner.sizes, "Third", "Fourth", "Fifth", "Sixth", "Seventh"]
    larger = dataclasses.replace(planner, sizes=dict.fromkeys(methods, 1))
    left = larger._left(larger.sizes, share=3, finalists=1, is_first=False)
    chosen = survivors(
        {Arm(method=name, label=""): 0.5 for name in methods},
        share=3,
        references=REFERENCES,
        beside=BESIDE,
        keep_methods=False,
        finalists=1,
    )
    assert sum(left.values()) == pytest.approx(len(chosen))
    assert len(chosen) == 5
