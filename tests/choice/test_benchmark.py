"""The page of ``benchmarks/choose.py``, from choices and a reference that are made up."""

from typing import Any

import pytest
from scripts import script

from fl_lightning.choice.candidates import DEFAULT


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("benchmarks/choose.py")


def runs(*accuracies: float) -> dict[str, Any]:
    seeds = ("100", "101")
    return {
        seed: {"acc": accuracy, "rounds": 9, "marks": [], "of_twin": False}
        for seed, accuracy in zip(seeds, accuracies, strict=False)
    }


def test_the_reference_has_all_candidates_but_the_ceiling(benchmark: Any) -> None:
    assert set(benchmark.METHODS) == set(DEFAULT)
    assert len(benchmark.CASES) == 15


def test_the_distance_is_over_the_seeds_that_all_methods_have(benchmark: Any) -> None:
    behind = benchmark.distances(
        {"FedAvg": runs(0.80, 0.70), "SCAFFOLD": runs(0.81), "Local": runs(0.5, 0.9)}, ["FedAvg", "SCAFFOLD"]
    )
    assert behind == pytest.approx({"FedAvg": 1.0, "SCAFFOLD": 0.0, "Local": 31.0})
    both = benchmark.distances({"FedAvg": runs(0.80, 0.70), "SCAFFOLD": runs(0.81)}, ["FedAvg"])
    assert both == {"FedAvg": 0.0}


def test_the_page(benchmark: Any) -> None:
    level = {name: 0.7 for name in DEFAULT} | {"SCAFFOLD": 0.8, "FedAvg": 0.75}
    reference = {name: runs(value, value) for name, value in level.items()}
    choices = {
        str(budget): {"error": "", "method": method, "taken": float(budget)}
        for budget, method in zip(benchmark.BUDGETS, ("FedAvg", "SCAFFOLD"), strict=True)
    }
    found: dict[str, Any] = {name: {"choices": {}, "reference": {}} for name in benchmark.CASES}
    found["Cora-10"] = {"choices": choices, "reference": reference}
    text = benchmark.page(found)
    assert "| Cora-10 | SCAFFOLD 80.0 | FedAvg 5.0 | SCAFFOLD 0.0 | 5.0 | 0.0 | 10.0 | 8.3 |" in text
    assert "| **largest** |  | **5.0** | **0.0** | **5.0** | **0.0** | **10.0** | **8.3** |" in text
    assert "| SCAFFOLD | 1 | 0.0 | 0.0 |" in text
    assert "Left out, since a choice or the reference is missing: Cora-20; " in text
