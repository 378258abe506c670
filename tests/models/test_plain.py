"""Nets that know nothing of the package."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCNConv, GraphSAGE

from fl_lightning import ClientModule
from fl_lightning.models import PlainNet, PyGNet
from fl_lightning.strategies import FedAvg, FedPer


class TwoLayers(nn.Module):
    """A tutorial's net."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(num_features, 8)
        self.conv2 = GCNConv(8, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = F.dropout(self.conv1(x, edge_index).relu(), 0.5, self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class OnData(TwoLayers):
    def forward(self, data: Any) -> Any:
        return super().forward(data.x, data.edge_index)


class Pair(TwoLayers):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        hidden = self.conv1(x, edge_index)
        return self.conv2(hidden.relu(), edge_index), hidden


class Encoder(nn.Module):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv = GCNConv(num_features, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


NETS = {
    "logits": (TwoLayers, 8),
    "data": (OnData, 8),
    "pair": (Pair, 8),
    "embedding": (Encoder, 5),
    "GraphSAGE": (functools.partial(GraphSAGE, hidden_channels=8, num_layers=2), 8),
    "GAT": (functools.partial(GAT, hidden_channels=8, num_layers=2), 8),
    "path of PyG": (
        functools.partial(
            PyGNet, architecture="torch_geometric.nn.GraphSAGE", arguments={"hidden_channels": 8, "num_layers": 2}
        ),
        8,
    ),
}


@pytest.mark.parametrize("kind", list(NETS))
def test_plain_nets_train(kind: str, make_trainer: Any, federation: Any) -> None:
    net, width = NETS[kind]
    model = ClientModule(net)
    trainer = make_trainer(num_rounds=4)
    with pytest.warns(UserWarning, match="is a net of plain PyG layers: clients are run one after another"):
        trainer.fit(model, federation, FedAvg(num_epochs=3))
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[0]["train/loss"]
    batch = trainer.run.executor.collator([0])
    output = model.output(model.parameter_dict(), batch)
    assert output.logits.shape == (federation.clients[0].num_nodes, 3)
    assert output.embedding.shape[-1] == width


def test_the_embedding_is_what_the_last_layer_reads() -> None:
    model = ClientModule(TwoLayers)
    model.build(6, 3)
    assert isinstance(model.net, PlainNet)
    model.eval()
    x_NF, edges_2E = torch.randn(4, 6), torch.tensor([[0, 1], [1, 0]])
    graph = type("Batch", (), {"plain": type("Graph", (), {"x": x_NF, "edge_index": edges_2E})})
    output = model.net(graph)
    torch.testing.assert_close(output.embedding, model.net.net.conv1(x_NF, edges_2E).relu())
    torch.testing.assert_close(output.logits, model.net.net(x_NF, edges_2E))


def test_an_added_head_can_stay_at_home(make_trainer: Any, federation: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    with pytest.warns(UserWarning, match="plain PyG layers"):
        trainer.fit(ClientModule(Encoder), federation, FedPer())
    assert {name.partition(".")[0] for name in trainer.run.executor.state().parameters} == {"net", "head"}


def test_logits_alone_are_taken_from_any_net(make_trainer: Any, federation: Any) -> None:
    class Bare(nn.Module):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__()
            self.head = nn.Linear(in_features, out_features)

        def forward(self, batch: Any) -> Tensor:
            return self.head(batch.propagated_x)

    trainer = make_trainer(num_rounds=3)
    trainer.fit(ClientModule(Bare), federation, FedAvg(num_epochs=3))
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[0]["train/loss"]


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda f, k: object(), "it makes a object, which is no torch.nn.Module"),
        (GraphSAGE, "hidden_channels"),
        (functools.partial(PyGNet, architecture="torch_geometric.nn.Sage"), "cannot be imported"),
    ],
)
def test_what_is_no_net_is_refused(net: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientModule(net).build(6, 3)


def test_a_net_that_pools_its_nodes_is_refused() -> None:
    class Pools(TwoLayers):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv1(x, edge_index).mean(dim=0)

    with pytest.raises(ValueError, match=r"returns \[\(8,\)\] for 3 nodes: return logits"):
        ClientModule(Pools).build(6, 3)


def test_the_last_layer_is_the_head_in_copies_too() -> None:
    net = PlainNet(GraphSAGE(4, 8, num_layers=2, out_channels=3), 4, 3)
    names = [name for name, _ in net.named_parameters()]
    assert any(name.startswith("head.") for name in names)
    assert not any(name.startswith("net.convs.1") for name in names)
    twin = copy.deepcopy(net)
    graph = SimpleNamespace(x=torch.ones(3, 4), edge_index=torch.tensor([[0, 1], [1, 0]]))
    before = net(SimpleNamespace(plain=graph)).logits.detach().clone()
    torch.nn.init.zeros_(twin.head.lin_l.weight)
    torch.nn.init.zeros_(twin.head.lin_l.bias)
    torch.nn.init.zeros_(twin.head.lin_r.weight)
    assert not twin(SimpleNamespace(plain=graph)).logits.any()
    assert torch.equal(net(SimpleNamespace(plain=graph)).logits, before)
