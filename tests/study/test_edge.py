"""Where a chosen setting stands on the axes of its grid."""

from collections.abc import Callable
from typing import Any

import pytest

from fl_lightning.study.definition import Study
from fl_lightning.study.edge import Ordered, Point, at_edge

RATES: dict[str, Any] = {"model.optimizer.lr": [0.02, 0.01, 0.05]}
OWN: dict[str, Any] = {"client_lr": {"a third": {"model.optimizer.lr": 0.3}, "one": {"model.optimizer.lr": 1.0}}}


def rate(value: float) -> Point:
    return f"lr={value}", {"model.optimizer.lr": value}


@pytest.mark.parametrize(
    ("value", "expected"), [(0.01, "lr=0.01 is the lowest of 3"), (0.02, ""), (0.05, "lr=0.05 is the highest of 3")]
)
def test_the_edges_of_what_was_tried(value: float, expected: str) -> None:
    assert at_edge(RATES, rate(value), [rate(each) for each in (0.01, 0.02, 0.05)]) == expected


def test_past_the_end_the_edge_is_where_the_trials_end() -> None:
    tried = [rate(each) for each in (0.01, 0.02, 0.05, 0.125)]
    assert at_edge(RATES, rate(0.05), tried) == ""
    assert at_edge(RATES, rate(0.125), tried) == "lr=0.125 is the highest of 4"


def test_two_values_and_axes_without_an_order_say_nothing() -> None:
    two = {"a.b": [1.5, 2.5]}
    assert at_edge(two, ("b=1.5", {"a.b": 1.5}), [(f"b={value}", {"a.b": value}) for value in (1.5, 2.5)]) == ""
    kinds = {"kind": {"x": {"a.b": "sgd"}, "y": {"a.b": "adam"}, "z": {"a.c": 1}}}
    assert Ordered.of("kind", kinds["kind"]) is None
    assert at_edge(kinds, ("kind=x", {"a.b": "sgd"}), []) == ""


@pytest.mark.parametrize(("values", "natural"), [([0.0, 0.5, 0.9], True), ([1, 5, 25], True), ([0.1, 0.5, 1.0], False)])
def test_the_end_of_a_setting_is_no_edge_of_a_grid(values: list[float], natural: bool) -> None:
    tried: list[Point] = [(f"b={value}", {"a.b": value}) for value in values]
    assert bool(at_edge({"a.b": values}, tried[0], tried)) != natural
    assert at_edge({"a.b": values}, tried[-1], tried)


def test_another_axis_has_the_last_word() -> None:
    point = "lr=0.05, client_lr=one", {"model.optimizer.lr": 1.0}
    tried = [point, ("lr=0.05, client_lr=a third", {"model.optimizer.lr": 0.3}), rate(0.01), rate(0.02), rate(0.05)]
    assert at_edge({**RATES, **OWN}, point, tried) == ""
    three = {"client_lr": {**OWN["client_lr"], "three": {"model.optimizer.lr": 3.0}}}
    top = "lr=0.05, client_lr=three", {"model.optimizer.lr": 3.0}
    assert at_edge({**RATES, **three}, top, [*tried, top]) == "client_lr=three is the highest of 3"


def test_labeled_numbers_go_on_like_listed_ones() -> None:
    axis = Ordered.of("client_lr", OWN["client_lr"])
    assert axis is not None
    point = "lr=0.05, client_lr=one", {"model.optimizer.lr": 1.0}
    (further,) = axis.past(point, 2)
    assert further == ("lr=0.05, client_lr=3.33", {"model.optimizer.lr": 3.33})
    (last,) = axis.past(further, 2)
    assert last == ("lr=0.05, client_lr=11.1", {"model.optimizer.lr": 11.1})
    assert axis.past(last, 2) == []
    assert len(axis.past(last, None)) == 1


@pytest.mark.parametrize(
    ("steps", "tried"),
    [(1, [0.02, 0.01, 0.005]), (2, [0.02, 0.01, 0.005, 0.0025]), (None, [0.02, 0.01, 0.005, 0.0025])],
)
def test_both_ends_are_followed_for_so_many_steps(steps: int | None, tried: list[float]) -> None:
    axis = Ordered.of("model.optimizer.lr", [0.01, 0.02])
    assert axis is not None
    found, point = [], rate(0.02)
    while point[1]["model.optimizer.lr"] > 0.0025 and point[0] not in found:
        found.append(point[0])
        lower = [each for each in axis.past(point, steps) if each[1]["model.optimizer.lr"] < 0.01]
        point = rate(0.01) if len(found) == 1 else lower[0] if lower else point
    found += [] if point[0] in found else [point[0]]
    assert found == [f"lr={value}" for value in tried]


def test_axes_of_a_methods_own_may_go_on_too(make_study: Callable[..., Study]) -> None:
    grid = {"model.optimizer.lr": [0.01, 0.02]}
    tuning = {"seeds": [7], "budget": 2, "grid": grid, "beyond": ["model.optimizer.lr", "client_lr"], "steps": 2}
    methods = {"FedAvg": {"config": "quickstart.yaml", "tune": OWN}, "Local": {"config": "quickstart.yaml"}}
    study = make_study(tuning=tuning, methods=methods)
    point = "lr=0.02, client_lr=one", {"model.optimizer.lr": 1.0}
    assert [label for label, _ in study.beyond("FedAvg", "plain", point)] == ["lr=0.02, client_lr=3.33"]
    assert [label for label, _ in study.beyond("Local", "plain", rate(0.02))] == ["lr=0.04"]


@pytest.mark.parametrize(
    ("values", "at", "expected"),
    [([1, 2], 2, [4]), ([1, 2], 1, []), ([2, 3], 3, [4]), ([4, 8], 4, [2]), ([1, 5, 25], 25, [125]), ([2, 3], 2, [1])],
    ids=str,
)
def test_whole_numbers_go_on_in_whole_numbers(values: list[int], at: int, expected: list[int]) -> None:
    axis = Ordered.of("strategy.num_epochs", values)
    assert axis is not None
    further = axis.past((f"num_epochs={at}", {"strategy.num_epochs": at}), None)
    assert further == [(f"num_epochs={each}", {"strategy.num_epochs": each}) for each in expected]
    assert all(type(settings["strategy.num_epochs"]) is int for _, settings in further)


def test_axes_with_the_same_last_name_are_apart(make_study: Callable[..., Study]) -> None:
    """Only the axis that goes on changes, and no two settings have one label."""
    own = "strategy.server_optimizer.init_args.lr"
    methods = {
        "FedOpt": {"config": "quickstart.yaml", "tune": {own: [0.1, 0.01]}},
        "Local": {"config": "quickstart.yaml"},
    }
    tuning = {"seeds": [7], "budget": 2, "grid": {"model.optimizer.lr": [0.01, 0.1]}, "beyond": ["model.optimizer.lr"]}
    study = make_study(methods=methods, tuning=tuning)
    grid = study.grid_of("FedOpt", "plain")
    assert grid[0] == (f"model.optimizer.lr=0.01, {own}=0.1", {"model.optimizer.lr": 0.01, own: 0.1})
    point = f"model.optimizer.lr=0.1, {own}=0.1", {"model.optimizer.lr": 0.1, own: 0.1}
    assert study.beyond("FedOpt", "plain", point) == [
        (f"model.optimizer.lr=1.0, {own}=0.1", {"model.optimizer.lr": 1.0, own: 0.1})
    ]
    assert study.grid_of("Local", "plain")[0][0] == "lr=0.01"
    fixed = make_study(methods=methods, tuning={**tuning, "beyond": []})
    assert [label for label, _ in fixed.grid_of("FedOpt", "plain")] == ["lr=0.01, lr=0.1", "lr=0.1, lr=0.01"]
