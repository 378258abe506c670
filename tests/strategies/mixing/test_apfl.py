"""APFL: numbers by hand, what it is equal to, which mixture is evaluated."""

import functools

import pytest
import torch
from both_executors import both_executors
from quadratics import CURVATURES, EXAMPLES, MINIMA, parameters
from torch.optim import SGD

from fl_lightning import Participation, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.round.client import parameters_of
from fl_lightning.round.context import Context
from fl_lightning.strategies import APFL, FedAvg, Local

#: After each of two rounds: the global model, the personal ones, the mixtures with the own w_i, with the global one.
CONSTANT = [
    (
        0.1525,
        [0.091875, -0.048984375, 0.14390625],
        [0.29296875, -0.1584960938, 0.4634765625],
        [0.13734375, 0.1021289062, 0.1503515625],
    ),
    (
        0.2787572917,
        [0.1712452148, -0.1004464989, 0.2806043518],
        [0.3860113037, -0.0681381872, 0.5902948380],
        [0.2518792725, 0.1839563440, 0.2792190567],
    ),
]
ADAPTIVE = (
    [0.2395402930, 0.2711773064, 0.2475510834],
    [0.1696353818, -0.1025454483, 0.2799496934],
    [0.3886208710, -0.0696196453, 0.5911439848],
)


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs, with dropout and Adam."""

    def run(strategy, executor=StackedExecutor, optimizer=None, clip=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        model = make_model(dropout=0.5, optimizer=optimizer, gradient_clip_val=clip)
        trainer.fit(model, federation, strategy)
        return trainer

    return run


def losses_at(points) -> list[float]:
    return [0.5 * a * (x - b) ** 2 for a, b, x in zip(CURVATURES, MINIMA, points, strict=True)]


def evaluated(trainer, kind: str) -> list[float]:
    """Each client's test loss of a model."""
    return trainer.run.scores[kind].extras["test/loss"][:, 0].tolist()


@both_executors
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_two_rounds(num_rounds, executor, quadratics) -> None:
    w, v, own, present = CONSTANT[num_rounds - 1]
    trainer = quadratics(APFL(num_epochs=2), executor(), num_rounds=num_rounds)
    assert float(trainer.run.strategy.models["shared.x"]) == pytest.approx(w, rel=1e-9)
    assert parameters(trainer, "personal.x") == pytest.approx(v, rel=1e-9)
    assert evaluated(trainer, "") == pytest.approx(losses_at(own), rel=1e-6)
    assert evaluated(trainer, "present/") == pytest.approx(losses_at(present), rel=1e-6)
    assert evaluated(trainer, "global/") == pytest.approx(losses_at([w] * 3), rel=1e-6)
    assert trainer.run.history[-1]["server/own_mixtures"] == 1


@both_executors
def test_a_mixture_learned_once_a_round(executor, quadratics) -> None:
    first = quadratics(APFL(num_epochs=2, adaptive="round"), executor(), num_rounds=1)
    assert parameters(first, "alpha") == [0.25] * 3  # v and w were the same
    assert parameters(first, "personal.x") == pytest.approx(CONSTANT[0][1], rel=1e-9)
    second = quadratics(APFL(num_epochs=2, adaptive="round"), executor(), num_rounds=2)
    alpha, v, own = ADAPTIVE
    assert parameters(second, "alpha") == pytest.approx(alpha, rel=1e-9)
    assert parameters(second, "personal.x") == pytest.approx(v, rel=1e-9)
    assert evaluated(second, "") == pytest.approx(losses_at(own), rel=1e-6)
    assert float(second.run.strategy.models["shared.x"]) == pytest.approx(CONSTANT[1][0], rel=1e-9)


@both_executors
@pytest.mark.parametrize("rate", [None, 30.0])
def test_a_mixture_learned_at_every_step(rate, executor, quadratics) -> None:
    """By hand; with a large rate it meets both ends of [0, 1]."""
    states, w = [(0.0, 0.25)] * 3, 0.0
    for _ in range(3):
        mixed = []
        for client, (v, alpha) in enumerate(states):
            a, b, u = CURVATURES[client], MINIMA[client], w
            for _ in range(2):
                gradient = a * (alpha * v + (1 - alpha) * u - b)
                moved = alpha - (rate or 0.1) * (v - u) * gradient
                u, v, alpha = u - 0.1 * a * (u - b), v - 0.1 * alpha * gradient, min(max(moved, 0.0), 1.0)
            states[client] = v, alpha
            mixed.append(u)
        w = sum(n * u for n, u in zip(EXAMPLES, mixed, strict=True)) / sum(EXAMPLES)
    trainer = quadratics(APFL(num_epochs=2, adaptive="step", mixture_lr=rate), executor(), num_rounds=3)
    assert parameters(trainer, "alpha") == pytest.approx([alpha for _, alpha in states], rel=1e-6)
    assert parameters(trainer, "personal.x") == pytest.approx([v for v, _ in states], rel=1e-6)
    assert (rate is not None) == ({0.0, 1.0} <= set(parameters(trainer, "alpha")))


@pytest.mark.parametrize("adaptive", ["round", "step"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_executors_agree_on_what_is_learned(adaptive, clip, fit, assert_same) -> None:
    runs = []
    for executor in (SequentialExecutor, StackedExecutor, functools.partial(StackedExecutor, max_padding=0.8)):
        busy = Participation(num_clients=3, straggler_probability=0.5, held_out_fraction=0.2)
        strategy = APFL(adaptive=adaptive, mixture=0.5)
        trainer = fit(strategy, executor, clip=clip, participation=busy, precision="64-true", num_rounds=4)
        runs.append((trainer.run.executor.state().parameters, trainer.run.history))
    assert len(set(runs[0][0]["alpha"].tolist())) > 1
    for state, history in runs[1:]:
        assert_same(dict(state), dict(runs[0][0]), tolerance=1e-9)
        assert_same(history, runs[0][1], tolerance=1e-6)


@both_executors
def test_nothing_personal_is_fedavg(executor, fit, assert_same) -> None:
    settings = {"participation": Participation(straggler_probability=0.5), "optimizer": functools.partial(SGD, lr=0.3)}
    plain = fit(FedAvg(), executor, **settings)
    twin = fit(APFL(mixture=0.0), executor, **settings)
    state = twin.run.executor.state().parameters
    for name, start in parameters_of("personal", twin.run.architectures[0]).items():
        assert (state[f"personal.{name}"] == start).all()
    for row, expected in zip(twin.run.history, plain.run.history, strict=True):
        assert (row["test/acc"], row["test/loss"]) == (expected["trained/test/acc"], expected["trained/test/loss"])


@both_executors
def test_all_personal_is_local(executor, fit, assert_same) -> None:
    alone = fit(Local(), executor)
    twin = fit(APFL(mixture=1.0), executor)
    state = twin.run.executor.state().parameters
    assert_same(parameters_of("personal", state), dict(alone.run.executor.state().parameters))
    for row, expected in zip(twin.run.history, alone.run.history, strict=True):
        assert (row["test/acc"], row["test/loss"]) == (expected["test/acc"], expected["test/loss"])


@both_executors
@pytest.mark.parametrize("settings", [{}, {"mixture": 0.8, "adaptive": "step"}, {"mixture": 0.0}])
def test_the_global_model_is_that_of_fedavg(settings, executor, fit, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    plain = fit(FedAvg(), executor, participation=busy)
    twin = fit(APFL(**settings), executor, participation=busy)
    assert_same(parameters_of("shared", twin.run.strategy.models), plain.run.strategy.models)
    assert [row["global/test/acc"] for row in twin.run.history] == [row["test/acc"] for row in plain.run.history]


@pytest.mark.parametrize("adaptive", ["none", "step"])
def test_gradients_of_the_loss(adaptive, quadratics) -> None:
    """∇f(w), α ∇f(v̄) and <v - w, ∇f(v̄)>, at a point where none is zero."""
    trainer = quadratics(APFL(num_epochs=0, adaptive=adaptive), SequentialExecutor(), num_rounds=1)
    strategy, client = trainer.run.strategy, trainer.run.executor.modules[1]
    w, v, alpha, (a, b) = 0.7, -0.4, 0.25, (CURVATURES[1], MINIMA[1])
    given = {"shared.x": torch.tensor([w]).double(), "personal.x": torch.tensor([v]).double()}
    given |= {"alpha": torch.tensor(alpha).double()} if adaptive == "step" else {}
    given = {name: tensor.requires_grad_() for name, tensor in given.items()}
    strategy.losses(client, given, trainer.run.executor._batch(1), Context()).backward()
    slope = a * (alpha * v + (1 - alpha) * w - b)
    assert float(given["shared.x"].grad) == pytest.approx(a * (w - b))
    assert float(given["personal.x"].grad) == pytest.approx(alpha * slope)
    assert "alpha" not in given or float(given["alpha"].grad) == pytest.approx((v - w) * slope)


@both_executors
def test_who_did_not_answer_is_evaluated_with_the_global_model(executor, quadratics) -> None:
    participation = Participation(num_clients=1, held_out_fraction=0.34)
    trainer = quadratics(APFL(num_epochs=2), executor(), num_rounds=1, participation=participation)
    (unseen_client,) = trainer.run.unseen_clients
    (present,), _ = participation.draw(trainer.run.training_clients, 0, 0)
    row = trainer.run.training_clients.index(present)
    w = float(trainer.run.strategy.models["shared.x"])
    v = parameters(trainer, "personal.x")
    assert trainer.run.history[-1]["server/own_mixtures"] == 0.5
    assert w == pytest.approx([0.36, -0.195, 0.57][present], rel=1e-9)
    expected = losses_at([w if client == present else 0.75 * w for client in range(3)])  # others still have v = 0
    assert evaluated(trainer, "")[1 - row] == pytest.approx(expected[trainer.run.training_clients[1 - row]], rel=1e-6)
    assert evaluated(trainer, "")[row] == pytest.approx(losses_at(CONSTANT[0][2])[present], rel=1e-6)
    assert parameters(trainer, "shared.x")[unseen_client] == v[unseen_client] == pytest.approx(w, rel=1e-12)
    assert evaluated(trainer, "unseen/") == pytest.approx([losses_at([w] * 3)[unseen_client]], rel=1e-6)


def test_who_responded_survives_a_checkpoint(quadratics) -> None:
    settings = {"num_rounds": 1, "participation": Participation(num_clients=2)}
    trainer = quadratics(APFL(num_epochs=2), StackedExecutor(), **settings)
    other = APFL()
    other.setup(trainer.run.strategy.federation)
    other.load_state_dict(trainer.run.strategy.state_dict())
    assert other.metrics() == {"server/own_mixtures": 2 / 3}
    other.aggregate(other.stages(0)[0], trainer.run.executor.state().rows(()))
    assert other.metrics() == {"server/own_mixtures": 0}


def test_bytes_are_those_of_fedavg(fit) -> None:
    rows = []
    for strategy in (FedAvg(), APFL(), APFL(adaptive="step")):
        participation = Participation(num_clients=3, dropout_probability=0.2)
        last = fit(strategy, callbacks=CommunicationLedger(), participation=participation).run.history[-1]
        rows.append({name: value for name, value in last.items() if name.startswith("comm/")})
    assert rows[0] == rows[1] == rows[2]
    assert rows[0]["comm/bytes_up"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture": 1.1}, r"strategy\.mixture must be in \[0, 1\], got 1\.1"),
        ({"adaptive": "always"}, r"strategy\.adaptive must be 'none' or 'round' or 'step', got 'always'"),
        ({"mixture_lr": 0.1}, r"strategy\.mixture_lr is 0\.1: it must be positive, and strategy\.adaptive round or"),
        ({"mixture_lr": -1.0, "adaptive": "step"}, r"strategy\.mixture_lr is -1: it must be positive"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        APFL(**settings)
