"""pFedGraph: its numbers on the quadratics, the projection, limits of W, the direction of its term."""

import itertools

import pytest
import torch
from both_executors import both_executors
from learning import learned, quadrants
from quadratics import parameters

from fl_lightning import Participation
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.federation import Federation
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, Local, PFedGraph
from fl_lightning.strategies.mixing.pfedgraph import project_to_simplex


def server(**settings) -> PFedGraph:
    """A strategy that is set up, for models of two numbers that start at (1, 1)."""
    strategy = PFedGraph(**settings)
    known = {"num_features": 2, "seed": 0, "device": torch.device("cpu")}
    strategy.setup(Federation(num_clients=3, training_clients=(0, 1, 2), parameters={"a": torch.ones(2)}, **known))
    return strategy


@both_executors
def test_numbers(executor, quadratics) -> None:
    third, half = (0.4166666667, 0.0, 0.5833333333), (0.0, 1.0, 0.0)
    expected = [
        ([0.36, -0.195, 0.57], [0.4825, -0.195, 0.4825]),
        ([0.6688, -0.3709875, 0.960825], [0.8391479167, -0.3709875, 0.8391479167]),
    ]
    for num_rounds, (local, mixed) in enumerate(expected, start=1):
        strategy = PFedGraph(num_epochs=2, alignment_weight=0.0, snap=None)
        trainer = quadratics(strategy, executor(), num_rounds=num_rounds)
        assert parameters(trainer) == pytest.approx(local, rel=1e-9)
        assert strategy.models["x"].flatten().tolist() == pytest.approx(mixed, rel=1e-9)
        assert strategy.mixing_CC.flatten().tolist() == pytest.approx([*third, *half, *third], abs=1e-9)


def test_row_problem() -> None:
    d = torch.tensor([[-1, -0.6, 0.2], [-0.6, -1, 0.5], [0.2, 0.5, -1]], dtype=torch.float64)
    actual = project_to_simplex(torch.tensor([1 / 6, 1 / 2, 1 / 3], dtype=torch.float64) - d / 1.6)
    expected = [0.4583333333, 0.5416666667, 0, 0.2083333333, 0.7916666667, 0, 0, 0.1145833333, 0.8854166667]
    assert actual.flatten().tolist() == pytest.approx(expected, abs=1e-9)


def test_the_projection_is_the_nearest_point() -> None:
    points = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = project_to_simplex(points)
    torch.testing.assert_close(actual.sum(dim=1), torch.ones(50, dtype=torch.float64))
    assert (actual >= 0).all()
    slack = points - actual  # largest, and the same, on the support: the condition of the nearest point
    largest = slack.amax(dim=1, keepdim=True)
    torch.testing.assert_close(torch.where(actual > 0, slack, largest), largest.expand_as(slack))
    torch.testing.assert_close(project_to_simplex(actual), actual)


def test_limits_of_w() -> None:
    models = {"a": torch.tensor([[2.0, 1.0], [1.0, 3.0], [0.0, 1.0]])}
    examples_C = torch.tensor([1, 3, 2])
    p = examples_C.double() / 6
    torch.testing.assert_close(
        server(size_weight=1e9).weights(models, examples_C), p.expand(3, 3), rtol=1e-6, atol=1e-6
    )
    alike = {"a": torch.tensor([[3.0, 1.0]] * 3)}
    torch.testing.assert_close(server().weights(alike, examples_C), p.expand(3, 3))
    unmoved = {"a": torch.ones(3, 2)}
    torch.testing.assert_close(server().weights(unmoved, examples_C), p.expand(3, 3))
    cosine_CC = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]], dtype=torch.float64)
    bounds = (1 - cosine_CC) / (2 * (1 - p[:, None] + p))
    alone = float(bounds[~torch.eye(3, dtype=torch.bool)].min())
    torch.testing.assert_close(
        server(size_weight=0.999 * alone).weights(models, examples_C), torch.eye(3, dtype=torch.float64)
    )
    assert server(size_weight=1.01 * alone).weights(models, examples_C).diagonal().min() < 1
    nobody = server(size_weight=1e9).weights(models, torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(nobody, torch.full((3, 3), 1 / 3, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_snap_and_what_is_compared() -> None:
    models = {"a": torch.tensor([[2.0, 1.0], [2.0, 1.3], [0.0, 1.0]])}  # the first two at a cosine of 0.958
    examples_C = torch.ones(3)
    snapped, exact = (server(snap=snap).weights(models, examples_C) for snap in (0.9, None))
    assert snapped[0, 0] == pytest.approx(float(snapped[0, 1]))
    assert exact[0, 0] > exact[0, 1] + 0.01
    with pytest.raises(ValueError, match=r"parameter pattern 'head\.\*' matches none"):
        server(compared=["head.*"])


@both_executors
def test_large_and_small_size_weight(executor, fit, assert_same) -> None:
    alone = fit(PFedGraph(size_weight=1e-4, alignment_weight=0.0, snap=None), executor)
    local = fit(Local(), executor)
    assert_same(
        dict(alone.run.executor.state().parameters), dict(local.run.executor.state().parameters), tolerance=1e-6
    )
    together = fit(PFedGraph(size_weight=1e9, alignment_weight=0.0), executor, precision="64-true")
    fedavg = fit(FedAvg(), executor, precision="64-true")
    for name, model in fedavg.run.strategy.models.items():
        actual = together.run.strategy.models[name]
        torch.testing.assert_close(actual, model.expand_as(actual), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("penalty_of", ["cosine", "mixed"])
def test_the_term_turns_a_model_toward_the_mixed_one(penalty_of) -> None:
    strategy = server(penalty_of=penalty_of, alignment_weight=5.0)
    target = torch.tensor([0.6, 0.8], dtype=torch.float64)
    received = {"direction/a": target, "has_taken_part": torch.tensor(True)}
    context = Context(anchor={"a": 3 * target}, received=received)
    x = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    cosines = []
    for _ in range(20):
        cosines.append(float(torch.nn.functional.cosine_similarity(x.detach(), target, dim=0)))
        (gradient,) = torch.autograd.grad(strategy.penalty()({"a": x}, context), [x])
        assert gradient.norm() <= 5.0 / x.norm() + 1e-9
        x = (x - 0.02 * gradient).detach().requires_grad_()
    assert all(later > sooner for sooner, later in itertools.pairwise(cosines))
    still = (3 * target).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(strategy.penalty()({"a": still}, context), [still])
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


@both_executors
@pytest.mark.parametrize("penalty_of", ["cosine", "mixed"])
def test_the_term_begins_with_the_second_participation(penalty_of, executor, fit, assert_same) -> None:
    def states(weight: float, rounds: int):
        strategy = PFedGraph(alignment_weight=weight, penalty_of=penalty_of)
        return dict(fit(strategy, executor, num_rounds=rounds).run.executor.state().parameters)

    assert_same(states(3.0, 1), states(0.0, 1), tolerance=1e-6)
    assert (states(3.0, 2)["convs.0.weight"] - states(0.0, 2)["convs.0.weight"]).abs().max() > 1e-3


def test_bytes(fit) -> None:
    busy = Participation(num_clients=3)
    plain, mixed, cosine = (
        fit(strategy, callbacks=CommunicationLedger(), participation=busy).run.history[-1]
        for strategy in (FedAvg(), PFedGraph(penalty_of="mixed"), PFedGraph())
    )
    assert plain["comm/bytes_up"] == mixed["comm/bytes_up"] == cosine["comm/bytes_up"]
    assert mixed["comm/bytes_down"] == plain["comm/bytes_down"] + 3  # whether they have taken part
    assert cosine["comm/bytes_down"] == 2 * plain["comm/bytes_down"]


def test_two_kinds_of_clients() -> None:
    clients = quadrants(6, num_train=20, labels=lambda client, y_N: (y_N + 2 * (client % 2)) % 4)
    strategy = PFedGraph(num_epochs=5, size_weight=0.4, snap=None)
    inferred = learned(strategy, clients, num_rounds=20)
    assert inferred > learned(FedAvg(num_epochs=5), clients, num_rounds=20) + 0.2
    mixing_CC = strategy.mixing_CC
    assert mixing_CC[0, 2] > mixing_CC[0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size_weight": 0.0}, r"strategy\.size_weight must be positive, got 0"),
        ({"alignment_weight": -1}, r"strategy\.alignment_weight must not be negative, got -1"),
        ({"penalty_of": "sum"}, r"strategy\.penalty_of must be 'cosine' or 'mixed', got 'sum'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        PFedGraph(**settings)
