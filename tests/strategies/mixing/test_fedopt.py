"""FedOpt: its numbers on the three quadratics, what it reduces to, and a round in which nobody responds."""

import math

import pytest
import torch
from both_executors import both_executors
from hypothesis import given
from hypothesis import strategies as st
from quadratics import fit_quadratics

from fl_lightning import Callback, Participation, Payload
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.strategies import FedAvg, FedOpt

ADAPTIVE = {"server_lr": 0.1, "momentum": 0.9, "second_momentum": 0.99, "adaptivity": 1e-3}


@both_executors
@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"server_optimizer": "avgm", "server_lr": 1.0}, (0.1525, None, None), (0.4160072917, None, None)),
        (
            {"server_optimizer": "adam", **ADAPTIVE},
            (0.0936592702, 0.01525, 2.335525e-4),
            (0.2213701677, 0.0273632801, 4.172197e-4),
        ),
        (
            {"server_optimizer": "yogi", **ADAPTIVE},
            (0.0936573883, 0.01525, 2.335625e-4),
            (0.2210274725, 0.0273633124, 4.195661e-4),
        ),
        (
            {"server_optimizer": "adagrad", **ADAPTIVE},
            (0.0099346412, 0.01525, 0.02325725),
            (0.0233029912, 0.0288040414, 0.0459949989),
        ),
    ],
    ids=["avgm", "adam", "yogi", "adagrad"],
)
def test_numbers(settings, first, second, executor, tmp_path) -> None:
    for num_rounds, (x, m, v) in ((1, first), (2, second)):
        strategy = FedOpt(num_epochs=2, **settings)
        fit_quadratics(strategy, executor(), num_rounds=num_rounds, default_root_dir=str(tmp_path))
        assert float(strategy.models["x"]) == pytest.approx(x, rel=1e-7)
        if m is not None:
            assert float(strategy.m["x"]) == pytest.approx(m, rel=1e-7)
            assert float(strategy.v["x"]) == pytest.approx(v, rel=1e-6)


@both_executors
def test_without_momentum_it_is_fedavg(executor, federation, make_model, make_trainer, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    plain = FedOpt(server_optimizer="avgm", momentum=0.0, server_lr=1.0)
    runs = []
    for strategy in (plain, FedAvg()):
        trainer = make_trainer(executor=executor(), participation=busy)
        trainer.fit(make_model(dropout=0.5), federation, strategy)
        runs.append((strategy.models, trainer.run.executor.state().parameters, trainer.run.history))
    assert_same(runs[0], runs[1])


@pytest.mark.parametrize("weighting", ["examples", "equal"])
@pytest.mark.parametrize("server_optimizer", ["adam", "yogi"])
def test_with_rates_that_stay_it_is_fedavg(
    server_optimizer, weighting, federation, make_model, make_trainer, assert_same
) -> None:
    still = {"momentum": 0.0, "second_momentum": 1.0, "adaptivity": 0.1, "server_lr": 0.2}
    strategies = [
        FedOpt(server_optimizer=server_optimizer, weighting=weighting, **still),
        FedAvg(weighting=weighting),
    ]
    for strategy in strategies:
        make_trainer(precision="64-true").fit(make_model(), federation, strategy)
    assert_same(strategies[0].models, strategies[1].models, tolerance=1e-9)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1))
def test_second_moments_stay_positive(v, square, second_momentum) -> None:
    strategy = FedOpt(server_optimizer="yogi", second_momentum=second_momentum)
    v, square = torch.tensor([v], dtype=torch.float64), torch.tensor([square], dtype=torch.float64)
    assert strategy.second_moment(v, square) >= 0


class Nobody(Callback):
    """Loses every update from a round on."""

    def on_upload(self, trainer, stage, payload) -> Payload:
        return payload if trainer.run.round_idx < 2 else payload.rows(())


@pytest.mark.parametrize("server_optimizer", ["avgm", "adagrad", "adam", "yogi"])
def test_a_round_without_updates_changes_nothing(
    server_optimizer, federation, make_model, make_trainer, assert_same
) -> None:
    states = []
    for num_rounds, callbacks in ((2, []), (4, [Nobody()])):
        strategy = FedOpt(server_optimizer=server_optimizer, server_lr=0.1)
        trainer = make_trainer(num_rounds=num_rounds, callbacks=callbacks)
        if callbacks:
            with pytest.warns(UserWarning, match="its update was lost"):
                trainer.fit(make_model(), federation, strategy)
        else:
            trainer.fit(make_model(), federation, strategy)
        states.append(strategy.state_dict())
    assert_same(states[0], states[1])
    assert all(m.any() for m in states[0]["m"].values())


def test_it_costs_what_fedavg_costs(federation, make_model, make_trainer) -> None:
    totals = []
    for strategy in (FedOpt(), FedAvg()):
        trainer = make_trainer(callbacks=CommunicationLedger(), participation=Participation(num_clients=3))
        trainer.fit(make_model(), federation, strategy)
        totals.append(trainer.run.history[-1]["comm/bytes_total"])
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_optimizer": "sgd"}, "server_optimizer must be 'avgm' or 'adagrad' or 'adam' or 'yogi', got 'sgd'"),
        ({"weighting": "size"}, "weighting must be 'examples' or 'equal', got 'size'"),
        ({"server_lr": 0.0}, "server_lr must be positive, got 0.0"),
        ({"adaptivity": -1.0}, "adaptivity must be positive, got -1.0"),
        ({"server_lr": math.inf}, "server_lr must be finite, got inf"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"second_momentum": 1.1}, r"second_momentum must be in \[0, 1\], got 1.1"),
    ],
    ids=str,
)
def test_settings_are_checked(settings, message) -> None:
    with pytest.raises(ValueError, match=f"strategy.{message}"):
        FedOpt(**settings)
