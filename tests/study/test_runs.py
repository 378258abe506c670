"""What a run's key depends on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.run import version
from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.runs import StudyRun, as_read, make_run
from fl_lightning.study.store import Store
from fl_lightning.yaml_input import parse_yaml

ROOT = Path(__file__).parents[2]

POINT = ("lr=0.1", {"model.optimizer.lr": 0.1})


def cell(study: Study, method: str = "FedAvg", case: str = "plain", seed: int = 0, point: Any = POINT) -> StudyRun:
    from fl_lightning.study import runs

    runs._content.cache_clear()
    return make_run(study, method, case, seed, point, "report")


def test_infinite_settings_are_written_as_they_are_read(make_study: Callable[..., Study]) -> None:
    point = ("", {"strategy.max_correction": math.inf, "strategy.prior_examples": -math.inf})
    arguments = cell(make_study(), point=point).arguments
    written = [parse_yaml(each.partition("=")[2]) for each in arguments if each.startswith("--strategy.")]
    assert math.inf in written
    assert -math.inf in written


def test_the_key_is_of_all_settings(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study = make_study()
    first = cell(study)
    others = [
        cell(study, method="Local"),
        cell(study, case="wide"),
        cell(study, seed=1),
        cell(study, point=("", {"model.optimizer.lr": 0.2})),
    ]
    assert len({first.key, *(other.key for other in others)}) == 5
    config = tmp_path / "quickstart.yaml"
    config.write_text("# a comment\n" + config.read_text().replace("run_name: quickstart", "run_name: other"))
    assert cell(study).key == first.key
    config.write_text(config.read_text().replace("dropout: 0.5", "dropout: 0.4"))
    assert cell(study).key != first.key


def test_a_run_is_trained_with_the_configuration_that_its_key_is_of(
    make_study: Callable[..., Study], tmp_path: Path
) -> None:
    run = cell(make_study())
    before = parse_yaml((tmp_path / "quickstart.yaml").read_text())
    del before["trainer"]["run_name"]
    (tmp_path / "quickstart.yaml").write_text("trainer: {num_rounds: 60}\n")
    given = as_read(run.arguments, tmp_path / "scratch")
    assert given[0] == "fit"
    assert given[2:] == run.arguments[2:]
    copy = Path(given[1].removeprefix("--config="))
    assert copy.parent == tmp_path / "scratch"
    assert parse_yaml(copy.read_text()) == before
    assert "--config=quickstart.yaml" in run.arguments  # which is the command that is recorded


def test_the_case_comes_after_the_method_and_final_settings_last(make_study: Callable[..., Study]) -> None:
    method = {"config": "quickstart.yaml", "settings": {"a.x": 1, "a.y": 1}, "final": {"a.y": 3}}
    study = make_study(methods={"M": method}, cases={"C": {"settings": {"a.x": 2, "a.y": 2}}}, baselines=[])
    arguments = make_run(study, "M", "C", 5, ("", {"a.z": None, "a.w": [1, {"b": True}]}), "report").arguments
    assert arguments[-6:] == (
        "--a.x=2",
        "--a.z=null",
        '--a.w=[1, {"b": true}]',
        "--a.y=3",
        "--data.seed=5",
        "--seed_everything=5",
    )


def test_a_case_has_its_own_words_on_single_methods(make_study: Callable[..., Study]) -> None:
    method = {"config": "quickstart.yaml", "settings": {"a.x": 1}}
    case = {"settings": {"a.x": 2}, "methods": {"M": {"a.x": "{x}"}}, "each": [3]}
    study = make_study(methods={"M": method, "N": method}, cases={"C{x}": case}, baselines=[])
    values = {name: make_run(study, name, "C3", 5, ("", {}), "report").arguments[-3] for name in study.methods}
    assert values == {"M": "--a.x=3", "N": "--a.x=2"}


def test_runs_on_the_same_data_are_known(make_study: Callable[..., Study]) -> None:
    study = make_study()
    assert cell(study).data == cell(study, case="wide").data == cell(study, method="Local").data
    assert cell(study).data != cell(study, seed=1).data
    other = make_study(cases={"plain": {"settings": {"data.source.init_args.num_nodes": 100}}})
    assert cell(other).data != cell(study).data


def test_the_data_are_also_what_the_configuration_says(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study = make_study()
    before = cell(study)
    config = tmp_path / "quickstart.yaml"
    config.write_text(config.read_text().replace("data:\n", "data:\n  batch_size: 3\n"))
    assert cell(study).data != before.data


def test_a_run_in_words(make_study: Callable[..., Study]) -> None:
    study = make_study()
    assert cell(study).title == "FedAvg on plain, seed 0"
    tuning = make_run(study, "FedAvg", "plain", 3, POINT, "tuning")
    assert tuning.title == "FedAvg on plain, seed 3, tuning lr=0.1"


def test_the_version_is_of_the_strategy_and_the_packages(
    make_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study()
    assert (cell(study).strategy, cell(study, method="Local").strategy) == ("FedAvg", "Local")
    before = cell(study).version, cell(study, method="Local").version
    monkeypatch.setattr(version, "MATHEMATICS", {**version.MATHEMATICS, "FedAvg": 2})
    assert cell(study).version != before[0]
    assert cell(study, method="Local").version == before[1]
    assert "torch " in before[0]


def test_a_kind_of_data_has_a_version_of_its_own(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study = make_study()
    config = tmp_path / "quickstart.yaml"
    plain = config.read_text()

    def with_data(settings: str) -> str:
        config.write_text(plain.replace("data:\n", f"data:\n{settings}"))
        return cell(study).version

    whole = with_data("")
    assert "passes" not in whole
    assert with_data("  batch_size: 3\n") == whole.replace(
        "; torch ", f"; passes {version.MATHEMATICS['passes']}; torch ", 1
    )
    assert with_data("  batch_size: 3\n  steps_per_epoch: 2\n") == whole
    assert with_data("  batch_size: 3\n  steps_per_epoch: null\n") == with_data("  batch_size: 3\n") != whole
    assert with_data("  batch_size: null\n") == whole
    override = make_study(settings={**study.settings, "data.batch_size": 3})
    config.write_text(plain)
    assert "passes" in cell(override).version
    config.write_text(plain.replace("data:\n", "data:\n  batch_size: 3\n"))
    assert "passes" not in cell(make_study(settings={**study.settings, "data.steps_per_epoch": 1})).version


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("sheaf_fmtl_rotated_mnist", True),
        ("sheaf_fmtl_school", False),
        ("panacea_relations", False),
        ("client_similarity", False),
    ],
)
def test_the_version_of_passes_is_of_the_studies_with_them(name: str, passes: bool) -> None:
    study = Study(ROOT / "studies" / f"{name}.yaml")
    progress = Progress(study, Store(study.results))
    pairs = progress.groups(study.methods, study.cases)
    versions = {each.version for pair in pairs for each in (*progress.tuning(*pair), *progress.report(*pair))}
    assert {"passes" in each for each in versions} == {passes}


def test_a_digest_of_sources_without_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text('"""Words."""\ndef f():\n    """More."""\n    return 1  # why\n')
    first = version._syntax(path)
    path.write_text('"""Others."""\n\ndef f():\n    return 1\n')
    assert version._syntax(path) == first
    path.write_text("def f():\n    return 2\n")
    assert version._syntax(path) != first
    assert "strategies/mixing/fedavg.py" in version.sources()
    assert "trainer.py" in version.sources()


def test_a_number_is_the_same_run_however_it_is_written(make_study: Callable[..., Study], tmp_path: Path) -> None:
    tuning = {"seeds": [7], "budget": 2, "grid": {"model.optimizer.lr": [0.01, 0.05]}}
    studies = [make_study(tuning=tuning, settings={"model.optimizer.weight_decay": 0.0005, "strategy.x": 1500.0})]
    text = studies[0].path.read_text()
    for plain, other in {"0.01": "1e-2", "0.05": "5E-2", "0.0005": "5e-4", "1500.0": "1.5e3"}.items():
        assert text.count(plain) == 1
        text = text.replace(plain, other)
    studies[0].path.write_text(text)
    studies.append(Study(studies[0].path))
    points = [study.grid_of("FedAvg", "plain") for study in studies]
    assert points[0] == points[1]
    first, second = (cell(study, point=study.grid_of("FedAvg", "plain")[1]) for study in studies)
    assert first == second
    assert "--model.optimizer.lr=0.05" in second.arguments


def test_a_number_of_a_configuration_is_too(make_study: Callable[..., Study], tmp_path: Path) -> None:
    study, config = make_study(), tmp_path / "quickstart.yaml"
    config.write_text(config.read_text() + "\nown: {weight_decay: 0.0005}\n")
    first = cell(study)
    config.write_text(config.read_text().replace("0.0005}", "5e-4}"))
    assert cell(study).key == first.key
