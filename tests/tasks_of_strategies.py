"""What is tested of every strategy on a kind of data other than the nodes of a graph."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from strategies.test_contract import tiny
from torch import nn
from torch.optim import SGD

from fl_lightning import FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import Oracle, Strategy

#: Adam would make a step of a gradient that is 0 but for rounding.
SLOW = functools.partial(SGD, lr=0.05)
#: Of three clients, where they must be known.
GROUPS = [0, 1, 0]
#: Those that refuse batch normalization, or need another setting of it.
WITHOUT_BATCH_NORM = {"APFL", "Flow", "PerFedAvg", "Pooled"}
#: Warnings that say what strategies always say in such small federations.
EXPECTED = [
    pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum"),
    pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree"),
]


def strategy_of(kind: type[Strategy]) -> Strategy:
    return Oracle(groups=GROUPS) if kind is Oracle else tiny(kind)


def net_of(kind: type[Strategy], other: Callable[..., nn.Module]) -> Any:
    """The strategy's own net if it pools, else another one."""
    own = kind.default_net
    if getattr(own, "pools", False):
        return functools.partial(own, hidden_channels=8, dropout=0.0)  # type: ignore[misc]
    return functools.partial(other, hidden_channels=8)


def assert_executors_agree(
    kind: type[Strategy], net: Any, data: FederatedDataModule, make_trainer: Any, assert_same: Any
) -> None:
    runs = []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        result = trainer.fit(kind.client_class(net, SLOW), data, strategy_of(kind))
        runs.append((trainer.run.history, result, trainer.run.strategy.state_dict()))
    assert_same(*runs, tolerance=1e-6)


def assert_training_is_the_same(
    kind: type[Strategy],
    net: Any,
    data: FederatedDataModule,
    change: Callback,
    tested: str,
    make_trainer: Any,
    assert_same: Any,
) -> None:
    """With other test examples, models and the server's state are the same to the bit; the test metric is not."""
    runs, metrics = [], []
    for callbacks in ([], [change]):
        trainer = make_trainer(num_rounds=2, executor=StackedExecutor(max_padding=0.9), callbacks=callbacks)
        result = trainer.fit(kind.client_class(net, SLOW), data, strategy_of(kind))
        state = trainer.run.executor.state()
        seen = {name: value for name, value in result.items() if name.startswith(("train/", "val/"))}
        runs.append((dict(state.parameters), dict(state.extras), trainer.run.strategy.state_dict(), seen))
        metrics.append(result[tested])
    assert_same(*runs)
    assert metrics[0] != metrics[1]
