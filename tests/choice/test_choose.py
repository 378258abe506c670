"""Where the right answer is planted, it is found, and said with its evidence."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_checks import check_page
from planted_choice import CONFIG, Choose, Planted

from fl_lightning.choice.candidates import WrongChoice
from fl_lightning.choice.preparation import Asked, prepare
from fl_lightning.run.version import MATHEMATICS, own_digest
from fl_lightning.study.store import Store

pytestmark = pytest.mark.full
LEVELS = {"Local": 0.6, "FedAvg": 0.7, "SCAFFOLD": 0.8, "Ditto": 0.65, "Pooled": 0.85}
THREE = ["FedAvg", "SCAFFOLD"]


def test_the_best_is_found_and_written(choose: Choose, tmp_path: Path) -> None:
    planted = Planted(LEVELS, rates={0.03: 0.02}, sent={"SCAFFOLD": 20, "Local": 0, "Pooled": 0})
    answer, said = choose(planted, methods=[*THREE, "Ditto"])
    assert answer.method == "SCAFFOLD"
    assert answer.settings == {"model.optimizer.lr": 0.03}
    assert re.match(r"SCAFFOLD: (9.9|10.0|10.1) points above FedAvg, 95 % interval .* seeds, twice", answer.sentence)
    assert answer.results.set_index("method").loc["Pooled", "test/acc"] == pytest.approx(0.87, abs=0.002)
    assert "Ditto" in str(answer)
    assert answer.notes == [
        "Of the settings of SCAFFOLD that were tried lr=0.03 is the highest of 3: --grid may give others."
    ]
    assert "still rising" in next(line for line in said if line.startswith("dropped: "))
    chosen = yaml.safe_load(answer.config.read_text())
    assert chosen["strategy"]["class_path"].endswith("SCAFFOLD")
    assert chosen["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.03
    assert (chosen["seed_everything"], chosen["data"]["seed"], chosen["trainer"]["num_rounds"]) == (0, 0, 90)
    text = check_page(answer.page.read_text())
    assert answer.sentence in text
    assert "Ditto (lr=0.01, proximal_weight=0.1)" in text
    _goes_on_with_what_there_is(choose, planted, answer.sentence)


def _goes_on_with_what_there_is(choose: Choose, planted: Planted, sentence: str) -> None:
    before = list(planted.trained)
    again, _ = choose(planted, methods=[*THREE, "Ditto"])
    assert planted.trained == before
    assert again.sentence == sentence


def test_what_goes_on_resumes_its_own_state(choose: Choose) -> None:
    planted = Planted(LEVELS)
    choose(planted, methods=["FedAvg"], grid={"model.optimizer.lr": [0.01, 0.03]})
    search = [(before, length) for method, before, length in planted.trained if method == "FedAvg"]
    assert search[:5] == [(0, 2), (2, 10), (0, 10), (10, 30), (30, 90)]


def test_the_simpler_method_wins_a_tie(choose: Choose) -> None:
    answer, _ = choose(Planted({**LEVELS, "SCAFFOLD": 0.7}, scatter=0.01), methods=THREE)
    assert answer.method == "FedAvg"
    assert answer.sentence.startswith("nothing is clearly better than FedAvg: take FedAvg")


def test_stay_local(choose: Choose) -> None:
    answer, _ = choose(Planted({**LEVELS, "Local": 0.82}, scatter=0.01), methods=THREE)
    assert answer.method == "Local"
    assert answer.sentence.startswith("stay local: federation adds nothing that can be seen here")


@pytest.mark.parametrize("budget", [1800, 2500])
def test_the_budget_is_kept(budget: int, choose: Choose) -> None:
    planted = Planted(LEVELS)
    answer, said = choose(planted, methods=THREE, budget=budget)
    assert 0.5 * budget < planted.seconds <= 1.1 * budget
    assert answer.results["seeds"].min() >= 3
    assert any(line.startswith("[") and "left]" in line for line in said)


def test_too_small_a_budget_says_what_it_is_enough_for(choose: Choose) -> None:
    planted = Planted({**LEVELS, "SheafRidge": 0.7}, each={"SheafRidge": 20.0})
    with pytest.raises(WrongChoice) as error:
        choose(planted, methods=["FedAvg", "SheafRidge"], budget="25m")
    message = str(error.value)
    assert message.startswith("a budget of 25 min is too small for one setting of each of 4 methods and 3 seeds")
    assert "It is enough for --methods FedAvg or for all with --trainer.num_rounds " in message
    assert planted.seconds < 120


@pytest.mark.parametrize(("budget", "seeds", "runs"), [("12runs", None, 12), ("6runs", 1, 6)])
def test_a_budget_in_runs_counts_rounds(budget: str, seeds: int | None, runs: int, choose: Choose) -> None:
    """Whatever a method's rounds take: two methods and the ceiling, once for the search and once for each seed."""
    planted = Planted(LEVELS, each={"SCAFFOLD": 1000.0})
    answer, said = choose(planted, methods=["FedAvg"], budget=budget, seeds=seeds)
    assert sum(length - before for _, before, length in planted.trained) == 90 * runs
    assert answer.found.took == f"{runs} runs"
    assert answer.results["seeds"].min() == (seeds or 3)
    assert any("runs left]" in line for line in said)


def test_too_few_runs_are_refused(choose: Choose) -> None:
    with pytest.raises(WrongChoice, match=r"a budget of 11 runs is too small for .* these need about 12 runs"):
        choose(Planted(LEVELS), methods=["FedAvg"], budget="11runs")


def test_what_does_not_fit_is_left_out_by_name(choose: Choose) -> None:
    refused = {"SCAFFOLD": "SCAFFOLD needs what is not there", "Pooled": "Pooled cannot"}
    planted = Planted(LEVELS, refused={**refused, "Ditto": "strategy.proximal_weight is 0.1, but must be less"})
    answer, said = choose(planted, methods=[*THREE, "Ditto"])
    assert "SCAFFOLD is left out: SCAFFOLD needs what is not there" in said
    remedy = " (--grid strategy.proximal_weight=VALUE tries another)"
    assert answer.found.left_out == {**planted.refused, "Ditto": f"{planted.refused['Ditto']}{remedy}"}
    assert answer.method == "FedAvg"


def test_what_sends_too_much_is_left_out(choose: Choose) -> None:
    answer, _ = choose(Planted(LEVELS, sent={"SCAFFOLD": 20_000}), methods=THREE, max_bytes="1MB")
    assert answer.method == "FedAvg"
    assert answer.found.left_out["SCAFFOLD"] == "it would send 1.8 MB in 90 rounds, more than --max-bytes 1 MB"


def test_a_setting_that_fails_at_the_full_length_hides_no_better_one(choose: Choose) -> None:
    """One rate of FedAvg overtakes the other after the second rung, and Ditto between the two diverges."""
    planted = Planted(LEVELS)

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        found = Planted.train(planted, arguments, *others)
        given = dict(word.removeprefix("--").partition("=")[::2] for word in arguments)
        if given["seed_everything"] == "1000":
            rate, is_whole = given["model.optimizer.lr"], given["trainer.num_rounds"] == "90"
            found["result"]["val/acc"] = {"0.02": 0.8, "0.03": 0.9 if is_whole else 0.7}.get(rate, 0.1)
            if "Ditto" in given["strategy"]:
                first = (rate, given["strategy.proximal_weight"]) == ("0.02", "0.1")
                found["result"]["val/acc"] = 0.75 if first else 0.05
                if is_whole:
                    return {"error": "ServerDiverged: no number", "seconds": 1.0}
        return found

    planted.train = train  # type: ignore[method-assign, assignment]
    rates = [0.02, 0.03, 0.04, 0.05]
    answer, _ = choose(planted, methods=["FedAvg", "Ditto"], grid={"model.optimizer.lr": rates}, budget="9h", seeds=1)
    assert answer.found.finalists["FedAvg"][0] == "lr=0.03"
    assert "Ditto (proximal_weight=0.1, lr=0.02): after 90 rounds, ServerDiverged: no number" in str(answer)


def test_what_there_is_no_time_for_keeps_nothing_else_from_its_turn(choose: Choose, tmp_path: Path) -> None:
    """After its first two rounds a round of SCAFFOLD takes a hundred times as long as it took there."""
    planted = Planted(LEVELS)

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        found = Planted.train(planted, arguments, *others)
        if "SCAFFOLD" in next(word for word in arguments if "strategy" in word) and found["num_rounds"] > 2:
            planted.seconds += 1000
            found |= {"training_seconds": 1000.0, "seconds": 1000.0}
        return found

    planted.train = train  # type: ignore[method-assign, assignment]
    answer, said = choose(planted, methods=THREE, budget=7200, seeds=1)
    assert list(answer.found.finalists) == ["Local", "FedAvg", "Pooled"]
    assert any(line.startswith("dropped: SCAFFOLD") and "there was no time left" in line for line in said)
    with pytest.raises(WrongChoice) as error:
        choose(planted, methods=THREE, budget=3600, seeds=1, folder=tmp_path / "less")
    assert str(error.value) == (
        f"no method could be trained for 30 rounds: there was no time left to train it: give a larger --budget "
        f"({tmp_path / 'less'} goes on)"
    )


def test_without_time_for_new_seeds_the_search_itself_is_the_answer(choose: Choose) -> None:
    """The last run of the search takes far longer than it was expected to."""
    planted = Planted(LEVELS, sent={"SCAFFOLD": 20})

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        found = Planted.train(planted, arguments, *others)
        whole = [length for _, _, length in planted.trained if length == 90]
        planted.seconds += 4000 if len(whole) == 4 else 0
        return found

    planted.train = train  # type: ignore[method-assign, assignment]
    answer, _ = choose(planted, methods=THREE, budget="1h")
    assert answer.sentence == "SCAFFOLD: 9.8 points above FedAvg, one seed, twice the bytes"
    assert answer.notes[:2] == [
        "The budget ended before all finalists were trained with a new seed: the numbers are validation's of the seed "
        "of the search, which chose the settings, too, so they are optimistic. A larger --budget goes on.",
        "With one seed alone nothing can be told apart: give a larger --budget, or more --seeds.",
    ]
    assert answer.results["val/acc"].tolist() == pytest.approx([0.6, 0.7, 0.8, 0.85], abs=0.002)
    assert yaml.safe_load(answer.config.read_text())["strategy"]["class_path"].endswith("SCAFFOLD")
    text = check_page(answer.page.read_text())
    assert answer.notes[0] in text
    assert "took no part in the search" not in text
    planted.train = Planted.train.__get__(planted)  # type: ignore[method-assign]
    before = len(planted.trained)
    more, _ = choose(planted, methods=THREE, budget="2h")
    assert more.metric == "test/acc"
    assert {length for _, _, length in planted.trained[before:]} == {90}


def test_a_partition_of_which_no_figure_is_is_said_to_be_so(choose: Choose) -> None:
    answer, _ = choose(Planted(LEVELS), methods=["FedAvg"], seeds=2, overrides=["--data.seed=7"])
    text = answer.config.read_text()
    assert yaml.safe_load(text)["data"]["seed"] == 7
    note = (
        "These figures are of data.seed 0, 1; chosen.yaml has your data.seed 7, with which no run of them was trained."
    )
    assert note in answer.notes
    assert text.startswith(f"# {answer.sentence}\n# ")
    assert f"\n# {note}\n" in text


def test_a_search_in_a_folder_in_use_changes_nothing_in_it(choose: Choose, tmp_path: Path) -> None:
    choose(Planted(LEVELS), methods=["FedAvg"], seeds=1)
    files = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with Store(tmp_path / "out").running(), pytest.raises(WrongChoice, match=r"another process chooses in .*--output"):
        choose(Planted(LEVELS), methods=THREE, overrides=["--trainer.num_rounds=40"])
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(("budget", "method"), [("3h", "SCAFFOLD"), ("25m", "FedAvg")])
def test_what_could_not_be_trained_takes_part_where_the_budget_is_enough(
    budget: str, method: str, choose: Choose
) -> None:
    """What had been decided without it is decided anew."""
    planted, gone = Planted(LEVELS), ["SCAFFOLD"]

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        if gone and any(gone[0] in word for word in arguments):
            return {"error": f"{gone.pop()} is gone", "may_pass": True, "seconds": 0.5, "cpu_seconds": 0.5}
        return Planted.train(planted, arguments, *others)

    planted.train = train  # type: ignore[method-assign, assignment]
    asked = {"methods": THREE, "budget": budget, "seeds": 3}
    first, _ = choose(planted, **asked)
    assert (first.method, first.found.left_out) == ("FedAvg", {"SCAFFOLD": "SCAFFOLD is gone"})
    again, _ = choose(planted, **asked)
    assert again.method == method
    too_late = {"SCAFFOLD": "it could not be trained before, and too little is left of the budget now"}
    assert again.found.left_out == ({} if method == "SCAFFOLD" else too_late)


@pytest.mark.parametrize("failing", ["", "Pooled"], ids=["all", "all but the ceiling"])
def test_new_seeds_with_which_nothing_can_be_trained_are_named(failing: str, choose: Choose) -> None:
    planted = Planted(LEVELS)

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        found = Planted.train(planted, arguments, *others)
        is_new = "--seed_everything=1000" not in arguments
        fails = is_new and not (failing and any(failing in word for word in arguments))
        return {"error": "a client has no test example", "seconds": 1.0} if fails else found

    planted.train = train  # type: ignore[method-assign, assignment]
    with pytest.raises(WrongChoice) as error:
        choose(planted, methods=["FedAvg"], seeds=1)
    assert str(error.value) == (
        "with new seeds no method can be trained: Local with seed 0: a client has no test example"
    )


def test_another_version_of_the_code_has_a_budget_of_its_own(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runs of the older one took, and decided, does not count."""
    planted = Planted(LEVELS)
    asked = {"methods": ["FedAvg"], "budget": 1500, "seeds": 3}
    expected, _ = choose(planted, **asked)
    before, seconds = len(planted.trained), planted.seconds
    monkeypatch.setitem(MATHEMATICS, "", 99)
    answer, _ = choose(planted, **asked)
    assert answer.sentence == expected.sentence
    assert planted.trained[before:] == planted.trained[:before]
    assert answer.found.taken == pytest.approx(planted.seconds - seconds)


def test_the_clients_whose_validation_decides_are_those_whose_test_is_told(choose: Choose, tmp_path: Path) -> None:
    planted = Planted(LEVELS)

    def train(*arguments: Any) -> dict[str, Any]:
        found = Planted.train(planted, *arguments)
        benign = {"benign/val/acc": found["result"]["val/acc"], "benign/test/acc": 0.5, "benign/test/acc_worst": 0.4}
        return found | {"monitor": "benign/val/acc", "result": {**found["result"], **benign}}

    planted.train = train  # type: ignore[method-assign, assignment]
    answer, _ = choose(planted, methods=["FedAvg"], seeds=1)
    assert answer.metric == "benign/test/acc"
    row = answer.results.set_index("method").loc["Pooled"]
    assert (row["benign/test/acc"], row["worst_client"]) == (0.5, 0.4)
    assert [row[3:6] for row in answer.table.rows][:2] == [["–", "0.4000", "+0"], ["–", "0.4000", "–"]]  # of one seed
    assert not any("no test examples" in note for note in answer.notes)


def test_the_search_does_without_references_and_logger_and_the_chosen_configuration_has_them(
    choose: Choose, tmp_path: Path
) -> None:
    logger = {"class_path": "fl_lightning.run.loggers.WandbLogger", "init_args": {"project": "mine"}}
    trainer = {**CONFIG["trainer"], "references": ["local"], "logger": logger}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**CONFIG, "trainer": trainer}))
    answer, _ = choose(Planted(LEVELS), config=["own.yaml"], methods=["FedAvg"], seeds=1)
    chosen = yaml.safe_load(answer.config.read_text())["trainer"]
    assert chosen["references"] == ["local"]
    assert chosen["logger"]["class_path"].endswith("WandbLogger")
    assert chosen["logger"]["init_args"]["project"] == "mine"
    (base,) = (tmp_path / "out").glob("config-*.yaml")
    searched = yaml.safe_load(base.read_text())["trainer"]
    assert (searched["references"], searched["logger"]) == (None, False)


def test_another_metric_has_its_own_direction(tmp_path: Path) -> None:
    trainer = {**CONFIG["trainer"], "monitor": "val/mine", "monitor_mode": "max"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**CONFIG, "trainer": trainer}))
    modes = {}
    for metric in ("val/loss", "val/mine", None):
        prepared = prepare(Asked(config=["own.yaml"], folder=tmp_path / str(metric), metric=metric))
        (base,) = prepared.study.path.parent.glob("config-*.yaml")
        modes[metric] = yaml.safe_load(base.read_text())["trainer"]["monitor_mode"]
    assert modes == {"val/loss": None, "val/mine": "max", None: "max"}


def test_data_without_test_examples_are_compared_on_validation(choose: Choose) -> None:
    planted = Planted(LEVELS)

    def train(*arguments: Any) -> dict[str, Any]:
        found = Planted.train(planted, *arguments)
        return found | {"result": {name: each for name, each in found["result"].items() if "test" not in name}}

    planted.train = train  # type: ignore[method-assign, assignment]
    answer, _ = choose(planted, methods=THREE, seeds=3)
    assert re.match(r"SCAFFOLD: (9.8|9.9|10.0) points above FedAvg, 95 % interval .* three seeds", answer.sentence)
    assert answer.notes == ["There are no test examples: the numbers are validation's, which decided, too."]
    assert answer.results["val/acc"].tolist() == pytest.approx([0.6, 0.7, 0.8, 0.85], abs=0.002)
    assert "no test examples" in check_page(answer.page.read_text())


def test_differences_of_errors_have_the_sign_of_the_errors(choose: Choose) -> None:
    planted = Planted({"Local": 0.5, "FedAvg": 0.3, "Pooled": 0.2})

    def train(*arguments: Any) -> dict[str, Any]:
        found = Planted.train(planted, *arguments)
        result = {name.replace("acc", "mse"): each for name, each in found["result"].items()}
        return found | {"monitor": "val/mse", "mode": "min", "result": result}

    planted.train = train  # type: ignore[method-assign, assignment]
    answer, _ = choose(planted, methods=["FedAvg"], seeds=3)
    index = answer.table.columns.index("beside FedAvg")
    local, _, pooled = (re.findall(r"[+-][\d.]+", row[index].replace("−", "-")) for row in answer.table.rows)
    assert [float(each) for each in local] == pytest.approx([0.2] * 3, abs=0.005)
    assert [float(each) for each in pooled] == pytest.approx([-0.1] * 3, abs=0.005)
    better_by = answer.results.set_index("method")["better_by"]
    assert (better_by["Local"], better_by["Pooled"]) == (pytest.approx(-0.2, abs=0.01), pytest.approx(0.1, abs=0.01))


class _Stop(KeyboardInterrupt):
    pass


@dataclasses.dataclass
class _Stopping:
    """Ends the search at the so many-eth training."""

    planted: Planted
    at: int

    def __call__(self, *arguments: object) -> object:
        if len(self.planted.trained) == self.at:
            raise _Stop
        return Planted.train(self.planted, *arguments)  # type: ignore[arg-type]


def test_a_run_that_a_signal_stopped_is_begun_again(choose: Choose) -> None:
    planted, stopped = Planted(LEVELS), list[Any]()

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        if not stopped and any("FedAvg" in word for word in arguments):
            stopped.append(arguments)
            return {"error": "stopped by SIGTERM", "interrupted": True}
        return Planted.train(planted, arguments, *others)

    planted.train = train  # type: ignore[method-assign, assignment]
    answer, _ = choose(planted, methods=["FedAvg"], seeds=1)
    assert stopped
    assert (answer.method, answer.found.left_out) == ("FedAvg", {})


def test_a_run_that_is_killed_has_a_state_to_go_on_from_until_it_is_recorded(choose: Choose, tmp_path: Path) -> None:
    planted, states = Planted(LEVELS), set[Path]()

    def train(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        others[5].parent.mkdir(exist_ok=True)
        others[5].touch()
        states.add(others[5])
        return Planted.train(planted, arguments, *others)

    planted.train = train  # type: ignore[method-assign, assignment]
    choose(planted, methods=["FedAvg"], seeds=1)
    assert {path.parent for path in states} == {tmp_path / "out" / "partial"}
    assert len(states) == len(planted.trained)
    assert not any(path.exists() for path in states)


@pytest.mark.parametrize("at", [7, 13])
def test_a_search_that_was_stopped_goes_on(at: int, choose: Choose, tmp_path: Path) -> None:
    whole = Planted(LEVELS)
    expected, _ = choose(whole, methods=THREE, budget=2000, folder=tmp_path / "whole")
    stopped = Planted(LEVELS)
    stopped.train = _Stopping(stopped, at)  # type: ignore[method-assign, assignment]
    with pytest.raises(_Stop):
        choose(stopped, methods=THREE, budget=2000)
    del stopped.train  # type: ignore[method-assign]
    answer, _ = choose(stopped, methods=THREE, budget=2000)
    assert stopped.trained == whole.trained
    assert answer.sentence == expected.sentence
    assert answer.found.taken == pytest.approx(expected.found.taken)


def test_a_method_of_ones_own_is_tried_again_after_an_edit(
    choose: Choose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the code of before came to decided for the edited one."""
    monkeypatch.syspath_prepend(tmp_path)
    code = "from fl_lightning.strategies import FedAvg\n\nclass Edited(FedAvg):\n    RATE = 1\n"
    (tmp_path / "edited_method.py").write_text(code)
    planted = Planted({**LEVELS, "Edited": 0.9})
    asked = {"methods": ["FedAvg", "Edited"], "overrides": ["--strategy=edited_method.Edited"]}
    assert choose(planted, **asked)[0].method == "Edited"
    store = Store(tmp_path / "out")
    (own,) = {own_digest(each["version"]) for each in store.records().values() if each["method"] == "Edited"}
    sources_of = {each["sources"] for each in store.records().values()}
    assert store.known_sources().keys() == {own, *sources_of}
    before = len(planted.trained)
    assert choose(planted, **asked)[0].method == "Edited"
    assert len(planted.trained) == before
    (tmp_path / "edited_method.py").write_text(code.replace("1", "2"))
    planted.levels = {**LEVELS, "Edited": 0.3}
    assert choose(planted, **asked)[0].method == "FedAvg"
    assert "Edited" in {method for method, _, _ in planted.trained[before:]}


def test_other_data_are_searched_anew(choose: Choose, tmp_path: Path) -> None:
    """Neither the runs on the data of before nor what they decided and took counts, and those on the new ones do."""
    planted = Planted(LEVELS, refused={"FedAvg": "this feature is missing"})
    assert choose(planted, methods=THREE)[0].method == "SCAFFOLD"
    before, seconds = len(planted.trained), planted.seconds
    planted.data, planted.levels, planted.refused = "changed", {**LEVELS, "SCAFFOLD": 0.5}, {}
    answer, _ = choose(planted, methods=THREE)
    assert answer.method == "FedAvg"
    assert answer.results["test/acc"].tolist() == pytest.approx([0.6, 0.7, 0.5, 0.85], abs=0.005)
    assert answer.found.taken == pytest.approx(planted.seconds - seconds)
    fresh = Planted(planted.levels)
    assert choose(fresh, methods=THREE, folder=tmp_path / "fresh")[0].sentence == answer.sentence
    assert planted.trained[before:] == fresh.trained
    again = len(planted.trained)
    assert choose(planted, methods=THREE)[0].sentence == answer.sentence
    assert len(planted.trained) == again


def test_data_that_change_during_a_search_end_it(choose: Choose) -> None:
    planted = Planted(LEVELS)

    def train(*arguments: Any) -> dict[str, Any]:
        planted.data = "changed"
        return Planted.train(planted, *arguments)

    planted.train = train  # type: ignore[method-assign, assignment]
    with pytest.raises(WrongChoice, match=r"the data of seed 1000 are not those of the earlier runs in .*--output"):
        choose(planted, methods=THREE)
    assert len(planted.trained) == 1
