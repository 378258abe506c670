"""Tests of significance against values known by other means."""

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from fl_lightning.study import statistics

SEEDS = range(5)


def table(
    values: dict[str, dict[str, list[float]]], metric: str = "acc", val: dict[str, float] | None = None
) -> pd.DataFrame:
    """Rows of results by case and method; validation metrics are the test metrics' mean, or given."""
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "case": case,
            "seed": seed,
            "metric": metric,
            "is_error": metric == "mse",
            "test": test,
            "val": (val or {}).get(method, float(np.mean(tests))),
        }
        for case, methods in values.items()
        for method, tests in methods.items()
        for seed, test in enumerate(tests)
    ]
    return pd.DataFrame(rows)


BASE = [0.70, 0.72, 0.71, 0.69, 0.73]
BETTER = [0.75, 0.78, 0.75, 0.75, 0.78]
WORSE = [0.60, 0.63, 0.60, 0.60, 0.64]
NOISE = [0.75, 0.68, 0.70, 0.73, 0.69]


def test_the_baseline_is_chosen_on_validation_not_on_test() -> None:
    actual = table({"a": {"Local": BASE, "FedAvg": BETTER}}, val={"Local": 0.9, "FedAvg": 0.8})
    assert statistics.best_baselines(actual, ["Local", "FedAvg"]) == {"a": "Local"}
    errors = table({"a": {"Local": BASE, "FedAvg": BETTER}}, metric="mse", val={"Local": 0.9, "FedAvg": 0.8})
    assert statistics.best_baselines(errors, ["Local", "FedAvg"]) == {"a": "FedAvg"}


@pytest.mark.parametrize(("metric", "words"), [("acc", ["above", "below"]), ("mse", ["below", "above"])])
def test_paired_tests_with_holms_correction(metric: str, words: list[str]) -> None:
    actual = table({"a": {"Local": BASE, "Better": BETTER, "Worse": WORSE, "Noise": NOISE}}, metric)
    compared = statistics.against_baselines(actual, ["Local"]).set_index("method")
    p = {
        m: scipy.stats.ttest_rel(v, BASE).pvalue for m, v in {"Better": BETTER, "Worse": WORSE, "Noise": NOISE}.items()
    }
    assert {method: compared.loc[method, "p"] for method in p} == pytest.approx(p)
    ordered = sorted(p, key=lambda method: p[method])
    holm = {ordered[0]: 3 * p[ordered[0]], ordered[1]: 2 * p[ordered[1]], ordered[2]: p[ordered[2]]}
    assert {method: compared.loc[method, "holm"] for method in p} == pytest.approx(holm)
    assert list(compared.loc[["Better", "Worse", "Noise"], "verdict"]) == [*words, "not distinguishable"]
    sign = 1 if metric == "acc" else -1
    assert compared.loc["Better", "difference"] == pytest.approx(sign * 0.052)


def test_only_seeds_that_both_have_are_paired() -> None:
    actual = table({"a": {"Local": BASE, "Better": BETTER}})
    actual = actual[~((actual["method"] == "Better") & (actual["seed"] > 1))]
    (row,) = statistics.against_baselines(actual, ["Local"]).to_dict("records")
    assert (row["pairs"], row["verdict"]) == (2, "too few runs to test")
    assert row["difference"] == pytest.approx(0.055)
    assert math.isnan(row["holm"])


def test_three_pairs_and_three_cases_are_enough() -> None:
    cases = {
        name: {"Local": BASE[:3], "Better": [v + gain for v in BASE[:3]]}
        for name, gain in zip("abc", (1, 2, 3), strict=True)
    }
    actual = table(cases)
    compared = statistics.against_baselines(actual, ["Local"])
    assert list(compared["verdict"]) == ["above"] * 3
    assert statistics.over_cases(compared).loc[0, "p"] == pytest.approx(2 / 2**3)
    assert statistics.wins_ties_losses(actual).loc["Better", "Local"] == "3/0/0"
    assert math.isnan(statistics.over_cases(compared[:2]).loc[0, "p"])


def test_ties_over_cases_count_as_ties() -> None:
    gains = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, -1.0, 2.0]
    compared = statistics.against_baselines(
        table({f"case {k}": {"Local": BASE, "Other": [v + gain for v in BASE]} for k, gain in enumerate(gains)}),
        ["Local"],
    )
    compared["difference"] = gains
    ranks = scipy.stats.rankdata(np.abs(gains))
    sums = [np.dot(ranks, signs) for signs in itertools.product((0, 1), repeat=8)]
    expected = 2 * np.mean(np.array(sums) <= ranks[6])
    assert statistics.over_cases(compared).loc[0, "p"] == pytest.approx(expected)


def test_equal_metrics_are_not_distinguishable() -> None:
    actual = table({"a": {"Local": BASE, "Same": BASE}})
    (row,) = statistics.against_baselines(actual, ["Local"]).to_dict("records")
    assert (row["p"], row["verdict"]) == (1.0, "not distinguishable")


def test_over_cases() -> None:
    cases = {f"case {k}": {"Local": BASE, "Better": [v + 0.01 * (k + 1) for v in BASE]} for k in range(6)}
    compared = statistics.against_baselines(table(cases), ["Local"])
    (row,) = statistics.over_cases(compared).to_dict("records")
    assert (row["cases"], row["verdict"]) == (6, "above")
    assert row["p"] == pytest.approx(2 / 2**6)
    (row,) = statistics.over_cases(compared[:4]).to_dict("records")
    assert row["verdict"] == "too few cases to test"


@pytest.mark.parametrize(
    ("methods", "cases", "word"),
    [(1, 5, "too few cases to test"), (1, 6, "above"), (2, 6, "too few cases to test"), (2, 7, "above")],
)
def test_over_few_cases_nothing_is_said_that_no_result_could_change(methods: int, cases: int, word: str) -> None:
    """The least p-value over five cases is 0.0625, and over six 0.03125, which Holm doubles for two methods."""
    values = {
        f"case {k}": {"Local": BASE, **{f"Better {m}": [v + 0.01 * (k + m + 1) for v in BASE] for m in range(methods)}}
        for k in range(cases)
    }
    overall = statistics.over_cases(statistics.against_baselines(table(values), ["Local"]))
    assert list(overall["verdict"]) == [word] * methods


@pytest.mark.parametrize(
    ("gains", "p", "word"),
    [
        ([1, 2, 3, 4, 5, 0], 2 / 2**5, "too few cases to test"),
        ([1, 2, 3, 4, 5, 6, 0], 2 / 2**6, "above"),
        ([-1, -2, 3, 4, 5, 6, 0], 10 / 2**6, "not distinguishable"),
        ([0, 0, 0, 0, 0, 0], 1.0, "not distinguishable"),
        ([0, 0, 0, 0, 0], 1.0, "too few cases to test"),
        ([-1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, 100], 70 * 2 / 2**12, "below"),
    ],
)
def test_over_cases_ranks_count(gains: list[int], p: float, word: str) -> None:
    """Without the cases that have no difference, and not the mean's way. P-values by counting.

    5 of 64 assignments of signs have a sum of negative ranks of at most 1 + 2; 70 of 4096 have one of at most 12.
    """
    cases = {f"case {k}": {"Local": BASE, "Other": [v + gain for v in BASE]} for k, gain in enumerate(gains)}
    compared = statistics.against_baselines(table(cases, val={"Local": 1.0}), ["Local"])
    compared["difference"] = [float(gain) for gain in gains]
    (row,) = statistics.over_cases(compared).to_dict("records")
    assert row["p"] == pytest.approx(p)
    assert (row["cases"], row["verdict"]) == (len(gains), word)


def test_a_baseline_without_the_metric_is_none() -> None:
    actual = table({"a": {"Local": BASE, "FedAvg": BASE, "Better": BETTER}}, val={"Local": 0.9, "FedAvg": 0.8})
    actual.loc[actual["method"] == "Local", "test"] = math.nan
    compared = statistics.against_baselines(actual, ["Local", "FedAvg"])
    assert compared[["method", "baseline", "verdict"]].to_numpy().tolist() == [["Better", "FedAvg", "above"]]
    assert statistics.against_baselines(actual.assign(test=math.nan), ["Local"]).empty


@pytest.mark.parametrize(
    ("metric", "order"), [("test_std", ["Z", "Y", "X"]), ("test/ece", ["Z", "Y", "X"]), ("test/mrr", ["X", "Y", "Z"])]
)
def test_ranks_are_in_the_direction_of_their_metric(metric: str, order: list[str]) -> None:
    cases = {case: {"X": [0.3], "Y": [0.2], "Z": [0.1]} for case in "abc"}
    means = statistics.case_means(table(cases).rename(columns={"test": metric}), metric)
    assert list(statistics.average_ranks(means).index) == order


def test_average_ranks() -> None:
    cases = {
        "a": {"X": [0.9], "Y": [0.8], "Z": [0.7]},
        "b": {"X": [0.9], "Y": [0.9], "Z": [0.1]},
        "c": {"X": [0.2], "Y": [0.5], "Z": [0.4]},
        "d": {"X": [0.5]},
    }
    means = statistics.case_means(table(cases))
    assert list(means.index) == ["a", "b", "c"]
    ranks = statistics.average_ranks(means)
    assert dict(ranks) == pytest.approx({"X": (1 + 1.5 + 3) / 3, "Y": (2 + 1.5 + 1) / 3, "Z": (3 + 3 + 2) / 3})
    assert list(ranks.index) == ["Y", "X", "Z"]
    expected = scipy.stats.friedmanchisquare([0.9, 0.9, 0.2], [0.8, 0.9, 0.5], [0.7, 0.1, 0.4]).pvalue
    assert statistics.friedman_p(means) == pytest.approx(expected)
    assert statistics.nemenyi(means).shape == (3, 3)
    errors = statistics.average_ranks(statistics.case_means(table(cases, metric="mse")))
    assert list(errors.index) == ["Z", "X", "Y"]


def test_a_method_that_lacks_cases_does_not_cost_the_others_theirs() -> None:
    level = {"X": [0.9], "Y": [0.8]}
    cases = {name: {**level, "Z": [0.7]} if name in "abc" else level for name in "abcde"}
    means = statistics.case_means(table(cases))  # 5 x 2 metrics, not 3 x 3
    assert (list(means.index), list(means.columns)) == (list("abcde"), ["X", "Y"])
    del cases["e"]
    means = statistics.case_means(table(cases))  # 3 x 3, not 4 x 2
    assert (list(means.index), list(means.columns)) == (list("abc"), ["X", "Y", "Z"])


def test_means_of_panels() -> None:
    level = {"X": [0.9], "Y": [0.8]}
    cases = {"a": level, "b": {**level, "Z": [0.7]}, "c": {**level, "Z": [0.6]}, "d": level}
    means = statistics.panel_means(table(cases), {"a": "first", "b": "second", "c": "second", "d": "first"})
    assert {name: (list(actual.index), list(actual.columns)) for name, actual in means.items()} == {
        "first": (["a", "d"], ["X", "Y"]),
        "second": (["b", "c"], ["X", "Y", "Z"]),
        "": (["a", "b", "c", "d"], ["X", "Y"]),
    }
    assert list(statistics.panel_means(table(cases), dict.fromkeys(cases, "one"))) == [""]
    assert statistics.panel_means(table({"a": level}), {"a": ""}) == {}


def test_wins_ties_and_losses() -> None:
    cases = {
        "a": {"X": BETTER, "Y": BASE},
        "b": {"X": NOISE, "Y": BASE},
        "c": {"X": WORSE, "Y": BASE},
        "d": {"X": BASE},
    }
    matrix = statistics.wins_ties_losses(table(cases))
    assert matrix.loc["X", "Y"] == "1/1/1"
    assert matrix.loc["Y", "X"] == "1/1/1"
    assert matrix.loc["X", "X"] == ""


# ---------------------------------------------------------------- unfinished comparisons


def rising(actual: pd.DataFrame, *pairs: tuple[str, str], share: float = 1.0) -> pd.DataFrame:
    """The table with runs of these methods and cases still rising, or the first share of their seeds."""
    marked = [
        (method, case) in pairs and seed < share * len(BASE)
        for method, case, seed in zip(actual["method"], actual["case"], actual["seed"], strict=True)
    ]
    return actual.assign(still_rising=["round 4 of 5 is the best" if mark else "" for mark in marked])


@pytest.mark.parametrize("who", ["Better", "Local"])
def test_above_and_below_are_not_said_of_the_unfinished(who: str) -> None:
    actual = table({"a": {"Local": BASE, "Better": BETTER, "Worse": WORSE, "Noise": NOISE}})
    compared = statistics.against_baselines(rising(actual, (who, "a")), ["Local"]).set_index("method")
    expected = {"Better": "unfinished", "Worse": "below", "Noise": "not distinguishable"}
    expected |= {"Worse": "unfinished"} if who == "Local" else {}
    assert dict(compared["verdict"]) == expected
    assert list(compared["unfinished"]) == [who in ("Local", method) for method in compared.index]
    wins = statistics.wins_ties_losses(rising(actual, (who, "a")))
    assert wins.loc["Better", "Local"] == wins.loc["Local", "Better"] == "0/0/0 (1 unfinished)"


def test_half_of_the_seeds_are_not_most() -> None:
    actual = table({"a": {"Local": BASE, "Better": BETTER}})
    for share, word in ((0.5, "unfinished"), (0.4, "above")):  # three and two of five
        compared = statistics.against_baselines(rising(actual, ("Better", "a"), share=share), ["Local"])
        assert list(compared["verdict"]) == [word]


def test_a_test_over_cases_counts_the_unfinished_and_is_above_by_the_others_alone() -> None:
    cases = {f"case {k}": {"Local": BASE, "Better": [v + 0.01 * (k + 1) for v in BASE]} for k in range(7)}
    for number, word in ((0, "above"), (1, "above"), (2, "unfinished")):  # six finished cases suffice, five do not
        unfinished = [("Better", f"case {k}") for k in range(number)]
        compared = statistics.against_baselines(rising(table(cases), *unfinished), ["Local"])
        (row,) = statistics.over_cases(compared).to_dict("records")
        assert (row["cases"], row["unfinished"], row["verdict"]) == (7, number, word)
        assert row["p"] == pytest.approx(2 / 2**7)
