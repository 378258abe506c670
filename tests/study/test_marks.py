"""What is said of the end of stored runs, and where it is shown."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from study_pool import HerePool, invented

from fl_lightning.study.command import main
from fl_lightning.study.definition import Study
from fl_lightning.study.marks import columns_of, legend, marked_pairs, with_signs
from fl_lightning.study.progress import Progress
from fl_lightning.study.report import write_report
from fl_lightning.study.runner import Runner
from fl_lightning.study.store import Store
from fl_lightning.study.table import near_the_end, tidy

RECORD: dict[str, Any] = {
    "error": "",
    "monitor": "val/acc",
    "mode": "max",
    "num_rounds": 20,
    "result": {"best_round": 3, "val/acc": 0.8},
}
FALLING = {"round": list(range(20)), "val/acc": [0.5, 0.6, 0.7, 0.8, *[0.2] * 15, None]}


def test_a_record_that_has_marks_is_believed() -> None:
    marks = {"diverged": "3 updates lost to overflow"}
    actual = columns_of({**RECORD, "marks": marks, "near": {"rounds": 3, "bytes": 7}}, None)
    assert actual == {
        "still_rising": "",
        "diverged": "3 updates lost to overflow",
        "marks_from": "all rounds",
        "rounds_to_95": 3,
        "bytes_to_95": 7,
    }


def test_an_older_record_is_judged_by_the_curve_that_was_kept() -> None:
    actual = columns_of(RECORD, {**FALLING, "comm/bytes_total": [100.0 * n for n in range(1, 21)]})
    assert actual["diverged"] == "0.8 in round 3, 0.2 at the end, 0.5 in the first round"
    assert (actual["marks_from"], actual["rounds_to_95"], actual["bytes_to_95"]) == ("all rounds", 4, 400)
    assert columns_of(RECORD, FALLING)["bytes_to_95"] is None


@pytest.mark.parametrize("rounds", [None, {"round": [0.0], "test/acc": [0.5]}])
def test_of_a_record_without_a_curve_nothing_is_made_up(rounds: Any) -> None:
    actual = columns_of(RECORD, rounds)
    assert (actual["still_rising"], actual["diverged"], actual["marks_from"]) == ("", "", "best round")
    assert actual["rounds_to_95"] is None
    late = columns_of({**RECORD, "result": {"best_round": 18, "val/acc": 0.8}}, rounds)
    assert late["still_rising"] == "round 18 of 20 is the best"


def test_an_overflow_that_was_warned_of_and_a_server_that_diverged() -> None:
    warned = "client-24 failed in stage 'train' round 11: it sent numbers that are not finite; it is left out"
    assert columns_of({**RECORD, "warnings": ["another", warned]}, None)["diverged"] == warned
    failed = {"error": "ServerDiverged: the server's models are not finite", "monitor": ""}
    assert columns_of(failed, None)["diverged"] == failed["error"]
    assert columns_of({"error": "ValueError: no", "monitor": ""}, None)["diverged"] == ""


def table(**marks: list[str]) -> pd.DataFrame:
    rows = len(next(iter(marks.values())))
    return pd.DataFrame({"method": ["A"] * rows, "case": ["x"] * rows, "marks_from": ["all rounds"] * rows, **marks})


def test_a_pair_has_a_mark_if_most_of_its_runs_have() -> None:
    assert marked_pairs(table(still_rising=["late", "late", ""]), "still_rising") == {("A", "x")}
    assert marked_pairs(table(still_rising=["late", ""]), "still_rising") == set()
    assert marked_pairs(table(still_rising=["late"]), "diverged") == set()


def test_signs_and_their_legend() -> None:
    shown = pd.DataFrame({"x": ["50.0", ""], "y": ["60.0", "70.0"]}, index=["A", "B"])
    marked = table(still_rising=["late"], diverged=["fell"], at_edge=["lr"])
    assert with_signs(shown, marked).loc["A", "x"] == "50.0 ↗ ↯ ⊣"
    assert with_signs(shown, marked, plain=True).loc["A", "x"] == "50.0 ^ ! #"
    assert with_signs(shown, marked).loc["B", "y"] == "70.0"
    assert legend(marked, plain=True) == (
        "In most seeds: ^ still rising (1), ! diverged (1), # at an edge of the grid (1), of 1 pair of method and case."
    )
    assert legend(marked, plain=True).isascii()
    assert legend(table(still_rising=[""])) == ""
    assert legend(table(still_rising=[""]).assign(marks_from="best round")).startswith("Of 1 of 1 runs the best round")


# ---------------------------------------------------------------- in a study


def ends(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
    """FedAvg is still rising, Local's learning rate is best at 0.05, where the grid ends."""
    actual = invented(arguments)
    (rate,) = (float(each.partition("=")[2]) for each in arguments if each.startswith("--model.optimizer.lr="))
    actual["result"]["val/acc"] = rate
    if "--strategy=FedAvg" in arguments:
        actual |= {"marks": {"still_rising": "round 1 of 2 is the best"}, "near": {"rounds": 2, "bytes": 3_000_000}}
    else:
        actual["near"] = {"rounds": 1}
    return actual


@pytest.fixture
def progress(make_study: Callable[..., Study]) -> Progress:
    axes = {"model.optimizer.lr": [0.01, 0.02, 0.05], "kind": {"adam": {"model.optimizer": "torch.optim.Adam"}}}
    study = make_study(tuning={"seeds": [7], "budget": 3, "grid": axes}, seeds=[0, 1, 2])
    with HerePool(train=ends) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    return Progress(study, Store(study.results))


def test_the_table_carries_the_marks(progress: Progress) -> None:
    actual = tidy(progress)
    assert set(actual[actual["method"] == "FedAvg"]["still_rising"]) == {"round 1 of 2 is the best"}
    assert set(actual[actual["method"] == "Local"]["still_rising"]) == {""}
    assert set(actual["at_edge"]) == {"lr=0.05 is the highest of 3"}
    assert set(actual["tried"]) == {3}
    near = near_the_end(actual, progress.study)
    assert near is not None
    assert (near.loc["FedAvg", "plain"], near.loc["Local", "wide"]) == ("2 (3 MB)", "1")


def test_tuning_records_have_marks_too(progress: Progress) -> None:
    (record,) = (progress.records[run.key] for run in progress.tuning("FedAvg", "plain") if "0.05" in run.setting)
    assert record["marks"] == {"still_rising": "round 1 of 2 is the best"}


def test_the_report_and_the_table_show_them(progress: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_report(progress, tidy(progress)).read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("| FedAvg |") and "↗" in line)
    assert line.count(" ↗ ⊣") == 2
    assert "↗ still rising (2), ⊣ at an edge of the grid (4), of 4 pairs of method and case." in text
    assert "▲" not in line
    assert "## Rounds to 95 % of the final validation score" in text
    assert "| FedAvg | 2 (3 MB) | 2 (3 MB) |" in text
    assert "Of the 4 means that are ranked 2 were still rising in most seeds." in text
    assert main(["table", str(progress.study.path), "--markdown"]) == 0
    assert " ↗ ⊣ |" in capsys.readouterr().out


def test_a_second_table_is_that_of_the_study_to_convergence(progress: Progress, make_study: Any, tmp_path: Any) -> None:
    source = progress.study.path.read_text()
    (tmp_path / "far.yaml").write_text(source)
    first = make_study(tuning=None, seeds=[0, 1, 2], results="results/small", convergence="far.yaml")
    with HerePool() as pool:
        Runner(first, Store(first.results), say=lambda line: None).run(pool)
    near = Progress(first, Store(first.results))
    text = write_report(near, tidy(near)).read_text()
    papers, convergence = text.index("### The papers' protocol"), text.index("### To convergence")
    assert papers < convergence < text.index("## Rounds to")
    assert "far.yaml` was run yet." in text[convergence:]
    far = Study(tmp_path / "far.yaml")
    with HerePool(train=ends) as pool:
        Runner(far, Store(far.results), say=lambda line: None).run(pool)
    text = write_report(near, tidy(near)).read_text()
    assert "↗" in text[text.index("### To convergence") :]
