"""Every strategy on clients that hold links: it learns under both executors, or says why it is not for them."""

import functools
from typing import Any

import pytest
from strategies.test_contract import STRATEGIES, every_strategy, tiny
from task_data import link_data
from torch.optim import SGD, Adam

from fl_lightning import FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.models import LinkGCN
from fl_lightning.relations.topology import Ring
from fl_lightning.strategies import FedBN, Oracle, Strategy

GROUPS = [0, 1, 0]
#: Adam would make a step of a gradient that is 0 but for rounding.
SLOW = functools.partial(SGD, lr=0.05)
#: Those that are for the nodes of a graph, for classes, or for examples that share no nodes.
REFUSED = {kind.__name__ for kind in STRATEGIES if kind.needs_nodes or kind.needs_classes} | {"Flow"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum"),
    pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree"),
]
learning = [kind for kind in STRATEGIES if kind.__name__ not in REFUSED]


@pytest.fixture(scope="module")
def links(tmp_path_factory) -> FederatedDataModule:
    """Three clients, in mini-batches."""
    return link_data(tmp_path_factory.mktemp("links"), relation_graph=Ring(), batch_size=64)


def strategy_of(kind: type[Strategy]) -> Strategy:
    return Oracle(groups=GROUPS) if kind is Oracle else tiny(kind)


def net_of(kind: type[Strategy]) -> Any:
    own = kind.default_net
    if getattr(own, "pools", False):
        return functools.partial(own, hidden_channels=8, dropout=0.0)  # type: ignore[misc]
    return functools.partial(LinkGCN, hidden_channels=8, batch_norm=kind is FedBN)


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
    runs = []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        result = trainer.fit(kind.client_class(net_of(kind), SLOW), links, strategy_of(kind))
        runs.append((trainer.run.history, result, trainer.run.strategy.state_dict()))
    assert_same(*runs, tolerance=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_its_defaults_run(kind, links, make_trainer) -> None:
    """With nothing set but the data, and the groups where they must be known."""
    result = make_trainer(num_rounds=1).fit(None, links, strategy_of(kind))
    assert 0 <= result["test/auroc"] <= 1


@every_strategy
def test_the_others_refuse_by_name(kind, links, make_trainer) -> None:
    if kind.__name__ not in REFUSED:
        kind().check_task(links.task)
        return
    with pytest.raises(ValueError, match=f"^{kind.__name__} is for .*: choose a source of .*, or another strategy"):
        make_trainer().fit(None, links, kind())
