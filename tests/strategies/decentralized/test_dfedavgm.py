"""DFedAvgM: its numbers on a path of three, what it is equal to, which optimizer it is for."""

import functools

import pytest
import torch
from both_executors import both_executors
from learning import learned, quadrants
from quadratics import parameters
from torch.optim import SGD

from fl_lightning import StackedExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.relations.topology import Complete, EdgeListFile, Ring
from fl_lightning.strategies import DPSGD, DFedAvgM, FedAvg, Local


@pytest.fixture
def path(tmp_path):
    """The path 0-1-2."""
    (tmp_path / "path.txt").write_text("0 1\n1 2\n")
    return EdgeListFile(str(tmp_path / "path.txt"))


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs, with dropout."""

    def run(strategy, executor=StackedExecutor, momentum=0.9, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        sgd = functools.partial(SGD, lr=0.05, momentum=momentum)
        trainer.fit(make_model(dropout=0.5, optimizer=sgd), federation, strategy)
        return trainer

    return run


@both_executors
def test_numbers(executor, quadratics, path) -> None:
    expected = [
        ([0.46, -0.245, 0.72], [0.225, 0.3116666667, 0.3983333333]),
        ([0.5815, 0.0284875, 1.0227333333], [0.3971625, 0.5442402778, 0.6913180556]),
    ]
    for num_rounds, (trained, combined) in enumerate(expected, start=1):
        strategy = DFedAvgM(num_epochs=2, topology=path)
        trainer = quadratics(strategy, executor(), num_rounds=num_rounds, momentum=0.5)
        assert parameters(trainer) == pytest.approx(trained, rel=1e-8)
        assert strategy.models_CP.flatten().tolist() == pytest.approx(combined, rel=1e-8)
        assert float(strategy.models_CP.mean()) == pytest.approx(sum(trained) / 3, rel=1e-8)


@both_executors
def test_one_step_without_momentum_is_dpsgd(executor, fit, assert_same) -> None:
    strategies = [DFedAvgM(num_epochs=1, topology=Ring()), DPSGD(num_epochs=1, topology=Ring())]
    runs = [fit(strategy, executor, momentum=0.0) for strategy in strategies]
    assert_same(runs[0].run.strategy.state_dict(), runs[1].run.strategy.state_dict())
    assert_same(runs[0].run.history, runs[1].run.history)


@both_executors
def test_on_a_complete_graph_it_is_fedavg(executor, fit) -> None:
    gossip = fit(DFedAvgM(num_epochs=2, topology=Complete()), executor, precision="64-true")
    server = fit(FedAvg(num_epochs=2, weighting="equal", reset_optimizer=True), executor, precision="64-true")
    flat_P = torch.cat([model.flatten() for model in server.run.strategy.models.values()])
    torch.testing.assert_close(gossip.run.strategy.models_CP, flat_P.expand(5, -1))


@both_executors
def test_momentum_is_forgotten_after_every_round(executor, fit, assert_same) -> None:
    class Alone(DFedAvgM):
        def combine(self, clients, trained_CP):
            return trained_CP

    alone = fit(Alone(num_epochs=2, topology=Ring()), executor).run.executor.state().parameters
    local = fit(Local(num_epochs=2, reset_optimizer=True), executor).run.executor.state().parameters
    assert_same(dict(alone), dict(local))
    kept = fit(Local(num_epochs=2), executor).run.executor.state().parameters
    assert (kept["head.weight"] - local["head.weight"]).abs().max() > 1e-3


def test_bytes_are_those_of_dpsgd(fit) -> None:
    rows = [fit(s(topology=Ring()), callbacks=CommunicationLedger()).run.history[-1] for s in (DPSGD, DFedAvgM)]
    numbers = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    assert [row["comm/bytes_peer"] for row in rows] == [5 * 2 * 4 * numbers] * 2


def test_momentum_gets_further_in_few_rounds() -> None:
    """Beside gossip without it, and beside a server."""
    clients = quadrants(8, num_train=20)
    settings = {"num_rounds": 12, "lr": 0.03}
    heavy = learned(DFedAvgM(num_epochs=5, topology=Ring()), clients, momentum=0.9, **settings)
    light = learned(DFedAvgM(num_epochs=5, topology=Ring()), clients, **settings)
    central = learned(FedAvg(num_epochs=5), clients, **settings)
    assert heavy > max(light, central) + 0.05


def test_another_optimizer_is_named(federation, make_model, make_trainer) -> None:
    with pytest.warns(UserWarning, match=r"DFedAvgM is for SGD with momentum; with Adam it is D-PSGD with that: set"):
        make_trainer(num_rounds=1).fit(make_model(), federation, DFedAvgM(topology=Ring()))
