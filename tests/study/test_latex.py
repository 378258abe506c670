"""A leaderboard for a paper."""

import re

import pandas as pd
import pytest

from fl_lightning.study.latex import latex


def rows_of(method: str, case: str, values: list[float], *, rising: bool = False, is_error: bool = False) -> list[dict]:
    more = {"metric": "acc", "is_error": is_error, "still_rising": "round 9 of 10 is the best" if rising else ""}
    return [{"method": method, "case": case, "seed": s, "test": v, **more} for s, v in enumerate(values)]


@pytest.fixture
def table() -> pd.DataFrame:
    rows = rows_of("FedAvg", "Cora_10", [0.70, 0.72]) + rows_of("Local", "Cora_10", [0.80], rising=True)
    rows += rows_of("FedAvg", "B & C", [0.5, 0.5]) + rows_of("Pooled", "Cora_10", [0.9, 0.9])
    return pd.DataFrame(rows)


def test_a_table_by_hand(table) -> None:
    shown = pd.DataFrame("x", index=["Pooled", "FedAvg", "Local"], columns=["Cora_10", "B & C"])
    assert latex(shown, table, "test", ceilings=["Pooled"], num_seeds=2).splitlines() == [
        r"\begin{tabular}{lcc}",
        r"\toprule",
        r"method & Cora\_10 & B \& C \\",
        r"\midrule",
        r"FedAvg & $71.0 \pm 1.4$ & $\mathbf{50.0} \pm 0.0$ \\",
        r"Local & $\mathbf{80.0}\,(1)^{\uparrow}$ &  \\",
        r"\midrule",
        r"Pooled & $90.0 \pm 0.0$ &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% accuracy in percent",
        r"% in most seeds: $\uparrow$ was still rising",
    ]


def test_of_spreads_none_is_the_best(table) -> None:
    shown = pd.DataFrame("x", index=["FedAvg", "Local"], columns=["Cora_10"])
    assert r"\mathbf" not in latex(
        shown, table.rename(columns={"test": "test_std"}), "test_std", ceilings=[], num_seeds=2
    )


def test_of_errors_the_least_is_the_best() -> None:
    rows = rows_of("A", "c", [0.2, 0.2], is_error=True) + rows_of("B", "c", [0.1, 0.1], is_error=True)
    shown = pd.DataFrame("x", index=["A", "B"], columns=["c"])
    text = latex(shown, pd.DataFrame(rows), "test", ceilings=[], num_seeds=2)
    assert r"B & $\mathbf{100.0} \pm 0.0$" in text
    assert r"A & $200.0 \pm 0.0$" in text
    assert len(re.findall(r"\\midrule", text)) == 1


@pytest.mark.parametrize(
    ("metric", "best", "cell"),
    [
        ("test/ece", "B", r"\mathbf{100.0} \pm 0.0"),
        ("test/loss", "B", r"\mathbf{100.0} \pm 0.0"),
        ("test_asr", "B", r"\mathbf{10.0} \pm 0.0"),
        ("test/mrr", "A", r"\mathbf{20.0} \pm 0.0"),
        ("test_worst", "A", r"\mathbf{20.0} \pm 0.0"),
    ],
)
def test_of_further_metrics_the_best_is_by_their_own_direction(metric: str, best: str, cell: str) -> None:
    rows = pd.DataFrame(rows_of("A", "c", [0.2, 0.2]) + rows_of("B", "c", [0.1, 0.1])).rename(columns={"test": metric})
    shown = pd.DataFrame("x", index=["A", "B"], columns=["c"])
    (line,) = [line for line in latex(shown, rows, metric, ceilings=[], num_seeds=2).splitlines() if "mathbf" in line]
    assert line == f"{best} & ${cell}$ " + 2 * "\\"
