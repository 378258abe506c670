"""Every strategy on clients that hold independent examples: nothing that is tested has a part in training."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from strategies.test_contract import STRATEGIES
from task_data import Clouds
from tasks_of_strategies import EXPECTED, WITHOUT_BATCH_NORM, assert_training_is_the_same, net_of
from torch import nn

from fl_lightning import FederatedDataModule
from fl_lightning.models import MLP
from fl_lightning.relations.topology import Ring
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import FedAvg

pytestmark = EXPECTED


class OtherTests(Callback):
    """Gives the examples that are tested on other inputs and the other class."""

    needs_data = changes_training = True

    def on_clients(self, trainer: Any, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self.changed, clients))

    def changed(self, client: Any) -> Any:
        tested_N1 = client.test_mask_N.unsqueeze(1)
        y_N = torch.where(client.test_mask_N, 1 - client.y_N, client.y_N)
        other = client.with_inputs(torch.where(tested_N1, 3 * client.inputs + 1, client.inputs))
        return dataclasses.replace(other, y_N=y_N)


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if not kind.needs_graphs], ids=lambda kind: kind.__name__)
def test_training_sees_nothing_of_what_is_tested(kind, batch_size, make_trainer, assert_same) -> None:
    data = FederatedDataModule(Clouds(), batch_size=batch_size, relation_graph=Ring())
    data.setup()
    net = net_of(kind, functools.partial(MLP, batch_norm=kind.__name__ not in WITHOUT_BATCH_NORM))
    assert_training_is_the_same(kind, net, data, OtherTests(), "test/loss", make_trainer, assert_same)


def test_layers_of_pytorch_see_nothing_of_what_is_tested(make_trainer, assert_same) -> None:
    data = FederatedDataModule(Clouds())
    data.setup()
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    assert_training_is_the_same(FedAvg, net, data, OtherTests(), "test/loss", make_trainer, assert_same)
