"""Every strategy on clients that hold many graphs: it learns under both executors, or says why it is not for them."""

import dataclasses
import functools
from typing import Any

import pytest
import tasks_of_strategies
import torch
from strategies.test_contract import STRATEGIES, every_strategy
from task_data import graph_data
from tasks_of_strategies import EXPECTED, assert_executors_agree, assert_training_is_the_same, strategy_of
from torch import Tensor
from torch.optim import Adam
from torch_geometric.nn import GINConv, global_add_pool

from fl_lightning import FederatedDataModule, StackedExecutor
from fl_lightning.models import GIN, PooledGCN
from fl_lightning.relations.topology import Ring
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import FedAvg, FedBN, Strategy

#: Those whose papers are about the nodes of one graph: its missing edges, its neighborhoods, labels of neighbors.
OF_NODES = {
    "AdaFGL",
    "FGGP",
    "FGSSL",
    "FedAux",
    "LocalAux",
    "FedGCN",
    "FedGNN",
    "FedGTA",
    "FedIIH",
    "FedPub",
    "FedSage",
    "FedSagePlus",
    "FedSpray",
    "FedStruct",
    "FedTAD",
    "S2FGL",
}

pytestmark = [*EXPECTED, pytest.mark.filterwarnings("ignore:.*not use the graph's edge_weight")]
learning = [kind for kind in STRATEGIES if kind.__name__ not in OF_NODES]


@pytest.fixture(scope="module")
def graph_sets() -> FederatedDataModule:
    """Three clients with rings and stars, in mini-batches."""
    return graph_data(batch_size=4, relation_graph=Ring())


def net_of(kind: type[Strategy]) -> Any:
    return tasks_of_strategies.net_of(kind, functools.partial(PooledGCN, dropout=0.0, batch_norm=kind is FedBN))


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_it_learns(kind, graph_sets, make_trainer) -> None:
    trainer = make_trainer(num_rounds=6, executor=StackedExecutor(max_padding=0.9))
    client = kind.client_class(net_of(kind), functools.partial(Adam, lr=0.02))
    result = trainer.fit(client, graph_sets, strategy_of(kind))
    first, *_, last = trainer.run.history
    assert last["train/loss"] < 0.95 * first["train/loss"]
    assert result["test/acc"] > 0.6  # by chance: 0.5
    assert result["test/acc"] == trainer.run.history[int(result["best_round"])]["test/acc"]


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_both_executors_agree(kind, graph_sets, make_trainer, assert_same) -> None:
    assert_executors_agree(kind, net_of(kind), graph_sets, make_trainer, assert_same)


class Plain(torch.nn.Module):
    """A net in PyG's layers, normalized as OpenFGL's."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        map = torch.nn.Sequential(torch.nn.Linear(in_channels, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.conv, self.head = GINConv(map), torch.nn.Linear(8, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(global_add_pool(self.conv(x, edge_index), batch))


class OtherTests(Callback):
    """Gives the graphs that are tested on other features and the other class."""

    needs_data = changes_training = True

    def on_clients(self, trainer: Any, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self.changed, clients))

    def changed(self, client: Any) -> Any:
        tested_N1 = client.test_mask_N[client.graph_of_N].unsqueeze(1)
        y_N = torch.where(client.test_mask_N, 1 - client.y_N, client.y_N)
        other = client.with_inputs(torch.where(tested_N1, 3 * client.inputs + 1, client.inputs))
        return dataclasses.replace(other, y_N=y_N)


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_training_sees_nothing_of_what_is_tested(kind, batch_size, make_trainer, assert_same) -> None:
    data = graph_data(batch_size=batch_size, relation_graph=Ring())
    batch_norm = kind.__name__ not in tasks_of_strategies.WITHOUT_BATCH_NORM
    net = tasks_of_strategies.net_of(kind, functools.partial(PooledGCN, dropout=0.0, batch_norm=batch_norm))
    assert_training_is_the_same(kind, net, data, OtherTests(), "test/loss", make_trainer, assert_same)


@pytest.mark.parametrize("net", [GIN, Plain], ids=lambda net: net.__name__)
def test_batch_normalization_sees_training_graphs_alone(net, make_trainer, assert_same) -> None:
    net = functools.partial(net, batch_norm=True, dropout=0.0) if net is GIN else net
    assert_training_is_the_same(FedAvg, net, graph_data(), OtherTests(), "test/loss", make_trainer, assert_same)


@pytest.mark.full
@pytest.mark.parametrize("kind", learning, ids=lambda kind: kind.__name__)
def test_its_defaults_run(kind, graph_sets, make_trainer) -> None:
    """With nothing set but the data, and the groups where they must be known."""
    result = make_trainer(num_rounds=1).fit(None, graph_sets, strategy_of(kind))
    assert 0 <= result["test/acc"] <= 1


def test_those_of_nodes_are_known() -> None:
    assert {kind.__name__ for kind in STRATEGIES if kind.needs_nodes} == OF_NODES


@every_strategy
def test_those_of_nodes_refuse_by_name(kind, graph_sets, make_trainer) -> None:
    if kind.__name__ not in OF_NODES:
        kind().check_task(graph_sets.task)
        return
    message = (
        f"^{kind.__name__} is for clients with graphs whose nodes are the examples, but here the examples are graphs: "
        "choose a source of one graph for each client, or another strategy$"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer().fit(None, graph_sets, kind())
