"""FedAMP: its numbers on the quadratics, limits of its attention, who starts where."""

import pytest
import torch
from both_executors import both_executors
from joined import Joined
from learning import learned, quadrants
from quadratics import parameters

from fl_lightning import Participation, Payload, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAMP, FedAvg, Local, PFedGraph


def xi(rows, **settings):
    models = {"a": torch.tensor(rows, dtype=torch.float64)}
    return FedAMP(**settings).weights(models, torch.ones(len(rows)))


@both_executors
def test_numbers(executor, quadratics) -> None:
    """σ 2, α_k 0.5, λ 0.5."""
    settings = {"num_epochs": 2, "collaboration": 0.5, "bandwidth": 2.0, "proximal_weight": 1.0}
    expected = [[0.34, -0.185, 0.54], [0.5212734822, -0.1226422818, 0.8283361652]]
    for num_rounds, x in enumerate(expected, start=1):
        trainer = quadratics(FedAMP(**settings), executor(), num_rounds=num_rounds)
        assert parameters(trainer) == pytest.approx(x, rel=1e-9)
        if num_rounds == 1:
            actual = trainer.run.strategy.models["x"].flatten().tolist()
            assert actual == pytest.approx([0.2746567912, 0.0687137390, 0.3516294698], rel=1e-9)


def test_limits_of_the_attention() -> None:
    rows = [[0.0, 0.0], [3.0, 0.0], [0.0, -4.0]]
    for settings in ({"bandwidth": 1e-6}, {"bandwidth": 1e9, "collaboration": 1e-12}):
        torch.testing.assert_close(xi(rows, **settings), torch.eye(3, dtype=torch.float64), atol=1e-9, rtol=0)
    others = (torch.ones(3, 3, dtype=torch.float64) - torch.eye(3, dtype=torch.float64)) / 2
    torch.testing.assert_close(xi(rows, bandwidth=1e12, collaboration=1.0), others)
    same = xi([[1.0, 2.0]] * 3, collaboration=1.0)
    torch.testing.assert_close(same, others)
    torch.testing.assert_close(xi([[1.0, 2.0]]), torch.ones(1, 1, dtype=torch.float64))


def test_by_hand() -> None:
    rows = [[0.0, 0.0], [3.0, 0.0], [0.0, -4.0]]  # squared distances 9, 16, 25: their median is 16
    actual = xi(rows, collaboration=0.6)
    ahead = 0.3 * torch.tensor([9.0, 16.0, 25.0], dtype=torch.float64).div(-16).exp()
    assert actual[0, 1] == pytest.approx(float(ahead[0]))
    assert actual[2, 0] == pytest.approx(float(ahead[1]))
    assert actual[1, 2] == pytest.approx(float(ahead[2]))
    torch.testing.assert_close(actual.sum(dim=1), torch.ones(3, dtype=torch.float64))
    far = xi([[1e4 + x for x in row] for row in rows], collaboration=0.6)  # distances do not depend on the origin
    torch.testing.assert_close(far, actual)


def test_attention_by_cosines() -> None:
    actual = xi([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]], attention="cosine", self_weight=0.4, temperature=2.0)
    e = float(torch.tensor(2.0).exp())
    assert actual[0].tolist() == pytest.approx([0.4, 0.6 * e / (e + 1), 0.6 / (e + 1)])
    assert actual[2].tolist() == pytest.approx([0.3, 0.3, 0.4])


@both_executors
@pytest.mark.parametrize("kind", [FedAMP, PFedGraph])
def test_an_unseen_client_hears_the_mean_of_all_and_then_what_is_mixed_for_it(kind, executor, fit) -> None:
    strategy, joined = kind(), Joined()
    trainer = fit(strategy, executor, participation=Participation(held_out_fraction=0.2), callbacks=joined)
    joined.restore(strategy)
    (unseen_client,), training = trainer.run.unseen_clients, list(strategy.federation.training_clients)
    heard = [*training, unseen_client]
    models = {name: table[heard] for name, table in strategy.last.items()}
    weight_C = strategy.weights(models, strategy.examples_C[heard])[-1]
    after = strategy.mixed_models([training[0], unseen_client]).parameters
    strategy.known_C[unseen_client] = False
    before = strategy.mixed_models([training[0], unseen_client]).parameters
    for name, model in models.items():
        torch.testing.assert_close(after[name][1], torch.tensordot(weight_C.to(model), model, dims=1))
        torch.testing.assert_close(before[name][1], strategy.models[name][training].mean(dim=0))
        assert torch.equal(before[name][0], after[name][0])
    assert 0 <= strategy.metrics()["server/self_weight"] < 1


def test_gradient_of_the_pull() -> None:
    strategy = FedAMP(proximal_weight=0.3)
    strategy.shared = ("a",)
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    for context in (
        Context(anchor={"a": torch.tensor([0.5, 1.0])}),
        Context(anchor={"a": torch.zeros(2)}, received={"cloud/a": torch.tensor([0.5, 1.0])}),
    ):
        x.grad = None
        strategy.penalty()({"a": x}, context).backward()
        torch.testing.assert_close(x.grad, 0.3 * torch.tensor([0.5, -3.0]))


@both_executors
def test_without_pull_from_its_own_model_it_is_local(executor, fit, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    runs = [
        fit(strategy, executor, participation=busy).run.executor.state().parameters
        for strategy in (FedAMP(start="own", proximal_weight=0.0), Local())
    ]
    assert_same(dict(runs[0]), dict(runs[1]))


@both_executors
def test_from_its_own_model(executor, quadratics) -> None:
    trainers = [
        quadratics(FedAMP(num_epochs=1, start="own", proximal_weight=2.0), executor(), num_rounds=rounds)
        for rounds in (1, 2)
    ]
    clouds = trainers[0].run.strategy.models["x"].flatten().tolist()
    before = parameters(trainers[0])
    a, b = (2.0, 0.5, 1.0), (1.0, -2.0, 3.0)
    expected = [x - 0.1 * (a[i] * (x - b[i]) + 2.0 * (x - clouds[i])) for i, x in enumerate(before)]
    assert parameters(trainers[1]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("start", ["received", "own"])
def test_masked_averaging_compares_with_where_a_client_began(start, quadratics) -> None:
    """A client that sends that back has not updated it, so that all take what client 2 sends."""
    strategy = FedAMP(start=start, bandwidth=1e9, masked_averaging=True)
    trainer = quadratics(strategy, SequentialExecutor(), num_rounds=1)
    began = parameters(trainer) if start == "own" else strategy.models["x"].flatten().tolist()
    x = torch.tensor(began, dtype=torch.float64)[:, None]
    x[2] += 1
    upload = Payload(clients=(0, 1, 2), parameters={"x": x}, num_examples=torch.tensor([1, 3, 2]))
    strategy.aggregate(strategy.stages(1)[0], upload)
    assert strategy.models["x"].flatten().tolist() == pytest.approx([float(x[2])] * 3)


@both_executors
@pytest.mark.parametrize("start", ["received", "own"])
def test_an_unseen_client_trains_the_mean_model(start, executor, fit) -> None:
    participation = Participation(held_out_fraction=0.2)
    trainer = fit(FedAMP(start=start, num_epochs=0), executor, participation=participation)
    strategy, (unseen_client,) = trainer.run.strategy, trainer.run.unseen_clients
    old = list(trainer.run.training_clients)
    own = trainer.run.executor.state().parameters
    for name, table in strategy.models.items():
        torch.testing.assert_close(own[name][unseen_client], table[old].mean(dim=0))


def test_bytes_are_those_of_fedavg(fit) -> None:
    rows = [fit(strategy, callbacks=CommunicationLedger()).run.history[-1] for strategy in (FedAvg(), FedAMP())]
    ways = ("comm/bytes_up", "comm/bytes_down")
    assert [rows[0][way] for way in ways] == [rows[1][way] for way in ways]


def test_two_kinds_of_clients() -> None:
    clients = quadrants(6, num_train=20, labels=lambda client, y_N: (y_N + 2 * (client % 2)) % 4)
    strategy = FedAMP(num_epochs=5, collaboration=1.0, proximal_weight=0.1)
    attentive = learned(strategy, clients, num_rounds=20)
    assert attentive > learned(FedAvg(num_epochs=5), clients, num_rounds=20) + 0.1
    mixing_CC = strategy.mixing_CC
    assert mixing_CC[0, 2] > 1.2 * mixing_CC[0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collaboration": 1.5}, r"strategy\.collaboration must be in \(0, 1\], got 1\.5"),
        ({"bandwidth": 0.0}, r"strategy\.bandwidth must be positive, or null for the median, got 0"),
        ({"self_weight": -0.1}, r"strategy\.self_weight must be in \[0, 1\], got -0\.1"),
        ({"proximal_weight": -1}, r"strategy\.proximal_weight must not be negative, got -1"),
        ({"attention": "dot"}, r"strategy\.attention must be 'distance' or 'cosine', got 'dot'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedAMP(**settings)
