"""Parts of graphs that local steps train on: which nodes and edges they have, and what nets compute on them."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from directed_graph import NUM_CLASSES, NUM_FEATURES, directed_graph
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINEConv, GraphConv, SAGEConv, TransformerConv

from fl_lightning.batches import (
    ClientGraph,
    ClusterSampler,
    GraphBatch,
    GraphSampler,
    NeighborSampler,
    SampledGraphCollator,
)
from fl_lightning.batches.base import single
from fl_lightning.batches.edges_by_target import EdgesByTarget
from fl_lightning.models import GAT, GCN, GIN, DisentangledGCN, GraphSAGE
from fl_lightning.models.fitting import fitted
from fl_lightning.models.reach import reads_beyond
from fl_lightning.models.stacked.graph import StackedEdges

DIRECTED = functools.partial(directed_graph, 12, seed=3)


def collator_of(
    *graphs: ClientGraph,
    sampler: GraphSampler,
    batch_size: int = 2,
    steps: int | None = None,
    drop_last: bool = False,
    sparse: bool = False,
) -> SampledGraphCollator:
    return SampledGraphCollator(
        graphs,
        sampler=sampler,
        batch_size=batch_size,
        steps_per_epoch=steps,
        drop_last=drop_last,
        layout={"sparse_features": sparse},
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


def undirected(graph: ClientGraph) -> ClientGraph:
    """The graph with both directions of every edge."""
    edges_2E = torch.unique(torch.cat([graph.edge_index_2E, graph.edge_index_2E.flip(0)], dim=1), dim=1)
    fields = {name: value for name, value in vars(graph).items() if name not in ("edge_index_2E", "is_directed")}
    return ClientGraph(**fields, edge_index_2E=edges_2E)


GRAPHS = {
    "directed": DIRECTED(),
    "undirected": undirected(DIRECTED()),
    "weighted": DIRECTED(weighted=True),
    "attributes": DIRECTED(attributes=2),
}
every_graph = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)


# ---------------------------------------------------------------- neighborhoods


@every_graph
@pytest.mark.parametrize("replace", [False, True], ids=["without", "with"])
def test_a_node_is_expanded_once_along_the_edges_that_lead_to_it(graph, replace) -> None:
    edges, seeds = EdgesByTarget(graph), torch.tensor([4, 0, 7])
    whole = {tuple(pair) for pair in graph.edge_index_2E.T.tolist()}
    degree = graph.edge_index_2E[1].bincount(minlength=graph.num_nodes)
    for key in range(20):
        part = NeighborSampler([2, 1], replace=replace).part(edges, seeds, key)
        node = part.position_N
        pairs = node[part.edge_index_2E].T.tolist()

        assert node[:3].tolist() == [4, 0, 7]
        assert part.train_mask_N.tolist() == [True] * 3 + [False] * (len(node) - 3)
        assert len(set(node.tolist())) == len(node)
        assert {tuple(pair) for pair in pairs} <= whole
        assert torch.equal(part.x_NF, graph.x_NF[node])
        assert torch.equal(part.num_neighbors_N, degree[node])
        found = {source for source, target in pairs if target in (4, 0, 7)}
        for place, each in enumerate(node.tolist()):
            into = part.edge_index_2E[1] == place
            k = 2 if each in (4, 0, 7) else 1 if each in found else 0
            assert into.sum() == min(k, degree[each]) or (replace and into.sum() <= k)
            # each of k sampled edges stands for d / k
            counted = degree[each] if k else 0
            torch.testing.assert_close(part.factor_E[into].sum(), counted.float() if k else torch.tensor(0.0))


@every_graph
def test_all_edges_are_sampled_equally_often(graph) -> None:
    edges, node = EdgesByTarget(graph), graph.edge_index_2E[1].bincount().argmax()[None]
    degree = int((graph.edge_index_2E[1] == node).sum())
    for replace in (False, True):
        draws = [NeighborSampler([2], replace=replace).part(edges, node, key) for key in range(300)]
        counts = torch.zeros(graph.num_nodes).index_add_(
            0,
            torch.cat([part.position_N[part.edge_index_2E[0]] for part in draws]),
            torch.cat([part.factor_E for part in draws]),
        )

        chosen = counts[counts > 0] / 300
        assert len(chosen) == degree
        assert (chosen - 1).abs().max() < 4 * (degree / 2 / 300) ** 0.5


@every_graph
def test_with_all_neighbors_the_hops_are_those_of_the_whole_graph(graph) -> None:
    part = NeighborSampler([-1, -1]).part(EdgesByTarget(graph), torch.tensor([5]), 0)
    source, target = graph.edge_index_2E
    first = torch.unique(source[target == 5])
    expanded = torch.unique(torch.cat([first, torch.tensor([5])]))
    kept = torch.isin(target, expanded)

    assert set(part.position_N.tolist()) == {5, *first.tolist(), *source[kept].tolist()}
    pairs = part.position_N[part.edge_index_2E].T.tolist()
    assert sorted(pairs) == sorted(graph.edge_index_2E[:, kept].T.tolist())
    assert (part.factor_E == 1).all()


class PlainNet(nn.Module):
    """Two PyG layers."""

    def __init__(self, convs: nn.ModuleList) -> None:
        super().__init__()
        self.convs = convs

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second = self.convs
        return second(F.relu(first(x, edge_index)), edge_index)


class NetOfAttributes(PlainNet):
    """Two PyG layers that read the attributes of edges."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        first, second = self.convs
        return second(F.relu(first(x, edge_index, edge_attr)), edge_index, edge_attr)


def two(layer, **settings):
    def build(in_channels: int, out_channels: int) -> nn.Module:
        convs = [layer(in_channels, 5, **settings), layer(5, out_channels, **settings)]
        return PlainNet(nn.ModuleList(convs))

    return build


def two_gine(in_channels: int, out_channels: int) -> nn.Module:
    convs = [GINEConv(nn.Linear(width, 5), edge_dim=2) for width in (in_channels, 5)]
    return NetOfAttributes(nn.ModuleList(convs))


NETS = {
    "GCN": GCN,
    "GraphSAGE": GraphSAGE,
    "GAT": GAT,
    "GIN": functools.partial(GIN, num_layers=2),
    "GCNConv": two(GCNConv),
    "GCNConv without loops": two(GCNConv, add_self_loops=False),
    "SAGEConv": two(SAGEConv),
    "SAGEConv of maxima": two(SAGEConv, aggr="max"),
    "GATConv": two(GATConv),
    "GraphConv of means": two(GraphConv, aggr="mean"),
    "GINEConv": two_gine,
}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("name", "graph"), [(n, g) for n in NETS for g in GRAPHS if n != "GINEConv" or "att" in g])
def test_with_all_neighbors_nodes_have_their_outputs_in_the_whole_graph(name, graph, sparse) -> None:
    torch.manual_seed(0)
    net = fitted(NETS[name], NUM_FEATURES, NUM_CLASSES).double().eval()
    data = GRAPHS[graph]
    collator = collator_of(data, sampler=NeighborSampler([-1, -1]), sparse=sparse)
    whole = single(collator([0]))
    expected = net(whole).logits
    for drawn in whole.draws(torch.arange(2)):
        position = match(drawn, whole)
        logits = net(drawn).logits[drawn.train_mask]

        torch.testing.assert_close(logits, expected[position][drawn.train_mask])


def match(drawn: GraphBatch, whole: GraphBatch) -> Tensor:
    """Which nodes of the whole graph those of a part are, by their features."""
    every = [batch.features_of(torch.arange(len(batch.node_mask))) for batch in (drawn, whole)]
    return torch.cdist(*every).argmin(dim=1)


@pytest.mark.full
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GCNConv", "SAGEConv", "GraphConv of means"])
def test_a_layer_on_sampled_edges_is_unbiased(name) -> None:
    torch.manual_seed(0)
    layers = {"GCN": functools.partial(GCN, num_layers=1), "GraphSAGE": functools.partial(GraphSAGE, num_layers=1)}
    one = {"GCNConv": GCNConv, "SAGEConv": SAGEConv, "GraphConv of means": functools.partial(GraphConv, aggr="mean")}

    class Layer(nn.Module):
        def __init__(self, in_channels: int, out_channels: int) -> None:
            super().__init__()
            self.conv = one[name](in_channels, out_channels + 1)  # with a head after it

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    net = fitted(layers.get(name, Layer), NUM_FEATURES, NUM_CLASSES).double().eval()
    for graph in ("undirected", "weighted"):
        collator = collator_of(GRAPHS[graph], sampler=NeighborSampler([2], replace=graph == "weighted"), batch_size=9)
        whole = single(collator([0]))

        def before_relu(batch: GraphBatch) -> Tensor:
            return net(batch).embedding if name in layers else net(batch).logits

        expected = before_relu(whole)[whole.train_mask]
        found = []
        for drawn in whole.draws(torch.arange(200)):
            order = match(drawn, whole)[drawn.train_mask].argsort()
            found.append(before_relu(drawn)[drawn.train_mask][order])
        drawn = torch.stack(found)
        error = drawn.std(dim=0).norm() / len(drawn) ** 0.5

        assert (drawn.mean(dim=0) - expected).norm() < 3 * error + 1e-12


class OneLayer(nn.Module):
    """A PyG layer, with weights of edges of its own if it takes any."""

    def __init__(self, conv: nn.Module, weight: float | None = None) -> None:
        super().__init__()
        self.conv, self.weight = conv, weight

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        own = () if self.weight is None else (torch.full_like(edge_attr[:, 0], self.weight),)
        return self.conv(x, edge_index, *own)


@pytest.mark.parametrize("replace", [False, True], ids=["without", "with"])
@pytest.mark.parametrize(
    "layer",
    [GATConv, functools.partial(GATConv, add_self_loops=False, heads=2), GATv2Conv, TransformerConv],
    ids=["GAT", "GAT without loops", "GATv2", "Transformer"],
)
def test_attention_to_a_sample_sums_to_one(layer, replace) -> None:
    """Of equal features it makes what it makes of them on the whole graph, however few edges were sampled."""
    torch.manual_seed(0)
    net = fitted(lambda i, o: OneLayer(layer(i, 4)), NUM_FEATURES, NUM_CLASSES).double().eval()
    data = GRAPHS["attributes"]
    data = dataclasses.replace(data, x_NF=torch.ones_like(data.x_NF))
    whole = single(collator_of(data, sampler=NeighborSampler([1], replace=replace), batch_size=9)([0]))
    expected = net(whole).logits[whole.train_mask][:1]
    [drawn] = whole.draws(torch.arange(1))
    logits = net(drawn).logits[drawn.train_mask]

    torch.testing.assert_close(logits, expected.expand_as(logits))


STAR = ClientGraph(
    name="star",
    x_NF=torch.cat([torch.rand(1, NUM_FEATURES), torch.rand(1, NUM_FEATURES).expand(6, -1)]),
    edge_index_2E=torch.stack([torch.arange(1, 7), torch.zeros(6, dtype=torch.int64)]),
    y_N=torch.zeros(7, dtype=torch.int64),
    node_idx_N=torch.arange(7),
    train_mask_N=torch.arange(7) == 0,
    edge_attr_EK=torch.ones(6, 1),
    val_mask_N=torch.zeros(7, dtype=torch.bool),
    test_mask_N=torch.zeros(7, dtype=torch.bool),
)


@pytest.mark.parametrize("replace", [False, True], ids=["without", "with"])
@pytest.mark.parametrize(
    "net",
    [
        functools.partial(GAT, num_layers=1),
        functools.partial(DisentangledGCN, num_layers=1),
        lambda i, o: OneLayer(GATConv(i, 4)),
    ],
    ids=["GAT", "DisentangledGCN", "GATConv"],
)
def test_a_sampled_edge_counts_for_its_like_beside_the_node_itself(net, replace) -> None:
    """A node whose neighbors are all alike gets from two of six what it gets from all."""
    torch.manual_seed(0)
    built = fitted(net, NUM_FEATURES, NUM_CLASSES).double().eval()
    whole = single(collator_of(STAR, sampler=NeighborSampler([2], replace=replace), batch_size=1)([0]))
    [drawn] = whole.draws(torch.arange(1))

    torch.testing.assert_close(built(drawn).logits[drawn.train_mask], built(whole).logits[whole.train_mask])


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_weights_of_the_nets_own_count_as_often_as_the_sampled_edges(aggr) -> None:
    torch.manual_seed(0)
    conv = GraphConv(NUM_FEATURES, 4, aggr=aggr)
    nn.init.zeros_(conv.lin_root.weight)
    nn.init.zeros_(conv.lin_rel.bias)
    nets = [fitted(lambda i, o, w=w: OneLayer(conv, w), NUM_FEATURES, NUM_CLASSES).double() for w in (None, 0.5)]
    whole = single(collator_of(GRAPHS["attributes"], sampler=NeighborSampler([2, 1]), batch_size=9)([0]))
    [drawn] = whole.draws(torch.arange(1))
    one, half = (net(drawn).embedding for net in nets)

    assert one.abs().sum() > 0
    torch.testing.assert_close(half, 0.5 * one)


@every_graph
def test_nets_read_the_weights_that_sampled_edges_have_in_the_graph(graph) -> None:
    [drawn] = single(collator_of(graph, sampler=NeighborSampler([2, 2]), batch_size=9)([0])).draws(torch.arange(1))
    read = StackedEdges(drawn).weight
    if graph.edge_weight_E is None:
        assert read is None
        assert drawn.plain.edge_weight is None
        return
    assert drawn.plain.edge_weight.sort().values.float().equal(read.sort().values.float())
    assert set(read.float().tolist()) <= set(graph.edge_weight_E.tolist())


def gradient(net: nn.Module, batch: GraphBatch, loss) -> Tensor:
    """That of the loss of the training nodes."""
    net.zero_grad()
    loss(net(batch).logits[batch.train_mask], batch.y[batch.train_mask]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def test_with_all_neighbors_the_mean_gradient_of_a_pass_is_that_of_full_batch() -> None:
    torch.manual_seed(0)
    net = GCN(NUM_FEATURES, NUM_CLASSES, dropout=0.0).double()
    collator = collator_of(GRAPHS["directed"], sampler=NeighborSampler([-1, -1]), batch_size=2)
    whole = single(collator([0]))
    steps = [gradient(net, drawn, F.cross_entropy) for drawn in whole.draws(torch.arange(collator.steps_per_epoch(0)))]

    torch.testing.assert_close(torch.stack(steps).mean(dim=0), gradient(net, whole, F.cross_entropy))


class LinearGCN(GCN):
    """Two convolutions without anything between them."""

    def forward(self, batch):
        first, second = self.convs
        return GCN.forward(self, batch)._replace(logits=self.head(second(first(None, batch), batch)))


@pytest.mark.full
@pytest.mark.parametrize("replace", [False, True], ids=["without", "with"])
def test_mean_gradient_over_2000_draws_is_that_of_full_batch(replace, monkeypatch) -> None:
    """A linear net with two convolutions and a loss that is linear in its outputs: nothing is biased."""
    torch.manual_seed(0)
    net = LinearGCN(NUM_FEATURES, NUM_CLASSES, hidden_channels=4, dropout=0.0).double()
    graph = undirected(directed_graph(30, seed=5))

    def linear_loss(logits: Tensor, y: Tensor) -> Tensor:
        return -logits.gather(1, y[:, None]).mean()

    def deviation() -> float:
        """How far the mean is from the gradient of full batch, in standard errors."""
        collator = collator_of(graph, sampler=NeighborSampler([3, 2], replace=replace), batch_size=5, steps=2000)
        whole = single(collator([0]))
        drawn = torch.stack([gradient(net, batch, linear_loss) for batch in whole.draws(torch.arange(2000))])
        apart = drawn.mean(dim=0) - gradient(net, whole, linear_loss)
        return float(apart.norm() / (drawn.std(dim=0).norm() / 2000**0.5))

    assert deviation() < 3

    sample = EdgesByTarget.sample  # an edge that stands for itself alone gives another gradient
    monkeypatch.setattr(
        EdgesByTarget, "sample", lambda self, n, p, t, factor, m: sample(self, n, p, t, torch.ones_like(factor), m)
    )
    assert deviation() > 10


# ---------------------------------------------------------------- clusters


@every_graph
def test_clusters_have_all_edges_between_their_nodes(graph) -> None:
    collator = collator_of(graph, sampler=ClusterSampler(4), batch_size=2)
    edges = collator.edges_of(0)
    cluster = collator.sampler._clusters(edges)
    part = collator.sampler.part(edges, torch.tensor([0, 2]), 0)
    chosen = torch.unique(cluster[graph.train_mask_N])[[0, 2]]
    inside = torch.isin(cluster, chosen)
    kept = inside[graph.edge_index_2E].all(dim=0)

    assert torch.equal(part.node_idx_N, inside.nonzero().flatten())
    assert torch.equal(part.node_idx_N[part.edge_index_2E], graph.edge_index_2E[:, kept])
    for name in ("edge_weight_E", "edge_attr_EK"):
        assert (getattr(graph, name) is None) or torch.equal(getattr(part, name), getattr(graph, name)[kept])
    assert torch.equal(part.train_mask_N, graph.train_mask_N[inside])


@pytest.mark.parametrize("sampler", [NeighborSampler([2, 2]), ClusterSampler(5)], ids=["neighbors", "clusters"])
def test_a_pass_has_each_training_node_once(sampler, graphs) -> None:
    collator = collator_of(*graphs[:3], sampler=sampler)
    steps = max(collator.steps_per_epoch(client) for client in range(3))
    keys = torch.arange(steps)[:, None] + torch.tensor([0, 10, 20])
    seen: list[list[Tensor]] = [[], [], []]
    whole = collator([0, 1, 2])
    for step, drawn in enumerate(whole.draws(keys)):
        for client in range(3):
            if step < collator.steps_per_epoch(client):
                seen[client].append(drawn.x[client][drawn.train_mask[client]])

    for client, rows in enumerate(seen):
        expected = whole.x[client][whole.train_mask[client]]
        assert sorted(torch.cat(rows).tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("sampler", [NeighborSampler([2, 2]), ClusterSampler(5)], ids=["neighbors", "clusters"])
@pytest.mark.parametrize("steps", [None, 3])
def test_draws_of_a_client_are_the_same_alone_and_in_a_stack(sampler, steps, graphs) -> None:
    collator = collator_of(*graphs[:3], sampler=sampler, steps=steps)
    keys = torch.arange(12).view(4, 3)
    stack = collator([0, 1, 2])
    for rows, batch in (([0, 1, 2], stack), ([2, 0], stack.select(torch.tensor([2, 0])))):
        together = list(batch.draws(keys[:, rows]))
        for row, client in enumerate(rows):
            for drawn, alone in zip(together, single(collator([client])).draws(keys[:, client]), strict=True):
                size = len(alone.node_mask)
                for name in ("y", "train_mask", "degree", "x"):
                    assert torch.equal(getattr(drawn, name)[row, :size], getattr(alone, name))
                dense, width = alone.adjacency.matrix.to_dense(), drawn.node_mask.shape[1]
                block = drawn.adjacency.matrix.to_dense()[row * width : row * width + size]
                torch.testing.assert_close(block[:, row * width : row * width + size], dense)


# ---------------------------------------------------------------- how far nets read


@pytest.mark.parametrize("net", ["GCN", "GAT", "SAGEConv", "GCNConv"])
def test_reach_of_nets(net) -> None:
    built = fitted(NETS[net], NUM_FEATURES, NUM_CLASSES)

    assert not reads_beyond(built, 2, NUM_FEATURES)
    assert reads_beyond(built, 1, NUM_FEATURES)
