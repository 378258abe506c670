"""Which finalist is taken, and in which words."""

import dataclasses
import math
from typing import Any

import pytest

from fl_lightning.choice.verdict import Interval, Standing, Verdict, decide


def standing(method: str, val: list[float], test: list[float] | None = None, **others: Any) -> Standing:
    settings: dict[str, Any] = {"worst": 0.5, "sent": 100.0, "seconds": 3.0, "is_rising": False, **others}
    return Standing(
        method=method,
        label="",
        val=dict(enumerate(val)),
        test=dict(enumerate(val if test is None else test)),
        **settings,
    )


def verdict(*standings: Standing, less_is_better: bool = False) -> Verdict:
    metric = "test/mse" if less_is_better else "test/acc"
    return decide(standings, metric, less_is_better=less_is_better, num_rounds=100)


LOCAL = standing("Local", [0.50, 0.52, 0.51], sent=0.0)
FEDAVG = standing("FedAvg", [0.70, 0.72, 0.71])


def test_a_difference_that_can_be_seen_is_told_with_its_interval() -> None:
    result = verdict(
        LOCAL, FEDAVG, standing("SCAFFOLD", [0.72, 0.742, 0.729], sent=200.0), standing("Pooled", [0.9] * 3)
    )
    assert result.method == "SCAFFOLD"
    assert result.sentence == (
        "SCAFFOLD: 2.0 points above FedAvg, 95 % interval 1.7 to 2.4, three seeds, twice the bytes"
    )
    assert not result.notes


def test_it_is_compared_with_training_alone_where_that_is_better_than_fedavg() -> None:
    local = standing("Local", [0.80, 0.82, 0.81], sent=0.0)
    result = verdict(local, FEDAVG, standing("SCAFFOLD", [0.84, 0.86, 0.85], sent=200e6))
    assert result.sentence == (
        "SCAFFOLD: 4.0 points above Local, 95 % interval 4.0 to 4.0, three seeds, 200 MB in a run"
    )


def test_the_simpler_one_wins_a_tie() -> None:
    result = verdict(LOCAL, FEDAVG, standing("SCAFFOLD", [0.71, 0.70, 0.75]))
    assert result.method == "FedAvg"
    assert result.sentence == (
        "nothing is clearly better than FedAvg: take FedAvg (FedAvg: 20.0 points above Local, 95 % interval 20.0 to "
        "20.0, three seeds)"
    )
    assert result.notes[0].startswith("On validation SCAFFOLD: 1.0 points above FedAvg, 95 % interval −6.5 to 8.5")


def test_what_is_clearly_worse_than_fedavg_is_not_said_to_be_level_with_it() -> None:
    result = verdict(LOCAL, FEDAVG, standing("SCAFFOLD", [0.60, 0.61, 0.63]), standing("Ditto", [0.40, 0.41, 0.43]))
    assert result.method == "FedAvg"
    assert result.sentence.startswith("nothing is clearly better than FedAvg: take FedAvg (FedAvg: 20.0 points above")
    assert not result.notes


def test_without_test_results_that_two_share_there_is_no_difference() -> None:
    result = verdict(LOCAL, dataclasses.replace(FEDAVG, test={}))
    assert result.sentence == "take FedAvg (FedAvg and Local have test/acc of no seed in common)"


def test_between_two_that_are_alike_and_better_the_simpler_is_taken() -> None:
    result = verdict(LOCAL, FEDAVG, standing("FedPer", [0.79, 0.82, 0.80]), standing("Ditto", [0.80, 0.80, 0.82]))
    assert (result.method, result.against) == ("FedPer", "FedAvg")


def test_stay_local() -> None:
    result = verdict(standing("Local", [0.7, 0.8, 0.75]), standing("FedAvg", [0.71, 0.78, 0.77]))
    assert result.method == "Local"
    assert result.sentence.startswith(
        "stay local: federation adds nothing that can be seen here (FedAvg: 0.3 points above Local, 95 % interval −"
    )
    assert not result.notes[1:]
    seen = verdict(standing("Local", [0.7, 0.8, 0.75], test=[0.5, 0.51, 0.5]), standing("FedAvg", [0.71, 0.78, 0.77]))
    assert seen.method == "Local"
    assert seen.notes[1:] == ["Validation decided: on test examples the difference can be seen."]
    clear = verdict(standing("Local", [0.9, 0.91, 0.9]), FEDAVG)
    assert "(FedAvg: 19.3 points below Local" in clear.sentence


def test_what_was_still_rising_is_said() -> None:
    result = verdict(LOCAL, FEDAVG, standing("SCAFFOLD", [0.9, 0.91, 0.92], is_rising=True))
    assert result.notes == [
        "SCAFFOLD was still rising after 100 rounds: this is how it stands so far, and more rounds "
        "(--trainer.num_rounds) may change it."
    ]


def test_test_metrics_decide_nothing() -> None:
    high = standing("SCAFFOLD", [0.60, 0.61, 0.60], test=[0.99, 0.99, 0.99])
    assert verdict(LOCAL, FEDAVG, high).method == "FedAvg"
    low = standing("SCAFFOLD", [0.80, 0.81, 0.80], test=[0.7, 0.73, 0.71])
    result = verdict(LOCAL, FEDAVG, low)
    assert result.method == "SCAFFOLD"
    assert result.notes[-1].startswith("Validation decided (SCAFFOLD: 9.3 points above FedAvg")


def test_errors_are_lower() -> None:
    fedavg, scaffold = standing("FedAvg", [-0.30, -0.31, -0.30]), standing("SCAFFOLD", [-0.20, -0.21, -0.21])
    result = verdict(standing("Local", [-0.5] * 3), fedavg, scaffold, less_is_better=True)
    assert result.sentence == (
        "SCAFFOLD: test/mse 0.0967 lower than FedAvg, 95 % interval 0.0823 to 0.1110, three seeds, the same bytes"
    )


def test_a_metric_of_ones_own_has_no_points() -> None:
    """Nobody knows that 100 of them are all there is."""
    methods = standing("Local", [50.0, 52.0, 51.0]), standing("FedAvg", [70.0, 73.0, 72.0])
    assert decide(methods, "test/score", less_is_better=False, num_rounds=9).sentence == (
        "take FedAvg (FedAvg: test/score 20.6667 higher than Local, 95 % interval 19.2324 to 22.1009, three seeds)"
    )


def test_too_few_seeds_tell_nothing_apart() -> None:
    result = verdict(standing("Local", [0.5]), standing("FedAvg", [0.7]), standing("Ditto", [0.8]))
    assert result.method == "Ditto"
    assert result.sentence == "Ditto: 10.0 points above FedAvg, one seed, the same bytes"
    assert result.notes == ["With one seed alone nothing can be told apart: give a larger --budget, or more --seeds."]


def test_a_method_alone() -> None:
    assert verdict(LOCAL, standing("Pooled", [0.9] * 3)).method == "Local"
    with pytest.raises(ValueError, match="no method has a result"):
        verdict(standing("Pooled", [0.9] * 3))


def test_intervals() -> None:
    """1, 2, 3: mean 2, standard deviation 1, and t = 4.303 with two degrees of freedom."""
    interval = Interval.of([1.0, 2.0, 3.0])
    assert (interval.low, interval.high) == pytest.approx(
        (2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4
    )
    assert not interval.is_clear or interval.low > 0
    assert math.isnan(Interval.of([1.0, 2.0]).low)


def test_scatter_does_not_make_a_worse_method_as_good() -> None:
    """FedAvg scatters so much that its gap is below its standard error, but it is below Local, whose gap is not."""
    val = {"Local": [0.84, 0.82, 0.83], "FedAvg": [0.50, 0.86, 0.99], "TwinScaffold": [0.86, 0.85, 0.86]}
    result = verdict(*(standing(name, values) for name, values in val.items()))
    assert result.method == "TwinScaffold"
    assert verdict(standing("FedAvg", val["FedAvg"]), standing("TwinScaffold", val["TwinScaffold"])).method == "FedAvg"


def test_a_large_gap_of_three_seeds_is_no_tie_though_its_interval_has_zero() -> None:
    """Vehicle: Local is 6 points below on validation, with gaps of 0, 3 and 16 points."""
    local = standing("Local", [0.878, 0.800, 0.771], test=[0.738, 0.680, 0.731])
    fedavg = standing("FedAvg", [0.876, 0.842, 0.884], test=[0.847, 0.865, 0.882])
    fedopt = standing("FedOpt", [0.876, 0.830, 0.929], test=[0.834, 0.899, 0.878])
    result = verdict(local, fedavg, fedopt)
    assert result.method == "FedAvg"
    assert result.sentence.startswith("nothing is clearly better than FedAvg: take FedAvg (FedAvg: 14.8 points above")
    assert verdict(local, fedopt).method == "FedOpt"


def test_a_choice_that_chance_may_have_made_is_said_to_be_one() -> None:
    result = verdict(LOCAL, FEDAVG, standing("SCAFFOLD", [0.73, 0.71, 0.75]))
    assert result.method == "SCAFFOLD"
    assert result.notes == [
        "SCAFFOLD is likelier to be better, no more: neither on validation nor on test examples does the interval "
        "leave out zero."
    ]


def test_a_method_that_failed_with_seeds_of_the_others_is_out() -> None:
    lucky = dataclasses.replace(standing("Ditto", []), val={2: 0.9}, test={2: 0.9}, errors=("diverged", "diverged"))
    result = verdict(LOCAL, FEDAVG, lucky)
    assert result.method == "FedAvg"
    assert result.notes == ["Ditto is out: 2 of its three seeds failed, first with diverged."]
    pooled = dataclasses.replace(standing("Pooled", []), errors=("no memory",) * 3)
    assert verdict(LOCAL, FEDAVG, pooled).notes == [
        "Pooled has not all results: 3 of its three seeds failed, first with no memory."
    ]
