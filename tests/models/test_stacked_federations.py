"""Federations of users' PyG modules: both executors agree, and the user is told when clients run one after another."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, ChebConv, GCNConv, GraphSAGE

from fl_lightning import ClientModule, SequentialExecutor, StackedExecutor
from fl_lightning.strategies import FedAvg, FedPer

SMALL = {"hidden_channels": 8, "num_layers": 2, "dropout": 0.4}


class TwoLayers(nn.Module):
    """A tutorial's net."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(num_features, 8)
        self.norm = nn.BatchNorm1d(8)
        self.conv2 = GCNConv(8, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        x = F.dropout(x, 0.2, self.training)
        x = F.dropout(self.norm(self.conv1(x, edge_index, edge_weight)).relu(), 0.5, self.training)
        return F.log_softmax(self.conv2(x, edge_index, edge_weight), dim=1)


NETS = {
    "GCN": functools.partial(GCN, norm="batch_norm", **SMALL),
    "GraphSAGE": functools.partial(GraphSAGE, jk="cat", **SMALL),
    "GIN": functools.partial(GIN, train_eps=True, **SMALL),
    "GAT": functools.partial(GAT, heads=2, edge_dim=2, **SMALL),
    "own": TwoLayers,
}


@pytest.mark.filterwarnings("ignore:.* not use the graph's edge_:UserWarning")
@pytest.mark.parametrize("name", NETS)
def test_both_executors_agree(name: str, graphs: Any, given_clients: Any, make_trainer: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [
        dataclasses.replace(
            graph,
            edge_index_2E=graph.edge_index_2E[:, 1:],
            edge_weight_E=torch.rand(graph.num_edges - 1, generator=draw),
            edge_attr_EK=torch.randn(graph.num_edges - 1, 2, generator=draw),
            is_directed=True,
        )
        for graph in graphs
    ]
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(num_rounds=2, executor=executor)
        # not Adam, which makes steps of what rounding leaves of the gradients in biases before a normalization
        model = ClientModule(NETS[name], optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        trainer.fit(model, given_clients(clients), FedPer(num_epochs=2))
        assert type(trainer.run.executor) is type(executor)
        states.append((trainer.run.executor.state().parameters, trainer.run.history))
    (one, history), (other, others) = states
    for parameter, value in one.items():
        torch.testing.assert_close(other[parameter], value, rtol=1e-3, atol=1e-5)
    assert history[-1]["val/loss"] == pytest.approx(others[-1]["val/loss"], rel=1e-4)


def test_the_user_is_told_which_layer_runs_one_after_another(federation: Any, make_trainer: Any) -> None:
    class Net(nn.Module):
        def __init__(self, num_features: int, num_classes: int) -> None:
            super().__init__()
            self.first = GCNConv(num_features, 8)
            self.filter = ChebConv(8, num_classes, 2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.filter(self.first(x, edge_index).relu(), edge_index)

    trainer = make_trainer(num_rounds=1)
    told = r"model.net Net: filter \(ChebConv\) has no form for a stack of clients: clients are run one after another"
    with pytest.warns(UserWarning, match=told):
        trainer.fit(ClientModule(Net), federation, FedAvg(num_epochs=1))
    assert isinstance(trainer.run.executor, SequentialExecutor)
