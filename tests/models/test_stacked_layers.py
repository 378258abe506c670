"""PyG's layers on a stack of clients: what PyG computes for one client after another, outputs and gradients."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from directed_graph import NUM_CLASSES, NUM_FEATURES, batch_of, directed_graph
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization

from fl_lightning.batches import ClientGraph
from fl_lightning.batches.base import single
from fl_lightning.batches.plain_graph import PlainGraph
from fl_lightning.models import PlainNet

WIDTH = 4  # of all layers; not that of the classes


class OneLayer(nn.Module):
    """A layer, an activation and a linear map."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(width, NUM_CLASSES)
        self.reads = set(inspect.signature(layer.forward).parameters)

    def forward(
        self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        given = {"edge_weight": edge_weight, "edge_attr": edge_attr if getattr(self.layer, "edge_dim", 1) else None}
        return self.last(self.layer(x, edge_index, **{k: v for k, v in given.items() if k in self.reads}).tanh())


def layer(kind: Any, *more: Any, width: int = WIDTH, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = kind(NUM_FEATURES, WIDTH, *more, **options)
        return OneLayer(made, width)

    return build


def gin(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: OneLayer(kind(nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.ReLU()), **options))


class Reweighted(OneLayer):
    """Weights of edges that the net computes itself."""

    def __init__(self, made: nn.Module) -> None:
        super().__init__(made)
        self.score = nn.Linear(2, 1)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(self.layer(x, edge_index, self.score(edge_attr).sigmoid().squeeze(-1)).tanh())


def sequential() -> nn.Module:
    """PyG's, whose ``forward`` takes any arguments."""
    layers = [(pyg.GCNConv(NUM_FEATURES, WIDTH), "x, edge_index -> x"), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES)]
    return pyg.Sequential("x, edge_index", layers)


class Bounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def parametrized() -> nn.Module:
    """A layer whose weight is computed from parameters."""
    net = OneLayer(pyg.SAGEConv(NUM_FEATURES, WIDTH))
    register_parametrization(net.last, "weight", Bounded())
    return net


attention = {"edge_dim": 2, "heads": 2}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": layer(pyg.GCNConv),
    "GCN improved": layer(pyg.GCNConv, improved=True, bias=False),
    "GCN without loops": layer(pyg.GCNConv, add_self_loops=False),
    "GCN not normalized": layer(pyg.GCNConv, normalize=False),
    "GCN with its own weights": lambda: Reweighted(pyg.GCNConv(NUM_FEATURES, WIDTH)),
    "GCN with its own weights, not normalized": lambda: Reweighted(pyg.GCNConv(NUM_FEATURES, WIDTH, normalize=False)),
    "SAGE": layer(pyg.SAGEConv),
    "SAGE wide": lambda: OneLayer(pyg.SAGEConv(NUM_FEATURES, 9), 9),
    "SAGE sum": layer(pyg.SAGEConv, aggr="sum", root_weight=False, bias=False),
    "SAGE max": layer(pyg.SAGEConv, aggr="max", normalize=True, project=True),
    "SAGE projected": layer(pyg.SAGEConv, project=True),
    "Graph": layer(pyg.GraphConv),
    "Graph mean": layer(pyg.GraphConv, aggr="mean", bias=False),
    "Graph max": layer(pyg.GraphConv, aggr="max"),
    "Graph with its own weights": lambda: Reweighted(pyg.GraphConv(NUM_FEATURES, WIDTH)),
    "GIN": gin(pyg.GINConv, eps=0.3),
    "GIN trained": gin(pyg.GINConv, train_eps=True, aggr="mean"),
    "GIN max": gin(pyg.GINConv, aggr="max"),
    "GINE": gin(pyg.GINEConv, edge_dim=2),
    "GINE trained": gin(pyg.GINEConv, edge_dim=2, train_eps=True, aggr="max"),
    "GAT": layer(pyg.GATConv),
    "GAT heads": layer(pyg.GATConv, width=2 * WIDTH, heads=2, negative_slope=0.1),
    "GAT attributes": layer(pyg.GATConv, width=2 * WIDTH, **attention),
    "GAT max attributes": layer(pyg.GATConv, width=2 * WIDTH, fill_value="max", **attention),
    "GAT filled": layer(pyg.GATConv, width=2 * WIDTH, fill_value=0.5, **attention),
    "GAT mean": layer(pyg.GATConv, concat=False, residual=True, bias=False, **attention),
    "GAT without loops": layer(pyg.GATConv, add_self_loops=False),
    "GATv2": layer(pyg.GATv2Conv, width=2 * WIDTH, residual=True, **attention),
    "GATv2 mean": layer(pyg.GATv2Conv, concat=False, bias=False, heads=2),
    "GATv2 without loops": layer(pyg.GATv2Conv, width=2 * WIDTH, add_self_loops=False, fill_value="add", **attention),
    "Transformer": layer(pyg.TransformerConv),
    "Transformer attributes": layer(pyg.TransformerConv, width=2 * WIDTH, beta=True, **attention),
    "Transformer mean": layer(pyg.TransformerConv, concat=False, heads=2, root_weight=False, bias=False),
    "Sequential": sequential,
    "parametrized": parametrized,
    "GCN model": functools.partial(pyg.GCN, NUM_FEATURES, WIDTH, 2, NUM_CLASSES, act="elu"),
    "GCN model, BatchNorm": functools.partial(
        pyg.GCN, NUM_FEATURES, WIDTH, 2, NUM_CLASSES, norm="batch_norm", jk="cat"
    ),
    "SAGE model, LayerNorm": functools.partial(
        pyg.GraphSAGE, NUM_FEATURES, WIDTH, 2, NUM_CLASSES, norm="layer_norm", jk="max", act_first=True
    ),
    "GIN model": functools.partial(pyg.GIN, NUM_FEATURES, WIDTH, 2, NUM_CLASSES, norm="batch_norm", train_eps=True),
    "GAT model, LayerNorm": functools.partial(
        *(pyg.GAT, NUM_FEATURES, WIDTH, 2, NUM_CLASSES),
        **{"heads": 2, "v2": True, "edge_dim": 2, "norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    ),
}


def members(*, weighted: bool) -> list[ClientGraph]:
    """Two directed graphs with attributes of edges, and one without edges."""
    made = [directed_graph(size, weighted=weighted, seed=size) for size in (9, 5, 4)]
    weight_E = None if made[-1].edge_weight_E is None else made[-1].edge_weight_E[:0]
    made[-1] = dataclasses.replace(made[-1], edge_index_2E=made[-1].edge_index_2E[:, :0], edge_weight_E=weight_E)
    draw = torch.Generator().manual_seed(0)
    return [dataclasses.replace(graph, edge_attr_EK=torch.randn(graph.num_edges, 2, generator=draw)) for graph in made]


def results(net: PlainNet, start: dict[str, Tensor], batch: Any, *, how: str = "") -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of a function of them that is not 0 beside others."""
    leaves = {
        name: value.clone().requires_grad_(net.get_parameter(name).requires_grad) for name, value in start.items()
    }
    mutable = {name: value if value.requires_grad else value.clone() for name, value in leaves.items()}

    def logits(values: dict[str, Tensor], batch: Any) -> Tensor:
        return functional_call(net, values, (batch,), tie_weights=False).logits

    if how == "vmap":
        found = torch.vmap(lambda p, t: logits(p, batch.replace(t)))(mutable, batch.tensors())
    else:
        found = logits(mutable, batch)
    if found.dim() > 2:
        found = found * batch.node_mask.unsqueeze(-1)
    weight = torch.arange(found.shape[-2] * 3, dtype=found.dtype).view(-1, 3).cos()
    trained = [name for name, value in leaves.items() if value.requires_grad]
    pulled = torch.autograd.grad(
        (found * weight).sum(), [leaves[name] for name in trained], allow_unused=True, materialize_grads=True
    )
    moved = {name: value for name, value in mutable.items() if name not in trained}
    return found.detach(), {**dict(zip(trained, pulled, strict=True)), **moved}


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.full), True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stack_computes_what_pyg_does(name: str, weighted: bool) -> None:
    torch.manual_seed(0)
    net = PlainNet(LAYERS[name]().double(), NUM_FEATURES, NUM_CLASSES)
    assert net.why_alone == ""
    graphs = members(weighted=weighted)
    draw = torch.Generator().manual_seed(1)
    start = {
        n: torch.stack([p.detach() + 0.3 * torch.rand(p.shape, generator=draw, dtype=p.dtype) for _ in graphs])
        for n, p in net.named_parameters()
    }
    for training in (True, False):
        net.train(training)
        alone = [
            results(
                net,
                {n: value[row] for n, value in start.items()},
                SimpleNamespace(
                    plain=PlainGraph(graph, device=torch.device("cpu"), dtype=torch.float64), key=torch.tensor(0)
                ),
            )
            for row, graph in enumerate(graphs)
        ]
        for sparse in (False, True):
            batch = batch_of(*graphs, sparse=sparse)
            ways = ["vmap", *(["stack"] if net.takes_stacks else [])]
            found = [results(net, start, batch, how=how) for how in ways]
            for row, (logits, pulled) in enumerate(alone):
                one = results(net, {n: v[row] for n, v in start.items()}, single(batch_of(graphs[row], sparse=sparse)))
                stacks = [(each[row, : len(logits)], {n: g[row] for n, g in more.items()}) for each, more in found]
                for other, others in (*stacks, one):
                    torch.testing.assert_close(other, logits, rtol=1e-9, atol=1e-9)
                    for n, gradient in pulled.items():
                        torch.testing.assert_close(others[n], gradient, rtol=1e-9, atol=1e-9)


def test_pygs_models_need_no_vmap() -> None:
    for kind in (pyg.GCN, pyg.GraphSAGE, pyg.GIN, pyg.GAT):
        net = PlainNet(kind(NUM_FEATURES, 8, 2, NUM_CLASSES, dropout=0.5), NUM_FEATURES, NUM_CLASSES)
        assert net.takes_stacks
        assert set(net.state_dict()) == set(net.whole_module.state_dict())


class Net(nn.Module):
    """Two convolutions, whose inputs a subclass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = pyg.GCNConv(NUM_FEATURES, WIDTH)
        self.conv2 = pyg.GCNConv(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.conv2(self.between(self.conv1(x, edge_index), edge_index), edge_index)

    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        return h


class Centered(Net):
    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        return h - h.mean(dim=0)


class Selects(Net):
    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        return torch.zeros_like(h).index_add(0, (h.sum(dim=1) > 0).nonzero().flatten(), h[h.sum(dim=1) > 0])


class Reads(Net):
    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        return h.index_add(0, edge_index[0], h[edge_index[1]])


class Scaled(Net):
    """Begins as if it did not read other nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        return h + self.scale * h.max(dim=0).values


class Follows(Net):
    """A running mean over all nodes, which the outputs of training do not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(dim=0))
        return h


def test_rounding_of_deep_normalized_nets_is_no_difference() -> None:
    """Some of them ran one after another: small gradients were compared in single precision."""
    for seed in (0, 2, 5):
        torch.manual_seed(seed)
        assert PlainNet(pyg.GIN(100, 64, 5, NUM_CLASSES, norm="batch_norm"), 100, NUM_CLASSES).takes_stacks


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (lambda: OneLayer(pyg.ChebConv(NUM_FEATURES, WIDTH, 2)), "layer (ChebConv) has no form for a stack of clients"),
        (
            lambda: OneLayer(pyg.GCNConv(NUM_FEATURES, WIDTH, flow="target_to_source")),
            "layer (GCNConv) has no form for a stack of clients with flow=target_to_source",
        ),
        (
            lambda: OneLayer(pyg.SAGEConv(NUM_FEATURES, WIDTH, aggr=["mean", "max"])),
            "layer (SAGEConv) has no form for a stack of clients with aggr=a module",
        ),
        (
            lambda: OneLayer(pyg.GATConv(NUM_FEATURES, WIDTH, edge_dim=2, fill_value="mul")),
            "layer (GATConv) has no form for a stack of clients with fill_value=mul",
        ),
        (
            functools.partial(pyg.GCN, NUM_FEATURES, WIDTH, 2, NUM_CLASSES, norm="pair_norm"),
            "norms.0 (PairNorm) has no form for a stack of clients",
        ),
        (
            functools.partial(pyg.GCN, NUM_FEATURES, WIDTH, 2, NUM_CLASSES, jk="lstm"),
            "jk.lstm (LSTM) has no form for a stack of clients",
        ),
        (
            lambda: pyg.GCN(
                *(NUM_FEATURES, WIDTH, 2, NUM_CLASSES), norm="batch_norm", norm_kwargs={"allow_single_element": True}
            ),
            "norms.0 (BatchNorm) has no form for a stack of clients with allow_single_element=True",
        ),
        (Follows, "Follows.forward has mean on a stack of clients that it does not have on one graph"),
        (Reads, "Reads.forward does not run on a stack of clients (it reads edge_index (by index))"),
        (Selects, "Selects.forward does not run on a stack of clients (RuntimeError: vmap: "),
        (Centered, "Centered.forward has outputs on a stack of clients that it does not have on one graph"),
        (Scaled, "Scaled.forward has outputs on a stack of clients that it does not have on one graph"),
    ],
)
def test_what_runs_one_after_another_is_named(net: Any, why: str) -> None:
    torch.manual_seed(0)
    found = PlainNet(net(), NUM_FEATURES, NUM_CLASSES)
    assert found.why_alone.startswith(why), found.why_alone
    assert not found.takes_stacks


class Drops(Net):
    """Dropout of features and between, by function."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training), edge_index)

    def between(self, h: Tensor, edge_index: Any) -> Tensor:
        return F.dropout(h.relu(), 0.25, training=self.training)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [Drops, functools.partial(pyg.GAT, NUM_FEATURES, 9, 2, NUM_CLASSES, dropout=0.3)])
def test_dropout_is_of_the_key_and_not_of_the_stack(kind: Any, sparse: bool) -> None:
    torch.manual_seed(0)
    net = PlainNet(kind().double(), NUM_FEATURES, NUM_CLASSES).train()
    graphs = members(weighted=False)
    whole = batch_of(*graphs, sparse=sparse)
    whole = whole.replace({"key": torch.arange(len(graphs)) + 7})
    start = {n: p.detach().expand(len(graphs), *p.shape) for n, p in net.named_parameters()}
    before = torch.get_rng_state()
    together, _ = results(net, start, whole, how="vmap")
    assert torch.equal(torch.get_rng_state(), before)
    for row, graph in enumerate(graphs):
        alone = single(batch_of(graph, sparse=sparse)).replace({"key": torch.tensor(7 + row)})
        found, _ = results(net, {n: v[row] for n, v in start.items()}, alone)
        torch.testing.assert_close(found, together[row, : len(found)])
        other, _ = results(net, {n: v[row] for n, v in start.items()}, alone.replace({"key": torch.tensor(99)}))
        assert not torch.allclose(other, found)
