"""Every net on a directed graph: its gradients, and what PyG's layers with the same weights say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from directed_graph import NUM_CLASSES, NUM_FEATURES, batch_of, directed_graph, normalized, one_batch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import GCNConv, GINEConv, SAGEConv

from fl_lightning import models
from fl_lightning.batches import ClientGraph
from fl_lightning.models.adaptive_gcn import corrected_propagation
from fl_lightning.models.neighbor_generator import NeighborGenerationNet, NeighborGenerator
from fl_lightning.models.plain import PyGNet
from fl_lightning.models.routed import Routed

SMALL = {"hidden_channels": 5, "num_layers": 2, "dropout": 0.0}

#: How the nets of clients that hold graphs are built.
GRAPH_NETS: dict[str, dict[str, Any]] = {
    "GCN": SMALL,
    "NormalizedGCN": SMALL,
    "MaskedGCN": SMALL,
    "ProjectionGCN": SMALL | {"tolerance": 1e-10},
    "ExpandedGCN": SMALL,
    "AdaptiveGCN": SMALL,
    "AugmentedGCN": SMALL,
    "GraphSAGE": SMALL,
    "GIN": SMALL,
    "GINE": SMALL | {"edge_channels": 2},
    "GAT": SMALL | {"hidden_channels": 6, "num_heads": 2},
    "ProxySAGE": SMALL | {"proxy_channels": 3},
    "DisentangledGCN": {"hidden_channels": 3, "num_layers": 3, "num_iterations": 2, "dropout": 0.0},
    "PyGNet": {"architecture": "torch_geometric.nn.GCN", "arguments": {"hidden_channels": 5, "num_layers": 2}},
}
#: Names of the package that are no such nets, and nets of clients that hold sets of graphs.
OTHERS = {"CNN", "MLP", "BatchNorm", "GRUForecaster", "LinearModel", "NetOutput", "PlainExampleNet", "PlainNet", "Twin"}
OTHERS |= {"DecoupledGIN", "LinkGCN", "PooledGCN", "Pretrained", "SpectralGNN", "StructureGCN"}
#: Those whose logits are a GCN's, but for what is said of each below.
LIKE_GCN = ("GCN", "NormalizedGCN", "MaskedGCN", "ProjectionGCN", "ExpandedGCN", "AdaptiveGCN", "AugmentedGCN")

weighted_or_not = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    net: nn.Module = getattr(models, name)(NUM_FEATURES, NUM_CLASSES, **GRAPH_NETS[name])
    return net.double()


def test_no_net_is_left_out() -> None:
    assert set(models.__all__) == set(GRAPH_NETS) | OTHERS


def check_gradients(compute: Callable[[dict[str, Tensor]], Any], named: dict[str, Tensor]) -> None:
    """Derivatives of a weighted sum of all outputs against central differences."""
    parameters = {name: p.detach().clone().requires_grad_() for name, p in named.items()}

    def total(values: dict[str, Tensor]) -> Tensor:
        draw = torch.Generator().manual_seed(2)
        outputs = [out for out in compute(values) if isinstance(out, Tensor) and out.is_floating_point()]
        return sum(((out * torch.randn(out.shape, generator=draw, dtype=out.dtype)).sum() for out in outputs), out_0())

    def out_0() -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    actual = torch.autograd.grad(
        total(parameters), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    assert any(bool(gradient.any()) for gradient in actual)
    step = 1e-6
    with torch.no_grad():
        for (name, p), gradient in zip(parameters.items(), actual, strict=True):
            flat = p.view(-1)
            for index in range(len(flat)):
                middle, ends = float(flat[index]), []
                for shift in (step, -step):
                    flat[index] = middle + shift
                    ends.append(float(total(parameters)))
                flat[index] = middle
                expected = (ends[0] - ends[1]) / (2 * step)
                assert abs(expected - float(gradient.view(-1)[index])) < 1e-5 * max(1, abs(expected)), (name, index)


@weighted_or_not
@pytest.mark.parametrize("name", GRAPH_NETS)
def test_gradients_are_those_of_finite_differences(name, weighted) -> None:
    net, batch = build(name), one_batch(directed_graph(weighted=weighted, attributes=2))
    check_gradients(lambda values: functional_call(net, values, (batch,)), dict(net.named_parameters()))


@weighted_or_not
def test_so_they_are_on_a_stack_and_with_sparse_features(weighted) -> None:
    graphs = [directed_graph(size, weighted=weighted, seed=size) for size in (6, 4)]
    for name in ("GCN", "GraphSAGE"):
        net = build(name)
        both = {n: torch.stack([p.detach(), 0.5 * p.detach() + 0.1]) for n, p in net.named_parameters()}
        for sparse in (False, True):
            batch = batch_of(*graphs, sparse=sparse)
            check_gradients(lambda values: functional_call(net, values, (batch,)), both)  # noqa: B023


def test_so_they_are_where_nets_have_more_than_one_way() -> None:
    batch = one_batch(directed_graph())
    net = build("ExpandedGCN")
    received_ND, share_N = torch.randn(9, 5, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    arguments = (batch, received_ND, share_N)
    check_gradients(lambda values: functional_call(net, values, arguments), dict(net.named_parameters()))

    adaptive = build("AdaptiveGCN").eval()
    assert isinstance(adaptive, models.AdaptiveGCN)
    near_NN = torch.ones(9, 9, dtype=torch.float64).fill_diagonal_(0)
    propagation_NN = corrected_propagation(batch, near_NN, 0.5)
    for part, further in (
        (adaptive.homophilous, (propagation_NN, "part")),
        (adaptive.heterophilous, (propagation_NN, near_NN, 0.5)),
    ):
        named, extra = dict(part.named_parameters()), {"below_mean": "ratio"} if len(further) == 3 else {}

        def compute(values, part=part, further=further, extra=extra):
            actual = functional_call(part, values, (batch, *further), extra)
            return actual if isinstance(actual, tuple) else (actual,)

        check_gradients(compute, named)

    routed = Routed(build("GCN"), hidden_channels=3).double()
    check_gradients(lambda values: functional_call(routed, values, (batch, "soft")), dict(routed.named_parameters()))


@weighted_or_not
@pytest.mark.parametrize("name", LIKE_GCN)
def test_logits_are_those_of_pygs_gcn_with_the_same_weights(name, weighted) -> None:
    graph = directed_graph(weighted=weighted)
    net = build(name).train()
    if name == "MaskedGCN":
        with torch.no_grad():
            for layer in (*net.convs, net.head):
                layer.mask.copy_(torch.rand_like(layer.mask))
    output = net(one_batch(graph))
    h_ND = graph.x_NF.double()
    weight_E = None if graph.edge_weight_E is None else graph.edge_weight_E.double()
    for layer, conv in enumerate(net.convs):
        ours = conv.weight * getattr(conv, "mask", 1)
        theirs = GCNConv(*ours.shape).double()
        theirs.load_state_dict(
            {"lin.weight": ours.detach().T, "bias": torch.zeros(5) if conv.bias is None else conv.bias}
        )
        embedding_ND = theirs(h_ND, graph.edge_index_2E, weight_E)
        if name == "NormalizedGCN":
            embedding_ND = nn.BatchNorm1d(5, eps=net.norms[layer].eps).double()(embedding_ND)
        h_ND = embedding_ND.relu()
    torch.testing.assert_close(output.embedding, embedding_ND)
    if name == "ProjectionGCN":  # its classifier reads more
        return
    masks = getattr(net.head, "mask", 1)
    torch.testing.assert_close(output.logits, h_ND @ (net.head.weight * masks).T + net.head.bias)


@weighted_or_not
@pytest.mark.parametrize("name", ["GraphSAGE", "ProxySAGE"])
def test_logits_are_those_of_pygs_sage_with_the_same_weights(name, weighted) -> None:
    graph = directed_graph(weighted=weighted)
    net = build(name)
    output = net(one_batch(graph))
    h_ND = graph.x_NF.double()
    for conv in net.convs:
        theirs = SAGEConv(*conv.weight.shape).double()
        state = {"lin_l.weight": conv.neighbor_weight.T, "lin_l.bias": conv.bias, "lin_r.weight": conv.weight.T}
        theirs.load_state_dict({key: value.detach() for key, value in state.items()})
        embedding_ND = theirs(h_ND, graph.edge_index_2E)
        h_ND = embedding_ND.relu()
    torch.testing.assert_close(output.embedding, embedding_ND)
    torch.testing.assert_close(output.logits, h_ND @ net.head.weight.T + net.head.bias)


def test_logits_are_those_of_pygs_gine_with_the_same_weights() -> None:
    """A node receives along the edges that lead to it; of a random view, along those that are left."""
    graph = directed_graph(attributes=2)
    net, batch = build("GINE"), one_batch(graph)
    view = batch.augmented(1, edge_dropout=0.4, feature_dropout=0.0)
    assert view.edge_mask is not None
    assert 0 < int(view.edge_mask.sum()) < graph.num_edges
    assert graph.edge_attr_EK is not None
    for seen in (batch, view):
        h_ND, kept_E = net.features(seen), seen.edge_mask
        edge_index = graph.edge_index_2E[:, kept_E]
        assert torch.equal(edge_index[1].bincount(minlength=9), seen.degree)
        for conv in net.convs:
            theirs = GINEConv(nn.Sequential(conv.first, nn.ReLU(), conv.last), edge_dim=2).double()
            theirs.lin.load_state_dict(conv.edge.state_dict())
            h_ND = theirs(h_ND, edge_index, graph.edge_attr_EK[kept_E].double()).relu()
        embedding_ND = net.hidden(h_ND)
        output = net(seen)
        torch.testing.assert_close(output.embedding, embedding_ND)
        torch.testing.assert_close(output.logits, net.head(embedding_ND.relu()))


@weighted_or_not
def test_routing_shares_out_the_sources_of_a_node(weighted) -> None:
    graph = directed_graph(weighted=weighted)
    batch = one_batch(graph)
    h_KND = torch.randn(2, 9, 3, dtype=torch.float64)
    found_KND = models.disentangled_gcn.route(h_KND, batch, 2)
    z_KND = torch.nn.functional.normalize(h_KND, dim=2)
    center_KND = z_KND.clone()
    for _ in range(2):
        total_KND = z_KND.clone()
        for source, target in graph.edge_index_2E.T.tolist():
            share_K = (z_KND[:, source] * center_KND[:, target]).sum(dim=1).softmax(dim=0)
            total_KND[:, target] += share_K[:, None] * z_KND[:, source]
        center_KND = torch.nn.functional.normalize(total_KND, dim=2)
    torch.testing.assert_close(found_KND, center_KND)


def test_a_corrected_propagation_receives_from_the_sources() -> None:
    graph = directed_graph()
    nothing_NN = torch.zeros(9, 9, dtype=torch.float64)
    found_NN = corrected_propagation(one_batch(graph), nothing_NN, 1.0)
    torch.testing.assert_close(found_NN, normalized(graph))


@pytest.mark.parametrize(
    ("name", "takes_weight"),
    [*((name, True) for name in LIKE_GCN), ("GraphSAGE", False), ("ProxySAGE", False), ("DisentangledGCN", False)],
)
def test_nets_say_whether_weights_change_what_they_say(name, takes_weight) -> None:
    from fl_lightning.run.checks import takes

    net = build(name).eval()
    logits = [net(one_batch(graph)).logits for graph in graphs_with_and_without_weights()]
    assert takes(net, "edge_weight") is takes_weight
    assert torch.allclose(*logits) is not takes_weight
    assert not takes(net, "edge_attr")


def graphs_with_and_without_weights() -> list[ClientGraph]:
    return [directed_graph(weighted=weighted) for weighted in (False, True)]


def test_nets_of_pyg_take_what_their_forward_names() -> None:
    from fl_lightning.run.checks import takes

    gcn = PyGNet(4, 3, architecture="torch_geometric.nn.GCN", arguments={"hidden_channels": 5, "num_layers": 2})
    assert takes(gcn, "edge_weight")
    assert takes(NeighborGenerationNet(gcn, NeighborGenerator(4, 3)), "edge_weight")
    conv = PyGNet(4, 3, architecture="torch_geometric.nn.SAGEConv")
    assert not takes(conv, "edge_weight")
    assert not takes(conv, "edge_attr")
    assert not takes(PyGNet(4, 3, architecture="torch_geometric.nn.GATConv"), "edge_attr")
    assert takes(PyGNet(4, 3, architecture="torch_geometric.nn.GATConv", arguments={"edge_dim": 2}), "edge_attr")
