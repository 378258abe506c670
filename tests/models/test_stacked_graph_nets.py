"""Users' PyG modules that pool, on sets of graphs: against PyG itself, on both executors, and what is refused."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from task_data import graph_data, node_data
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches import GraphSetCollator
from fl_lightning.batches.base import single
from fl_lightning.models import PlainNet
from fl_lightning.strategies import FedAvg, FedPer

CPU, WIDTH, NUM_FEATURES, NUM_CLASSES = torch.device("cpu"), 4, 3, 2
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*not use the graph's edge_(weight|attr)", "ignore:There is a performance drop because:UserWarning"
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Net(nn.Module):
    """Two convolutions, BatchNorm over nodes, a readout, BatchNorm over graphs, and a head."""

    def __init__(
        self, num_features: int = NUM_FEATURES, num_outputs: int = NUM_CLASSES, *, pool: Any, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.first = pyg.GCNConv(num_features, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = pyg.GINConv(mlp())
        self.pool = pool() if isinstance(pool, (type, functools.partial)) else pool
        self.of_graphs = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, num_outputs)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor, edge_weight: Any = None) -> Tensor:
        h = F.dropout(self.norm(self.first(x, edge_index, edge_weight)).tanh(), self.dropout, self.training)
        h = self.of_graphs(self.pool(self.second(h, edge_index), batch))
        return self.head(F.dropout(h, self.dropout, self.training))


class Attributes(nn.Module):
    """Attributes of edges, all of it in one ``data``, norms of graphs, and what each node's graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(NUM_FEATURES, WIDTH)
        self.conv = pyg.GINEConv(mlp(), edge_dim=4)
        self.norms = nn.ModuleList([pyg.LayerNorm(WIDTH), pyg.GraphNorm(WIDTH)])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, data: Data) -> Tensor:
        h = self.conv(self.map(data.x), data.edge_index, data.edge_attr)
        h = h + pyg.global_mean_pool(h, data.batch, data.num_graphs)[data.batch]
        for norm in self.norms:
            h = norm(h, data.batch)
        return self.head(pyg.global_add_pool(h, data.batch))


POOLS: dict[str, Any] = {
    "add": pyg.global_add_pool,
    "mean": pyg.global_mean_pool,
    "max": pyg.global_max_pool,
    "Sum": pyg.aggr.SumAggregation,
    "Mean": pyg.aggr.MeanAggregation,
    "Max": pyg.aggr.MaxAggregation,
    "Min": pyg.aggr.MinAggregation,
    "Std": pyg.aggr.StdAggregation,
    "PowerMean": functools.partial(pyg.aggr.PowerMeanAggregation, learn=True),
    "Softmax": functools.partial(pyg.aggr.SoftmaxAggregation, learn=True),
    "Attentional": functools.partial(lambda: pyg.aggr.AttentionalAggregation(nn.Linear(WIDTH, 1), mlp())),
    "Multi": functools.partial(pyg.aggr.MultiAggregation, ["sum", "mean", "max"], mode="mean"),
}
NETS: dict[str, Any] = {name: functools.partial(Net, pool=pool) for name, pool in POOLS.items()}
NETS["attributes"] = Attributes


QUICK = ("max", "attributes")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in NETS])
def test_a_stack_and_one_client_compute_what_pyg_does(name: str) -> None:
    torch.manual_seed(0)
    module = NETS[name]().double()
    net = PlainNet(module, NUM_FEATURES, NUM_CLASSES)
    assert (net.why_alone, net.pools, net.takes_stacks) == ("", True, False)
    clients = graph_data(edge_attributes=4).clients
    make = GraphSetCollator(clients, device=CPU, dtype=torch.float64)
    whole = make(range(len(clients)))
    noise = 100 * torch.randn(whole.x.shape, dtype=whole.x.dtype) * ~whole.node_mask.unsqueeze(-1)
    whole = whole.replace({"x": whole.x + noise, "propagated_x": whole.propagated_x + noise})
    trained = [n for n, p in net.named_parameters() if p.requires_grad]
    start = {n: p.detach() + 0.3 * torch.rand(len(clients), *p.shape).to(p) for n, p in net.named_parameters()}
    for training in (True, False):
        net.train(training)
        leaves = {n: start[n].clone().requires_grad_() for n in trained}
        values = {n: leaves.get(n, value.clone()) for n, value in start.items()}

        def logits(values: dict[str, Tensor], batch: Any) -> Tensor:
            return functional_call(net, values, (batch,), tie_weights=False).logits

        stacked = torch.vmap(lambda p, t: logits(p, whole.replace(t)))(values, whole.tensors())
        numbers = [client.size for client in clients]
        rows = torch.cat([each[:size] for each, size in zip(stacked, numbers, strict=True)])
        weights = torch.cat([torch.arange(size * NUM_CLASSES).cos().view(size, NUM_CLASSES) for size in numbers])
        grads = torch.autograd.grad((rows * weights).sum(), list(leaves.values()))
        for row, client in enumerate(clients):
            union, of_N = client.union, client.graph_of_N
            given = {"edge_weight": union.edge_weight_E, "edge_attr": union.edge_attr_EK}
            given = {n: None if value is None else value.double() for n, value in given.items()}
            own = {n: start[n][row].clone().requires_grad_(n in trained) for n in start}
            x, edges = union.x_NF.double(), union.edge_index_2E
            if name == "attributes":
                inputs = (Data(x=x, edge_index=edges, batch=of_N, num_graphs=client.size, **given),)
            else:
                inputs = (x, edges, of_N, given["edge_weight"])
            expected = functional_call(module, own, inputs)
            torch.testing.assert_close(stacked[row, : client.size], expected, rtol=1e-9, atol=1e-9)
            weight = torch.arange(expected.numel()).cos().view(expected.shape)
            for n, grad, ours in zip(
                trained, torch.autograd.grad((expected * weight).sum(), [own[n] for n in trained]), grads, strict=True
            ):
                torch.testing.assert_close(ours[row], grad, rtol=1e-7, atol=1e-9, msg=n)
            alone = {n: start[n][row].clone() for n in start}
            torch.testing.assert_close(logits(alone, single(make([row]))), expected, rtol=1e-9, atol=1e-9)
            for n in set(start) - set(trained):  # running statistics
                torch.testing.assert_close(values[n][row], own[n], rtol=1e-9, atol=1e-9)


def runs_of(net: Any, make_trainer: Any, *executors: Any) -> list[Any]:
    found = []
    for executor in executors:
        data = graph_data(batch_size=4, drop_last=True, edge_attributes=4)
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        result = trainer.fit(ClientModule(net, functools.partial(SGD, lr=0.05)), data, FedPer(num_epochs=1))
        assert type(trainer.run.executor) is type(executor)
        found.append((result, trainer.run.history, trainer.run.executor.state().parameters))
    return found


@pytest.mark.parametrize("name", ["own", pytest.param("attributes", marks=pytest.mark.full)])
def test_both_executors_agree_in_mini_batches_and_drop_by_the_key(
    name: str, make_trainer: Any, assert_same: Any
) -> None:
    net: Any = functools.partial(Net, pool=pyg.global_max_pool, dropout=0.4)
    if name == "attributes":
        net = lambda num_features, num_outputs: Attributes()  # noqa: E731
    stacked, sequential = runs_of(net, make_trainer, StackedExecutor(max_padding=0.9), SequentialExecutor())
    assert_same(stacked, sequential, tolerance=1e-6)


class Reads(Net):
    """Reads a value of the batch, which no stack has."""

    def forward(  # type: ignore[override]
        self, x: Tensor, edge_index: Any, batch: Tensor, batch_size: int, edge_weight: Any = None
    ) -> Tensor:
        assert int(batch[-1]) + 1 == batch_size
        return super().forward(x, edge_index, batch, edge_weight)


def test_what_does_not_run_on_a_stack_runs_as_pyg_and_is_named(make_trainer: Any, assert_same: Any) -> None:
    """The same net, once with a reason to run one after another, which then is computed by PyG on mini-batches."""
    known = functools.partial(Net, pool=pyg.global_mean_pool)
    [on_stack] = runs_of(known, make_trainer, StackedExecutor(max_padding=0.9))
    trainer = make_trainer(num_rounds=2, precision="64-true")
    model = ClientModule(functools.partial(Reads, pool=pyg.global_mean_pool), functools.partial(SGD, lr=0.05))
    with pytest.warns(UserWarning, match=r"model.net Reads: .* does not run on a stack of clients"):
        result = trainer.fit(model, graph_data(batch_size=4, drop_last=True, edge_attributes=4), FedPer(num_epochs=1))
    assert isinstance(trainer.run.executor, SequentialExecutor)
    found = (result, trainer.run.history, trainer.run.executor.state().parameters)
    assert_same(found, on_stack, tolerance=1e-6)


def test_what_does_not_fit_the_task_is_refused(tmp_path: Any, make_trainer: Any) -> None:
    pools = ClientModule(functools.partial(Net, pool=pyg.global_add_pool))
    with pytest.raises(ValueError, match=r"model\.net Net returns a row for each graph of a batch, but the"):
        make_trainer(num_rounds=1).fit(pools, node_data("labels", tmp_path), FedAvg())
    for_nodes = ClientModule(functools.partial(pyg.GCN, hidden_channels=4, num_layers=2))
    with pytest.raises(ValueError, match=r"a net with an output for each graph: .*forward\(x, edge_index, batch\)"):
        make_trainer(num_rounds=1).fit(for_nodes, graph_data(), FedAvg())
