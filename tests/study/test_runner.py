"""What is trained, in which order, and what is not trained again."""

import argparse
import json
import math
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from study_pool import HerePool, invented, partition

from fl_lightning.run import version
from fl_lightning.run.version import own_digest
from fl_lightning.study import command, runs, worker
from fl_lightning.study.command import main
from fl_lightning.study.definition import Study, WrongStudy
from fl_lightning.study.progress import Progress
from fl_lightning.study.report import write_report
from fl_lightning.study.runner import Runner, Tally
from fl_lightning.study.single import check, sweep, train_run
from fl_lightning.study.store import Record, Store
from fl_lightning.study.table import on_current_data, tidy


def run(study: Study, pool: HerePool | None = None, **options: Any) -> tuple[Tally, HerePool, list[str]]:
    pool, said = pool or HerePool(), []
    runs._content.cache_clear()
    with pool:
        tally = Runner(study, Store(study.results), say=said.append, **options).run(pool)
    return tally, pool, said


def progress(study: Study) -> Progress:
    return Progress(study, Store(study.results))


def test_a_study_from_beginning_to_end(make_study: Callable[..., Study]) -> None:
    study = make_study()
    tally, pool, said = run(study)
    assert (tally.trained, tally.failed, tally.missing, tally.waiting) == (12, {}, 0, [])
    assert [(study_run.purpose, study_run.case) for study_run in pool.trained[:4]] == [("tuning", "plain")] * 2 + [
        ("report", "plain")
    ] * 2
    assert len(said) == 12
    assert said[0].startswith("[1/12] Local on plain, seed 7, tuning lr=0.01, kind=adam: val/acc ")
    assert "left" in said[0]
    assert "left" not in said[-1]
    table = tidy(progress(study))
    assert list(table["method"]) == ["Local", "Local", "FedAvg", "FedAvg"] * 2
    assert list(table["seed"]) == [0, 1] * 4
    assert table["test"].notna().all()
    assert table["command"][2].startswith("fl-train fit --config=quickstart.yaml --trainer.num_rounds=2")
    chosen = progress(study).choice("FedAvg", "plain")
    assert chosen is not None
    assert chosen.validation == max(chosen.tried.values())
    assert set(table[table["method"] == "FedAvg"]["setting"]) == {chosen.point[0]}
    assert {path.name for path in study.results.iterdir()} == {
        "runs.jsonl",
        "history.jsonl",
        "sources.json",
        ".write.lock",
        "leases",
    }
    assert [path.name for path in (study.results / "leases").iterdir()] == [".write.lock"]
    _, again, said = run(study)
    assert (again.trained, said) == ([], [])


def test_the_metrics_are_those_of_the_command(make_study: Callable[..., Study], tmp_path: Path) -> None:
    import shlex

    from fl_lightning.cli import FederatedCLI

    study = make_study(tuning=None, seeds=[3])
    run(study, HerePool(real=True), methods=["FedAvg"], cases=["plain"])
    row = tidy(progress(study)).iloc[0]
    for name in ("test_std", "test_worst", "trained_val", "trained_test", "seconds", "cpu_seconds", "bytes_up"):
        assert math.isfinite(row[name])
    assert not list(tmp_path.glob("runs*"))
    actual = FederatedCLI(shlex.split(row["command"])[1:]).trainer.run.selection.result
    assert actual["test/acc"] == pytest.approx(row["test"], abs=1e-5)
    assert actual["val/acc"] == pytest.approx(row["val"], abs=1e-5)
    assert actual["best_round"] == row["round"]
    record = Store(study.results).records()[progress(study).report("FedAvg", "plain")[0].key]
    assert math.fsum(record["clients"]["test"]) / len(record["clients"]["test"]) == pytest.approx(row["test"], abs=1e-5)
    assert len(Store(study.results).history()[record["key"]]["val/acc"]) == 2


def test_of_tuning_no_test_metric_is_kept(make_study: Callable[..., Study]) -> None:
    study = make_study()
    run(study, cases=["plain"])
    records = [record for record in Store(study.results).records().values() if record["purpose"] == "tuning"]
    assert len(records) == 4
    assert all("test" not in json.dumps({**record, "command": ""}) for record in records)


def test_what_is_cut_off_goes_on(make_study: Callable[..., Study]) -> None:
    study = make_study()
    tally, pool, _ = run(study, minutes=0.0)
    assert (tally.trained, tally.missing) == (0, 12)
    run(study)
    whole = Store(study.results).records()
    lines = Store(study.results).runs.read_text().splitlines(keepends=True)
    Store(study.results).runs.write_text("".join(lines[:5]) + lines[5][:40])
    _, pool, _ = run(study)
    assert len(pool.trained) == 7
    again = Store(study.results).records()
    assert {key: (r["val"], r.get("result")) for key, r in again.items()} == {
        key: (r["val"], r.get("result")) for key, r in whole.items()
    }


def test_runs_of_other_processes_are_counted(make_study: Callable[..., Study]) -> None:
    study, said = make_study(), list[str]()
    watching = Runner(study, Store(study.results), say=said.append)
    run(study, minutes=None, methods=["Local"])
    watching.report_others()
    assert [line.split()[0] for line in said] == [f"[{number}/12]" for number in range(1, 7)]


def test_a_run_that_a_signal_stopped_is_still_to_do(make_study: Callable[..., Study]) -> None:
    def stopped(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        cut = "--seed_everything=1" in arguments and any("Local" in word for word in arguments)
        return {"error": "stopped by SIGTERM", "interrupted": True} if cut else invented(arguments)

    study = make_study(tuning=None, cases={"plain": {}})
    tally, _, said = run(study, HerePool(train=stopped))
    assert (tally.trained, tally.failed, tally.missing) == (3, {}, 1)
    assert said[1] == "Local on plain, seed 1 was stopped by SIGTERM: it is still to do"
    assert [line.split()[0] for line in said[2:]] == ["[2/4]", "[3/4]"]
    assert run(study)[0].trained == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_recorded_waits(
    number: int, make_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Store.add

    def interrupted(self: Store, record: Record, rounds: Any = None) -> None:
        signal.raise_signal(number)
        add(self, record, rounds)

    monkeypatch.setattr(Store, "add", interrupted)
    study = make_study(tuning=None)
    with pytest.raises(KeyboardInterrupt):
        run(study)
    assert len(Store(study.results).records()) == 1


def test_what_was_computed_when_a_signal_arrives_is_recorded(make_study: Callable[..., Study]) -> None:
    class Interrupted(HerePool):
        def finished(self, seconds: float = math.inf) -> Iterator[tuple[Any, dict[str, Any] | None]]:
            if seconds and self.trained:
                raise KeyboardInterrupt
            yield from super().finished(seconds)

    study = make_study(tuning=None)
    with pytest.raises(KeyboardInterrupt):
        run(study, Interrupted())
    assert len(Store(study.results).records()) == 1


def test_a_failed_run_stops_nothing(make_study: Callable[..., Study]) -> None:
    methods = {
        "Bad": {"config": "quickstart.yaml", "settings": {"strategy": "FedSheafHN", "strategy.num_neighbors": 50}},
        "Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}},
    }
    study = make_study(methods=methods, tuning=None, cases={"plain": {}})
    tally, _, said = run(study, HerePool(real=True))
    assert (tally.trained, len(tally.failed), tally.missing) == (4, 2, 0)
    assert "strategy.num_neighbors is 50" in tally.failed["Bad on plain, seed 0"]
    assert any("failed: strategy.num_neighbors is 50" in line for line in said)
    assert len(tidy(progress(study)).dropna(subset="test")) == 2
    refused = {"error": "it failed", "seconds": 0.1}
    failing = make_study(methods={"Local": methods["Local"]}, tuning=None, cases={"other": {}})
    for options, number in (({}, 2), ({}, 0), ({"retry": True}, 2), ({}, 0)):
        tally, pool, _ = run(failing, HerePool(train=lambda *_: refused), **options)
        assert (len(pool.trained), tally.failed_before) == (number, 2 - number)


def test_a_run_that_diverged_has_failed(make_study: Callable[..., Study]) -> None:
    def diverged(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        actual = invented(arguments)
        actual["result"] |= {"val/acc": None}
        return actual

    tally, _, said = run(make_study(tuning=None, cases={"plain": {}}), HerePool(train=diverged), methods=["Local"])
    assert set(tally.failed.values()) == {"val/acc is not finite in any round"}
    assert "seed 0: failed: val/acc is not finite in any round" in said[0]


def test_a_setting_that_fails_is_not_chosen(make_study: Callable[..., Study]) -> None:
    study = make_study()
    pool = HerePool(lose=lambda study_run, number: "lr=0.05" in study_run.setting and study_run.purpose == "tuning")
    tally, _, said = run(study, pool, methods=["FedAvg"], cases=["plain"])
    chosen = progress(study).choice("FedAvg", "plain")
    assert chosen is not None
    assert chosen.point[0] == "lr=0.01, kind=adam"
    assert said[1] == "the worker of FedAvg on plain, seed 7, tuning lr=0.05, kind=adam was killed: trying once more"
    assert "its worker was killed, twice" in next(iter(tally.failed.values()))


def test_a_killed_worker_is_tried_once_more_and_in_the_next_run(make_study: Callable[..., Study]) -> None:
    study = make_study()
    _, pool, _ = run(study, HerePool(lose=lambda study_run, number: number == 1))
    assert len(pool.trained) == 13
    Store(study.results).runs.unlink()
    tally, _, _ = run(study, HerePool(lose=lambda study_run, number: study_run.case == "wide" and study_run.seed == 1))
    assert len(tally.failed) == 2
    tally, pool, _ = run(study)
    assert (len(pool.trained), tally.failed) == (2, {})


def test_where_every_setting_fails_nothing_is_reported(make_study: Callable[..., Study]) -> None:
    study = make_study()
    tally, pool, _ = run(study, HerePool(lose=lambda study_run, number: study_run.method == "Local"), cases=["plain"])
    assert tally.waiting == ["Local on plain"]
    assert {study_run.purpose for study_run in pool.trained if study_run.method == "Local"} == {"tuning"}


def test_what_is_stale_is_trained_again(make_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study()
    run(study)
    monkeypatch.setattr(version, "MATHEMATICS", {**version.MATHEMATICS, "FedAvg": 2})
    table = tidy(progress(study))
    assert list(table[table["stale"]]["method"]) == ["FedAvg"] * 4
    _, pool, _ = run(study)
    assert {study_run.method for study_run in pool.trained} == {"FedAvg"}
    assert len(pool.trained) == 6
    assert not tidy(progress(study))["stale"].any()


def test_what_was_computed_with_own_code_that_was_edited_is_stale(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Results of the code of before were taken for those of the edited one, and mixed with them."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("import factors")
    (tmp_path / "factors.py").write_text("RATE = 1")
    mine = {"Mine": {"config": "quickstart.yaml", "settings": {"strategy": "mine.Mine"}}}
    methods = {**mine, "FedAvg": {"config": "quickstart.yaml", "settings": {"strategy": "FedAvg"}}}
    parts = {"methods": methods, "baselines": ["FedAvg"], "states_gb": 1}
    run(make_study(**parts))
    before = progress(make_study(**parts)).report("Mine", "plain")[0]
    assert Store(make_study().results).known_sources()[own_digest(before.version)].keys() == {"factors.py", "mine.py"}
    assert run(make_study(**parts))[1].trained == []
    (tmp_path / "factors.py").write_text("RATE = 2")
    table = tidy(progress(make_study(**parts)))
    assert list(table[table["stale"]]["method"]) == ["Mine"] * 4
    command._status(make_study(**parts), argparse.Namespace())
    assert "6 runs stale, computed before these files of your own changed, or were recorded: factors.py\n" in (
        capsys.readouterr().out
    )
    after = progress(make_study(**parts)).report("Mine", "plain")[0]
    store = Store(make_study().results)
    assert (after.key, after.data) == (before.key, before.data)
    assert store.partial_state(after) != store.partial_state(before)
    assert store.state(after) != store.state(before)
    _, pool, _ = run(make_study(**parts))
    assert {study_run.method for study_run in pool.trained} == {"Mine"}
    assert len(pool.trained) == 6
    assert run(make_study(**parts))[1].trained == []


def test_what_own_code_was_edited_during_is_stale(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1")
    methods = {"Mine": {"config": "quickstart.yaml", "settings": {"strategy": "mine.Mine"}}}
    parts = {"methods": methods, "baselines": [], "tuning": None, "cases": {"plain": {}}}

    def edits(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        if "--seed_everything=1" in arguments:
            (tmp_path / "mine.py").write_text("x = 2")
        return invented(arguments)

    run(make_study(**parts), HerePool(train=edits))
    for text, trained in (("x = 1", {1}), ("x = 2", {0, 1})):
        (tmp_path / "mine.py").write_text(text)
        _, pool, _ = run(make_study(**parts))
        assert {study_run.seed for study_run in pool.trained} == trained


@pytest.mark.parametrize("edited", [True, False])
def test_check_says_what_to_do(
    make_study: Callable[..., Study],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    edited: bool,
) -> None:
    """It advised to raise a number in a file of the package for an edit of one's own code."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1")
    methods = {"Mine": {"config": "quickstart.yaml", "settings": {"strategy": "mine.Mine"}}}
    parts = {"methods": methods, "baselines": [], "tuning": None, "cases": {"plain": {}}}
    run(make_study(**parts))
    (tmp_path / "mine.py").write_text("x = 2" if edited else "x = 1")

    def other(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        actual = invented(arguments)
        actual["result"] |= {"val/acc": 0.125}
        return actual

    monkeypatch.setattr(command, "Pool", lambda processes: HerePool(train=other))
    assert command._check(make_study(**parts), argparse.Namespace(processes=None, methods=None)) == 1
    said = capsys.readouterr().out
    assert ("trains what is stale again" in said) == edited
    assert ("raise MATHEMATICS" in said) == (not edited)


def test_other_data_under_the_same_settings_are_noticed(make_study: Callable[..., Study]) -> None:
    study = make_study()
    run(study)

    def other_if_one(arguments: tuple[str, ...]) -> dict[str, Any]:
        actual = partition(arguments)
        return {**actual, "partition": "another"} if "--data.seed=1" in arguments else actual

    _, pool, _ = run(study, HerePool(partition=other_if_one))
    assert len(pool.trained) == 4
    assert {study_run.seed for study_run in pool.trained} == {1}
    _, pool, said = run(study, HerePool(partition=lambda arguments: {"error": "no such file"}))
    assert pool.trained == []
    assert said[0].startswith("the data of plain, seed ")
    assert "cannot be compared with the runs': no such file" in said[0]


def test_runs_on_other_data_are_stale_and_compared_with_none_without_the_data_being_read(
    make_study: Callable[..., Study], capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a study was trained again after its data had changed."""
    study = make_study(tuning=None, cases={"plain": {}}, seeds=[0, 1, 2])
    run(study)

    def other(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        return {**invented(arguments), "partition": "another"}

    pool = HerePool(partition=lambda arguments: {"error": "", "partition": "another"}, train=other)
    run(study, pool, methods=["FedAvg"])
    for method, state in {"Local": "stale", "FedAvg": "done"}.items():
        assert {progress(study).state(each) for each in progress(study).report(method, "plain")} == {state}
    table = tidy(progress(study))
    assert list(table["stale"]) == [True] * 3 + [False] * 3
    assert set(on_current_data(table)["method"]) == {"FedAvg"}
    text = write_report(progress(study), table).read_text()
    assert "3 runs are left out: the data have changed since, so that they compare with no others." in text
    assert "| Local |" not in text
    assert main(["table", str(study.path)]) == 0
    said = capsys.readouterr().out
    assert "3 runs are left out" in said
    for form in ("--markdown", "--latex"):
        assert main(["table", str(study.path), form]) == 0
        assert "3 runs are left out" in capsys.readouterr().out
    assert "Local" in said.partition("nothing was run yet of")[2]


def test_tiers_order_the_work(make_study: Callable[..., Study]) -> None:
    methods = {
        "Late": {"config": "quickstart.yaml", "settings": {"strategy": "FedPer"}, "tier": 2},
        "Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}},
    }
    study = make_study(methods=methods)
    assert list(progress(study).groups(study.methods, study.cases)) == [
        ("Local", "plain"),
        ("Local", "wide"),
        ("Late", "plain"),
        ("Late", "wide"),
    ]


def test_wrong_settings_are_reported_before_anything_is_trained(make_study: Callable[..., Study]) -> None:
    methods = {
        "Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}},
        "Wrong": {"config": "quickstart.yaml", "settings": {"strategy": "FedProx", "strategy.proximal": 1.0}},
    }
    pool = HerePool(real=True)
    with pytest.raises(WrongStudy, match=r"Wrong on plain, seed 7, tuning .* and \d runs? more: there is no option"):
        run(make_study(methods=methods), pool)
    assert pool.trained == []
    grid = {"trainer.num_rounds": [1, 0]}
    with pytest.raises(WrongStudy, match=r"num_rounds=0 .* trainer.num_rounds must be at least 1, got 0"):
        run(make_study(tuning={"seeds": [7], "budget": 2, "grid": grid}), pool)
    assert pool.trained == []


def test_a_worker_that_dies_in_the_check_is_no_wrong_setting(make_study: Callable[..., Study]) -> None:
    asked: list[str] = []

    def dies(arguments: tuple[str, ...]) -> None:
        asked.append(" ".join(arguments))

    said: list[str] = []
    study = make_study(tuning=None)
    with HerePool(build=dies) as pool:
        tally = Runner(study, Store(study.results), say=said.append).run(pool)
    assert tally.trained == 8
    assert len(asked) == 2 * len(set(asked))  # each is tried again
    assert sum("were not checked: the worker was killed, twice" in line for line in said) == len(set(asked))


def test_choices_of_another_study(make_study: Callable[..., Study], tmp_path: Path) -> None:
    first = make_study()
    (tmp_path / "first.yaml").write_text(first.path.read_text())
    first = Study(tmp_path / "first.yaml")
    methods = {
        "A": {"config": "quickstart.yaml", "settings": {"strategy": "FedAvg"}, "tuned_as": "FedAvg"},
    }
    cases = {"new": {"tuned_on": "plain", "settings": {"trainer.num_rounds": 1}}}
    second = make_study(methods=methods, cases=cases, tuning={"study": "first.yaml"}, baselines=[])
    tally, pool, _ = run(second)
    assert (tally.waiting, pool.trained) == (["A on new"], [])
    run(first, methods=["FedAvg"], cases=["plain"])
    tally, pool, _ = run(second)
    assert tally.trained == 2
    assert {study_run.setting for study_run in pool.trained} == {progress(first).choice("FedAvg", "plain").point[0]}  # type: ignore[union-attr]


def test_choices_of_another_study_are_those_that_it_takes_itself(
    make_study: Callable[..., Study], tmp_path: Path
) -> None:
    make_study(seeds=[0]).path.rename(tmp_path / "first.yaml")
    first = Study(tmp_path / "first.yaml")  # in which wide is tuned on plain
    run(first)
    second = make_study(cases={"wide": {}}, seeds=[3], tuning={"study": "first.yaml"}, results="results/other")
    tally, pool, _ = run(second)
    assert (tally.trained, tally.waiting) == (2, [])
    for study_run in pool.trained:
        chosen = progress(first).choice(study_run.method, "plain")
        assert chosen is not None
        assert study_run.setting == chosen.point[0] != ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tuning": {"study": "third.yaml"}}, "it takes the choices of third.yaml: name the one that tunes"),
        ({"tuning": {"study": "second.yaml"}}, "it takes the choices of second.yaml: name the one that tunes"),
        ({"tuning": None}, "it tunes nothing: name one that does, or leave it out"),
    ],
    ids=["chain", "cycle", "nothing"],
)
def test_only_choices_of_a_study_that_tunes_are_taken(
    other: dict[str, Any], message: str, write_study: Callable[..., Path], tmp_path: Path
) -> None:
    """A study in a chain could have reported seeds that its settings were tuned on."""
    write_study().rename(tmp_path / "third.yaml")
    write_study(**other).rename(tmp_path / "second.yaml")
    with pytest.raises(WrongStudy, match=re.escape(f"tuning.study is second.yaml: {message}")):
        Study(write_study(tuning={"study": "second.yaml"}, seeds=[8]))


def test_files_of_runs_are_kept(make_study: Callable[..., Study]) -> None:
    study = make_study(keep=["result.json"], tuning=None)
    run(study, HerePool(real=True), methods=["Local"], cases=["plain"])
    kept = study.results / "files" / "Local" / "plain" / "1" / "result.json"
    assert json.loads(kept.read_text())["status"] == "finished"


def test_agents_take_runs(make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.setattr(worker, "train", invented)
    study, store = make_study(), Store(tmp_path / "small")
    study.results = store.folder
    drawn = yaml.safe_load(str(sweep(study, store)))
    keys = drawn["parameters"]["run"]["values"]
    assert drawn["command"] == ["fl-train", "study", "train", str(study.path), "${args}"]
    assert len(keys) == 4
    for key in keys:
        record = train_run(study, store, key, tmp_path / "scratch")
        assert record is not None
        assert record["error"] == ""
    assert train_run(study, store, keys[0], tmp_path / "scratch") is None
    assert len(yaml.safe_load(str(sweep(study, store)))["parameters"]["run"]["values"]) == 8
    tally, _, _ = run(study)
    assert tally.trained == 8
    assert sweep(study, store) is None


def test_agents_are_told_the_folder_of_results(
    make_study: Callable[..., Study], capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    study = make_study()
    assert main(["sweep", str(study.path), "--results", "elsewhere"]) == 0
    command = yaml.safe_load(capsys.readouterr().out)["command"]
    assert command == ["fl-train", "study", "train", str(study.path), "--results", "elsewhere", "${args}"]


def test_an_agent_leaves_alone_what_another_process_trains(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study()
    store = Store(study.results)
    driver = Runner(study, store)
    key = next(driver.todo(ready=True)).key

    def train(*arguments: Any) -> dict[str, Any]:
        """While an agent trains it, a driver leaves the run alone, too."""
        assert Runner(study, store).leases.claim(key, tmp_path / "none") is None
        return invented(arguments[0])

    monkeypatch.setattr(worker, "train", train)
    with driver.leases:
        driver.leases.claim(key, tmp_path / "none")
        with pytest.raises(WrongStudy, match="another process trains it"):
            train_run(study, store, key, tmp_path)
    assert not store.records()
    assert train_run(study, store, key, tmp_path) is not None
    assert set(store.records()) == {key}


def test_check_compares_metrics(make_study: Callable[..., Study]) -> None:
    study = make_study()
    run(study, cases=["plain"])
    store, said = Store(study.results), []
    with HerePool() as pool:
        assert check(study, store, pool, said.append) == []
    assert len(said) == 2
    assert all(line.endswith(": reproduced") for line in said)
    for record in list(store.records().values()):
        if record["purpose"] == "report" and record["method"] == "FedAvg":
            record["result"]["test/acc"] += 0.1
            store.add(record)
    with HerePool() as pool:
        assert len(check(study, store, pool, said.append)) == 1
    assert "FedAvg on plain" in said[-1]
    assert "1 metric changed: test/acc" in said[-1]


def test_runs_are_sent_to_wandb(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = {"project": "studies", "offline": True, "save_dir": str(tmp_path / "sent")}
    study = make_study(wandb=wandb, tuning=None, seeds=[0])
    tally, _, _ = run(study, HerePool(real=True), methods=["Local"])
    assert (tally.trained, tally.failed) == (2, {})
    assert len(list((tmp_path / "sent" / "wandb").glob("offline-run-*"))) == 2
    without = make_study(tuning=None, seeds=[0])
    assert [progress(without).state(study_run) for study_run in progress(without).report("Local", "plain")] == ["done"]


def peaked(best: float) -> Callable[..., dict[str, Any]]:
    """Invents validation metrics that are highest at a learning rate."""

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        (rate,) = (a.partition("=")[2] for a in arguments if a.startswith("--model.optimizer.lr="))
        actual = invented(arguments)
        actual["result"]["val/acc"] = 1.0 - abs(math.log(float(rate) / best)) / 10
        return actual

    return train


BEYOND: dict[str, Any] = {
    "seeds": [7],
    "budget": 2,
    "grid": {"model.optimizer.lr": [0.01, 0.02], "kind": {"adam": {"model.optimizer": "torch.optim.Adam"}}},
    "beyond": ["model.optimizer.lr"],
}


@pytest.mark.parametrize(
    ("best", "tried", "chosen"),
    [
        (0.1, [0.01, 0.02, 0.04, 0.08, 0.16], 0.08),
        (0.003, [0.01, 0.02, 0.005, 0.0025, 0.00125], 0.0025),
        (0.021, [0.01, 0.02, 0.04], 0.02),
    ],
)
def test_the_grid_goes_on_past_its_end_as_long_as_that_is_better(
    best: float, tried: list[float], chosen: float, make_study: Callable[..., Study]
) -> None:
    study = make_study(tuning=BEYOND)
    tally, pool, _ = run(study, HerePool(train=peaked(best)), methods=["FedAvg"])
    labels = [f"lr={rate}, kind=adam" for rate in tried]
    assert [study_run.setting for study_run in pool.trained if study_run.purpose == "tuning"] == labels
    assert {study_run.setting for study_run in pool.trained if study_run.purpose == "report"} == {
        f"lr={chosen}, kind=adam"
    }
    assert (len(pool.trained), tally.missing) == (len(tried) + 4, 0)
    assert len(run(study, HerePool(train=peaked(best)), methods=["FedAvg"])[1].trained) == 0


def test_until_it_was_tried_the_choice_of_the_grid_stands(make_study: Callable[..., Study]) -> None:
    pool = HerePool(train=peaked(0.05))
    run(make_study(tuning={**BEYOND, "beyond": []}), pool)
    study = make_study(tuning=BEYOND)
    chosen = progress(study).choice("FedAvg", "wide")
    assert chosen is not None
    assert chosen.point[0] == "lr=0.02, kind=adam"
    table = tidy(progress(study))
    assert table["test"].notna().all()
    text = write_report(progress(study), table).read_text()
    assert "as long as that is better, which is yet to be tried by Local on plain, FedAvg on plain." in text
    tally, pool, said = run(study, HerePool(train=peaked(0.05)), methods=["FedAvg"])
    assert said[0].startswith("[1/6] FedAvg on plain, seed 7, tuning lr=0.04")  # one beyond it, four by the new choice
    assert (tally.trained, tally.missing) == (6, 0)
    chosen = progress(study).choice("FedAvg", "wide")
    assert chosen is not None
    assert (chosen.point[0], len(chosen.tried)) == ("lr=0.04, kind=adam", 4)
    assert "yet to be tried by Local on plain." in write_report(progress(study), tidy(progress(study))).read_text()


def test_a_setting_of_the_methods_own_is_not_at_the_grids_end(make_study: Callable[..., Study]) -> None:
    rates = {"fast": {"model.optimizer.lr": 3.0}, "slow": {"model.optimizer.lr": 1.0}}
    methods = {"FedAvg": {"config": "quickstart.yaml", "tune": {"own": rates}}}
    _, pool, _ = run(make_study(tuning=BEYOND, methods=methods, baselines=[]), HerePool(train=peaked(9.0)))
    assert sum(study_run.purpose == "tuning" for study_run in pool.trained) == 2


def test_choices_past_the_grid_are_taken_by_other_studies(make_study: Callable[..., Study], tmp_path: Path) -> None:
    make_study(tuning=BEYOND).path.rename(tmp_path / "first.yaml")
    run(Study(tmp_path / "first.yaml"), HerePool(train=peaked(0.04)))
    second = make_study(tuning={"study": "first.yaml"}, seeds=[3], results="results/other")
    _, pool, _ = run(second, HerePool(train=peaked(0.04)))
    assert {study_run.setting for study_run in pool.trained} == {"lr=0.04, kind=adam"}


def test_an_agent_that_is_stopped_records_nothing(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "train", lambda *_: {"error": "stopped by SIGTERM", "interrupted": True})
    study = make_study()
    store = Store(study.results)
    key = next(Runner(study, store).todo(ready=True)).key
    with pytest.raises(WrongStudy, match="stopped by SIGTERM; nothing was recorded, and it goes on"):
        train_run(study, store, key, tmp_path)
    assert not store.records()


def test_an_agent_keeps_files(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(worker, "train", lambda *arguments: asked.append(arguments) or invented(arguments[0]))
    study = make_study(tuning=None, keep=["report.json"])
    store = Store(study.results)
    train_run(study, store, next(Runner(study, store).todo(ready=True)).key, tmp_path)
    assert asked[0][3:5] == (("report.json",), study.results / "files" / "Local" / "plain" / "0")


def test_check_leaves_out_what_failed(make_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study(tuning=None)

    def fails(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        return {"error": "too cold"} if "--seed_everything=1" in arguments else invented(arguments)

    run(study, HerePool(train=fails), cases=["plain"])
    monkeypatch.setitem(version.MATHEMATICS, "", version.MATHEMATICS[""] + 1)  # all of them are stale
    said: list[str] = []
    with HerePool() as pool:
        assert check(study, Store(study.results), pool, said.append) == []
    assert said == ["Local on plain, seed 0: reproduced", "FedAvg on plain, seed 0: reproduced"]


def test_a_ceiling_is_one_whatever_came_of_its_tuning(make_study: Callable[..., Study]) -> None:
    methods = {name: {"config": "quickstart.yaml", "settings": {"strategy": name}} for name in ("Local", "Pooled")}
    study = make_study(methods=methods)
    assert progress(study).report("Pooled", "plain") == []
    assert progress(study).ceilings == ["Pooled"]
