"""The way from Local to Pooled, and how far methods come on it."""

import pandas as pd
import pytest
from study.test_report import LEVEL, METHODS, known
from study_pool import HerePool

from fl_lightning.study.progress import Progress
from fl_lightning.study.report import write_report
from fl_lightning.study.room import room, ways, with_shares
from fl_lightning.study.runner import Runner
from fl_lightning.study.store import Store
from fl_lightning.study.table import leaderboard, tidy


def table_of(**tests: list[float]) -> pd.DataFrame:
    rows = [
        {"method": method, "case": "A", "seed": seed, "val": value, "test": value, "metric": "acc", "is_error": False}
        for method, values in tests.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def shares(table: pd.DataFrame, *names: str) -> dict[str, str]:
    shown = pd.DataFrame("x", index=list(dict.fromkeys(table["method"])), columns=["A"])
    return dict(with_shares(shown, table, names)["A"])


LOCAL = [0.70, 0.72, 0.71]


def test_a_share_is_of_the_way_from_local_to_the_ceiling() -> None:
    table = table_of(Local=LOCAL, FedAvg=[0.75, 0.77, 0.76], Kin=[0.69, 0.71, 0.70], Pooled=[0.80, 0.82, 0.82])
    way = ways(table, ["Pooled"])["A"]
    assert way.length == pytest.approx((0.10 + 0.10 + 0.11) / 3)
    assert way.uncertainty == pytest.approx(4.3027 * 0.0057735 / 3**0.5, rel=1e-3)
    assert shares(table, "Pooled") == {"Local": "x", "FedAvg": "x · 48 %", "Kin": "x · -10 %", "Pooled": "x"}
    assert "| A | 71.0 | 81.3 (Pooled) | 10.3 ± 1.4 |  |" in room(table, ["Pooled"])


def test_of_two_ceilings_validation_chooses_one() -> None:
    table = table_of(Local=LOCAL, Pooled=[0.80, 0.81, 0.82], whole=[0.85, 0.87, 0.86])
    assert ways(table, ["Pooled", "whole"])["A"].ceiling == "whole"
    assert shares(table, "Pooled", "whole") == {"Local": "x", "Pooled": "x · 67 %", "whole": "x"}


@pytest.mark.parametrize("ceiling", [[0.69, 0.74, 0.72], [0.60, 0.62, 0.61]], ids=["uncertain", "below"])
def test_where_the_way_is_within_its_uncertainty_there_is_no_room(ceiling) -> None:
    table = table_of(Local=LOCAL, FedAvg=[0.75, 0.77, 0.76], Pooled=ceiling)
    assert shares(table, "Pooled") == {"Local": "x", "FedAvg": "x · no room", "Pooled": "x"}
    assert room(table, ["Pooled"]).endswith("| no room |")


def test_less_is_better_of_errors() -> None:
    table = table_of(Local=[1.0, 1.1, 1.0], FedAvg=[0.8, 0.9, 0.8], Pooled=[0.6, 0.7, 0.6]).assign(is_error=True)
    assert shares(table, "Pooled")["FedAvg"] == "x · 50 %"


@pytest.mark.parametrize("tests", [{"Pooled": LOCAL, "FedAvg": LOCAL}, {"Local": [0.7], "Pooled": [0.8]}])
def test_nothing_is_said_without_both_ends_or_with_one_seed(tests) -> None:
    table = table_of(**tests)
    assert ways(table, ["Pooled"]) == {}
    assert room(table, ["Pooled"]) == ""


def test_a_ceiling_changes_no_comparison_of_the_others(make_study, monkeypatch) -> None:
    monkeypatch.setitem(LEVEL, "Pooled", 0.9)
    reports = {}
    ceiling = {"Pooled": {"config": "quickstart.yaml", "settings": {"strategy": "Pooled"}}}
    for name, methods in {"without": METHODS, "with": METHODS | ceiling}.items():
        study = make_study(methods=methods, cases={"1": {}, "2": {}}, tuning=None, seeds=[0, 1, 2], baselines=["Local"])
        study.results /= name
        store = Store(study.results)
        with HerePool(train=known) as pool:
            Runner(study, store, say=lambda line: None).run(pool)
        progress = Progress(study, store)
        assert progress.ceilings == (["Pooled"] if name == "with" else [])
        table = tidy(progress)
        reports[name] = write_report(progress, table).read_text()
        assert with_shares(leaderboard(progress, table), table, []).equals(leaderboard(progress, table))

    def part(name: str, title: str) -> str:
        return reports[name].partition(f"## {title}\n")[2].partition("\n## ")[0]

    assert "## Room for methods" not in reports["without"]
    assert " · 50 %" in part("with", "Test metrics")
    for title in ("Against the best simple baseline", "Average ranks", "Wins, ties and losses"):
        assert part("with", title) == part("without", title) != ""


def test_ends_have_their_sign_and_are_of_common_seeds() -> None:
    table = table_of(Local=[-0.5, -0.55, -0.45, 0.9], Pooled=[0.5, 0.52, 0.51]).assign(metric="r2")
    assert "| A | -50.0 | 51.0 (Pooled) | 101.0 ± " in room(table, ["Pooled"])
    errors = table_of(Local=[0.5, 0.55, 0.45], Pooled=[0.3, 0.32, 0.31]).assign(is_error=True)
    assert "| A | 500.0 | 310.0 (Pooled) | 190.0 ± " in room(errors, ["Pooled"])
