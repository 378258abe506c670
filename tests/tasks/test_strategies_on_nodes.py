"""What is tested of every strategy on the nodes of a graph, beside its contract."""

import dataclasses
from typing import Any

import pytest
import tasks_of_strategies
import torch
from strategies.test_contract import STRATEGIES
from tasks_of_strategies import EXPECTED, assert_training_is_the_same

from fl_lightning.run.callback import Callback

pytestmark = EXPECTED


class OtherLabels(Callback):
    """Gives the nodes that are tested on other classes."""

    needs_data = changes_training = True

    def on_clients(self, trainer: Any, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self.changed, clients))

    def changed(self, client: Any) -> Any:
        tested_N = client.test_mask_N & (client.y_N >= 0)
        return dataclasses.replace(client, y_N=torch.where(tested_N, (client.y_N + 1) % 3, client.y_N))


@pytest.mark.full
@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_training_sees_no_label_that_is_tested(kind, federation, make_trainer, assert_same, monkeypatch) -> None:
    monkeypatch.setattr(tasks_of_strategies, "GROUPS", [0, 1, 1, 0, 1])
    assert_training_is_the_same(kind, None, federation, OtherLabels(), "test/loss", make_trainer, assert_same)
