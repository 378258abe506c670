"""The page of ``benchmarks/choose.py``, from choices and levels that are made up."""

from typing import Any

import pytest
from scripts import script

from fl_lightning.choice.candidates import DEFAULT


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("benchmarks/choose.py")


def test_the_reference_has_all_candidates_but_the_ceiling(benchmark: Any) -> None:
    assert set(benchmark.METHODS) == set(DEFAULT)
    assert len(benchmark.CASES) == 15


def test_a_level_that_is_paired(benchmark: Any, tmp_path: Any) -> None:
    """Of TwinScaffold on Cora-10: SCAFFOLD's in the leaderboard, and their difference in another study."""
    content = benchmark.collected(tmp_path)["Cora-10"]
    twin = benchmark.of_study("twin")["Cora-10"]
    gain = sum(twin["TwinScaffold"][seed][0] - twin["SCAFFOLD"][seed][0] for seed in (100, 101)) / 2
    levels = content["levels"]
    assert set(levels) == set(DEFAULT)
    assert levels["TwinScaffold"]["acc"] == pytest.approx(levels["SCAFFOLD"]["acc"] + gain)
    assert levels["SCAFFOLD"]["seeds"] == 5


def test_the_page(benchmark: Any) -> None:
    acc = dict.fromkeys(DEFAULT, 70.0) | {"SCAFFOLD": 80.0, "FedAvg": 75.0}
    levels = {name: {"acc": value, "seeds": 5, "rising": name == "Ditto"} for name, value in acc.items()}
    choices = {
        str(budget): {"error": "", "method": method, "taken": float(budget)}
        for budget, method in zip(benchmark.BUDGETS, ("FedAvg", "SCAFFOLD"), strict=True)
    }
    found: dict[str, Any] = {name: {"choices": {}, "levels": levels} for name in benchmark.CASES}
    found["Cora-10"]["choices"] = choices
    text = benchmark.page(found)
    assert "| Cora-10 | SCAFFOLD 80.0 | FedAvg | 5.0 | 5.0 | 0.0 | 10.0 | 8.3 |" in text
    assert "| **largest** |  |  | **5.0** | **5.0** | **0.0** | **10.0** | **8.3** |" in text
    assert "| SCAFFOLD | 1 | 0.0 | 0.0 |" in text
    assert "| Cora-10 | FedAvg 5.0 | SCAFFOLD 0.0 |" in text
    assert "Left out, since a choice or the reference is missing: Cora-20; " in text
