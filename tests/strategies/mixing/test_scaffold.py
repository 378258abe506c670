"""SCAFFOLD: its numbers on the three quadratics, its identities, its controls under lost updates and stragglers."""

import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from quadratics import Quadratics, fit_quadratics
from torch.optim import SGD, Adam

from fl_lightning import Callback, Participation, Payload
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.strategies import SCAFFOLD, FedAvg, Local

both_controls = pytest.mark.parametrize("control", ["gradient_mean", "displacement"])
sgd = functools.partial(SGD, lr=0.1)


class Loses(Callback):
    """Loses the updates of some clients in some rounds."""

    def __init__(self, lost: dict[int, tuple[int, ...]]) -> None:
        self.lost = lost

    def on_upload(self, trainer: Any, stage: Any, payload: Payload) -> Payload:
        lost = self.lost.get(trainer.run.round_idx, ())
        return payload.rows([client for client in payload.clients if client not in lost])


@pytest.mark.filterwarnings("ignore:.*its update was lost")
@both_executors
@both_controls
@pytest.mark.parametrize(
    ("num_rounds", "x", "c", "controls"),
    [
        (1, 0.245, -1.225, (-1.8, 0.975, -2.85)),
        (2, 0.4427041667, -0.9885208333, (-1.4165, 1.1494375, -2.6985)),
        (3, 0.5849943750, -0.8038076389, (-1.0459304167, 1.1494375, -2.51493)),
    ],
)
def test_numbers(num_rounds, x, c, controls, control, executor, tmp_path) -> None:
    strategy = SCAFFOLD(num_epochs=2, control=control)
    loses = Loses({2: (1,)})
    fit_quadratics(strategy, executor(), num_rounds=num_rounds, callbacks=loses, default_root_dir=str(tmp_path))
    assert float(strategy.models["x"]) == pytest.approx(x, rel=1e-9)
    assert strategy.controls["x"].flatten().tolist() == pytest.approx(controls, rel=1e-9)
    assert float(strategy.controls["x"].mean()) == pytest.approx(c, rel=1e-9)


@both_executors
@both_controls
def test_corrections_of_training_clients_cancel_out(control, executor, tmp_path) -> None:
    strategy, participation = SCAFFOLD(num_epochs=2, control=control), Participation(held_out_fraction=0.34)
    fit_quadratics(strategy, executor(), num_rounds=2, participation=participation, default_root_dir=str(tmp_path))
    training = strategy.federation.training_clients
    assert len(training) == 2
    correction_C = strategy.correction("x", training).flatten()
    assert correction_C.abs().min() > 0.01
    assert float(correction_C.sum()) == pytest.approx(0, abs=1e-12)


@both_executors
@both_controls
def test_its_first_round_is_fedavg(control, executor, federation, make_model, make_trainer, assert_same) -> None:
    runs = []
    for strategy in (SCAFFOLD(control=control), FedAvg(weighting="equal")):
        trainer = make_trainer(executor=executor(), num_rounds=1)
        trainer.fit(make_model(optimizer=sgd, dropout=0.5), federation, strategy)
        runs.append((strategy.models, trainer.run.executor.state().parameters))
    assert_same(runs[0], runs[1])


@both_executors
@both_controls
def test_one_client_trains_alone(control, executor, graphs, given_clients, make_model, make_trainer, assert_same):
    runs = []
    for strategy in (SCAFFOLD(control=control), Local()):
        trainer = make_trainer(executor=executor(), num_rounds=4)
        trainer.fit(make_model(optimizer=sgd, dropout=0.5), given_clients(graphs[:1]), strategy)
        runs.append(trainer.run.executor.state().parameters)
    assert_same(runs[0], runs[1])


@both_controls
def test_identical_clients_are_averaged(control, graphs, given_clients, make_model, make_trainer, assert_same) -> None:
    models = []
    for strategy in (SCAFFOLD(control=control), FedAvg(weighting="equal")):
        trainer = make_trainer(precision="64-true")
        trainer.fit(make_model(optimizer=sgd, dropout=0.0), given_clients([graphs[1]] * 3), strategy)
        models.append(strategy.models)
    assert_same(models[0], models[1], tolerance=1e-9)


@both_executors
def test_one_step_a_round(executor, tmp_path) -> None:
    """θ moves as in FedAvg, and each control is the gradient where the round began."""
    models = []
    for num_rounds in (1, 2, 3):
        strategy, plain = SCAFFOLD(num_epochs=1), FedAvg(num_epochs=1, weighting="equal")
        for each in (strategy, plain):
            fit_quadratics(each, executor(), num_rounds=num_rounds, default_root_dir=str(tmp_path))
        assert float(strategy.models["x"]) == pytest.approx(float(plain.models["x"]), rel=1e-12)
        models.append(float(strategy.models["x"]))
    curvature, minimum = (torch.stack([c.x_NX[0, i] for c in Quadratics().clients]).double() for i in (0, 1))
    gradient = curvature * (models[1] - minimum)
    torch.testing.assert_close(strategy.controls["x"].flatten(), gradient)


@both_executors
@both_controls
def test_the_minimum_is_a_fixed_point(control, executor, tmp_path) -> None:
    """From anywhere it comes to the minimum of the sum and stays; FedAvg stops elsewhere."""
    ends = []
    plain = FedAvg(num_epochs=2, weighting="equal")
    for strategy, num_rounds in ((SCAFFOLD(num_epochs=2, control=control), 300), (plain, 100)):
        rounds = {"num_rounds": num_rounds, "evaluate_every": num_rounds}
        fit_quadratics(strategy, executor(), default_root_dir=str(tmp_path), **rounds)
        ends.append(float(strategy.models["x"]))
    minimum = (2 * 1 - 0.5 * 2 + 1 * 3) / 3.5
    assert ends[0] == pytest.approx(minimum, rel=1e-12)
    assert abs(ends[1] - minimum) > 0.001


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.0, "nesterov": False}], ids=str)
def test_both_controls_are_alike_under_sgd(settings, federation, make_model, make_trainer, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    states = []
    for control in ("gradient_mean", "displacement"):
        strategy = SCAFFOLD(control=control)
        trainer = make_trainer(num_rounds=5, precision="64-true", participation=busy)
        trainer.fit(make_model(optimizer=functools.partial(SGD, lr=0.1, **settings)), federation, strategy)
        states.append(strategy.state_dict())
    assert_same(states[0], states[1], tolerance=1e-9)


class Watches(Callback):
    """Keeps the controls before and after each round, and the steps that were taken."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def on_upload(self, trainer: Any, stage: Any, payload: Payload) -> Payload:
        self.before = {name: table.clone() for name, table in trainer.run.strategy.controls.items()}
        return payload

    def on_stage_end(self, trainer: Any, stage: Any, upload: Payload) -> None:
        moved = {c for c, steps in zip(upload.clients, upload.num_steps.tolist(), strict=True) if steps}
        for name, table in trainer.run.strategy.controls.items():
            for client, (old, new) in enumerate(zip(self.before[name], table, strict=True)):
                assert torch.equal(old, new) == (client not in moved)


@both_executors
@pytest.mark.parametrize("num_epochs", [0, 4])
def test_only_who_updates_and_takes_a_step_has_a_new_control(
    num_epochs, executor, federation, make_model, make_trainer
) -> None:
    busy = Participation(num_clients=4, dropout_probability=0.2, straggler_probability=0.5)
    trainer = make_trainer(executor=executor(), num_rounds=4, participation=busy, callbacks=Watches())
    strategy = SCAFFOLD(num_epochs=num_epochs)
    trainer.fit(make_model(), federation, strategy)
    moved = any(table.any() for table in strategy.controls.values())
    assert moved == bool(num_epochs)
    start = trainer.run.architectures[0]
    assert all(torch.allclose(strategy.models[name][0], start[name]) for name in start) == (not num_epochs)


@both_controls
def test_two_models_are_communicated_each_way(control, federation, make_model, make_trainer) -> None:
    totals = []
    for strategy in (SCAFFOLD(control=control), FedAvg()):
        trainer = make_trainer(callbacks=CommunicationLedger(), participation=Participation(num_clients=3))
        trainer.fit(make_model(optimizer=sgd), federation, strategy)
        totals.append([trainer.run.history[-1][f"comm/bytes_{way}"] for way in ("up", "down")])
    assert totals[0] == [2 * number for number in totals[1]]


@pytest.mark.parametrize(
    "model",
    [
        {"optimizer": functools.partial(Adam, lr=0.1)},
        {"optimizer": functools.partial(SGD, lr=0.1, momentum=0.9)},
        {"optimizer": functools.partial(SGD, lr=0.1, maximize=True)},
        {"optimizer": sgd, "gradient_clip_val": 1.0},
    ],
    ids=str,
)
def test_displacement_needs_plain_sgd(model, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"strategy\.control is 'displacement', for which a step must be"):
        make_trainer().fit(make_model(**model), federation, SCAFFOLD(control="displacement"))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"strategy\.control must be 'gradient_mean' or 'displacement', got 'x'"):
        SCAFFOLD(control="x")
    with pytest.raises(ValueError, match=r"strategy\.server_lr must be positive, got 0"):
        SCAFFOLD(server_lr=0)
