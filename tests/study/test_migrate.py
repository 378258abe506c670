"""Results follow the names of settings, methods, cases and studies, and none is lost."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import scripts
import yaml
from study_pool import HerePool

from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.runner import Runner
from fl_lightning.study.store import Store
from fl_lightning.study.table import tidy, write_csv

#: Own settings are drawn by the method's name: eight points of four times two.
CONTENT: dict[str, Any] = {
    "seeds": [0, 1],
    "methods": {
        "Local": {"config": "../configs/net.yaml", "settings": {"strategy": "Local"}},
        "Old, own": {
            "config": "../configs/net.yaml",
            "settings": {"strategy": "FedAvg"},
            "tune": {"strategy.masked_averaging": [True, False], "strategy.blend": [True, False]},
        },
        "Other": {"config": "../configs/net.yaml", "settings": {"strategy": "FedAvg"}, "tuned_as": "Old, own"},
    },
    "cases": {"plain": {}, "wide": {"settings": {"model.net.hidden_channels": 16}, "tuned_on": "plain"}},
    "tuning": {"seeds": [7], "budget": 4, "grid": {"model.optimizer.lr": [0.01, 0.05, 0.1, 0.2]}},
    "history": ["val/acc"],
}
STUDIES_OF_METHODS = ("leaderboard_a", "fedaux_settings", "fedaux_projection", "client_similarity")
COMMAND = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org"]


@pytest.fixture(scope="module")
def script() -> Any:
    return scripts.script("studies/migrate.py")


def write(content: dict[str, Any], name: str = "small", rate: str = "rate") -> Study:
    from fl_lightning.study import runs

    runs._content.cache_clear()
    for folder in ("studies", "configs"):
        Path(folder).mkdir(exist_ok=True)
    Path("configs/net.yaml").write_text(yaml.safe_dump({"model": {rate: 0.1}, "strategy": "FedAvg"}))
    path = Path("studies", f"{name}.yaml")
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return Study(path)


#: A study that takes the choices of the other, and comes before it by its name.
DEPENDENT: dict[str, Any] = {**CONTENT, "seeds": [2], "tuning": {"study": "small.yaml"}}


@pytest.fixture
def before(tmp_path: Path) -> Study:
    """The study of a commit, with all its results and a file of a run, and one that takes its choices."""
    study, dependent = write(CONTENT), write(DEPENDENT, "dependent")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Before"]):
        subprocess.run([*COMMAND, *command], check=True)
    for each in (study, dependent):
        store = Store(each.results)
        with HerePool() as pool:
            Runner(each, store, say=lambda line: None).run(pool)
        write_csv(tidy(Progress(each, store)), each.results / "results.csv")
    kept = Store(study.results).files({"method": "Old, own", "case": "plain", "seed": 0})
    kept.mkdir(parents=True)
    (kept / "picture.png").write_text("a picture")
    return study


def results(study: Study) -> dict[str, str]:
    return {
        path.name: path.read_text() for path in study.results.iterdir() if path.suffix != ".lock" and path.is_file()
    }


def figures(study: Study, num_seeds: int = 2) -> list[Any]:
    """What was measured, run by run, all of which must be done."""
    progress, history = Progress(study, Store(study.results)), Store(study.results).history()
    actual = []
    for method, case in progress.groups(study.methods, study.cases):
        report = progress.report(method, case)
        assert len(report) == num_seeds
        for run in (*progress.tuning(method, case), *report):
            record = progress.records[run.key]
            assert progress.state(run) == "done"
            actual.append([record["val"], record.get("result"), history.get(run.key), record["version"]])
    return actual


def renamed() -> dict[str, Any]:
    """The same study in other words."""
    content = json.loads(json.dumps(CONTENT).replace("masked_averaging", "masked").replace("Old, own", "New"))
    content["methods"]["New"]["drawn_as"] = "Old, own"
    for method in ("New", "Other"):
        content["methods"][method]["settings"] = {"strategy": "FedMean"}
    content["cases"] = {"narrow": {}, "wide": {**CONTENT["cases"]["wide"], "tuned_on": "narrow"}}
    return dict(content)


RENAMED = ["--study", "small=tiny", "--method", "Old, own=New", "--case", "plain=narrow"]


def test_every_record_has_its_new_key_and_names(before: Study, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    measured, old = figures(before), Store(before.results).records()
    dependent = Study(Path("studies/dependent.yaml"))
    of_dependent, num_rows = figures(dependent, 1), results(dependent)["results.csv"].count("\n")
    before.path.unlink()
    study = write(renamed(), "tiny", rate="learning_rate")
    dependent = write({**renamed(), "seeds": [2], "tuning": {"study": "tiny.yaml"}}, "dependent", rate="learning_rate")
    script.main(["--since", "HEAD", *RENAMED])

    assert figures(dependent, 1) == of_dependent
    assert results(dependent)["results.csv"].count("\n") == num_rows

    assert f"tiny: {len(old)} records, {len(old)} have new keys" in capsys.readouterr().out
    assert not Path("studies/results/small").exists()
    assert figures(study) == measured
    store = Store(study.results)
    records = store.records()
    assert not store.damaged
    assert len(records) == len(old)
    assert not set(records) & set(old)
    progress = Progress(study, store)
    for method, case in progress.groups(study.methods, study.cases):
        for run in (*progress.tuning(method, case), *progress.report(method, case)):
            record = records[run.key]
            assert record["setting"] == run.setting
            assert record["command"].startswith("fl-train fit --config=configs/net.yaml")
            assert method == "Other" or (record["method"], record["case"]) == (run.method, run.case)
    table = results(study)["results.csv"]
    assert "New,narrow" in table
    assert "--strategy=FedMean" in table
    assert "Old" not in table
    assert (study.results / "files" / "New" / "narrow" / "0" / "picture.png").read_text() == "a picture"

    after = results(study)
    rules = [f"{kind}={name}" for kind, name in zip(RENAMED[::2], RENAMED[1::2], strict=True)]
    Path("names.txt").write_text("\n".join(["--since=HEAD", *rules, ""]))
    script.main(["@names.txt", "tiny"])
    assert "0 have new keys, 0 new labels" in capsys.readouterr().out
    assert results(study) == after


def test_a_choice_past_the_grid_is_taken_along(script: Any) -> None:
    content = {**CONTENT, "methods": {"Local": CONTENT["methods"]["Local"]}}
    content["tuning"] = {**CONTENT["tuning"], "beyond": ["model.optimizer.lr"]}
    study = write(content)
    further = {f"lr={0.2 * 2**power:.3g}" for power in range(1, 6)}
    assert further <= {run.setting for run in script.runs_of(study.path) if run.purpose == "tuning"}
    assert further <= {run.setting for run in script.runs_of(study.path) if run.purpose == "report"}
    other = write({**content, "seeds": [3], "tuning": {"study": "small.yaml"}}, "other")
    runs = script.runs_of(other.path)
    assert {(run.purpose, run.seed) for run in runs} == {("report", 3)}
    assert further <= {run.setting for run in runs}


def refusal(script: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        script.main(["--since", "HEAD", *arguments])
    return str(caught.value.code)


def test_a_record_that_would_be_lost_is_named_and_nothing_written(before: Study, script: Any) -> None:
    there = results(before)
    study = write({**renamed(), "cases": CONTENT["cases"]})
    assert "Old, own on plain, seed 7" in refusal(script, "small")
    assert "has no run in today's studies" in refusal(script, "small")
    assert "no run of that commit is named 'Older'" in refusal(
        script, "--method", "Old, own=New", "--method", "Older=A", "small"
    )
    assert "give OLD=NEW" in refusal(script, "--method", "New", "small")
    content = renamed()
    del content["methods"]["New"]["drawn_as"]  # another draw of the grid
    write({**content, "cases": CONTENT["cases"]})
    assert "has no run" in refusal(script, "--method", "Old, own=New", "small")
    assert results(study) == there


def test_names_of_other_studies_are_known(before: Study, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A list of what was renamed in all studies serves for one of them."""
    there = results(before)
    dependent = write({**DEPENDENT, "methods": {"Local": CONTENT["methods"]["Local"]}}, "dependent")
    assert dependent.methods
    script.main(["--since", "HEAD", "--method", "dependent:Old, own=New", "--method", "dependent:Other=Else", "small"])
    assert "0 have new keys" in capsys.readouterr().out
    assert results(before) == there


@pytest.mark.parametrize("path", sorted(scripts.ROOT.glob("studies/names/*.txt")), ids=lambda path: path.stem)
def test_kept_names_are_arguments_that_lead_to_methods(path: Path, script: Any) -> None:
    since, *rules = path.read_text().splitlines()
    assert since.startswith("--since=")
    methods = {name: set(Study(scripts.ROOT / "studies" / f"{name}.yaml").methods) for name in STUDIES_OF_METHODS}
    for rule in rules:
        assert rule.startswith("--method=")
        (study, _), new = script._rule(rule.removeprefix("--method="))
        assert any(new in known for name, known in methods.items() if not study or name == study)


def test_two_records_never_become_one(before: Study, script: Any) -> None:
    there = results(before)
    content = json.loads(json.dumps(CONTENT))
    content["cases"]["wide"] = {"tuned_on": "plain"}  # the same as the other case
    write(content)
    assert "would have the key of another record" in refusal(script)
    assert results(before) == there


def test_one_record_never_becomes_two(before: Study, script: Any) -> None:
    """Methods that were the same share a record, and cannot part."""
    content = json.loads(json.dumps(CONTENT))
    content["methods"]["Other"]["settings"]["strategy.blend"] = True
    content["methods"]["Other"]["final"] = {"strategy.num_epochs": 3}
    write(content)
    assert "would be 2 runs" in refusal(script)


def test_results_of_another_commit_match_nothing(before: Study, script: Any) -> None:
    there = results(before)
    Path("configs/net.yaml").write_text("{model: {rate: 0.7}, strategy: FedAvg}")
    for command in (["add", "."], ["commit", "-q", "-m", "Others"]):
        subprocess.run([*COMMAND, *command], check=True)
    write(CONTENT, rate="speed")
    assert "no record in studies/results/small is of a run" in refusal(script, "small")
    before.path.unlink()
    assert "studies/small.yaml cannot be read" in refusal(script)  # which another study takes its choices from
    before.path.with_name("dependent.yaml").unlink()
    assert "give --study" in refusal(script)
    assert "studies/none.yaml is no file" in refusal(script, "none")
    assert results(before) == there
