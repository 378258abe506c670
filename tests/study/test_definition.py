"""What a study's file may say, and what it says when it may not."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_files import STUDIES

from fl_lightning.study.definition import Study
from fl_lightning.study.runs import make_run
from fl_lightning.study.schema import WrongStudy


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"seed": [1]}, "seed is not a setting of a study: did you mean seeds?"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"seeds": ["many"]}, "seeds.0: Input should be a valid integer"),
        ({"seeds": [0, 0]}, "seeds is [0, 0]: give each once"),
        ({"seeds": [-1]}, "seeds is -1: give numbers in [0, 4294967295]"),
        ({"seeds": [0, 7]}, "tuning.seeds is [7]: they are reported too: tune on others"),
        ({"processes": 0}, "processes: Input should be greater than or equal to 1 (given: 0)"),
        ({"methods": {}}, "methods is none: name at least one"),
        ({"methods": {"A": {"config": "missing.yaml"}}}, "missing.yaml: it is not a file"),
        ({"methods": {"A": {}}, "baselines": []}, "methods.A.config is nothing: give a file here or in cases.plain"),
        ({"methods": {"A": {"config": {"a": 1}}}}, "methods.A.config.list[str]: Input should be a valid list"),
        (
            {"methods": {"A": {"config": "quickstart.yaml", "tun": {}}}},
            "methods.A.tun is not a setting of a study: did you",
        ),
        (
            {"methods": {"A": {"config": "quickstart.yaml", "cases": ["p"]}}, "baselines": []},
            "methods.A.cases is ['p']: no case matches; there are plain, wide",
        ),
        (
            {"methods": {"A": {"config": "quickstart.yaml", "tuned_as": "B"}}, "baselines": []},
            "methods.A.tuned_as is B: there are A",
        ),
        (
            {
                "methods": {"A": {"config": "quickstart.yaml", "tune": {"a.x": [1], "a.y": [1], "a.z": [1]}}},
                "baselines": [],
            },
            "methods.A.tune is ['a.x', 'a.y', 'a.z']: give at most two settings",
        ),
        (
            {"methods": {"A": {"config": "quickstart.yaml", "tune": {"x": [1]}}}, "baselines": []},
            "methods.A.tune.x is [1]: a list of values is for a setting (its dotted name)",
        ),
        ({"cases": {"a": {"tuned_on": "b"}}}, "cases.a.tuned_on is b: there are a"),
        ({"cases": {"{x} of all": {}}}, "cases is {x} of all: give the values of {x} in each"),
        ({"cases": {"all": {"each": [1, 2]}}}, "cases.all.each is 1: all is there already: put {x} into the name"),
        ({"cases": {"{x}": {"each": [1]}, "{x} ": {"each": [2, 2]}}}, "cases.{x} .each is 2: 2  is there already"),
        ({"cases": {"{x}": {"each": [1], "x": 2}}}, "cases.{x}.x is 2.0: its places are in each: leave it out"),
        ({"cases": {"{x:d}": {"each": [0.5]}}}, "Unknown format code 'd' for object of type 'float'; formats are"),
        ({"cases": {"a": {"methods": {"Lokal": {}}}}}, "cases.a.methods is Lokal: did you mean Local?"),
        ({"baselines": ["Lokal"]}, "baselines is Lokal: did you mean Local?"),
        ({"configs": ["none/*.yaml"]}, "configs is 'none/*.yaml': nothing matches"),
        ({"tuning": {"seeds": [7]}}, "tuning is incomplete: give grid, budget and seeds, or none of them"),
        ({"cases": {"a": {"grid": {"b.c": [1]}}}}, "cases.a.grid is b.c: there are model.optimizer.lr"),
        (
            {"cases": {"a": {"grid": {"model.optimizer.lr": [1]}}}},
            "cases.a.grid.model.optimizer.lr is [1]: give 2 values, as tuning.grid.model.optimizer.lr has",
        ),
        (
            {"tuning": {"seeds": [7], "budget": 3, "grid": {"model.optimizer.lr": [0.1, 0.2]}}},
            "tuning.budget is 3: the axes that all methods share have 2 settings",
        ),
        ({"tuning": {"seeds": [7], "budget": 1, "grid": {"a.b": []}}}, "tuning.grid.a.b is []: give values"),
        (
            {"tuning": {"seeds": [7], "budget": 1, "grid": {"a.b": [1, 2]}, "steps": 2}},
            "tuning.steps is 2: name the axes",
        ),
        *(
            (
                {"tuning": {"seeds": [7], "budget": 1, "grid": {"a.b": axis}}},
                "give each value once: every method tries as many settings, different ones",
            )
            for axis in ([0.1, 0.2, 0.1], [1, 1.0], [1, "1"], {"x": {"a.b": 1}, "y": {"a.b": 1}})
        ),
        (
            {"cases": {"plain": {"grid": {"model.optimizer.lr": [1, 1]}}}},
            "cases.plain.grid.model.optimizer.lr is [1, 1]: give each value once",
        ),
        (
            {"methods": {"A": {"config": "quickstart.yaml", "tune": {"a.b": [1, 1]}}}, "baselines": []},
            "methods.A.tune.a.b is [1, 1]: give each value once",
        ),
        (
            {"cases": {"a": {}, "b": {"tuned_on": "a"}, "c": {"tuned_on": "b"}}},
            "cases.c.tuned_on is b: it takes the choice of a itself: name one that is tuned",
        ),
        (
            {"cases": {"a": {"tuned_on": "b"}, "b": {"tuned_on": "a"}}},
            "cases.a.tuned_on is b: it takes the choice of a",
        ),
        (
            {
                "methods": {
                    "A": {"config": "quickstart.yaml"},
                    "B": {"config": "quickstart.yaml", "tuned_as": "A"},
                    "C": {"config": "quickstart.yaml", "tuned_as": "B"},
                },
                "baselines": [],
            },
            "methods.C.tuned_as is B: it takes the choice of A itself: name one that is tuned",
        ),
        (
            {"cases": {"a": {}, "b": {"tuned_on": "a", "grid": {"model.optimizer.lr": [1, 2]}}}},
            "cases.b.grid is ['model.optimizer.lr']: a is tuned in its place: leave it out",
        ),
        (
            {
                "methods": {
                    "A": {"config": "quickstart.yaml"},
                    "B": {"config": "quickstart.yaml", "tuned_as": "A", "tune": {"a.b": [1, 2]}},
                },
                "baselines": [],
            },
            "methods.B.tune is ['a.b']: A is tuned in its place: leave it out",
        ),
        *(
            (
                {"history": ["comm/bytes_total"], "traffic": {"by_examples": bounds}},
                f"traffic.by_examples is {bounds}: give ascending bounds",
            )
            for bounds in ([100.0, 20.0], [5.0, 5.0])
        ),
        ({"convergence": "far.yaml"}, "convergence is far.yaml: it is no file"),
        (
            {"tuning": {"seeds": [7], "budget": 1, "grid": {"a.b": [1, 2]}, "beyond": ["a.c"]}},
            "tuning.beyond is a.c: did you mean a.b?",
        ),
        *(
            (
                {"tuning": {"seeds": [7], "budget": 1, "grid": {"a.b": axis}, "beyond": ["a.b"]}},
                "tuning.beyond is a.b: its axis must be two positive numbers or more, not",
            )
            for axis in ([1], [0, 1], [True, 2], ["x", "y"], {"x": {"a.b": 1}, "y": {"a.c": 2}})
        ),
        ({"tuning": {"study": "other.yaml", "seeds": [7]}}, "other.yaml cannot be read"),
        ({"pictures": {"p": {"kind": "curves", "metric": "test/acc"}}}, "its curves need test/acc in history"),
        ({"pictures": {"p": {"kind": "lines"}}}, "pictures.p is lines: no case has an x"),
        ({"pictures": {"p": {"kind": "pie"}}}, "pictures.p.kind: Input should be 'lines', 'curves' or 'ranks'"),
    ],
    ids=str,
)
def test_mistakes(parts: dict[str, Any], expected: str, make_study: Callable[..., Study]) -> None:
    with pytest.raises(WrongStudy) as error:
        make_study(**parts)
    assert expected in str(error.value)
    assert "small.yaml" in str(error.value) or "other.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1]", "holds no settings"),
        ("a: [", "is not YAML"),
        ("", "holds no"),
        ("title: a\ntitle: b", "title stands twice, in lines 1 and 2"),
    ],
)
def test_files_that_are_no_study(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(WrongStudy, match=expected):
        Study(tmp_path / "study.yaml")


def test_every_method_has_the_same_budget(make_study: Callable[..., Study]) -> None:
    own = {"strategy.a": [1, 2], "strategy.b": {"x": {"strategy.c": 0}, "y": {"strategy.c": 1}, "z": {"strategy.c": 2}}}
    methods = {"plain": {"config": "quickstart.yaml"}, "rich": {"config": "quickstart.yaml", "tune": own}}
    rates = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    tuning = {"seeds": [7], "budget": 12, "grid": {"model.optimizer.lr": rates, "decay.on": [False, True]}}
    study = make_study(methods=methods, tuning=tuning, baselines=[])
    plain, rich = study.grid_of("plain", "plain"), study.grid_of("rich", "plain")
    assert len(plain) == len(rich) == len({label for label, _ in rich}) == 12
    assert [settings for _, settings in plain] == [
        {name: settings[name] for name in ("model.optimizer.lr", "decay.on")} for _, settings in rich
    ]
    assert Counter((settings["strategy.a"], settings["strategy.c"]) for _, settings in rich) == Counter(
        {(a, c): 2 for a in (1, 2) for c in (0, 1, 2)}
    )
    assert rich[0][0] == "lr=0.1, on=False, a=1, strategy.b=x"
    again = make_study(methods=methods, tuning=tuning, baselines=[])
    assert rich == again.grid_of("rich", "plain")


def test_a_case_may_have_other_values(make_study: Callable[..., Study]) -> None:
    rates = {"model.optimizer.lr": [0.1, 0.2]}
    cases = {"plain": {}, "steep": {"grid": {"model.optimizer.lr": [0.01, 0.02]}}}
    study = make_study(cases=cases, tuning={"seeds": [7], "budget": 2, "grid": rates})
    assert [label for label, _ in study.grid_of("Local", "plain")] == ["lr=0.1", "lr=0.2"]
    assert [label for label, _ in study.grid_of("Local", "steep")] == ["lr=0.01", "lr=0.02"]


def test_a_smaller_budget_is_drawn_alike_in_number(make_study: Callable[..., Study]) -> None:
    tuning = {"seeds": [7], "budget": 3, "grid": {"model.optimizer.lr": [0.1, 0.2, 0.3, 0.4]}}
    study = make_study(tuning=tuning)
    grids = [
        [settings["model.optimizer.lr"] for _, settings in study.grid_of(method, "plain")] for method in study.methods
    ]
    assert all(len(set(grid)) == 3 and grid[0] == 0.1 for grid in grids)


def test_configurations_by_pattern(make_study: Callable[..., Study], tmp_path: Path) -> None:
    for name in ("FedAvg", "FedProx", "Ditto"):
        (tmp_path / f"{name.lower()}_toy.yaml").write_text(f"strategy: {{class_path: {name}}}\n")
    methods = {"average": {"config": "fedavg_toy.yaml"}}
    study = make_study(methods=methods, configs=["*_toy.yaml"], configs_except=["Ditto"], baselines=[])
    assert list(study.methods) == ["average", "FedProx"]
    assert study.configs_of("FedProx", "plain") == (tmp_path / "fedprox_toy.yaml",)


def test_a_case_for_each_of_some_places(make_study: Callable[..., Study]) -> None:
    case = {
        "settings": {
            "strategy.num_epochs": "{x}",
            "trainer.callbacks": [{"of": "{x} of all"}],
            "a.b": 3,
        },
        "final": {"model.optimizer.lr": "{x}"},
        "grid": {"model.optimizer.lr": ["{x}", 0.5]},
        "each": [1, 0.25],
        "panel": "share",
    }
    study = make_study(cases={"plain": {}, "a share of {x:.0%}": case})
    assert list(study.cases) == ["plain", "a share of 100%", "a share of 25%"]
    for index, name in zip([1, 0.25], list(study.cases)[1:], strict=True):
        actual = study.cases[name]
        callbacks = [{"of": f"{index} of all"}]
        assert actual.settings == {"strategy.num_epochs": index, "trainer.callbacks": callbacks, "a.b": 3}
        assert type(actual.settings["strategy.num_epochs"]) is type(index)  # 1 and 1.0 are other runs
        assert actual.final == {"model.optimizer.lr": index}
        assert actual.grid == {"model.optimizer.lr": [index, 0.5]}
        assert (actual.x, actual.panel) == (index, "share")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_repositorys_studies_are_in_order(path: Path) -> None:
    study = Study(path)
    seeds = {*study.tuning.seeds, *(study.other.tuning.seeds if study.other else ())}
    assert seeds.isdisjoint(study.seeds)


def test_the_study_of_the_documentation_is_one(tmp_path: Path) -> None:
    """Its methods have no configuration, but name their strategies in their settings."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "studies.md"
    text = page.read_text().partition("```yaml\ntitle: Mine")[2].partition("```")[0]
    (tmp_path / "mine.yaml").write_text(f"title: Mine{text}")
    study = Study(tmp_path / "mine.yaml")
    assert [len(study.grid_of(method, "METIS")) for method in study.methods] == [4, 4, 4]
    run = make_run(study, "FedPer", "Louvain", 0, study.grid_of("FedPer", "Louvain")[0], "report")
    assert (run.arguments[0], run.strategy) == ("fit", "FedPer")
    assert not any(argument.startswith("--config") for argument in run.arguments)
