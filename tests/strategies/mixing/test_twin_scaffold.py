"""TwinScaffold: SCAFFOLD at one end and Ditto at the other, bounded corrections and the choice by hand, bytes."""

from math import inf
from typing import Any

import pytest
import torch
from both_executors import both_executors
from quadratics import CURVATURES, MINIMA, Point, parameters
from torch import nn

from fl_lightning import Callback, ClientModule, Participation, Payload, StackedExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.round.client import parameters_of
from fl_lightning.round.context import Context
from fl_lightning.strategies import SCAFFOLD, Ditto, FedAvg, TwinScaffold
from fl_lightning.strategies.share_choice import ShareChoice

BUSY = {"num_clients": 4, "dropout_probability": 0.2, "straggler_probability": 0.5}


def at_round(trainer: Any, prefix: str = "") -> list[tuple[float, ...]]:
    names = [f"{prefix}{name}" for name in ("val/acc", "val/loss", "test/acc", "test/loss")]
    return [tuple(row[name] for name in names) for row in trainer.run.history]


@both_executors
def test_with_none_of_the_personal_model_it_is_scaffold(executor, fit, assert_same) -> None:
    settings = {"executor": executor, "num_rounds": 4, "participation": Participation(**BUSY)}
    plain = fit(SCAFFOLD(), **settings)
    twin = fit(TwinScaffold(shares=[0.0], max_correction=inf), **settings)
    assert_same(parameters_of("shared", twin.run.strategy.models), plain.run.strategy.models)
    assert_same(parameters_of("shared", twin.run.strategy.controls), plain.run.strategy.controls)
    assert at_round(twin) == at_round(twin, "global/") == at_round(plain)


@both_executors
def test_with_the_personal_model_alone_and_without_corrections_it_is_ditto(executor, fit, assert_same) -> None:
    settings = {"executor": executor, "num_rounds": 4, "participation": Participation(**BUSY)}
    plain = fit(Ditto(weighting="equal"), **settings)
    twin = fit(TwinScaffold(shares=[1.0], max_correction=0.0), **settings)
    assert_same(twin.run.strategy.models, plain.run.strategy.models)
    assert_same(*(dict(each.run.executor.state().parameters) for each in (twin, plain)))
    assert at_round(twin) == at_round(twin, "personal/") == at_round(plain)


def by_hand(num_rounds: int, bound: float, *, rate: float = 0.1, steps: int = 2) -> tuple[float, list[float]]:
    theta, controls = 0.0, [0.0, 0.0, 0.0]
    for _ in range(num_rounds):
        trained, means, mean = [], [], sum(controls) / 3
        for a, b, control in zip(CURVATURES, MINIMA, controls, strict=True):
            y, total, r = theta, 0.0, mean - control
            for _ in range(steps):
                g = a * (y - b)
                total += g
                y -= rate * (g + (r * min(1.0, bound * abs(g) / abs(r)) if r else 0.0))
            trained.append(y)
            means.append(total / steps)
        theta, controls = sum(trained) / 3, means
    return theta, controls


@both_executors
@pytest.mark.parametrize(("bound", "expected"), [(1.0, 0.4814744444), (0.3, 0.4998909968), (inf, 0.5971437118)])
def test_corrections_are_bounded_by_the_gradient(bound, expected, executor, quadratics) -> None:
    strategy = TwinScaffold(num_epochs=2, max_correction=bound)
    quadratics(strategy, executor(), num_rounds=3)
    theta, controls = by_hand(3, bound)
    assert float(strategy.models["shared.x"]) == pytest.approx(theta, rel=1e-9) == pytest.approx(expected, rel=1e-9)
    assert strategy.controls["shared.x"].flatten().tolist() == pytest.approx(controls, rel=1e-9)


def test_the_minimum_is_a_fixed_point_of_bounded_corrections(quadratics) -> None:
    strategy = TwinScaffold(num_epochs=3)
    quadratics(strategy, StackedExecutor(), num_rounds=300, learning_rate=0.5, evaluate_every=300)
    assert float(strategy.models["shared.x"]) == pytest.approx((2 * 1 - 0.5 * 2 + 1 * 3) / 3.5, rel=1e-9)


@pytest.mark.parametrize(("bound", "expected"), [(1.0, [6.0, 8.0]), (0.5, [4.5, 6.0]), (0.0, [3.0, 4.0])])
def test_a_correction_that_is_far_too_long_is_shortened_to_the_gradient(bound, expected, quadratics) -> None:
    """The gradient (3, 4) is 5 long, and so is then the correction, in its own direction."""
    strategy = TwinScaffold(num_epochs=1, max_correction=bound)
    quadratics(strategy, StackedExecutor(), num_rounds=1)
    strategy.shared = ("shared.x",)
    context = Context(received={"correction/shared.x": torch.tensor([6e6, 8e6])})
    step = strategy.training(0).program.step
    change = step(ClientModule(), {}, {"shared.x": torch.tensor([3.0, 4.0])}, None, context)
    assert change.gradients["shared.x"].tolist() == pytest.approx(expected)


class HalfTrained(Point):
    """A point beside parameters that training leaves alone: a frozen one, and one that no prediction needs."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(1))


@both_executors
def test_parameters_without_a_gradient_need_no_correction(executor, quadratics) -> None:
    strategy = TwinScaffold(num_epochs=2)
    trainer = quadratics(strategy, executor(), num_rounds=3, net=HalfTrained)
    assert not any(row["num_failures"] for row in trainer.run.history)
    assert float(strategy.models["shared.x"]) == pytest.approx(by_hand(3, 1.0)[0], rel=1e-9)
    assert [float(strategy.models[f"shared.{name}"]) for name in ("frozen", "unused")] == pytest.approx([1, 1])


def test_the_choice_by_hand() -> None:
    choice = ShareChoice([0.0, 0.5, 1.0], 10.0, 4)
    assert choice.of([0, 3]).tolist() == [0.5, 0.5]  # nobody has scored

    right = [[6, 7, 8], [40, 44, 41], [0, 0, 0]]  # of 10, of 50 and of no examples
    scores = torch.tensor([[[r, n] for r in row] for row, n in zip(right, (10, 50, 0), strict=True)])
    choice.note([0, 1, 2], scores)
    # the federation: 46, 51, 49 of 60. Client 0: (0.6, 0.7, 0.8) / 2 + (0.7667, 0.85, 0.8167) / 2 -> 0.775 and 0.8083
    assert choice.of([0, 1, 2, 3]).tolist() == [1.0, 0.5, 0.5, 0.5]
    choice.prior_examples = 100.0  # a part of 1/11 is its own: 0.8364 and 0.8152
    assert choice.of([0, 1]).tolist() == [0.5, 0.5]

    choice.note([1], torch.tensor([[[44.0, 50.0], [44.0, 50.0], [40.0, 50.0]]]))
    for prior_examples, expected in ((0.0, [1.0, 0.5]), (inf, [0.5, 0.5])):  # a tie is the federation's: 50, 51, 48
        again = ShareChoice([0.0, 0.5, 1.0], prior_examples, 4)
        again.scores_CS2 = choice.scores_CS2
        assert again.of([0, 1]).tolist() == expected


class Watches(Callback):
    """Keeps what clients score, and the models that the server had sent for it."""

    def __init__(self) -> None:
        self.scores: dict[int, torch.Tensor] = {}
        self.sent: dict[int, float] = {}

    def on_upload(self, trainer: Any, stage: Any, payload: Payload) -> Payload:
        run = trainer.run
        self.sent[run.round_idx] = float(run.strategy.models["shared.x"])
        if "scores" in payload.extras:
            self.scores[run.round_idx] = payload.extras["scores"]
        return payload


@both_executors
def test_scores_are_of_the_received_model_and_the_trained_personal_one(executor, quadratics) -> None:
    watches, strategy = Watches(), TwinScaffold(num_epochs=2, validate_every=3, shares=[0.0, 0.25, 1.0])
    trainer = quadratics(strategy, executor(), num_rounds=5, callbacks=watches)
    assert set(watches.scores) == {1, 4}
    theta, own_C = watches.sent[4], parameters(trainer, "personal.x")
    for row, a, b, v in zip(watches.scores[4], CURVATURES, MINIMA, own_C, strict=True):
        points = [(1 - share) * theta + share * v for share in strategy.shares]
        assert row[:, 0].tolist() == pytest.approx([-a / 2 * (x - b) ** 2 for x in points])  # more is better
        assert row[:, 1].tolist() == [1, 1, 1]
    chosen = strategy.choice.of([0, 1, 2]).tolist()
    assert chosen == [1.0, 1.0, 1.0]  # far apart as they are
    last = trainer.run.history[-1]
    assert last["val/loss"] == last["personal/val/loss"] != last["global/val/loss"]
    assert last["server/share"] == 1.0


def test_what_is_evaluated_is_the_mean_of_both_predictions(quadratics) -> None:
    strategy = TwinScaffold(num_epochs=2, shares=[0.25])
    trainer = quadratics(strategy, StackedExecutor(), num_rounds=3)
    theta, own_C = float(strategy.models["shared.x"]), parameters(trainer, "personal.x")
    points = [0.75 * theta + 0.25 * v for v in own_C]
    expected = [a / 2 * (x - b) ** 2 for a, b, x in zip(CURVATURES, MINIMA, points, strict=True)]
    assert trainer.run.history[-1]["test/loss"] == pytest.approx(sum(expected) / 3, rel=1e-6)


@both_executors
def test_unseen_clients_start_from_the_shared_model_and_take_the_choice_of_the_federation(executor, quadratics) -> None:
    strategy = TwinScaffold(num_epochs=2, proximal_weight=1.0)
    trainer = quadratics(strategy, executor(), num_rounds=3, participation=Participation(held_out_fraction=0.34))
    (unseen,) = trainer.run.unseen_clients
    theta = v = float(strategy.models["shared.x"])
    for _ in range(2):
        v -= 0.1 * (CURVATURES[unseen] * (v - MINIMA[unseen]) + (v - theta))
    assert parameters(trainer, "personal.x")[unseen] == pytest.approx(v, rel=1e-9)
    assert parameters(trainer, "shared.x")[unseen] == pytest.approx(theta, rel=1e-9)
    assert not strategy.choice.scores_CS2[unseen].any()


def test_bytes_are_twice_those_of_fedavg_and_two_numbers_for_each_share(fit) -> None:
    totals = []
    for strategy in (FedAvg(), SCAFFOLD(), TwinScaffold(validate_every=1), TwinScaffold(shares=[0.5])):
        last = fit(strategy, num_rounds=3, callbacks=CommunicationLedger()).run.history[-1]
        totals.append([last[f"comm/bytes_{way}"] for way in ("up", "down")])
    plain, scaffold, twin, fixed = totals
    assert fixed == scaffold == [2 * number for number in plain]
    clients, shares = 5, 5
    assert twin == [scaffold[0] + clients * shares * 2 * 4, scaffold[1]]  # of the last round


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"strategy\.max_correction must not be negative, got -1"):
        TwinScaffold(max_correction=-1.0)
    with pytest.raises(ValueError, match=r"strategy\.validate_every must be at least 1, got 0"):
        TwinScaffold(validate_every=0)
    for shares in ([], [0.5, 0.0], [0.0, 1.5], [0.5, 0.5]):
        with pytest.raises(
            ValueError, match=r"strategy\.shares must be a list of increasing numbers in \[0, 1\], got \["
        ):
            TwinScaffold(shares=shares)


def test_a_metric_of_unknown_direction_is_refused(federation, make_model, make_trainer) -> None:
    class Odd(ClientModule):
        monitor = "val/odd"

    base = make_model()
    client = Odd(base.net_factories, base.optimizer_factory)
    with pytest.raises(
        ValueError, match=r"strategy\.shares is \[0\.0, .*it is unknown whether more or less of 'val/odd'"
    ):
        make_trainer().fit(client, federation, TwinScaffold())
