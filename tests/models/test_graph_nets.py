"""Nets of sets of graphs: against PyG, on both executors, on nodes, and their readouts by hand."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from task_data import graph_data, node_data
from torch import nn
from torch.func import functional_call
from torch.optim import SGD
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GINConv, GINEConv, SAGEConv

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches import GraphCollator, GraphSetCollator
from fl_lightning.batches.base import single
from fl_lightning.data import RandomPartitioner
from fl_lightning.models import GAT, GIN, GINE, DecoupledGIN, GraphSAGE, PooledGCN, SpectralGNN
from fl_lightning.models.fitting import fitted
from fl_lightning.models.gin import VirtualNode
from fl_lightning.models.readout import Readout
from fl_lightning.strategies import FedAvg, FedProx

CPU = torch.device("cpu")
NETS: dict[str, Any] = {
    "GIN": functools.partial(GIN, hidden_channels=8),
    "GIN-norm": functools.partial(GIN, hidden_channels=8, batch_norm=True, pooling="max"),
    "GIN-attention": functools.partial(GIN, hidden_channels=8, pooling="attention"),
    "GIN-virtual": functools.partial(GIN, hidden_channels=8, virtual_node=True),
    "GINE": functools.partial(GINE, hidden_channels=8, edge_channels=4),
    "GAT": functools.partial(GAT, hidden_channels=8, num_heads=2),
    "GAT-attention": functools.partial(GAT, hidden_channels=8, num_heads=4, pooling="attention"),
    "GraphSAGE": functools.partial(GraphSAGE, hidden_channels=8, pooling="sum"),
    "PooledGCN": functools.partial(PooledGCN, hidden_channels=8, pooling="attention"),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*not use the graph's edge_(weight|attr)")
every_net = pytest.mark.parametrize("name", NETS)


def collator(batch_size: int | None = None) -> GraphSetCollator:
    clients = graph_data(edge_attributes=4).clients
    return GraphSetCollator(clients, batch_size=batch_size, device=CPU, dtype=torch.float64)


@pytest.fixture(scope="module")
def batch() -> Any:
    return collator()([0, 1, 2])


@every_net
def test_stack_vmap_and_one_client_agree(name: str, batch: Any) -> None:
    torch.manual_seed(0)
    net = NETS[name](3, 2, dropout=0.4).double()
    keyed = batch.replace({"key": torch.tensor([5, 6, 7])})
    parameters = {n: p.detach() + 0.2 * torch.randn(3, *p.shape, dtype=p.dtype) for n, p in net.named_parameters()}
    parameters = {n: p.abs() if n.endswith("running_var") else p for n, p in parameters.items()}
    mapped = torch.vmap(lambda p, t: functional_call(net, p, (keyed.replace(t),)))(parameters, keyed.tensors())
    if type(net).takes_stacks:
        for one, other in zip(functional_call(net, parameters, (keyed,)), mapped, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    make = collator()
    for client in range(3):
        alone = single(make([client])).replace({"key": torch.tensor(5 + client)})
        own = functional_call(net, {n: p[client].clone() for n, p in parameters.items()}, (alone,))
        for one, other in zip(own, mapped, strict=True):
            torch.testing.assert_close(one, other[client, : len(one)], rtol=1e-9, atol=1e-9)


@pytest.mark.full
@every_net
def test_both_executors_agree_in_mini_batches(name: str, make_trainer: Any, assert_same: Any) -> None:
    data, runs = graph_data(batch_size=4, edge_attributes=4), []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        for strategy in (FedAvg(num_epochs=1), FedProx(num_epochs=1, proximal_weight=0.1)):
            trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
            result = trainer.fit(ClientModule(NETS[name], functools.partial(SGD, lr=0.05)), data, strategy)
            runs.append((result, trainer.run.history, trainer.run.strategy.state_dict()))
    for stacked, sequential in zip(runs[:2], runs[2:], strict=True):
        assert_same(stacked, sequential, tolerance=1e-6)


@every_net
def test_every_parameter_learns(name: str, batch: Any) -> None:
    torch.manual_seed(0)
    net = NETS[name](3, 2, dropout=0.0).double().train()
    alone = single(collator()([0]))
    output = net(alone)
    assert output.logits.shape == (9, 2)
    assert output.embedding.shape == (9, 8)
    output.logits.square().sum().backward()
    for parameter_name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().sum() > 0, parameter_name


HALF: dict[str, Any] = {
    "sparse": (functools.partial(DecoupledGIN, hidden_channels=8), True),
    "maxima of sparse": (functools.partial(pyg.GraphSAGE, hidden_channels=8, num_layers=2, aggr="max"), True),
    "attributes": (functools.partial(pyg.GAT, hidden_channels=8, num_layers=2, edge_dim=4), False),
}


@pytest.mark.parametrize(("kind", "sparse"), HALF.values(), ids=HALF)
def test_nets_compute_in_half_precision(kind: Any, sparse: bool) -> None:
    torch.manual_seed(0)
    net = fitted(kind, 3, 2).eval()
    union, outputs = graph_data(edge_attributes=4).clients[0].union, []
    for dtype in (torch.float32, torch.bfloat16):
        make = GraphCollator([union], layout={"sparse_features": sparse}, device=CPU, dtype=dtype)
        outputs.append(net.to(dtype)(single(make([0]))).logits)
    assert outputs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1].float(), outputs[0], rtol=0.1, atol=0.1)


def test_spectral_filters_compute_in_mixed_precision() -> None:
    torch.manual_seed(0)
    net = SpectralGNN(3, 2, hidden_channels=8).eval()
    one = single(GraphSetCollator(graph_data().clients, device=CPU, dtype=torch.float32)([0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = net(one).logits
    torch.testing.assert_close(mixed.float(), net(one).logits, rtol=0.1, atol=0.1)


def test_attention_is_that_of_pyg(batch: Any) -> None:
    graphs = graph_data().clients[0]
    one = single(GraphSetCollator([graphs], device=CPU, dtype=torch.float64)([0]))
    torch.manual_seed(1)
    net = GAT(3, 2, hidden_channels=8, num_layers=1, num_heads=2).double().eval()
    conv, theirs = net.convs[0], GATConv(3, 4, heads=2).double()
    with torch.no_grad():
        conv.bias.normal_()
        theirs.lin.weight.copy_(conv.weight.T)
        theirs.att_src.copy_(conv.attention_from[None])
        theirs.att_dst.copy_(conv.attention_to[None])
        theirs.bias.copy_(conv.bias)
    expected = theirs(graphs.union.x_NF.double(), graphs.union.edge_index_2E)
    torch.testing.assert_close(conv(None, one), expected)
    torch.testing.assert_close(conv(1000 * one.x, one), theirs(1000 * one.x, graphs.union.edge_index_2E))


def test_isomorphism_and_sage_are_those_of_pyg(batch: Any) -> None:
    graphs = graph_data().clients[1]
    one = single(GraphSetCollator([graphs], device=CPU, dtype=torch.float64)([0]))
    x, edge_index = graphs.union.x_NF.double(), graphs.union.edge_index_2E
    conv = GIN(3, 2, hidden_channels=4).double().convs[0]
    h = torch.randn(len(x), 4, dtype=torch.float64)
    expected = GINConv(nn.Sequential(conv.first, nn.ReLU(), conv.last))(h, edge_index)
    torch.testing.assert_close(conv(h, one), expected)
    ours, theirs = GraphSAGE(3, 2, hidden_channels=4).double().convs[0], SAGEConv(3, 4).double()
    with torch.no_grad():
        theirs.lin_l.weight.copy_(ours.neighbor_weight.T)
        theirs.lin_r.weight.copy_(ours.weight.T)
        theirs.lin_l.bias.copy_(ours.bias)
    torch.testing.assert_close(ours(None, one), theirs(x, edge_index))


def test_attributes_of_edges_are_read_as_by_pyg(tmp_path: Any) -> None:
    """Of all graphs of a client, and of the graphs of every mini-batch of a stack of clients."""
    clients = graph_data(edge_attributes=4).clients
    conv = GINE(3, 2, hidden_channels=5, edge_channels=4).double().convs[0]
    theirs = GINEConv(nn.Sequential(conv.first, nn.ReLU(), conv.last), edge_dim=4).double()
    with torch.no_grad():
        theirs.lin.weight.copy_(conv.edge.weight)
        theirs.lin.bias.copy_(conv.edge.bias)
    convolve = functools.partial(functional_call, conv, {n: p.expand(3, *p.shape) for n, p in conv.named_parameters()})
    keys = torch.arange(6).view(2, 3)
    for batch in (
        collator()([0, 1, 2]),
        *collator(4)([0, 1, 2]).draws(keys),
        collator()([2, 0, 1]).select(torch.tensor([1, 2, 0])),
    ):
        h = torch.randn(*batch.node_mask.shape, 5, dtype=torch.float64)
        ours = convolve((h, batch))
        for client in range(3):
            mask, size = batch.edge_mask[client], int(batch.node_mask[client].sum())
            edge_index = batch.edge_ends[client][mask].t()
            expected = theirs(h[client, :size], edge_index, batch.edge_attr[client][mask])
            torch.testing.assert_close(ours[client, :size], expected)
            if batch.num_nodes.shape[1] > 4:  # all of them
                assert torch.equal(edge_index, clients[client].union.edge_index_2E)


def test_a_mini_batch_has_the_edges_of_its_graphs() -> None:
    net = GINE(3, 2, hidden_channels=5, edge_channels=4).double().eval()
    whole, own = collator()([1]), collator(4)([1])
    every, some = (net(single(each)).logits for each in (whole, next(own.draws(torch.tensor([[3]])))))
    apart = (some[:, None] - every).abs().amax(dim=-1)
    assert (apart.amin(dim=1) < 1e-9).all()
    assert len(apart.argmin(dim=1).unique()) == 4


@pytest.mark.full
def test_attributes_are_read_where_nodes_are_the_examples(make_trainer: Any, assert_same: Any, tmp_path: Path) -> None:
    ends = torch.arange(30)
    graph = Data(
        x=torch.randn(30, 3),
        y=ends % 2,
        edge_index=torch.stack([ends, (ends + 1) % 30]),
        edge_attr=(ends % 2)[:, None].float(),
    )
    data = FederatedDataModule(graph, RandomPartitioner(2), cache_dir=str(tmp_path), root=str(tmp_path))
    net, runs = functools.partial(GINE, edge_channels=1, hidden_channels=8), []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        trainer.fit(ClientModule(net), data, FedAvg(num_epochs=1))
        runs.append(trainer.run.history)
    assert_same(*runs, tolerance=1e-6)


@pytest.mark.parametrize(("there", "message"), [(3, "have 3 attributes: set it to 3"), (0, "have 0 attributes: give")])
def test_another_number_of_attributes_is_refused(there: int, message: str, make_trainer: Any) -> None:
    data = graph_data(edge_attributes=there)
    model = ClientModule(functools.partial(GINE, edge_channels=4))
    with pytest.raises(ValueError, match=rf"GINE.edge_channels is 4, but edges of the clients' graphs {message}"):
        make_trainer().fit(model, data, FedAvg())


def test_attention_of_a_readout_by_hand(batch: Any) -> None:
    readout = Readout(3, "attention").double()
    value = torch.randn(*batch.node_mask.shape, 3, dtype=torch.float64)
    assert readout.score is not None
    first = int(batch.num_nodes[1, 0])
    weight = (value[1, :first] @ readout.score.weight[0]).softmax(dim=0)
    torch.testing.assert_close(readout(value, batch)[1, 0], weight @ value[1, :first])
    assert not readout(value, batch)[0, 9:].any()  # padding
    with torch.no_grad():
        readout.score.weight.fill_(1.0)
    low = torch.where(batch.node_mask.unsqueeze(-1), value - 1e4, value)  # beside which padding scores high
    torch.testing.assert_close(readout(low, batch)[batch.example_mask], readout(value, batch)[batch.example_mask] - 1e4)
    with pytest.raises(ValueError, match="pooling must be one of sum, mean, max, attention, got 'best'"):
        GIN(3, 2, pooling="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["GIN", "GAT-attention", "GraphSAGE"])
def test_nodes_are_not_pooled(name: str, tmp_path: Any) -> None:
    data = node_data("numbers", tmp_path)
    one = single(data.collator(data.clients, device=CPU, dtype=torch.float32)([0]))
    output = NETS[name](5, 2)(one)
    assert len(output.logits) == len(output.embedding) == data.clients[0].num_nodes


def test_a_virtual_node_by_hand(batch: Any) -> None:
    node = VirtualNode(3).double()
    value = torch.randn(*batch.node_mask.shape, 3, dtype=torch.float64)
    virtual, moved = node(0.0, value, batch)
    first = int(batch.num_nodes[1, 0])
    expected = node.last(node.first(value[1, :first].sum(dim=0)[None]).relu())
    torch.testing.assert_close(virtual[1, :1], expected)
    torch.testing.assert_close(moved[1, :first], value[1, :first] + expected)


def test_a_virtual_node_is_of_a_graph(tmp_path: Any) -> None:
    data = node_data("numbers", tmp_path)
    one = single(data.collator(data.clients, device=CPU, dtype=torch.float32)([0]))
    with pytest.raises(ValueError, match="virtual_node is for sets of graphs, but here nodes are the examples"):
        NETS["GIN-virtual"](5, 2)(one)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: GAT(3, 2, hidden_channels=6, num_heads=4), "set it to a multiple of num_heads=4"),
        (lambda: GIN(3, 2, num_layers=0), "num_layers=0 is impossible"),
        (lambda: GIN(3, 2, dropout=1.0), "dropout=1.0 is impossible"),
    ],
)
def test_settings_that_are_impossible(net: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        net()
