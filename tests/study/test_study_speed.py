"""The table of ``benchmarks/study_speed.py``, from rows that are made up."""

from pathlib import Path

import pytest
from scripts import ROOT, script


def test_the_table_has_the_ratios_of_each_method_with_their_median_and_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(ROOT, "benchmarks")))
    found = {("A", "x"): "1.50", ("A", "y"): "2.50", ("A", "z"): "2.00", ("B", "z"): "1.25"}
    rows = [{"method": method, "case": case, "ratio": ratio} for (method, case), ratio in found.items()]
    assert script("benchmarks/study_speed.py").table(rows, ["z", "x", "y"]).splitlines() == [
        "| method | z | x | y | median | largest |",
        "|---|---|---|---|---|---|",
        "| A | 2.00 | 1.50 | 2.50 | 2.00 | 2.50 |",
        "| B | 1.25 |  |  | 1.25 | 1.25 |",
    ]
