"""Nets that know nothing of the package."""

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import (
    GAT,
    GCN,
    BatchNorm,
    GATConv,
    GCNConv,
    GraphConv,
    GraphSAGE,
    InstanceNorm,
    NNConv,
    global_mean_pool,
)

import fl_lightning
from fl_lightning import ClientModule, SequentialExecutor
from fl_lightning.batches import GraphCollator
from fl_lightning.batches.base import single
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.models import PlainNet, PyGNet
from fl_lightning.models.batch_norm import statistics_of
from fl_lightning.models.fitting import fitted
from fl_lightning.run import checkpoint
from fl_lightning.strategies import FedAvg, FedBABU, FedPer, FedRep, Local


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
    trainer.fit(model, federation, FedAvg(num_epochs=3))
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[0]["train/loss"]
    batch = single(trainer.run.executor.collator([0]))
    output = model.output(model.parameter_dict(), batch)
    assert output.logits.shape == (federation.clients[0].num_nodes, 3)
    assert output.embedding.shape[-1] == width


def test_the_embedding_is_what_the_last_layer_reads() -> None:
    model = ClientModule(TwoLayers)
    model.build(6, 3)
    assert isinstance(model.net, PlainNet)
    model.eval()
    x_NF, edges_2E = torch.randn(4, 6), torch.tensor([[0, 1], [1, 0]])
    plain = type("Graph", (), {"x": x_NF, "edge_index": edges_2E})
    graph = type("Batch", (), {"plain": plain, "key": torch.tensor(0)})
    output = model.net(graph)
    torch.testing.assert_close(output.embedding, model.net.conv1(x_NF, edges_2E).relu())
    hidden = model.net.conv1(x_NF, edges_2E).relu()
    torch.testing.assert_close(output.logits, F.log_softmax(model.net.conv2(hidden, edges_2E), dim=1))


def test_an_added_head_can_stay_local(make_trainer: Any, federation: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(Encoder), federation, FedPer())
    assert {name.partition(".")[0] for name in trainer.run.executor.state().parameters} == {"conv", "head"}
    assert set(trainer.run.strategy.kept_local) == {"head.weight", "head.bias"}


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


class Fixed(nn.Module):
    """Its widths are in its code."""

    def __init__(self) -> None:
        super().__init__()


class Kipf(nn.Module):
    """Its second width is not the output's."""

    def __init__(self, nfeat: int, nhid: int, nclass: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda f, k: object(), "it makes a object, which is not a torch.nn.Module"),
        (
            GraphSAGE,
            r"it also needs hidden_channels and num_layers: give functools.partial\(GraphSAGE, hidden_channels=..., ",
        ),
        (functools.partial(PyGNet, architecture="torch_geometric.nn.Sage"), "cannot be imported"),
        (Fixed, r"does not take the widths of inputs and outputs: .* in_channels and out_channels, or .* Fixed\("),
        (functools.partial(Kipf, nhid=8), r"it also needs nclass beside nfeat, to which the widths are passed.* both"),
        (Kipf, r"it also needs nclass beside nfeat and nhid, to which the widths are passed: .* a function of both"),
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


def graph_of(num_features: int, **more: Any) -> SimpleNamespace:
    """Four nodes in a batch, as a plain net reads it."""
    edges_2E = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graph = SimpleNamespace(x=torch.randn(4, num_features), edge_index=edges_2E, **more)
    return SimpleNamespace(plain=graph, key=torch.tensor(5))


def test_a_copy_computes_with_its_own_parameters() -> None:
    net = PlainNet(GraphSAGE(4, 8, num_layers=2, out_channels=3), 4, 3)
    assert net.head_names == ("convs.1.lin_l.weight", "convs.1.lin_l.bias", "convs.1.lin_r.weight")
    twin, batch = copy.deepcopy(net), graph_of(4)
    before = net(batch).logits.detach().clone()
    for name in net.head_names:
        torch.nn.init.zeros_(twin.get_parameter(name))
    assert not twin(batch).logits.any()
    assert torch.equal(net(batch).logits, before)


class Bare(nn.Module):
    """Parameters and a buffer of the module itself, and dropout by its own mode."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, num_classes))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("mean", torch.zeros(num_features))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.mean(dim=0))
        return F.dropout(self.scale * (x - self.mean) @ self.weight, 0.5, self.training)


def test_parameters_buffers_and_mode_of_the_module_itself() -> None:
    net = PlainNet(Bare(4, 3), 4, 3)
    assert [name for name, _ in net.named_parameters()] == ["weight", "mean"]
    assert statistics_of(net) == statistics_of(copy.deepcopy(net)) == {"mean"}  # training changes it
    assert [name for name, _ in net.named_buffers()] == ["scale"]  # training does not
    batch = graph_of(4)
    outputs = [net.train(mode)(batch).logits for mode in (True, False)]
    assert (outputs[0] == 0).any()
    assert not (outputs[1] == 0).any()
    net.mean.data.zero_()
    other = {"weight": torch.zeros(4, 3), "mean": torch.zeros(4)}
    assert not functional_call(net, other, (batch,), tie_weights=False).logits.any()
    torch.testing.assert_close(net(batch).logits, 2 * batch.plain.x.sum(dim=1, keepdim=True).expand(4, 3))


def test_buffers_that_training_changes_stay_with_their_client_or_are_shared(make_trainer: Any, federation: Any) -> None:
    means = {}
    for kind in ("personal", "shared"):
        trainer = make_trainer(num_rounds=2, executor=SequentialExecutor())
        trainer.fit(ClientModule(Bare, running_statistics=kind), federation, FedAvg(num_epochs=1))
        sent = set(trainer.run.strategy.shared)
        assert ("mean" in sent) == (kind == "shared")
        means[kind] = trainer.run.executor.state().parameters["mean"]
        assert means[kind].any(dim=1).all()
    assert not torch.allclose(means["personal"], means["shared"])


class Replaces(Bare):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        return x @ self.weight


class Counts(Bare):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x @ self.weight


class Pools(nn.Module):
    """PyG's normalization with a graph of each node replaces its running statistics."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.norm, self.last = (
            InstanceNorm(num_features, track_running_stats=True),
            nn.Linear(num_features, num_classes),
        )

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.last(global_mean_pool(self.norm(x, batch), batch))


class NeedsTypes(TwoLayers):
    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Any:
        return x


class HasHead(Encoder):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.conv(x, edge_index))


class EdgesFirst(TwoLayers):
    def forward(self, edge_index: Tensor, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, edge_index)


class Shadows(TwoLayers):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.plain_name = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Replaces, "Replaces replaces its buffer mean while it trains: change it in place"),
        (Pools, "Pools replaces its buffer norm.running_mean, norm.running_var while it trains: .* or do without it"),
        (Counts, "Counts counts in its buffer calls while it trains"),
        (NeedsTypes, "NeedsTypes.forward needs edge_type, which clients' graphs do not have"),
        (EdgesFirst, "EdgesFirst.forward begins with edge_index: let it begin with the features"),
        (HasHead, "HasHead returns 5 numbers per node, but there are 3 outputs, .* called head"),
        (Shadows, "Shadows has a part called plain_name, which is taken: rename it"),
        (GAT(7, 8, 2, 3), "GAT cannot compute on nodes of 6 features .RuntimeError: mat1 and mat2"),
        (Pair(6, 5), "Pair returns 5 logits per node, but there are 3 outputs"),
        (functools.partial(GCN, hidden_channels=8, num_layers=2, cached=True), "leave out cached=True"),
        (functools.partial(BatchNorm, momentum=None), "with momentum None: give it one"),
    ],
)
def test_what_clients_cannot_have_is_refused_by_name(net: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientModule(net).build(6, 3)


def test_an_instance_is_where_all_clients_start(make_trainer: Any, federation: Any) -> None:
    net = GAT(in_channels=6, hidden_channels=8, num_layers=2, out_channels=3)
    own = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(net), federation, FedAvg(num_epochs=1))
    start, state = trainer.run.architectures[0], trainer.run.executor.state().parameters
    assert start.keys() == own.keys() == state.keys()
    assert all(torch.equal(start[name], own[name]) for name in own)
    assert all(
        torch.equal(value, own[name]) for name, value in net.state_dict().items()
    )  # the user's net is left alone
    assert any(not torch.equal(state[name][0], own[name]) for name in own)


class OfCategories(nn.Module):
    """Vectors of the categories of nodes, whose numbers the features are."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(4, 6)
        self.conv = GraphConv(6, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.vectors(x.long()).mean(dim=-2), edge_index)


class WhereZero(nn.Module):
    """Puts something else where a feature is zero, which no random feature is."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.ones(num_features))
        self.conv = GraphConv(num_features, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x + (x == 0) * self.given, edge_index)


@pytest.mark.parametrize("kind", [OfCategories, WhereZero])
def test_features_may_be_numbers_of_things_and_are_compared_as_in_pyg(kind: Any, federation: Any) -> None:
    client = federation.clients[0]
    client = client.with_inputs((client.x_NF > client.x_NF.mean()).float()[:, :3])
    net = fitted(kind, 3, 2).eval()
    assert net.why_alone == ""
    dense = {"sparse_features": False}
    batch = single(GraphCollator([client], layout=dense, device=torch.device("cpu"), dtype=torch.float32)([0]))
    expected = net.plain_module(client.x_NF, client.edge_index_2E)
    torch.testing.assert_close(net(batch).logits, expected)


def test_an_instance_of_another_width_gets_a_head() -> None:
    model = ClientModule(GAT(in_channels=6, hidden_channels=8, num_layers=2, out_channels=5))
    model.build(6, 3)
    assert model.net.head_names == ("head.weight", "head.bias")
    assert model.net.embedding_channels == 5


def test_an_instance_of_the_packages_own_nets_is_taken() -> None:
    net = fl_lightning.models.GCN(6, 3)
    model = ClientModule(net)
    model.build(6, 3)
    assert model.net is not net
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), model.net.parameters(), strict=True))


def test_layers_of_another_number_than_the_last_are_no_head() -> None:
    class Wrapped(nn.Module):
        def __init__(self, num_features: int, num_classes: int) -> None:
            super().__init__()
            self.backbone = TwoLayers(num_features, num_classes)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.backbone(x, edge_index)

    net = PlainNet(Wrapped(6, 3), 6, 3)
    assert net.head_names == ("backbone.conv2.bias", "backbone.conv2.lin.weight")


@pytest.mark.parametrize(("strategy", "kept"), [(FedPer, "conv2.*"), (FedRep, "conv2.*"), (FedBABU, "conv2.*")])
def test_the_last_layer_stays_local_whatever_its_name(
    strategy: Any, kept: str, make_trainer: Any, federation: Any
) -> None:
    trainers = []
    for personal in (None, [kept]):
        trainer = make_trainer(num_rounds=2)
        given = strategy() if personal is None else strategy(personal=personal)
        trainer.fit(ClientModule(TwoLayers), federation, given)
        assert trainer.run.strategy.kept_local == ("conv2.bias", "conv2.lin.weight")
        trainers.append(trainer)
    one, other = (trainer.run.executor.state().parameters for trainer in trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert trainers[0].run.strategy.shared == ("conv1.bias", "conv1.lin.weight")


def test_a_pattern_that_matches_nothing_names_the_modules_own_parameters(make_trainer: Any, federation: Any) -> None:
    with pytest.raises(ValueError, match=r"pattern 'lin.\*' matches none .*: conv1.bias, conv1.lin.weight, conv2.bias"):
        make_trainer().fit(ClientModule(TwoLayers), federation, FedPer(personal=["lin.*"]))


class ReadsEdges(nn.Module):
    """Notes what it is given."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.lin = nn.Linear(num_features, num_classes)
        self.seen: list[Any] = []

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        self.seen.append((edge_weight, edge_attr))
        return self.lin(x)


class ReadsData(ReadsEdges):
    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.edge_weight, data.edge_attr)


@pytest.mark.parametrize("kind", [ReadsEdges, ReadsData])
def test_forward_is_given_weights_and_attributes_of_edges(kind: type[ReadsEdges]) -> None:
    module = kind(4, 3)
    net = PlainNet(module, 4, 3)
    edge_weight, edge_attr = torch.rand(4), torch.rand(4, 2)
    net(graph_of(4, edge_weight=edge_weight, edge_attr=edge_attr))
    assert module.seen[-1][0] is edge_weight
    assert module.seen[-1][1] is edge_attr
    net(graph_of(4))
    assert module.seen[-1] == (None, None)


def test_a_net_that_needs_attributes_of_edges_says_so() -> None:
    class Needs(nn.Module):
        def __init__(self, num_features: int, num_classes: int) -> None:
            super().__init__()
            self.conv = NNConv(num_features, num_classes, nn.Linear(2, num_features * num_classes))

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.conv(x, edge_index, edge_attr)

    net = PlainNet(Needs(4, 3), 4, 3)
    assert net(graph_of(4, edge_attr=torch.rand(4, 2))).logits.shape == (4, 3)
    with pytest.raises(ValueError, match=r"Needs\.forward needs edge_attr, which the clients' graphs do not have"):
        net(graph_of(4))


def test_models_of_pyg_without_edge_dim_are_not_given_attributes() -> None:
    attributes = {"edge_attr": torch.rand(4, 2)}
    assert not PlainNet(GAT(4, 8, 2, 3), 4, 3).takes_edge_attr
    assert PlainNet(GAT(4, 8, 2, 3), 4, 3)(graph_of(4, **attributes)).logits.shape == (4, 3)
    aware = PlainNet(GAT(4, 8, 2, 3, edge_dim=2), 4, 3)
    assert aware.takes_edge_attr
    assert not aware.takes_edge_weight
    batch = graph_of(4, **attributes)
    with_attributes = aware.eval()(batch).logits
    batch.plain.edge_attr = None
    assert not torch.equal(aware(batch).logits, with_attributes)


class Scores(nn.Module):
    """Reads attributes, if there are any, beside a layer that was made without edge_dim."""

    def __init__(self, score: nn.Module, center: bool = False) -> None:
        super().__init__()
        self.conv, self.attention = GraphConv(4, 5), GATConv(5, 5)
        self.last, self.score, self.center = nn.Linear(5, 3), score, center

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        weight = None
        if edge_attr is not None:
            weight = self.score(edge_attr - edge_attr.mean(dim=0) if self.center else edge_attr).squeeze(-1)
        return self.last(self.attention(self.conv(x, edge_index, weight).relu(), edge_index))


def test_a_forward_of_the_users_own_gets_attributes_whatever_its_layers_read() -> None:
    net = PlainNet(Scores(nn.Linear(2, 1)), 4, 3)
    assert net.takes_edge_attr
    assert net.why_alone == ""
    assert not torch.equal(net(graph_of(4)).logits, net(graph_of(4, edge_attr=torch.rand(4, 2))).logits)


def test_what_a_net_does_with_and_without_edge_data_is_tried_on_a_stack() -> None:
    class Ones(Scores):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
            weight = x.new_ones(edge_index.size(1)) if edge_weight is None else edge_weight
            return self.last(self.conv(x, edge_index, weight).relu())

    centers = PlainNet(Scores(nn.Linear(2, 1), center=True), 4, 3)
    assert "on a stack of clients that it does not have on one graph" in centers.why_alone  # outputs, or gradients
    assert "reads edge_index (size)" in PlainNet(Ones(nn.Identity()), 4, 3).why_alone


def test_a_lazy_layer_that_a_trial_cannot_reach_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Scores's score\.weight is of a lazy layer .* give it its width"):
        PlainNet(Scores(nn.LazyLinear(1)), 4, 3)


def test_checkpoints_have_the_modules_own_names(make_trainer: Any, federation: Any, tmp_path: Path) -> None:
    strategy, trainer = Local(num_epochs=1), make_trainer(num_rounds=1, callbacks=[FederatedCheckpoint()])
    trainer.fit(ClientModule(TwoLayers), federation, strategy)
    (path,) = (trainer.run.folder / "checkpoints").glob("best.ckpt")
    content = torch.load(path, weights_only=True)
    assert set(content["clients"]["parameters"]) == set(TwoLayers(6, 3).state_dict())
    content["identity"]["model"] = content["identity"]["model"].replace("conv2", "head").replace("conv1", "net.conv1")
    old = tmp_path / "old.ckpt"
    checkpoint.write(old, content)
    with pytest.raises(ValueError, match=r"belongs to another run; model: checkpoint 'net\.conv1"):
        make_trainer(executor=SequentialExecutor()).fit(
            ClientModule(TwoLayers), federation, strategy, ckpt_path=str(old)
        )


def test_what_a_module_draws_at_random_follows_from_the_batch(make_trainer: Any, federation: Any) -> None:
    net, batch = PlainNet(TwoLayers(4, 3), 4, 3), graph_of(4)
    before = torch.get_rng_state()
    first = net(batch).logits
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(net(batch).logits, first)
    batch.key = torch.tensor(6)
    assert not torch.equal(net(batch).logits, first)
    states = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        trainer = make_trainer(num_rounds=1, executor=SequentialExecutor())
        trainer.fit(ClientModule(TwoLayers), federation, FedAvg(num_epochs=2))
        states.append(trainer.run.executor.state().parameters)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
