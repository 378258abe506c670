"""Ditto: numbers by hand, what it is equal to, who receives what."""

import pytest
import torch
from both_executors import both_executors
from quadratics import CURVATURES, EXAMPLES, MINIMA, parameters

from fl_lightning import Participation, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.round.client import parameters_of
from fl_lightning.round.context import Context
from fl_lightning.strategies import Ditto, FedAvg, FedProx, Local


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs, with dropout and Adam."""

    def run(strategy, executor=StackedExecutor, model=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(model or make_model(dropout=0.5), federation, strategy)
        return trainer

    return run


def by_hand(v: float, theta: float, client: int, *, rate=0.1, weight=1.0, steps=2) -> float:
    for _ in range(steps):
        v -= rate * (CURVATURES[client] * (v - MINIMA[client]) + weight * (v - theta))
    return v


@both_executors
def test_two_rounds(executor, quadratics) -> None:
    expected = [(0.1525, [0.34, -0.185, 0.54]), (0.2787572917, [0.532525, -0.29045, 0.91305])]
    for num_rounds, (theta, personal) in enumerate(expected, start=1):
        trainer = quadratics(Ditto(num_epochs=2, proximal_weight=1.0), executor(), num_rounds=num_rounds)
        assert float(trainer.run.strategy.models["shared.x"]) == pytest.approx(theta, rel=1e-9)
        assert parameters(trainer, "personal.x") == pytest.approx(personal, rel=1e-9)


@both_executors
def test_equal_weights(executor, quadratics) -> None:
    trainer = quadratics(Ditto(num_epochs=2, weighting="equal"), executor(), num_rounds=2)
    assert float(trainer.run.strategy.models["shared.x"]) == pytest.approx(0.4371208333, rel=1e-9)


@both_executors
def test_the_personal_models_reach_their_minimum(executor, quadratics) -> None:
    trainer = quadratics(Ditto(num_epochs=300, proximal_weight=0.7), executor(), num_rounds=2)
    theta = sum(n * b for n, b in zip(EXAMPLES, MINIMA, strict=True)) / sum(EXAMPLES)  # of the first round
    expected = [(a * b + 0.7 * theta) / (a + 0.7) for a, b in zip(CURVATURES, MINIMA, strict=True)]
    assert parameters(trainer, "personal.x") == pytest.approx(expected, rel=1e-5)


@both_executors
def test_a_pull_of_length_one_starts_from_the_global_model(executor, quadratics) -> None:
    first, second = (
        quadratics(Ditto(num_epochs=1, proximal_weight=10.0), executor(), num_rounds=rounds) for rounds in (1, 2)
    )
    theta = float(first.run.strategy.models["shared.x"])
    old = parameters(first, "personal.x")
    expected = [theta - 0.1 * a * (v - b) for a, b, v in zip(CURVATURES, MINIMA, old, strict=True)]
    assert parameters(second, "personal.x") == pytest.approx(expected, rel=1e-12)


@both_executors
def test_decoupled(executor, quadratics) -> None:
    expected = [0.0, 0.0, 0.0]
    for theta in (0.0, 0.1525):
        for _ in range(2):
            half = [v - 0.1 * a * (v - b) for a, b, v in zip(CURVATURES, MINIMA, expected, strict=True)]
            expected = [v - 0.1 * 3.0 * (v - theta) for v in half]
    trainer = quadratics(Ditto(num_epochs=2, proximal_weight=3.0, decoupled=True), executor(), num_rounds=2)
    assert parameters(trainer, "personal.x") == pytest.approx(expected, rel=1e-9)
    assert float(trainer.run.strategy.models["shared.x"]) == pytest.approx(0.2787572917, rel=1e-9)


@both_executors
@pytest.mark.parametrize("clip", [None, 0.05])
def test_without_pull_it_is_local(clip, executor, fit, make_model, assert_same) -> None:
    def model():
        return make_model(dropout=0.5, gradient_clip_val=clip)

    alone = fit(Local(), executor, model()).run.executor.state().parameters
    trainer = fit(Ditto(proximal_weight=0.0), executor, model())
    twin = trainer.run.executor.state().parameters
    assert_same(parameters_of("personal", twin), dict(alone))


@both_executors
@pytest.mark.parametrize("settings", [{}, {"decoupled": True}, {"proximal_weight": 5.0, "reset_optimizer": True}])
def test_the_global_model_is_that_of_fedavg(settings, executor, fit, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    plain = fit(FedAvg(reset_optimizer="reset_optimizer" in settings), executor, participation=busy)
    twin = fit(Ditto(**settings), executor, participation=busy)
    assert_same(parameters_of("shared", twin.run.strategy.models), plain.run.strategy.models)
    for row, expected in zip(twin.run.history, plain.run.history, strict=True):
        assert row["global/test/loss"] == expected["test/loss"]
        assert row["global/val/acc"] == expected["val/acc"]


@both_executors
def test_the_first_round_is_that_of_fedprox(executor, fit, assert_same) -> None:
    settings = {"num_rounds": 1, "precision": "64-true"}
    near = fit(FedProx(proximal_weight=0.3), executor, **settings).run.executor.state().parameters
    twin = fit(Ditto(proximal_weight=0.3), executor, **settings).run.executor.state().parameters
    assert_same(parameters_of("personal", twin), dict(near), tolerance=1e-12)


def test_gradient_of_the_pull() -> None:
    given = {"shared.a": torch.tensor([9.0, 9.0]), "personal.a": torch.tensor([1.0, -2.0])}
    given = {name: tensor.requires_grad_() for name, tensor in given.items()}
    anchor = {"shared.a": torch.tensor([0.5, 1.0]), "personal.a": torch.tensor([7.0, 7.0])}

    pull = Ditto(proximal_weight=0.3).penalty()(given, Context(anchor=anchor))
    pull.backward()

    assert pull.item() == pytest.approx(0.15 * (0.25 + 9))
    torch.testing.assert_close(given["personal.a"].grad, 0.3 * torch.tensor([0.5, -3.0]))
    assert given["shared.a"].grad is None


@both_executors
def test_who_is_absent_keeps_its_model_and_unseen_clients_start_from_the_global_one(executor, quadratics) -> None:
    strategy = Ditto(num_epochs=2, proximal_weight=1.0)
    participation = Participation(num_clients=1, held_out_fraction=0.34)
    trainer = quadratics(strategy, executor(), num_rounds=1, participation=participation)
    (unseen_client,) = trainer.run.unseen_clients
    (present,), _ = participation.draw(trainer.run.training_clients, 0, 0)
    (absent,) = set(trainer.run.training_clients) - {present}
    theta = float(strategy.models["shared.x"])
    personal, shared = parameters(trainer, "personal.x"), parameters(trainer, "shared.x")
    assert theta == pytest.approx(by_hand(0.0, 0.0, present, weight=0.0), rel=1e-12)
    assert personal[absent] == shared[absent] == 0
    assert personal[present] == pytest.approx(by_hand(0.0, 0.0, present), rel=1e-12)
    assert shared[unseen_client] == pytest.approx(theta, rel=1e-12)
    assert personal[unseen_client] == pytest.approx(by_hand(theta, theta, unseen_client), rel=1e-12)


def test_bytes_are_those_of_fedavg(fit) -> None:
    rows = []
    for strategy in (FedAvg(), Ditto()):
        participation = Participation(num_clients=3, dropout_probability=0.2)
        last = fit(strategy, callbacks=CommunicationLedger(), participation=participation).run.history[-1]
        rows.append({name: value for name, value in last.items() if name.startswith("comm/")})
    assert rows[0] == rows[1]
    assert rows[0]["comm/bytes_up"] > 0


def test_settings(quadratics) -> None:
    with pytest.raises(ValueError, match=r"strategy\.proximal_weight must not be negative, got -1"):
        Ditto(proximal_weight=-1)
    with pytest.raises(ValueError, match=r"strategy\.weighting must be 'examples' or 'equal', got 'size'"):
        Ditto(weighting="size")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"learning rate 0.1 x strategy\.proximal_weight 20 is 2, which must be below"):
        quadratics(Ditto(num_epochs=1, proximal_weight=20.0), SequentialExecutor(), num_rounds=1)
