"""Every strategy on clients that hold links: it learns under both executors, or says why it is not for them."""

import dataclasses
import functools
from typing import Any

import pytest
import tasks_of_strategies
from strategies.test_contract import STRATEGIES, every_strategy
from task_data import link_data
from tasks_of_strategies import EXPECTED, assert_executors_agree, assert_training_is_the_same, strategy_of
from torch.optim import Adam

from fl_lightning import FederatedDataModule, StackedExecutor
from fl_lightning.models import LinkGCN
from fl_lightning.relations.topology import Ring
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import FedBN, Strategy

#: Those that are for the nodes of a graph, for classes, or for examples that share no nodes.
REFUSED = {kind.__name__ for kind in STRATEGIES if kind.needs_nodes or kind.needs_classes} | {"Flow"}

pytestmark = EXPECTED
learning = [kind for kind in STRATEGIES if kind.__name__ not in REFUSED]


@pytest.fixture(scope="module")
def links(tmp_path_factory) -> FederatedDataModule:
    """Three clients, in mini-batches."""
    return link_data(tmp_path_factory.mktemp("links"), relation_graph=Ring(), batch_size=64)


def net_of(kind: type[Strategy]) -> Any:
    return tasks_of_strategies.net_of(kind, functools.partial(LinkGCN, batch_norm=kind is FedBN))


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_it_learns(kind, links, make_trainer) -> None:
    trainer = make_trainer(num_rounds=8, executor=StackedExecutor(max_padding=0.9))
    client = kind.client_class(net_of(kind), functools.partial(Adam, lr=0.02))
    result = trainer.fit(client, links, strategy_of(kind))
    first, *_, last = trainer.run.history
    assert last["train/loss"] < 0.95 * first["train/loss"]
    if not getattr(kind.default_net, "pools", False):  # nets for whole graphs need longer
        assert result["test/auroc"] > 0.65  # by chance: 0.5


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_both_executors_agree(kind, links, make_trainer, assert_same) -> None:
    assert_executors_agree(kind, net_of(kind), links, make_trainer, assert_same)


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_its_defaults_run(kind, links, make_trainer) -> None:
    """With nothing set but the data, and the groups where they must be known."""
    result = make_trainer(num_rounds=1).fit(None, links, strategy_of(kind))
    assert 0 <= result["test/auroc"] <= 1


class OtherTests(Callback):
    """Puts nodes with themselves in the place of the pairs that are tested on, and says of links that they are none."""

    needs_data = changes_training = True

    def on_clients(self, trainer: Any, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self.changed, clients))

    def changed(self, client: Any) -> Any:
        pair_P2, y_N, tested_P = client.pair_P2.clone(), client.y_N.clone(), client.test_mask_N
        pair_P2[tested_P] = pair_P2[tested_P, :1].expand(-1, 2)
        y_N[tested_P] = 1 - y_N[tested_P]
        return dataclasses.replace(client, pair_P2=pair_P2, y_N=y_N)


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_training_sees_nothing_of_what_is_tested(kind, links, make_trainer, assert_same) -> None:
    assert_training_is_the_same(kind, net_of(kind), links, OtherTests(), "test/auroc", make_trainer, assert_same)


@every_strategy
def test_the_others_refuse_by_name(kind, links, make_trainer) -> None:
    if kind.__name__ not in REFUSED:
        kind().check_task(links.task)
        return
    with pytest.raises(ValueError, match=f"^{kind.__name__} is for .*: choose a source of .*, or another strategy"):
        make_trainer().fit(None, links, kind())
