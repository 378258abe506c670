"""Tables and pictures of a study, from records whose metrics are known."""

import itertools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
from PIL import Image
from study_pool import HerePool, invented

from fl_lightning import command_line, extras
from fl_lightning.study import messages
from fl_lightning.study.command import main
from fl_lightning.study.definition import Study
from fl_lightning.study.pictures import _curves, _dress, _finish, _panels, _without_overlap
from fl_lightning.study.progress import Progress
from fl_lightning.study.report import _shown, write_report
from fl_lightning.study.runner import Runner, Tally
from fl_lightning.study.schema import Picture
from fl_lightning.study.store import Store
from fl_lightning.study.table import leaderboard, markdown, tidy

METHODS = {
    name: {"config": "quickstart.yaml", "settings": {"strategy": name}} for name in ("Local", "FedAvg", "FedPer")
}
LEVEL = {"Local": 0.70, "FedAvg": 0.80, "FedPer": 0.60}


def known(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
    """Metrics by method, case and seed: FedAvg ten points above Local, FedPer ten below, but for small noise."""
    actual = invented(arguments)
    (method,) = (argument.partition("=")[2] for argument in arguments if argument.startswith("--strategy="))
    (seed,) = (int(argument.partition("=")[2]) for argument in arguments if argument.startswith("--data.seed="))
    rounds = next(int(argument.partition("=")[2]) for argument in arguments if "num_rounds" in argument)
    test = LEVEL[method] + 0.01 * seed + 0.001 * (seed * len(method) % 3) + 0.01 * rounds
    actual["result"] |= {"val/acc": test - 0.02, "test/acc": test, "test/acc_std": 0.1, "test/acc_worst": 0.5}
    actual["result"] |= {"test/mrr": test / 2, "test/ece": 0.0 if seed else 0.05}
    actual["clients"]["test"] = [test - 0.1, test + 0.1]
    actual["malicious"] = [1] if rounds == 3 else []
    actual["rounds"] = {"round": [0.0, 1.0, 2.0], "val/acc": [0.0, 0.5, test - 0.02]}
    actual["rounds"]["server/spread"] = [0.1, 0.5, 0.3] if method == "FedAvg" else [0.1, 0.1 * seed, None]
    actual["warnings"] = [f"client-{seed} in round {rounds}: its update is {1.5e-7 * (seed + 1):.3g} long"]
    return actual


@pytest.fixture
def progress(make_study: Callable[..., Study]) -> Progress:
    cases = {
        f"{rounds} rounds": {"settings": {"trainer.num_rounds": rounds}, "x": rounds, "paper": {"FedAvg": 83.49}}
        for rounds in (1, 2, 3)
    }
    study = make_study(
        methods=METHODS,
        cases=cases,
        tuning=None,
        seeds=[0, 1, 2, 3, 4],
        history=["val/acc", "test/acc", "server/spread", "test/mrr", "test/ece"],
        pictures={
            "by_rounds": {"kind": "lines", "x_label": "rounds"},
            "change": {"kind": "lines", "change": True},
            "bands": {"kind": "lines", "band": True},
            "convergence": {"kind": "curves", "metric": "val/acc"},
            "ranks": {"kind": "ranks"},
        },
    )
    with HerePool(train=known) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    return Progress(study, Store(study.results))


def test_leaderboard(progress: Progress) -> None:
    table = tidy(progress)
    shown = leaderboard(progress, table)
    values = [100 * (0.71 + 0.01 * seed + 0.001 * (seed * 5 % 3)) for seed in range(5)]
    mean = sum(values) / 5
    spread = (sum((value - mean) ** 2 for value in values) / 4) ** 0.5
    assert shown.loc["Local", "1 rounds"] == f"{mean:.1f} ± {spread:.1f}"
    fewer = leaderboard(progress, table[table["seed"] < 2])
    assert fewer.loc["Local", "1 rounds"].endswith("(2 of 5)")
    assert leaderboard(progress, table[table["case"] != "2 rounds"]).loc["Local", "2 rounds"] == ""
    assert markdown(shown, "method").splitlines()[0] == "| method | 1 rounds | 2 rounds | 3 rounds |"


def test_the_same_benign_clients_everywhere(progress: Progress) -> None:
    """Client 1 is malicious in one case, so its metrics count in none."""
    table = tidy(progress)
    assert (table["always_benign_test"] - (table["test"] - 0.1)).abs().max() < 1e-9


def test_report(progress: Progress) -> None:
    path = write_report(progress, tidy(progress))
    text = path.read_text()
    assert "0, 1, 2, 3, 4; accuracy in percent. Round and settings" in text
    assert "| FedAvg | 83.0 ± 1.6 ▲ |" in text
    assert "▼" in text
    assert "(best simple)" in text
    assert "| method | 1 rounds | 2 rounds | 3 rounds |\n|---|---|---|---|\n| FedAvg | 83.0 (83.49) | 84.0 (" in text
    assert "| FedAvg | 3 | +9.9 | 3 | 0 | 0 | 0 |" in text
    assert "## Average ranks" in text
    assert "| Local |  | 0/0/3 | 3/0/0 |" in text
    for name in ("by_rounds", "bands", "change", "convergence", "ranks"):
        assert f"![{name}.png]({name}.png)" in text
        with Image.open(path.with_name(f"{name}.png")) as picture:
            assert min(picture.size) > 100


def test_curves_have_panels_for_cases_with_their_metric_alone(make_study: Callable[..., Study]) -> None:
    def without_in_two_rounds(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        actual = known(arguments, *others)
        if "--trainer.num_rounds=2" in arguments:
            del actual["rounds"]["val/acc"]
        return actual

    cases = {f"{rounds} rounds": {"settings": {"trainer.num_rounds": rounds}} for rounds in (1, 2, 3)}
    study = make_study(methods=METHODS, cases=cases, tuning=None, seeds=[0], history=["val/acc"])
    with HerePool(train=without_in_two_rounds) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    progress = Progress(study, Store(study.results))
    figure = _curves(progress, tidy(progress), Picture(kind="curves", metric="val/acc"))
    assert figure is not None
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == ["1 rounds", "3 rounds"]
    assert all(len(axes.lines) == len(METHODS) for axes in shown)
    assert _curves(progress, tidy(progress), Picture(kind="curves", metric="test/mse")) is None


def test_a_long_legend_does_not_squeeze_the_panels() -> None:
    widths = []
    for name in ("FedAvg", "a configuration whose name takes more room than a panel of the picture has"):
        figure, [axes] = _panels(1, share_y=False)
        axes.plot([0, 4], [0, 1], label=name)
        _finish(figure, [axes], ["test"])
        figure.draw_without_rendering()
        widths.append(axes.get_window_extent().width)
    assert widths[1] > 0.8 * widths[0]


def test_labels_of_ticks_do_not_run_into_each_other() -> None:
    figure, [axes] = _panels(1, share_y=False)
    axes.plot([0, 4], [0, 1])
    _dress(axes, "", Picture(kind="lines"), ticks=[0.0, 0.03, 0.06, 1.0, 2.0, 4.0])
    _without_overlap(figure, [axes])
    shown = [label for label in axes.get_xticklabels() if label.get_visible()]
    assert [label.get_text() for label in shown] == ["0", "1", "2", "4"]
    boxes = [label.get_window_extent() for label in shown]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_numbers_of_a_logarithmic_axis_are_no_formulas() -> None:
    figure, [axes] = _panels(1, share_y=False)
    axes.plot([0.05, 2000], [0, 1])
    with matplotlib.rc_context({"text.parse_math": False}):
        _dress(axes, "", Picture(kind="lines", log=True))
        figure.draw_without_rendering()
        texts = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert {"0.1", "1", "10", "100", "1,000"} <= set(texts)
    assert not any("$" in text for text in texts)


def test_further_metrics_of_the_history_have_tables(progress: Progress) -> None:
    text = write_report(progress, tidy(progress)).read_text().partition("## Further test metrics")[2]
    assert text.startswith("\n\n**MRR in percent**\n\n| method | 1 rounds |")
    assert "\n\n**ECE × 10⁻³**\n\n| method | 1 rounds |" in text
    assert "| Local | 10.0 ± 22.4 |" in text
    assert "accuracy in percent" not in text.partition("##")[0]


def test_what_was_kept_by_round_is_reported_where_it_begins_and_ends(progress: Progress) -> None:
    lines = write_report(progress, tidy(progress)).read_text().splitlines()
    assert "## server/spread, first and last round" in lines
    reported = lines[lines.index("## server/spread, first and last round") :]
    assert "| FedAvg | " + " | ".join(["0.10 → 0.30 (highest 0.50 in round 1)"] * 3) + " |" in reported
    assert "| Local | " + " | ".join(["0.10 → undefined (highest 0.20 in round 1)"] * 3) + " |" in reported
    assert "## val/acc, first and last round" not in lines


def test_average_ranks_of_panels(progress: Progress) -> None:
    study = progress.study
    for name, panel in zip(study.cases, ("short", "long", "long"), strict=True):
        study.cases[name] = study.cases[name].model_copy(update={"panel": panel})
    lines = write_report(progress, tidy(progress)).read_text().splitlines()
    assert "| method | long (2 cases) | all (3 cases) |" in lines
    assert "| FedAvg | 1.00 | 1.00 |" in lines


def test_table_and_report_by_command(progress: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(progress.study.path)
    assert main(["table", path, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| method | 1 rounds |")
    assert main(["table", path, "--latex"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(r"\begin{tabular}{lccc}")
    assert text.count(r"\mathbf") >= 3
    assert text.count("{") == text.count("}")
    assert main(["table", path]) == 0
    assert "FedPer" in capsys.readouterr().out
    assert main(["report", path]) == 0
    assert capsys.readouterr().out == f"{progress.study.results / 'report.md'}\n"
    assert (progress.study.results / "results.csv").read_text().count("\n") == 46


def test_a_report_without_its_extra(
    progress: Progress, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "statsmodels" else find_spec(name))
    with pytest.raises(SystemExit) as ended:
        command_line.main(["study", "report", str(progress.study.path)])
    assert ended.value.code == 2
    assert "fl-train study report needs statsmodels: pip install --editable '" in capsys.readouterr().err


def test_a_terminal_that_is_narrow_has_the_columns_below_each_other(
    progress: Progress, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = leaderboard(progress, tidy(progress))
    for width, parts in ((30, 3), (80, 1)):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["table", str(progress.study.path)]) == 0
        reported = capsys.readouterr().out
        assert reported.count("FedPer") == parts
        assert all(len(line) <= width for line in reported.splitlines())
        assert all(run in reported for run in shown.to_numpy().flatten())


def test_cases_without_metrics_are_named(progress: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(iter(progress.study.cases))
    keys = {run.key for method in progress.study.methods for run in progress.report(method, case)}
    runs = progress.study.results / "runs.jsonl"
    kept = [line for line in runs.read_text().splitlines() if json.loads(line)["key"] not in keys]
    runs.write_text("\n".join(kept) + "\n")
    assert main(["table", str(progress.study.path), "--markdown"]) == 0
    assert case not in capsys.readouterr().out
    assert main(["table", str(progress.study.path)]) == 0
    assert capsys.readouterr().out.endswith(f"nothing was run yet of {case}\n")


def test_status_tells_every_kind_of_news_once(progress: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    known_sources = progress.study.results / "sources.json"
    of_files = {"trainer.py": "another", "gone.py": "1"}
    known_sources.write_text(json.dumps(dict.fromkeys(json.loads(known_sources.read_text()), of_files)))
    assert main(["status", str(progress.study.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    changed, warned = lines[lines.index("0 runs to do") + 1 :]
    assert changed.startswith("45 runs computed before these files changed: ")
    assert changed.endswith(f"more; fl-train study check {progress.study.path} compares one of each method")
    assert warned == "45 runs warned: client-0 in round 1: its update is 1.5e-07 long"


def test_status_of_runs_whose_files_were_not_recorded(
    progress: Progress, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known_sources = progress.study.results / "sources.json"
    known_sources.unlink()
    assert main(["status", str(progress.study.path)]) == 0
    assert "computed" not in capsys.readouterr().out  # they are those of today, whether or not they were recorded
    monkeypatch.setattr(messages, "digest_of_sources", lambda: "another")
    assert main(["status", str(progress.study.path)]) == 0
    said = capsys.readouterr().out
    assert f"45 runs computed by other files of this package, which {known_sources} does not name" in said
    assert "files changed" not in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "missing.yaml"], "missing.yaml cannot be read (No such file or directory)"),
        (["runn", "small.yaml"], "invalid choice: 'runn'"),
        (["run", "small.yaml", "--processes", "0"], "'0' is not a number of processes: give at least 1"),
        (["run", "small.yaml", "--methods", "FedAvgg"], "--methods 'FedAvgg' is not in small.yaml: there are Local"),
        (["table", "small.yaml"], "results/small has no reported runs yet: fl-train study run small.yaml"),
        (["run", "small.yaml", "--minutes", "-5"], "'-5' is not a time: give a number of at least 0"),
        (["run", "small.yaml", "--state_seconds", "nan"], "'nan' is not a time: give a number of at least 0"),
        (["run", "small.yaml", "--process", "2"], "study: unrecognized arguments: --process 2"),
        (["train", "small.yaml", "--run", "abc"], "--run abc is not to do in small.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(
    arguments: list[str], expected: str, write_study: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_study()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert line.startswith("fl-train: error: ")
    assert expected in line


def test_cases_are_selected_by_patterns_as_in_files(
    write_study: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = {"config": "quickstart.yaml", "settings": {}}
    write_study(cases={name: configs for name in ("Cora-10", "Cora-20", "CiteSeer-10")}, tuning=None)
    trained: list[str] = []
    monkeypatch.setattr(Runner, "prepare", lambda self, pool: trained.extend(case for _, case in self.groups))
    monkeypatch.setattr(Runner, "work", lambda self, pool: Tally())
    assert main(["run", "small.yaml", "--cases", "Cora*", "--methods", "Fed*"]) == 0
    assert set(trained) == {"Cora-10", "Cora-20"}
    with pytest.raises(SystemExit):
        main(["run", "small.yaml", "--cases", "Pub*"])
    assert "--cases 'Pub*' is not in small.yaml: there are Cora-10, Cora-20, CiteSeer-10" in capsys.readouterr().err


def test_an_unknown_metric(progress: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["table", str(progress.study.path), "--metric", "tset"])
    assert "--metric 'tset' is not a metric of the results: there are val, test" in capsys.readouterr().err
    for name in ("seconds", "setting", "error", "still_rising", "bytes_up"):
        with pytest.raises(SystemExit):
            main(["table", str(progress.study.path), "--metric", name])
        assert f"--metric '{name}' is not a metric of the results" in capsys.readouterr().err


def test_names_do_not_break_a_table_of_markdown() -> None:
    table = pd.DataFrame([["1.0", "2.0"]], index=["mine | yours"], columns=["a\nb", "c"])
    assert markdown(table, "method").splitlines() == [
        "| method | a b | c |",
        "|---|---|---|",
        "| mine \\| yours | 1.0 | 2.0 |",
    ]


def test_the_printed_path_is_one_that_works(tmp_path: Path) -> None:
    study = tmp_path / "far" / "own" / "mine.yaml"
    study.parent.mkdir(parents=True)
    study.touch()
    assert _shown(study) == str(study)
    (tmp_path / "pyproject.toml").touch()
    assert _shown(study) == "far/own/mine.yaml"


@pytest.mark.parametrize("verb", ["table", "report"])
def test_where_every_run_failed_that_is_said(
    make_study: Callable[..., Study], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    study = make_study(tuning=None)
    with HerePool(train=lambda *_: {"error": "too cold"}) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    with pytest.raises(SystemExit):
        main([verb, str(study.path)])
    assert "have failed so far: fl-train study status" in capsys.readouterr().err


def test_data_without_test_examples(make_study: Callable[..., Study], capsys: pytest.CaptureFixture[str]) -> None:
    def without(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        actual = known(arguments)
        actual["result"] = {name: None if "test" in name else value for name, value in actual["result"].items()}
        actual["result"]["test/acc_weighted"] = None
        actual["clients"]["test"] = [None, None]
        actual["rounds"]["comm/bytes_total"] = [0.0, 1e6, 2e6]
        return actual

    history = ["val/acc", "comm/bytes_total"]
    study = make_study(methods=METHODS, tuning=None, seeds=[0, 1, 2], history=history, traffic={"target": "Local"})
    with HerePool(train=without) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    assert main(["report", str(study.path)]) == 0
    text = (study.results / "report.md").read_text()
    assert text.count("There are no test examples: no test metric is known.") == 1
    assert "failed" not in text
    assert "| Local |  |  |" in text.partition("## What went over the wire")[2]
    assert "| Local | 71.1 ± 1.1 |" in text.partition("## Validation")[2]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["table", str(study.path)])
    assert "There are no test examples: no test metric is known. fl-train study table" in capsys.readouterr().err
    assert main(["table", str(study.path), "--metric", "val", "--markdown"]) == 0
    assert "| Local | 71.1 ± 1.1 |" in capsys.readouterr().out


def test_a_ceiling_is_no_best_baseline(make_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVEL, "Pooled", 0.9)
    methods = METHODS | {"Pooled": {"config": "quickstart.yaml", "settings": {"strategy": "Pooled"}}}
    study = make_study(methods=methods, tuning=None, seeds=[0, 1, 2], baselines=["Local", "Pooled"])
    with HerePool(train=known) as pool:
        Runner(study, Store(study.results), say=lambda line: None).run(pool)
    progress = Progress(study, Store(study.results))
    lines = write_report(progress, tidy(progress)).read_text().splitlines()
    assert {line.split("|")[1].strip() for line in lines if "(best simple)" in line} == {"Local"}


def test_further_metrics_in_their_own_direction_and_unit(
    progress: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calibration error of these runs is small for every seed but the first: 0.01 on average, more being worse."""
    path = str(progress.study.path)
    assert main(["table", path, "--metric", "test/ece", "--markdown"]) == 0
    assert "| Local | 10.0 ± 22.4 |" in capsys.readouterr().out
    assert main(["table", path, "--metric", "test/ece", "--latex"]) == 0
    assert "% test/ece × 10⁻³\n" in capsys.readouterr().out
