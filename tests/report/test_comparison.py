"""Runs side by side: groups, differences, where runs come from, and the two verbs."""

import io
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from page_checks import check_page
from rich.console import Console
from run_folders import record, write_run

import fl_lightning as fl
from fl_lightning.arguments import VERBS
from fl_lightning.command_line import main
from fl_lightning.report import compare
from fl_lightning.report.comparison import Comparison
from fl_lightning.report.comparison_tables import gaps_table, summary_table
from fl_lightning.report.gaps import gap, summary
from fl_lightning.report.sources import find

TESTS = Path(__file__).parents[1]


def settings(strategy: str, *, seed: int, lr: float = 0.1) -> dict[str, Any]:
    return {
        "seed_everything": seed,
        "strategy": {"class_path": f"fl_lightning.strategies.{strategy}", "init_args": {"num_epochs": 3}},
        "model": {
            "class_path": "ClientModule",
            "init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": lr}}},
        },
        "data": {"seed": seed},
        "trainer": {"run_name": f"{strategy}{seed}", "num_rounds": 3},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and Local with three seeds each, FedAvg with another learning rate and one."""
    root = tmp_path_factory.mktemp("runs")
    tests = {"FedAvg": (0.60, 0.70, 0.80), "Local": (0.55, 0.60, 0.80)}
    for strategy, values in tests.items():
        for seed, test in enumerate(values):
            run_record = record((test - 0.1, test, test + 0.1), strategy=strategy, seed=seed, partition_hash=f"p{seed}")
            given = {"strategy": strategy, "seed": seed, "partition_hash": f"p{seed}"}
            own = settings(strategy, seed=seed)
            write_run(root / strategy / f"version_{seed}", run_record=run_record, test=test, settings=own, **given)
    write_run(root / "other" / "version_0", settings=settings("FedAvg", seed=0, lr=0.2), partition_hash="elsewhere")
    return root


def test_groups_and_labels(runs: Path) -> None:
    actual = compare([runs])
    assert actual.labels == ["FedAvg, lr 0.1", "Local", "FedAvg, lr 0.2"]
    assert [len(actual.members(label)) for label in actual.labels] == [3, 3, 1]
    assert compare([runs / "FedAvg", runs / "Local"]).labels == ["FedAvg", "Local"]
    assert set(actual.settings.index) == {"strategy", "model.optimizer.lr"}
    assert list(actual.settings.loc["model.optimizer.lr"]) == [0.1, 0.1, 0.2]


def test_tables_have_the_metrics_of_the_runs(runs: Path) -> None:
    actual = compare([runs / "FedAvg", runs / "Local"])
    assert list(actual.runs["test/acc"]) == [0.6, 0.7, 0.8, 0.55, 0.6, 0.8]
    assert list(actual.runs["bytes"]) == [900.0] * 6
    assert list(actual.runs["seconds"]) == [1.5] * 6
    means = actual.configurations.set_index("configuration")
    assert means.loc["FedAvg", "test/acc"] == pytest.approx(0.7)
    assert means.loc["FedAvg", "std_over_runs"] == pytest.approx(0.1)
    rounds = actual.rounds
    assert len(rounds) == 18
    assert list(rounds["bytes"][:3]) == [300, 600, 900]
    assert list(rounds["seconds"][:3]) == [0.5, 1.0, 1.5]
    assert len(actual.clients) == 18


def test_differences_are_paired_by_hand(runs: Path) -> None:
    actual = compare([runs / "FedAvg", runs / "Local"])
    (seeds,) = actual.over_seeds.to_dict("records")
    gaps = np.array([-0.05, -0.10, 0.0])
    assert (seeds["configuration"], seeds["seeds"]) == ("Local", 3)
    assert seeds["mean"] == pytest.approx(gaps.mean())
    half = 4.302652729696142 * gaps.std(ddof=1) / math.sqrt(3)  # Student's t with two degrees of freedom, 97.5 %
    assert (seeds["low"], seeds["high"]) == (pytest.approx(gaps.mean() - half), pytest.approx(gaps.mean() + half))
    assert (seeds["better"], seeds["worse"]) == (0, 2)
    (clients,) = actual.over_clients.to_dict("records")
    assert clients["clients"] == 9
    assert clients["mean"] == pytest.approx(gaps.mean())
    assert (clients["better"], clients["worse"]) == (0, 6)
    assert clients["p_value"] == pytest.approx(2 / 2**6)  # all six signs alike
    swapped = Comparison(actual.recorded, reference="Local").over_seeds.to_dict("records")
    assert swapped[0]["mean"] == pytest.approx(-gaps.mean())


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_what_is_a_tie_does_not_depend_on_the_scale(scale: float) -> None:
    pairs = [(2.0, 1.0), (1.0, 3.0), (0.1 + 0.2, 0.3), (math.nan, 1.0)]
    gaps = np.array([gap(scale * value, scale * other) for value, other in pairs])
    described = summary(gaps, "clients", less_is_better=True)
    assert [described[name] for name in ("clients", "better", "worse")] == [3, 1, 1]


def test_the_verdict_is_over_seeds_and_one_seed_decides_nothing(runs: Path, tmp_path: Path) -> None:
    several = compare([runs / "FedAvg", runs / "Local"])
    assert several.verdict == (
        "Over 3 seeds, by 95 % intervals of paired differences: Local is not distinguishable from FedAvg. "
        "Few seeds leave wide intervals."
    )
    one = compare([runs / "FedAvg" / "version_0", runs / "Local" / "version_0"])
    assert "Only one seed is common" in one.verdict
    assert "decides nothing" in one.verdict
    page = one.write(tmp_path / "page.html").read_text()
    assert one.verdict in check_page(page)
    titles = re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', page)
    assert titles == ["What differs", "Result", "Differences from FedAvg", "Learning", "Clients", "Runs"]
    for seed in range(3):  # all of them by as much
        write_run(tmp_path / "SCAFFOLD" / f"version_{seed}", test=0.9 + 0.1 * seed, seed=seed, strategy="SCAFFOLD",
                  settings=settings("SCAFFOLD", seed=seed), partition_hash=f"p{seed}")  # fmt: skip
    assert "SCAFFOLD is better than FedAvg" in compare([runs / "FedAvg", tmp_path / "SCAFFOLD"]).verdict


def test_what_is_not_paired_is_said(runs: Path) -> None:
    actual = compare([runs / "FedAvg" / "version_0", runs / "other"])
    assert actual.over_seeds["seeds"].tolist() == [0]
    assert "their partitions differ" in actual.notes[0]
    twice = compare([runs / "FedAvg" / "version_0", runs / "Local" / "version_0"])
    twice.recorded.append(twice.recorded[0])
    twice._group_of.append("FedAvg")
    assert twice.over_seeds["seeds"].tolist() == [1]
    assert any("several runs of seed 0" in note for note in twice.notes)


def test_page_terminal_and_notebook(runs: Path, tmp_path: Path) -> None:
    actual = compare([runs])
    words = check_page(actual.write(tmp_path / "comparison.html").read_text())
    for run_record in (
        "7 runs compared",
        "Over bytes",
        "Over seconds",
        "Paired over clients",
        "model.optimizer.lr",
        "−0.0500",
    ):
        assert run_record in words, run_record
    console = Console(width=100, file=io.StringIO())
    with console.capture() as printed:
        console.print(actual)
    text = printed.get()
    assert "7 runs, test/acc at the best round" in text
    assert "−0.0500" in text
    frame = actual._repr_html_()
    assert frame.startswith("<iframe")
    assert '"' not in frame.partition('srcdoc="')[2].partition('" style')[0]


def test_a_narrow_terminal_breaks_labels_and_no_metric(runs: Path) -> None:
    actual = compare([runs])
    console = Console(width=80, file=io.StringIO())
    with console.capture() as printed:
        console.print(actual)
    text = printed.get()
    assert "…" not in text
    for table in (
        summary_table(actual.configurations, actual.metric),
        gaps_table(actual.over_seeds),
        gaps_table(actual.over_clients),
    ):
        assert all(cell in text for row in table.rows for cell in row[1:])


def test_one_run_alone(runs: Path, tmp_path: Path) -> None:
    words = check_page(compare(runs / "FedAvg" / "version_0").write(tmp_path / "page.html").read_text())
    assert "nothing to compare" in words


def test_runs_of_different_metrics_are_refused(runs: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run", monitor="val/mse")
    with pytest.raises(ValueError, match="the runs report test/acc and test/mse: compare runs of one metric"):
        compare([runs / "FedAvg", other])
    with pytest.raises(ValueError, match="there is no configuration 'Ditto' among 'FedAvg', 'Local'"):
        compare([runs / "FedAvg", runs / "Local"], reference="Ditto")


def test_folders_and_patterns(runs: Path) -> None:
    assert len(find([str(runs / "*" / "version_0")])) == 3
    assert len(find([runs, runs / "FedAvg" / "version_1"])) == 7, "each run once"
    assert [run.path.name for run in find([runs / "Local"])] == ["version_0", "version_1", "version_2"]
    with pytest.raises(ValueError, match="is not a run, and contains none"):
        find([runs / "nowhere*"])
    with pytest.raises(ValueError, match="no runs were given"):
        find([])


class FakeRun:
    state = "finished"
    config = settings("FedProx", seed=0)

    def scan_history(self) -> list[dict[str, Any]]:
        return [
            {
                "trainer/global_step": index,
                "_step": 7 * index,
                "val/acc": value,
                "test/acc": value + 0.1,
                "seconds": 1.0,
            }
            for index, value in enumerate((0.4, 0.6, 0.5))
        ]


class FakeApi:
    asked: ClassVar[list[str]] = []

    def run(self, path: str) -> FakeRun:
        self.asked.append(path)
        if path.endswith("gone"):
            raise RuntimeError("Could not find run\n<Run gone (not found)>")
        return FakeRun()


def test_runs_of_wandb(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "Api", FakeApi)
    actual = compare([runs / "FedAvg" / "version_0", "wandb:lab/project/abc"])
    assert FakeApi.asked[-1] == "lab/project/abc"
    assert actual.labels == ["FedAvg", "FedProx"]
    row = actual.runs.to_dict("records")[1]
    assert (row["seed"], row["best_round"], row["test/acc"], row["seconds"]) == (0, 1, pytest.approx(0.7), 3.0)
    assert actual.over_seeds["mean"].tolist() == [pytest.approx(0.1)]
    with pytest.raises(ValueError, match="give a W&B run as wandb:entity/project/run"):
        compare("wandb:abc")
    with pytest.raises(ValueError, match=r"cannot be read from W&B: Could not find run <Run gone \(not found\)>"):
        compare("wandb:lab/project/gone")


def test_the_verbs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", str(runs / "FedAvg"), str(runs / "Local"), "--output", str(page)]) == 0
    assert "page.html" in capsys.readouterr().out
    check_page(page.read_text())
    assert main(["report", str(runs / "FedAvg"), "--against", str(runs / "Local" / "version_0")]) == 2
    assert "of another partition" in capsys.readouterr().err
    assert main(["report", str(runs / "FedAvg" / "version_*")]) == 0
    assert capsys.readouterr().out.count("report.html") == 3
    assert main(["compare", str(tmp_path / "nothing")]) == 2
    assert "fl-train compare: error: " in capsys.readouterr().err
    assert main(["compare", str(runs / "FedAvg"), "--output", str(tmp_path / "page.html" / "x.html")]) == 2
    for verb in VERBS:
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0


def test_what_draws_is_imported_when_it_is_used() -> None:
    assert fl.compare is compare
    program = (
        "import sys, types\n"
        "package = types.ModuleType('fl_lightning')\n"
        f"package.__path__ = [{str(TESTS.parent / 'fl_lightning')!r}]\n"
        "sys.modules['fl_lightning'] = package\n"  # what the package itself imports is not the matter here
        "import fl_lightning.command_line, fl_lightning.report.compare_command, fl_lightning.report.report_command\n"
        "print([name for name in ('matplotlib', 'jinja2', 'pandas', 'scipy', 'torch', 'wandb') if name in sys.modules])"
    )
    run_record = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run_record.stdout.strip() == "[]"


def test_pairs_with_an_unfinished_run_are_counted_and_neither_better_nor_worse(tmp_path: Path) -> None:
    for seed in range(3):
        for strategy, test in {"FedAvg": 0.6, "Local": 0.5}.items():
            marks = {"still_rising": "round 2 of 3 is the best"} if strategy == "Local" and seed < 2 else {}
            own = {"strategy": strategy, "seed": seed, "marks": marks}
            write_run(tmp_path / strategy / f"version_{seed}", test=test, settings=settings(strategy, seed=seed), **own)
    actual = compare([tmp_path / "FedAvg", tmp_path / "Local"], reference="Local")
    (gap,) = actual.over_seeds.to_dict("records")
    assert (gap["seeds"], gap["better"], gap["worse"], gap["unfinished"]) == (3, 1, 0, 2)
    assert actual.configurations["still_rising"].tolist() == [0, 2]
    assert list(actual.runs["marks"][-3:]) == ["still rising (round 2 of 3 is the best)"] * 2 + [""]
    output = io.StringIO()
    Console(file=output, width=200).print(actual)
    assert "Of 3 pairs of FedAvg and Local 2 have a run that was still rising" in output.getvalue()
    assert "unfinished" in output.getvalue()
    one = compare([tmp_path / "FedAvg" / "version_0", tmp_path / "Local" / "version_0"], reference="Local")
    Console(file=output, width=200).print(one)
    assert "The only pair of FedAvg and Local has a run that was still rising" in output.getvalue()


def test_runs_that_did_not_finish_are_named(runs: Path, tmp_path: Path) -> None:
    own = {"strategy": "Ditto", "seed": 0, "partition_hash": "p0", "settings": settings("Ditto", seed=0)}
    write_run(tmp_path / "Ditto" / "version_0", status="interrupted", **own)
    actual = compare([runs / "FedAvg" / "version_0", tmp_path / "Ditto"])
    expected = (
        "Not finished, with the metrics of the rounds that there are: Ditto/version_0 (interrupted after 3 rounds)."
    )
    output = io.StringIO()
    Console(file=output, width=300).print(actual)
    assert expected in output.getvalue()
    assert expected in check_page(actual.write(tmp_path / "page.html").read_text())
    assert not compare([runs / "FedAvg"]).unended


def test_a_configuration_without_two_pairs_is_compared_with_nothing(tmp_path: Path) -> None:
    """Neither one with other seeds nor one with a single seed in common is as good as the reference."""
    tests = {"FedAvg": (0.70, 0.71, 0.72), "SCAFFOLD": (0.75, 0.761, 0.772), "FedPer": (0.3, 0.3, 0.3), "Ditto": (0.2,)}
    for strategy, values in tests.items():
        for seed, test in enumerate(values, 7 if strategy == "FedPer" else 0):
            own = {"strategy": strategy, "seed": seed, "partition_hash": f"p{seed}"}
            write_run(tmp_path / strategy / f"version_{seed}", test=test, settings=settings(strategy, seed=seed), **own)
    assert compare([tmp_path / strategy for strategy in tests]).verdict == (
        "Over 3 seeds, by 95 % intervals of paired differences: SCAFFOLD is better than FedAvg; FedPer and Ditto "
        "cannot be compared with FedAvg (test/acc of fewer than two common seeds on one partition). "
        "Few seeds leave wide intervals."
    )


def test_runs_without_test_examples_are_told(tmp_path: Path) -> None:
    for strategy in ("FedAvg", "Local"):
        for seed in range(2):
            write_run(
                tmp_path / strategy / f"version_{seed}",
                strategy=strategy,
                seed=seed,
                result={"val/acc": 0.6, "best_round": 1},
                rounds=[{"round": round_idx, "val/acc": 0.6, "seconds": 0.5} for round_idx in range(2)],
                settings=settings(strategy, seed=seed),
            )
    actual = compare([tmp_path])
    assert actual.verdict.startswith("No run has a value of test/acc, as where there are no test examples")
    assert actual.verdict in check_page(actual.write(tmp_path / "page.html").read_text())


def test_labels_tell_every_configuration_apart(tmp_path: Path) -> None:
    """By more settings where three are not enough, and by numbers where their words are the same."""
    for index, values in enumerate([(1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3), (2, 2, 2, 1)]):
        given = {"class_path": "FedAvg", "init_args": dict(zip("wxyz", values, strict=True))}
        write_run(tmp_path / str(index) / "exp" / "version_0", settings={"strategy": given}, test=0.5 + 0.1 * index)
    actual = compare([tmp_path])
    one = "FedAvg, w 1, x 1, y 1, z"
    assert actual.labels == [f"{one} 1", f"{one} 2", f"{one} 3", "FedAvg, w 2, x 2, y 2"]
    assert actual.configurations["runs"].tolist() == [1] * 4
    assert actual.configurations["test/acc"].tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8])
    for module in ("one", "two", "three"):
        write_run(tmp_path / "own" / module / "version_0", settings={"strategy": f"{module}.Mine"}, strategy="Mine")
    assert compare([tmp_path / "own"]).labels == ["Mine", "Mine (2)", "Mine (3)"]
