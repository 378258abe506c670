"""Distances to the best method of a case."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from fl_lightning.study.definition import Study
from fl_lightning.study.distance import distances
from fl_lightning.study.schema import WrongStudy


def rows_of(
    method: str, case: str, *tests: float, seconds: float = 1.0, is_error: bool = False
) -> list[dict[str, Any]]:
    common = {"method": method, "case": case, "cpu_seconds": seconds, "is_error": is_error}
    return [{**common, "seed": seed, "test": test} for seed, test in enumerate(tests)]


def test_mean_and_largest_distance_and_the_time_as_a_multiple() -> None:
    table = pd.DataFrame(
        rows_of("FedAvg", "A", 0.80, 0.82, seconds=2.0)
        + rows_of("FedAvg", "B", 0.90, 0.90, seconds=1.0)
        + rows_of("FedAvg", "C", 3.0, 3.0, is_error=True)
        + rows_of("Kin", "A", 0.84, 0.86, seconds=3.0)
        + rows_of("Kin", "B", 0.70, 0.72, seconds=4.0)
        + rows_of("Ditto", "B", 0.91, 0.91, seconds=1.0)
    )
    lines = distances(table, "FedAvg").splitlines()
    assert lines[-3:] == [
        "| FedAvg | 2 | 2.5 | 4.0 (A) | 1.0, 1.0 |",
        "| Kin | 2 | 10.0 | 20.0 (B) | 2.8, 4.0 |",
        "| Ditto | 1 | 0.0 | 0.0 (B) | 1.0, 1.0 |",
    ]


def test_of_errors_alone_there_is_none() -> None:
    assert distances(pd.DataFrame(rows_of("FedAvg", "C", 3.0, is_error=True)), "FedAvg") == ""


def test_distances_without_baselines_are_refused(make_study: Callable[..., Study]) -> None:
    with pytest.raises(WrongStudy, match="distances is True: it needs baselines"):
        make_study(distances=True, baselines=[])


def test_runs_that_failed_have_no_distance_and_no_time() -> None:
    table = pd.DataFrame(rows_of("FedAvg", "A", 0.8, 0.8, seconds=2.0) + rows_of("Kin", "A", 0.9, seconds=6.0))
    failed = {"test": None, "is_error": None, "cpu_seconds": 0.1, "seed": 9}
    more = pd.DataFrame([{**failed, "method": "Kin", "case": "A"}, {**failed, "method": "Kin", "case": "B"}])
    assert distances(pd.concat([table, more]), "FedAvg") == distances(table, "FedAvg")
