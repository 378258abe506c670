"""Runs that end when they no longer improve, and runs that are lengthened."""

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.run import checkpoint
from fl_lightning.study import runs
from fl_lightning.study.definition import Study, WrongStudy
from fl_lightning.study.runs import StudyRun, make_run
from fl_lightning.study.store import Store
from fl_lightning.study.worker import _ChosenClients, _States, train

QUIET = ("--trainer.logger=false",)
NOTHING = ("", {})


@pytest.fixture(autouse=True)
def fresh() -> None:
    runs._content.cache_clear()


def run_of(study: Study, num_rounds: int | None = None, case: str = "plain", method: str = "FedAvg") -> StudyRun:
    return make_run(study, method, case, 0, NOTHING, "report", num_rounds)


def setting(run: StudyRun, name: str) -> str:
    (value,) = (each.partition("=")[2] for each in run.arguments if each.startswith(f"--{name}="))
    return value


def test_until_is_the_last_word_on_the_number_of_rounds(make_study: Callable[..., Study]) -> None:
    fixed = run_of(make_study(tuning=None))
    until = run_of(make_study(tuning=None, until={"patience": 5, "at_most": 9}))
    assert (setting(fixed, "trainer.num_rounds"), setting(until, "trainer.num_rounds")) == ("2", "9")
    assert "EarlyStopping" in setting(until, "trainer.callbacks")
    assert '"patience": 5' in setting(until, "trainer.callbacks")
    assert fixed.key != until.key
    assert fixed.data == until.data


def test_a_case_has_its_own_end(make_study: Callable[..., Study]) -> None:
    cases = {"plain": {}, "long": {"until": {"patience": 7, "at_most": 50}}}
    study = make_study(tuning=None, cases=cases, until={"patience": 5, "at_most": 9})
    assert setting(run_of(study, case="long"), "trainer.num_rounds") == "50"
    assert setting(run_of(study), "trainer.num_rounds") == "9"


def test_patience_is_of_rounds_and_other_callbacks_stay(make_study: Callable[..., Study]) -> None:
    other = {"class_path": "fl_lightning.callbacks.LabelSimilarity"}
    settings = {"trainer.evaluate_every": 4, "trainer.callbacks": [other]}
    cases = {"plain": {"settings": settings}}
    run = run_of(make_study(tuning=None, cases=cases, until={"patience": 10, "at_most": 40}))
    assert setting(run, "trainer.callbacks") == (
        '[{"class_path": "fl_lightning.callbacks.LabelSimilarity"}, '
        '{"class_path": "fl_lightning.callbacks.EarlyStopping", "init_args": {"patience": 3}}]'
    )


@pytest.mark.parametrize("until", [{"patience": 0, "at_most": 9}, {"patience": 3}, {"patience": 3, "most": 9}])
def test_wrong_ends(until: dict[str, Any], make_study: Callable[..., Study]) -> None:
    with pytest.raises(WrongStudy, match=r"small.yaml: until\.(patience|at_most|most)"):
        make_study(until=until)


def test_runs_of_one_lineage_differ_in_their_length_alone(make_study: Callable[..., Study]) -> None:
    study = make_study(tuning=None, states_gb=1.0)
    lengths = [
        run_of(study),
        run_of(study, 4),
        run_of(make_study(tuning=None, states_gb=1, until={"patience": 1, "at_most": 3})),
    ]
    assert len({run.lineage for run in lengths}) == 1
    assert len({run.key for run in lengths}) == 3
    others = [
        run_of(study, method="Local"),
        run_of(study, case="wide"),
        make_run(study, "FedAvg", "plain", 1, NOTHING, "report"),
    ]
    assert len({run.lineage for run in (lengths[0], *others)}) == 4
    assert run_of(make_study(tuning=None)).lineage == ""
    assert run_of(make_study(tuning=None)).key == lengths[0].key


@pytest.mark.full
def test_a_lengthened_run_is_the_long_one(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study = make_study(tuning=None, states_gb=1.0)
    state = Store(study.results).state(run_of(study, 2))
    results = {
        length: train((*run_of(study, length).arguments, *QUIET), tmp_path, ["val/acc", "test/acc"], state=state)
        for length in (2, 5)
    }
    whole = train((*run_of(study, 5).arguments, *QUIET), tmp_path, ["val/acc", "test/acc"])
    assert [results[length]["resumed"] for length in (2, 5)] == [0, 2]
    assert results[5]["resumed"] == 2
    for name in ("error", "result", "clients", "rounds", "num_rounds", "bytes", "marks", "near", "kinds"):
        assert results[5][name] == whole[name], name
    assert results[2]["num_rounds"] == 2
    assert checkpoint.peek(state)["round"] == 5
    shorter = train((*run_of(study, 2).arguments, *QUIET), tmp_path, ["val/acc", "test/acc"], state=state)
    assert (shorter["resumed"], shorter["result"]) == (0, results[2]["result"])
    state.write_bytes(b"damaged")
    assert train((*run_of(study, 2).arguments, *QUIET), tmp_path, state=state)["result"] == results[2]["result"]


def test_a_run_goes_on_without_a_state_that_cannot_be_written(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study = make_study(tuning=None)
    (tmp_path / "full").write_text("a file in place of the folder")
    partial = tmp_path / "full" / "state.ckpt"
    result = train((*run_of(study).arguments, *QUIET), tmp_path, partial=partial, every_seconds=0.0)
    assert (result["error"], result["num_rounds"]) == ("", 2)
    assert sum("the run goes on without a state to resume from" in each for each in result["warnings"]) == 1


@pytest.mark.parametrize(("hook", "resumed"), [("on_round_end", 1), ("on_fit_end", 0)])
def test_a_signal_costs_a_run_nothing_that_was_computed(
    hook: str, resumed: int, make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tuning=None)
    arguments, partial = (*run_of(study).arguments, *QUIET), tmp_path / "state.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(_ChosenClients, hook, lambda *_: signal.raise_signal(signal.SIGTERM))
        result = train(arguments, tmp_path, partial=partial)
    if resumed:
        assert result["error"] == "stopped by SIGTERM"
        assert result["interrupted"]
        result = train(arguments, tmp_path, partial=partial)
    assert (result["error"], result["num_rounds"], result["resumed"]) == ("", 2, resumed)


@pytest.mark.full
def test_a_run_of_a_fixed_length_is_lengthened_until_it_no_longer_improves(
    make_study: Callable[..., Study], tmp_path: Path
) -> None:
    study = make_study(tuning=None, states_gb=1.0, until={"patience": 2, "at_most": 12})
    state = Store(study.results).state(run_of(study))
    train((*run_of(study, 2).arguments, *QUIET), tmp_path, state=state)
    resumed = train((*run_of(study).arguments, *QUIET), tmp_path, ["val/acc"], state=state)
    whole = train((*run_of(study).arguments, *QUIET), tmp_path, ["val/acc"])
    assert (resumed["rounds"], resumed["result"]) == (whole["rounds"], whole["result"])
    assert whole["num_rounds"] == min(12, whole["result"]["best_round"] + 3)


def test_the_oldest_states_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "states").mkdir()
    for number in range(4):
        path = tmp_path / "states" / f"{number}.ckpt"
        path.write_bytes(b"x" * 1000)
        os.utime(path, (number, number))
    store.bound_states(2.5e-6)
    assert {path.stem for path in (tmp_path / "states").iterdir()} == {"2", "3"}
    store.bound_states(0.0)
    assert not list((tmp_path / "states").iterdir())


def test_the_command_of_a_run_says_when_it_ends(make_study: Callable[..., Study]) -> None:
    run = run_of(make_study(tuning=None, until={"patience": 5, "at_most": 9}))
    (listed,) = (each for each in shlex.split(shlex.join(run.arguments)) if each.startswith("--trainer.callbacks="))
    assert listed.endswith('"init_args": {"patience": 5}}]')


@pytest.mark.parametrize(
    ("where", "value"), [("trainer.callbacks+", "LabelSimilarity"), ("trainer", {"callbacks": ["LabelSimilarity"]})]
)
def test_callbacks_that_until_would_replace_are_refused(
    make_study: Callable[..., Study], where: str, value: Any
) -> None:
    study = make_study(tuning=None, settings={where: value}, until={"patience": 5, "at_most": 9})
    with pytest.raises(WrongStudy, match=r"beside until: give all callbacks as one list, in .* trainer\.callbacks$"):
        run_of(study)


@pytest.mark.full
def test_a_state_past_the_end_of_a_run_is_not_used(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study = make_study(tuning=None, states_gb=1.0, until={"patience": 1, "at_most": 12})
    state = Store(study.results).state(run_of(study))
    whole = train((*run_of(study).arguments, *QUIET), tmp_path, ["val/acc"])
    assert whole["num_rounds"] < 10
    train((*run_of(study, 10).arguments, *QUIET), tmp_path, state=state)
    resumed = train((*run_of(study).arguments, *QUIET), tmp_path, ["val/acc"], state=state)
    assert (resumed["resumed"], resumed["rounds"], resumed["result"]) == (0, whole["rounds"], whole["result"])


def test_processor_time_is_that_of_all_parts_of_a_run() -> None:
    first, second = _States(), _States()
    first.load_state_dict({"cpu_seconds": 1e4})
    second.load_state_dict(first.state_dict())
    assert second.cpu_seconds > 1e4
    second.load_state_dict({})
    assert second.cpu_seconds < 1e4
