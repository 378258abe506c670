"""SFL: its numbers on a path of three, what it is equal to, who is smoothed with whom."""

import dataclasses
import functools
import inspect

import pytest
import torch
from both_executors import both_executors
from learning import learned, quadrants
from quadratics import Point as OnePoint
from quadratics import Quadratic, Quadratics, parameters
from torch.optim import SGD

from fl_lightning import FederatedTrainer, Participation, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.federation import ClientRegistry
from fl_lightning.strategies import SFL, FedAvg, FedProx, Local
from fl_lightning.tasks import NodeClassification

PATH = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
COMPLETE = torch.ones(3, 3) - torch.eye(3)


@pytest.fixture
def quadratics(tmp_path):
    """Run on the quadratics with a graph of them."""

    def run(strategy, executor, *, num_rounds=2, relation_CC=PATH, **settings):
        data = Quadratics()
        data.registry = dataclasses.replace(data.registry, relation_CC=relation_CC)
        defaults = {"accelerator": "cpu", "logger": False, "precision": "64-true", "default_root_dir": str(tmp_path)}
        trainer = FederatedTrainer(
            num_rounds=num_rounds, executor=executor, default_callbacks=False, **defaults, **settings
        )
        trainer.fit(Quadratic(OnePoint, functools.partial(SGD, lr=0.1)), data, strategy)
        return trainer

    return run


def personal(strategy: SFL) -> list[float]:
    actual: list[float] = strategy.personal_models((0, 1, 2)).parameters["x"].flatten().tolist()
    return actual


@both_executors
@pytest.mark.parametrize(
    ("start", "v", "u", "w"),
    [
        (
            "global",
            [0.4530724537, -0.0283504630, 0.6852837963],
            [0.2911814622, 0.3036098637, 0.3492342978],
            0.3146752079,
        ),
        (
            "personal",
            [0.4436581019, -0.0367127315, 0.7049875],
            [0.2870584877, 0.3027514532, 0.3523908372],
            0.3140669260,
        ),
    ],
)
def test_numbers(start, v, u, w, executor, quadratics) -> None:
    settings = {"num_epochs": 2, "num_hops": 2, "proximal_weight": 0.5, "start": start}
    first = quadratics(SFL(**settings), executor(), num_rounds=1)
    assert parameters(first) == pytest.approx([0.34, -0.185, 0.54], rel=1e-9)
    assert personal(first.run.strategy) == pytest.approx([0.1545833333, 0.1622222222, 0.2045833333], rel=1e-8)
    assert float(first.run.strategy.models["x"]) == pytest.approx(0.1737962963, rel=1e-8)
    trainer = quadratics(SFL(**settings), executor())
    assert parameters(trainer) == pytest.approx(v, rel=1e-8)
    assert personal(trainer.run.strategy) == pytest.approx(u, rel=1e-8)
    assert float(trainer.run.strategy.models["x"]) == pytest.approx(w, rel=1e-8)


@both_executors
@pytest.mark.parametrize("num_hops", [1, 3])
def test_on_a_complete_graph_it_is_fedavg_or_fedprox(num_hops, executor, quadratics) -> None:
    near = FedProx(num_epochs=2, proximal_weight=0.8, weighting="equal")
    for weight, plain in ((0.0, FedAvg(num_epochs=2, weighting="equal")), (0.4, near)):
        strategy = SFL(num_epochs=2, num_hops=num_hops, proximal_weight=weight)
        quadratics(strategy, executor(), relation_CC=COMPLETE)
        quadratics(plain, executor(), relation_CC=COMPLETE)
        expected = float(plain.models["x"])
        assert float(strategy.models["x"]) == pytest.approx(expected, rel=1e-9)
        assert personal(strategy) == pytest.approx([expected] * 3, rel=1e-9)


@both_executors
@pytest.mark.parametrize("settings", [{"num_hops": 0}, {"smoothing": 0.0}], ids=str)
def test_without_smoothing_from_their_own_models_it_is_local(settings, executor, fit, assert_same) -> None:
    busy = Participation(num_clients=3, straggler_probability=0.5)
    runs = [
        fit(strategy, executor, participation=busy).run.executor
        for strategy in (SFL(start="personal", proximal_weight=0.0, **settings), Local())
    ]
    last = sorted(runs[0].active)  # of the others the server keeps the models
    assert_same(*(dict(clients.state().rows(last).parameters) for clients in runs))


@both_executors
def test_those_who_were_not_asked_are_smoothed_with_what_they_sent_last(executor, fit) -> None:
    trainer = fit(SFL(num_hops=1, smoothing=0.7), executor, participation=Participation(num_clients=2), num_rounds=2)
    strategy = trainer.run.strategy
    step_CC = (trainer.run.registry.relation_CC + torch.eye(5)) / 3
    for name, table in strategy.last.items():
        smoothed = torch.einsum("ij,j...->i...", step_CC, table)
        expected = 0.7 * smoothed + 0.3 * table
        torch.testing.assert_close(strategy.personal_models(range(5)).parameters[name], expected)
        torch.testing.assert_close(strategy.models[name][0], expected.mean(dim=0))
    assert any(
        (table == trainer.run.architectures[0][n]).flatten(1).all(dim=1).any() for n, table in strategy.last.items()
    )


@both_executors
def test_an_unseen_client_is_evaluated_with_the_mean_of_its_neighbors(executor, fit) -> None:
    trainer = fit(SFL(), executor, participation=Participation(held_out_fraction=0.2))
    strategy, (unseen_client,) = trainer.run.strategy, trainer.run.unseen_clients
    beside = [(unseen_client - 1) % 5, (unseen_client + 1) % 5]
    actual = strategy.personal_models([unseen_client]).parameters
    for name, table in strategy.last.items():
        torch.testing.assert_close(actual[name][0], table[beside].mean(dim=0))
    strategy.relation_CC[unseen_client] = 0
    actual = strategy.personal_models([unseen_client]).parameters
    for name, table in strategy.last.items():
        torch.testing.assert_close(actual[name][0], table[strategy.training_T].mean(dim=0))


def test_bytes(fit) -> None:
    plain, both, start = (
        fit(s, callbacks=CommunicationLedger()).run.history[-1] for s in (FedAvg(), SFL(), SFL(proximal_weight=0.0))
    )
    assert both["comm/bytes_up"] == start["comm/bytes_up"] == plain["comm/bytes_up"]
    assert both["comm/bytes_down"] == 2 * plain["comm/bytes_down"]
    assert start["comm/bytes_down"] == plain["comm/bytes_down"]


def test_a_graph_of_two_kinds_of_clients() -> None:
    clients = quadrants(6, num_train=20, labels=lambda client, y_N: (y_N + 2 * (client % 2)) % 4)
    alike_CC = torch.tensor([[float(i != j and (i - j) % 2 == 0) for j in range(6)] for i in range(6)])
    strategy = SFL(num_epochs=5, start="personal", proximal_weight=0.01)
    related = learned(strategy, clients, num_rounds=20, relation_CC=alike_CC)
    assert related > learned(FedAvg(num_epochs=5), clients, num_rounds=20) + 0.2


def test_the_blend_is_of_the_personal_models(quadratics) -> None:
    strategy = SFL(num_epochs=2, blend=True)
    quadratics(strategy, SequentialExecutor(), num_rounds=1)
    blend = strategy.evaluations((0, 1, 2))["blend/"].payload.extras["x"]
    assert blend.flatten().tolist() == personal(strategy)
    assert personal(strategy) != [float(strategy.models["x"])] * 3


def test_it_has_no_setting_that_its_smoothing_would_not_heed() -> None:
    assert not {"aggregation", "masked_averaging"} & set(inspect.signature(SFL).parameters)


def test_settings(fit, graphs, given_clients, make_model, make_trainer) -> None:
    for settings, message in (
        ({"num_hops": -1}, r"strategy\.num_hops must not be negative, got -1"),
        ({"smoothing": 1.5}, r"strategy\.smoothing must be in \[0, 1\], got 1\.5"),
    ):
        with pytest.raises(ValueError, match=message):
            SFL(**settings)
    data = given_clients(graphs)
    data.registry = ClientRegistry.of(graphs, task=NodeClassification(), num_outputs=3)
    with pytest.raises(ValueError, match=r"SFL needs a client relation graph, and the data have none"):
        make_trainer().fit(make_model(), data, SFL())
