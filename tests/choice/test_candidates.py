"""What is tried of which methods."""

from pathlib import Path
from typing import Any

import pytest
from planted_choice import CONFIG

from fl_lightning import extras
from fl_lightning.choice.candidates import DEFAULT, WrongChoice, candidates
from fl_lightning.choice.halving import MOST_POINTS


def labels(name: str, config: dict[str, Any] = CONFIG, **options: Any) -> list[str]:
    return next([label for label, _ in each.points] for each in candidates(config, **options) if each.name == name)


def test_the_defaults_from_the_simplest_on_and_the_ceiling_last() -> None:
    methods = candidates(CONFIG)
    assert [each.name for each in methods] == [*DEFAULT, "Pooled"]
    assert all(each.settings["strategy"]["init_args"]["num_epochs"] == 1 for each in methods)
    assert labels("FedPer") == ["lr=0.01", "lr=0.03", "lr=0.00333"]
    assert labels("Ditto")[:3] == [
        "lr=0.01, proximal_weight=0.1",
        "lr=0.01, proximal_weight=0.01",
        "lr=0.03, proximal_weight=0.1",
    ]
    assert labels("FedOpt")[0] == "client_lr=0.3, adaptivity=0.0001"


def test_what_the_configuration_names_is_tried_as_given() -> None:
    given = {"class_path": "fl_lightning.strategies.Ditto", "init_args": {"num_epochs": 2, "proximal_weight": 0.5}}
    ditto = next(each for each in candidates({**CONFIG, "strategy": given}) if each.name == "Ditto")
    assert ditto.settings == {"strategy": given}
    assert ditto.as_given
    assert ditto.points[0] == (
        "lr=0.01, proximal_weight=0.5",
        {"model.optimizer.lr": 0.01, "strategy.proximal_weight": 0.5},
    )
    other = candidates({**CONFIG, "strategy": {"class_path": "fl_lightning.strategies.FedProx"}})
    assert [each.name for each in other][-2:] == ["FedProx", "Pooled"]


def test_the_given_rate_is_tried_as_it_is() -> None:
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001234}}
    assert labels("FedAvg", {"model": {"init_args": {"optimizer": adam}}}) == [
        "lr=0.001234",
        "lr=0.0037",
        "lr=0.000411",
    ]


def test_an_optimizer_that_is_left_out_and_one_with_decay() -> None:
    assert labels("FedAvg", {"strategy": None}) == ["lr=default", "lr=0.03", "lr=0.003"]
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "weight_decay": 0.001}}
    decayed = labels("FedAvg", {"model": {"init_args": {"optimizer": adam}}})
    assert decayed[:3] == ["lr=0.1, weight_decay=0.001", "lr=0.1, weight_decay=0.0", "lr=0.3, weight_decay=0.001"]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.02, "momentum": 0.9}}, ["given", "0.3", "1.0", "0.1"]),
        ({"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0, "momentum": 0.0}}, ["given", "0.3", "0.1"]),
        (None, ["given", "0.3", "1.0", "0.1"]),
    ],
    ids=["momentum", "plain steps", "none"],
)
def test_fedopt_as_it_is_given_is_tried_first(optimizer: dict[str, Any] | None, expected: list[str]) -> None:
    given = {"class_path": "fl_lightning.strategies.FedOpt", "init_args": {"adaptivity": 0.01}}
    config = {**CONFIG, "strategy": given, "model": {"init_args": {"optimizer": optimizer}}}
    fedopt = next(each for each in candidates(config) if each.name == "FedOpt")
    assert fedopt.points[0] == ("client_lr=given, adaptivity=0.01", {"strategy.adaptivity": 0.01})
    tried = [label.partition(",")[0].removeprefix("client_lr=") for label, _ in fedopt.points]
    assert list(dict.fromkeys(tried)) == expected


def test_a_grid_of_the_users() -> None:
    grid = {"model.optimizer.lr": [0.2, 0.4], "strategy.proximal_weight": [5.0]}
    options = {"methods": ["ditto", "FedAvg"], "grid": grid}
    assert labels("FedAvg", **options) == ["lr=0.2", "lr=0.4"]
    assert labels("Ditto", **options) == ["proximal_weight=5.0, lr=0.2", "proximal_weight=5.0, lr=0.4"]
    assert [each.name for each in candidates(CONFIG, **options)] == ["Local", "FedAvg", "Ditto", "Pooled"]


def test_a_range_is_drawn_from_by_optuna_alike_for_every_method() -> None:
    grid = {"model.optimizer.lr": ["0.001..0.1"], "strategy.proximal_weight": [0.1, 1.0]}
    options = {"methods": ["Ditto", "FedAvg"], "grid": grid}
    rates = [float(label.removeprefix("lr=")) for label in labels("FedAvg", **options)]
    assert len(rates) == MOST_POINTS
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    assert sum(rate < 0.01 for rate in rates) >= 2  # in logarithms
    assert labels("Local", **options) == labels("FedAvg", **options)
    assert labels("FedAvg", {**CONFIG, "seed_everything": 1}, **options) != labels("FedAvg", **options)
    ditto = next(each for each in candidates(CONFIG, **options) if each.name == "Ditto")
    for label, settings in ditto.points:
        assert label == f"proximal_weight={settings['strategy.proximal_weight']}, lr={settings['model.optimizer.lr']}"
    assert set(ditto.axes) == {"strategy.proximal_weight"}


def test_a_class_of_ones_own_is_named_after_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_methods.py").write_text(
        "from fl_lightning.strategies import FedAvg\n\n\nclass MineOnly(FedAvg):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = [each.name for each in candidates(CONFIG, methods=["own_methods.MineOnly", "FedAvg"])]
    assert "MineOnly" in found


def test_whole_numbers_are_drawn_from_a_range_of_whole_numbers() -> None:
    drawn = labels("FedAvg", methods=["FedAvg"], grid={"strategy.num_epochs": ["1..3"]})
    assert {label.partition("num_epochs=")[2] for label in drawn} <= {"1", "2", "3"}


def test_optuna_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(extras.MissingExtra, match="a range in --grid needs optuna: pip install"):
        candidates(CONFIG, grid={"model.optimizer.lr": ["0.001..0.1"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["FedAvgg"]}, "--methods 'FedAvgg' is no strategy: did you mean FedAvg?"),
        (
            {"methods": ["nowhere.Mine"]},
            "--methods: 'nowhere.Mine' cannot be imported: ModuleNotFoundError",
        ),
        ({"methods": ["os.FedAvg"]}, "--methods: 'os.FedAvg' cannot be imported: AttributeError: module 'os' has no"),
        ({"methods": ["os.path"]}, "--methods 'os.path' is no strategy of a name of its own"),
        ({"methods": [".X"]}, "--methods: '.X' cannot be imported"),
        (
            {"methods": ["FedAvg"], "grid": {"strategy.mu": [1]}},
            "--grid strategy.mu: none of Local, FedAvg, Pooled has",
        ),
        ({"grid": {"model.optimizer.lr": ["0.1..0.01"]}}, "--grid model.optimizer.lr=0.1..0.01: give the lower end"),
        (
            {"config": {}, "grid": {"model.optimizer.lr": [1.0]}},
            "--grid model.optimizer.lr: the configuration names no optimizer, and each strategy has its own: give "
            "--model.optimizer, too",
        ),
        (
            {"grid": {"trainer.num_rounds": [10, 50]}},
            "--grid trainer.num_rounds: all runs of a search have the same: give one value, --trainer.num_rounds",
        ),
        (
            {"grid": {"data.partitioner.num_clients": [5, 10]}},
            "--grid data.partitioner.num_clients: validation would be of other clients or examples",
        ),
        ({"grid": {"model.optimizer.lr": [0.1, 0.2, 0.1]}}, "--grid model.optimizer.lr: 0.1 is there twice: give each"),
        ({"grid": {"model.optimizer.lr": [1, 0.1, 1.0]}}, "--grid model.optimizer.lr: 1.0 is there twice"),
        ({"grid": {"model.optimizer": [None, None]}}, "--grid model.optimizer: None is there twice"),
        ({"grid": {"model.optimizer.lr": [1.0, "0.1..1"]}}, "the range 0.1..1 stands alone, without other values"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongChoice) as error:
        candidates(**{"config": CONFIG, **options})
    assert message in str(error.value)
