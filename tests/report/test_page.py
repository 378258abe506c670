"""A page from the files of a folder alone: whole ones, and those that lack this or that."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from page_checks import check_page
from run_folders import record, write_run

import fl_lightning.strategies
from fl_lightning.report import meanings, write
from fl_lightning.report.figures import Curve
from fl_lightning.report.pictures import Album
from fl_lightning.report.record import BestRound, Partition, RunRecord, Snapshot
from fl_lightning.report.references import levels
from fl_lightning.report.sections import result
from fl_lightning.report.theme import dash


def words_of(folder: Path, **options: object) -> str:
    return check_page(write(folder, **options).read_text())  # type: ignore[arg-type]


def test_everything_is_reported(tmp_path: Path) -> None:
    words = words_of(write_run(tmp_path / "run" / "version_0"))
    for run_record in (
        "FedAvg finished",
        "run/version_0 · 3 clients and 1 held out · seed 0",
        "best round 1",
        "0.6500",
        "of 20 test examples of all training clients 17 are right",
        "balanced accuracy",
        "client-03 0.4000",
        "Labels of the clients",
        "Embedding after round 0",
        "Adjacency after round 0, as a graph",
        "60 % and 20 % of the variance",
        "FloatingPointError",
        "milliseconds a round",
        "num_epochs",
        "torch 2.13.0",
    ):
        assert run_record in words, run_record


def test_the_result_comes_first_and_diagnostics_last(tmp_path: Path) -> None:
    rounds = [
        {"round": index, "val/acc": value, "test/acc": 0.6, "seconds": 1, "server/spread": value, "server/own_idea": 3}
        for index, value in enumerate((0.4, 0.6, 0.5))
    ]
    run_record = record(class_names=["healthy", "ill"], reference={"test/acc": 0.4})
    page = write(write_run(tmp_path / "run", run_record=run_record, rounds=rounds)).read_text()
    words = check_page(page)
    titles = re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', page)
    assert titles == [
        "Learning",
        "Clients",
        "Failures and attacks",
        "Predictions",
        "Embeddings",
        "Data and partition",
        "Communication and time",
        "Diagnostics of FedAvg",
        "Settings",
    ]
    assert "FedAvg comes to a test accuracy of 0.6500 on average over 3 clients, 0.4000 at the worst." in words
    assert "The same prediction for all examples of a client would come to 0.4000." in words
    assert "Validation chose round 1, of 3 rounds from 0." in words
    assert "one run with one seed" in words
    assert "0: every client is given the same model" in words
    assert "The same in all rounds: Own idea 3." in words
    assert "healthy" in words


def test_a_run_no_better_than_guessing_says_so(tmp_path: Path) -> None:
    words = words_of(write_run(tmp_path / "run", run_record=record(reference={"test/acc": 0.7})))
    assert "That is no better than the same prediction for all examples of a client (0.7000)." in words


def test_matrices_that_did_not_change_are_drawn_once(tmp_path: Path) -> None:
    matrix = np.eye(3, dtype=np.float32)
    snapshots = [Snapshot.of(round_idx, "embedding", matrix) for round_idx in (0, 1, 2)]
    words = words_of(write_run(tmp_path / "run", run_record=record(snapshots=snapshots)))
    assert "Embedding after round 0" in words
    assert "Embedding after round 2" not in words
    assert "It did not change." in words


def test_every_metric_of_a_strategy_says_what_good_is() -> None:
    strategies = Path(fl_lightning.strategies.__file__).parent
    named = {
        name
        for path in strategies.glob("**/*.py")
        for name in re.findall(r'"server/([a-z_]+(?:/x)?)', path.read_text().replace("/{name}", "/x"))
    }
    assert len(named) > 30
    for name in sorted(named - {"generator_", "similarity_", "x"}):
        assert meanings.metric(name)[1], f"server/{name} has no words in report/meanings.py"
    assert meanings.metric("similarity_mean")[0] == "Similarities of different clients: mean"
    assert meanings.metric("own_idea") == ("Own idea", "")


def test_clients_against_another_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", run_record=record((0.5, 0.6, 0.7)))
    local = write_run(tmp_path / "b", run_record=record((0.4, 0.6, 0.9), strategy="Local"), strategy="Local")
    words = words_of(run, against=local)
    assert "Beside Local, of 3 clients: better 1, worse 1, equal 1; the mean gain is −0.0333." in words
    assert "+0.1000" in words


def test_less_is_better_in_a_regression(tmp_path: Path) -> None:
    def run_record(values: list[float | None], strategy: str) -> RunRecord:
        scores = {"": {"val/mse": values, "test/mse": values}}
        chosen = BestRound(round=1, clients=[0, 1, 2], scores=scores, examples={}, predicted=[[1, 1.5], [2, 2]])
        changes = {"monitor": "val/mse", "mode": "min", "regression": True, "strategy": strategy, "best": chosen}
        return record(partition=None, **changes)

    rounds = [{"round": 0, "val/mse": 2.0, "test/mse": 3.0, "test/mse_std": 1, "test/mse_worst": 4.0, "seconds": 1}]
    given = {"rounds": rounds, "monitor": "val/mse", "result": {"val/mse": 2.0, "test/mse": 3.0, "test/mse_worst": 4.0}}
    run = write_run(tmp_path / "a", run_record=run_record([1.0, 2.0, 4.0], "FedAvg"), **given)
    other = write_run(tmp_path / "b", run_record=run_record([2.0, 2.0, 3.0], "Local"), strategy="Local", **given)
    words = words_of(run, against=other)
    assert "Beside Local, of 3 clients: better 1, worse 1, equal 1; the mean gain is +0." in words
    assert "its mean squared error is 0.1250" in words
    assert "worst client 4 client-02" in words
    assert "How the data are shared out was not kept." in words


def test_of_another_partition_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", run_record=record(partition_hash="def"))
    with pytest.raises(ValueError, match="of another partition than"):
        write(run, against=other)
    (tmp_path / "b" / "report.json").unlink()
    with pytest.raises(ValueError, match="no scores of single clients"):
        write(run, against=other)


@pytest.mark.parametrize("missing", ["metrics.csv", "result.json", "report.json", "config.yaml"])
def test_without_one_of_the_files(missing: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / missing).unlink()
    words = words_of(folder)
    run_record = {
        "metrics.csv": "There is no metrics.csv",
        "result.json": "There is no result.json",
        "report.json": "There is no report.json",
        "config.yaml": "There is no config.yaml",
    }
    assert run_record[missing] in words
    if missing == "result.json":
        assert "FedAvg unknown" in words
        assert "best round (from 0) 1" in words


def test_a_row_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.csv"
    path.write_text(path.read_text() + "3,0.")
    (folder / "result.json").unlink()
    assert "of 3, by val/acc 0.6000" in words_of(folder)


def test_failed_interrupted_and_attacked_runs(tmp_path: Path) -> None:
    failed = write_run(tmp_path / "a", status="failed", error="TooFewUpdates: the last 3 rounds failed")
    assert "The run failed: TooFewUpdates: the last 3 rounds failed" in words_of(failed)
    interrupted = write_run(
        tmp_path / "b", status="interrupted", changes=["from round 2 on: strategy.mu: 1 then, 2 now"]
    )
    words = words_of(interrupted)
    assert "can be continued with --ckpt_path last" in words
    assert "from round 2 on: strategy.mu" in words
    attacked = write_run(tmp_path / "c")
    (attacked / "malicious_clients.json").write_text(json.dumps({"1 Backdoor": ["client-01"]}))
    words = words_of(attacked)
    assert "Attack 1 Backdoor: client-01 (1 client)." in words
    assert "Under attack" in words


def test_a_metric_of_benign_clients_has_their_number_and_their_worst(tmp_path: Path) -> None:
    result = {"benign/val/acc": 0.6, "benign/test/acc": 0.65, "benign/test/acc_worst": 0.6, "best_round": 1}
    run_record = record((0.1, 0.6, 0.7), unseen_clients={})
    folder = write_run(tmp_path / "run", run_record=run_record, monitor="benign/val/acc", result=result)
    (folder / "malicious_clients.json").write_text(json.dumps({"SignFlip": ["client-00"]}))
    words = words_of(folder)
    assert "a test accuracy of benign clients of 0.6500 on average over 2 clients, 0.6000 at the worst" in words
    assert "worst client 0.6000 client-01" in words


def test_a_metric_of_another_model_has_its_values_of_the_clients(tmp_path: Path) -> None:
    run_record = record()
    assert run_record.best is not None
    run_record.best.scores["trained/"] = {"test/acc": [0.9, 0.8, 0.7]}
    result = {"trained/val/acc": 0.6, "trained/test/acc": 0.8, "trained/test/acc_worst": 0.7, "best_round": 1}
    words = words_of(write_run(tmp_path / "run", run_record=run_record, monitor="trained/val/acc", result=result))
    assert "a test accuracy of trained models of 0.8000 on average over 3 clients" in words
    assert "worst client 0.7000 client-02" in words


def test_numbers_that_are_none_are_read_again(tmp_path: Path) -> None:
    """A client without a known target has no mean of them, and one prediction has overflowed."""
    names = [f"lab-{number}" for number in range(70)]
    columns = ["client", "num_graphs", "num_train", "num_val", "num_test", "mean_target", "std_target"]
    rows: list[list[str | float | None]] = [
        [name, 5, 3, 1, 1, math.nan if name == "lab-7" else 2.0, math.nan] for name in names
    ]
    run_record = record(names=names, sizes=[5] * 70, regression=True, unseen_clients={}, points=None)
    run_record.partition = Partition(columns=columns, rows=rows, labels=[], heterogeneity=None)
    assert run_record.best is not None
    run_record.best.confusion, run_record.best.predicted = None, [[1.0, 3.0], [2.0, math.inf]]
    page = write(write_run(tmp_path / "run", run_record=run_record)).read_text()
    words = check_page(page)
    assert "A sample of 1 test example at round 1; its mean squared error is 4" in words
    assert "lab-7 5 3 1 1 – –" in words
    assert ">lab-50</text>" not in page, "so many names do not fit beside the targets"


def test_long_names_stand_in_lines() -> None:
    """They went past the picture's left edge."""
    names = ["FedAvg, lr 0.1, num_epochs 3, proximal_weight 0.01", "Local"]
    ends = np.zeros(2)
    svg = Album().intervals(names, ends, ends, ends, title="title", x_label="x").svg
    lines = re.findall(r'text-anchor: end[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', svg)
    assert [line for _, _, line in lines] == ["FedAvg, lr 0.1,", "num_epochs 3,", "proximal_weight 0.01", "Local"]
    assert all(float(x) > 5.2 * len(line) for x, _, line in lines)
    heights = [float(y) for _, y, _ in lines]
    assert min(np.diff(heights)) > 9


def test_before_the_first_round_was_evaluated(tmp_path: Path) -> None:
    empty = record(best=None, snapshots=[], points=None, failures=[], timing=None, unseen_clients={})
    folder = write_run(tmp_path / "run", run_record=empty, result={}, failures={})
    (folder / "metrics.csv").unlink()
    words = words_of(folder)
    for run_record in (
        "No round was evaluated",
        "were not kept",
        "No embeddings",
        "Neither bytes nor seconds",
        "No client failed",
    ):
        assert run_record in words, run_record


def test_names_are_text(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", 'a"b', "c&d", "e"]
    run_record = record(names=names)
    run_record.partition.rows = [[name, *row[1:]] for name, row in zip(names, run_record.partition.rows, strict=True)]  # type: ignore[union-attr]
    words = words_of(write_run(tmp_path / "run", run_record=run_record))
    assert "<script>" in words
    assert 'a"b' in words


def test_many_clients_and_classes(tmp_path: Path) -> None:
    names = [f"client-{index:03d}" for index in range(150)]
    run_record = record(names=names, sizes=[10] * 150, training=list(range(150)), snapshots=[], unseen_clients={})
    run_record.unkept = ["matrices are kept for at most 128 training clients"]
    assert run_record.partition is not None
    run_record.partition.rows = [[name, *run_record.partition.rows[0][1:]] for name in names]
    run_record.partition.labels = [[1] * 40 for _ in names]
    values: list[float | None] = [index / 150 for index in range(150)]
    run_record.best = BestRound(
        round=1,
        clients=list(range(150)),
        scores={"": {"val/acc": values, "test/acc": values}},
        examples={},
        confusion=[[1] * 40 for _ in range(40)],
    )
    words = words_of(write_run(tmp_path / "run", run_record=run_record))
    assert "Left out: matrices are kept for at most 128 training clients." in words


def test_labels_of_their_own_have_a_picture_for_each_client(tmp_path: Path) -> None:
    names = [f"client-{index:02d}" for index in range(14)]
    own = {name: [[[4, 1], [1, 4]], [[9, 0], [1, 0]]] for name in names}
    run_record = record(own_outputs=[2] * 4)
    assert run_record.best is not None
    run_record.best = BestRound(round=1, clients=[0], scores=run_record.best.scores, examples={}, own=own)
    words = words_of(write_run(tmp_path / "run", run_record=run_record))
    assert "Labels are each client's own" in words
    assert "The first 12 of 14 clients are drawn." in words
    assert "label 1" in words


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        write(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has none of metrics.csv"):
        write(tmp_path / "empty")
    for name, content, why in (
        ("result.json", "{", r"result.json is damaged"),
        ("result.json", "[]", r"result.json is damaged"),
        ("report.json", "{", r"report.json is damaged"),
        ("report.json", "{}", "has format version None"),
        ("config.yaml", "a: [", r"config.yaml is not YAML"),
        ("metrics.csv", "a,b\n1,2\n", r"metrics.csv is damaged"),
    ):
        folder = write_run(tmp_path / name)
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=why):
            write(folder)


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run_record = record()
    run_record.write(tmp_path)
    actual = RunRecord.read(tmp_path)
    assert actual == run_record
    assert actual is not None
    assert str(actual.snapshots[0].matrix()) == str(run_record.snapshots[0].matrix())
    assert Snapshot.of(0, "a", run_record.snapshots[1].matrix()).values == run_record.snapshots[1].values
    assert RunRecord.read(tmp_path / "nowhere") is None


def test_marks_are_told_before_anything_else(tmp_path: Path) -> None:
    marks = {"still_rising": "round 2 of 3 is the best", "diverged": "2 updates lost to overflow"}
    words = words_of(write_run(tmp_path / "run", marks=marks))
    assert "It was still rising: round 2 of 3 is the best." in words
    assert "It diverged: 2 updates lost to overflow." in words
    assert "still rising" not in words_of(write_run(tmp_path / "level"))


def test_marks_of_a_run_that_left_none_are_those_of_its_rounds(tmp_path: Path) -> None:
    rounds = [{"round": index, "val/acc": value, "seconds": 1} for index, value in enumerate((0.5, 0.8, *[0.2] * 9))]
    rounds[5]["num_overflows"] = 2
    words = words_of(write_run(tmp_path / "run", rounds=rounds))
    assert "0.8 in round 1, 0.2 at the end, 0.5 in the first round; 2 updates lost to overflow" in words


def test_the_metric_that_chose_the_round_comes_first_and_models_one_after_the_other() -> None:
    names = ("test/acc", "test/auroc", "test/loss", "trained/test/acc", "trained/test/auroc")
    metrics = {f"{name}{kind}": 0.5 for name in names for kind in ("", "_std", "_worst", "_weighted")}
    run = SimpleNamespace(figures=metrics, test_metric="test/auroc", record=None)
    table = result._other_metrics(run)  # type: ignore[arg-type]
    assert table is not None
    mixed = "trained locally, before mixing"
    expected = ["result, test/auroc", "result, test/acc", f"{mixed}, test/auroc", f"{mixed}, test/acc"]
    assert [row[0] for row in table.rows] == expected


def test_references_are_broken_lines_whatever_their_color() -> None:
    run = SimpleNamespace(reference=lambda metric: {"Katz": 0.5, "local": 0.4, "Local": 0.3})
    x = np.array([0.0, 1.0])
    curves = levels([run], "test/auroc", [Curve(label="val", x=x, y=x)], ", test")  # type: ignore[list-item]
    assert len(curves) == 3
    assert all(dash(curve.order) != "-" for curve in curves if curve.order is not None)


def test_axes_of_counts_and_of_bars_without_a_length() -> None:
    sizes = Album().points(
        np.array([2607.0, 2608.0]),
        np.array([0.1, 0.2]),
        [0, 0],
        ["a"],
        title="size",
        x_label="graphs",
        y_label="acc",
        whole_x=True,
    )
    assert ">2,608<" in sizes.svg
    assert "2,607.5" not in sizes.svg
    nothing = Album().bars(["a", "b"], np.zeros(2), title="F1", x_label="F1, 0 to 1")
    assert ">1<" in nothing.svg
    assert "−" not in nothing.svg
