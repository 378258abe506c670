"""FedSage+: the generator's losses by hand, the exchange's gradient, the completed graph, what it reduces to."""

import dataclasses
import functools
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from both_executors import both_executors
from torch.optim import Adam

from fl_lightning import Callback, ClientModule, StackedExecutor
from fl_lightning.batches import ClientGraph, GraphBatch
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.models import GraphSAGE
from fl_lightning.models.neighbor_generator import Generated, NeighborGenerator
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedSage, FedSagePlus
from fl_lightning.strategies.mixing import neighbor_exchange as exchange
from fl_lightning.strategies.mixing import neighbor_generation
from fl_lightning.strategies.mixing.neighbor_generation_client import NeighborGenerationClient

FEW = {"pretrain_epochs": 3, "refine_epochs": 2}
SMALL = {"encoder_channels": (8, 8), "generator_channels": (8, 8)}


@pytest.fixture
def model():
    """A client with a small classifier and a small generator."""

    def build(kind=NeighborGenerationClient, **settings):
        net = functools.partial(GraphSAGE, hidden_channels=8, dropout=0.5)
        return kind(net, **({**SMALL, **settings} if kind is NeighborGenerationClient else {}))

    return build


@pytest.fixture
def fit(federation, make_trainer, model):
    """Run on the graphs."""

    def run(strategy, executor=StackedExecutor, data=None, kind=NeighborGenerationClient, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(model(kind), data or federation, strategy)
        return trainer

    return run


def one(graph: ClientGraph) -> GraphBatch:
    return single(GraphCollator([graph], device=torch.device("cpu"), dtype=torch.float64)([0]))


def knows(batch: GraphBatch, share: float = 0.5, slots: int = 5) -> Context:
    """What a client knows after it has hidden nodes."""
    actual = neighbor_generation.hide(batch, torch.tensor(7), share, slots)
    return Context(client_state={f"impaired/{name}": tensor for name, tensor in actual.items()})


def test_the_nearest_target_counts() -> None:
    new = torch.tensor([[1.0, 0.8], [9.0, 9.0]], dtype=torch.float64)
    target = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 0.8]], dtype=torch.float64)
    apart, index = neighbor_generation.nearest(new, target, torch.tensor([True, True, False]))
    assert apart[0].item() == pytest.approx(0.02)  # (1/5) · 0.02 = 0.004 with five slots and one node
    assert index.tolist() == [1, 1]
    assert neighbor_generation.nearest(new, target, torch.tensor([False] * 3))[0].tolist() == [0, 0]
    assert neighbor_generation.nearest(target, target, torch.tensor([True] * 3))[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 3.0, 2.0)])
def test_what_the_generator_learns_and_how_wrong_it_is(weights, graphs, monkeypatch) -> None:
    """By a loop over nodes, slots and targets."""
    batch, client = one(graphs[0]), ClientModule(GraphSAGE)
    context, draw = knows(batch), torch.Generator().manual_seed(0)
    context = dataclasses.replace(context, received={"key": torch.tensor(3)})
    used_NS = torch.arange(5) < torch.randint(6, (30, 1), generator=draw)
    features_NSF, number_N, logits_NK = (
        torch.randn(*shape, generator=draw).double() for shape in ((30, 5, 6), (30,), (30, 3))
    )
    made = Generated(number_N, features_NSF * used_NS[..., None], used_NS, logits_NK)
    hidden_N, lost_NS, taught_N = (context.client_state[f"impaired/{name}"] for name in ("hidden", "lost", "taught"))
    missing_N = neighbor_generation.num_lost(batch, context)
    x_NF = graphs[0].x_NF.double()
    count = features = 0.0
    errors, differences = [], []
    for v in range(30):
        targets = x_NF[lost_NS[v][lost_NS[v] >= 0]]
        made_of_v = made.features[v, used_NS[v]] if len(targets) else x_NF[:0]
        apart = [float((each - targets).square().sum(dim=1).min()) for each in made_of_v]
        errors += apart
        difference = abs(float(number_N[v] - missing_N[v]))
        if not hidden_N[v]:
            differences.append(difference)
        if taught_N[v]:
            count += 0.5 * difference**2 if difference < 1 else difference - 0.5
            features += sum(apart) / 6 / 5
    train_N = batch.train_mask & ~hidden_N
    classes = float(F.cross_entropy(logits_NK[train_N], batch.y[train_N]))
    terms = count / int(taught_N.sum()), features / int(taught_N.sum()), classes
    actual = neighbor_generation.local_loss(client, made, batch, context, weights)
    assert float(actual) == pytest.approx(sum(w * term for w, term in zip(weights, terms, strict=True)))

    monkeypatch.setattr(neighbor_generation, "generate", lambda *arguments, **settings: made)
    metrics = neighbor_generation.generation_metrics(client, {}, batch, context)
    assert float(metrics["generated_neighbors"]) == int(used_NS.sum())
    assert float(metrics["count_error"]) == pytest.approx(sum(differences) / len(differences))
    assert float(metrics["feature_error"]) == pytest.approx(sum(errors) / len(errors))


def test_hidden_nodes_and_the_neighbors_that_lost_them(graphs) -> None:
    batch = one(graphs[0])
    client_state = knows(batch).client_state
    hidden_N, lost_NS = client_state["impaired/hidden"], client_state["impaired/lost"]
    assert int(hidden_N.sum()) == round(0.5 * int(batch.val_mask.sum()) + 1e-9)
    assert (hidden_N <= batch.val_mask).all()
    edge_2E = graphs[0].edge_index_2E
    number_N = neighbor_generation.num_lost(batch, Context(client_state=client_state))
    for node in range(len(hidden_N)):
        near = edge_2E[1, edge_2E[0] == node]
        hidden = set(near[hidden_N[near]].tolist())
        assert set(lost_NS[node][lost_NS[node] >= 0].tolist()) <= hidden
        assert int(number_N[node]) == len(hidden)
    nothing = knows(batch, share=0.0).client_state
    assert not nothing["impaired/hidden"].any()
    assert (nothing["impaired/lost"] < 0).all()


def test_both_exchanges_give_the_generator_the_same_gradient(graphs) -> None:
    """∂L_ij by the features that are exchanged, then the chain rule, and at once."""
    batch, other = one(graphs[0]), one(graphs[1])
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 5 * 6, generator=draw, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(len(batch.y), 4, generator=draw, dtype=torch.float64)
    used = torch.rand(len(batch.y), 5, generator=draw) < 0.7
    used = used.cumprod(dim=1).bool()
    context, key = knows(batch), torch.tensor(5)

    def made() -> Generated:
        features = (latent @ weight).tanh().unflatten(1, (5, 6))
        return Generated(latent[:, 0], features, used, latent[:, :3])

    shown = exchange.shown(made(), batch, context, key, 40)
    received = {name: tensor.detach()[None] for name, tensor in shown.items()}
    received |= {"keys": key[None], "key": torch.tensor(9), "other": torch.tensor([True])}
    gradient = exchange.foreign_gradient(other, Context(received=received), slots=5, weight=0.5, noise_std=0.0)[0]
    index, is_one = exchange.shown_nodes(batch, context, key, 40)
    foreign = (gradient * is_one[:, None, None] * made().features[index]).sum()
    (chained,) = torch.autograd.grad(foreign, [weight])

    # the same targets, and the loss itself: each used slot's distance to what the gradient says is nearest
    count = int(is_one.sum())
    target = (shown["features"] - gradient * 5 * 6 * count / (2 * 0.5)).detach()
    counts = (gradient != 0).any(dim=2)
    assert counts.any()
    loss = 0.5 * (((made().features[index] - target).square().mean(dim=2)) * counts).sum() / (5 * count)
    (direct,) = torch.autograd.grad(loss, [weight])
    torch.testing.assert_close(chained, direct)
    real = other.features_of(torch.arange(len(other.y)))
    assert torch.cdist(target[counts], real).amin(dim=1).max() < 1e-6  # the targets are neighbors' features


def test_what_is_shown_is_what_the_gradient_is_of(graphs, model) -> None:
    """With the next exchange's noise and dropout."""
    batch, client, strategy = one(graphs[0]), model(), FedSagePlus(num_shown=6)
    client.build(6, 3)
    client.double().train()
    parameters = {name: p.detach() for name, p in client.parameter_dict().items()}
    context = knows(batch)
    shown = strategy.show(
        client, parameters, batch, dataclasses.replace(context, received={"next_key": torch.tensor(5)})
    )
    slots = torch.arange(5) < shown["used"][:, None]
    gradient = torch.randn(6, 5, 6, generator=torch.Generator().manual_seed(0)).double() * slots[..., None]
    losses = []
    for sent in (gradient, torch.zeros_like(gradient)):
        received = {"key": torch.tensor(5), "gradient": sent, "share": torch.tensor(0.5)}
        losses.append(strategy.refine(client, parameters, batch, dataclasses.replace(context, received=received)))
    assert slots.any()
    torch.testing.assert_close(losses[0] - losses[1], (gradient * shown["features"]).sum())


def test_an_exchange_has_one_key(fit) -> None:
    class Note(Callback):
        keys: ClassVar[dict[str, Any]] = {}

        def on_send(self, trainer: Any, stage: Any, payload: Any) -> None:
            if "key" in payload.extras:
                self.keys[stage.name] = tuple(payload.extras[name].tolist() for name in ("key", "next_key"))

    trainer = fit(FedSagePlus(**FEW), callbacks=[note := Note()], num_rounds=1)
    assert trainer.run.round_idx == 1
    for before, now in (("pretrain", 0), ("refine-0", 1)):
        key, following = note.keys[f"refine-{now}"]
        assert note.keys[before][1] == key
        assert note.keys[f"compare-{now}"] == (key, following)
        assert not set(key) & set(following)


def test_one_client_has_nothing_to_compare_with(graphs) -> None:
    batch = one(graphs[0])
    context, key = knows(batch), torch.tensor(5)
    made = Generated(torch.ones(30), torch.ones(30, 5, 6).double(), torch.ones(30, 5).bool(), torch.ones(30, 3))
    received = {name: tensor[None] for name, tensor in exchange.shown(made, batch, context, key, 8).items()}
    received |= {"keys": key[None], "key": key, "other": torch.tensor([False])}
    gradient = exchange.foreign_gradient(batch, Context(received=received), slots=5, weight=1.0, noise_std=0.5)
    assert (gradient == 0).all()


def test_generated_neighbors_send_to_real_nodes(graphs) -> None:
    graph = graphs[4]
    used = torch.zeros(8, 5, dtype=torch.bool)
    used[2, :2] = used[5, 0] = True
    made = Generated(torch.zeros(8), torch.full((8, 5, 6), 3.0), used, torch.zeros(8, 3))
    completed = neighbor_generation.with_generated_neighbors(graph, made)
    assert completed.num_nodes == 11
    assert (completed.x_NF[8:] == 3).all()
    assert not (completed.train_mask_N | completed.val_mask_N | completed.test_mask_N)[8:].any()
    pairs = set(map(tuple, completed.edge_index_2E.T.tolist()))
    assert pairs == {(b, a) for a, b in pairs}
    assert {(2, 8), (2, 9), (5, 10)} <= pairs
    torch.manual_seed(0)
    net = GraphSAGE(6, 3, hidden_channels=4, dropout=0.0).double().eval()
    before, after = net(one(graph)).logits, net(one(completed)).logits[:8]
    assert (before[[2, 5]] != after[[2, 5]]).any(dim=1).all()
    assert neighbor_generation.with_generated_neighbors(graph, made._replace(used=torch.zeros_like(used))) is graph


def grown(trainer: Any, federation: Any) -> list[int]:
    return [trainer.run.executor.collator.size(c) - federation.clients[c].num_nodes for c in range(5)]


@both_executors
def test_graphs_are_completed_and_the_generators_stay(executor, fit, federation) -> None:
    trainer = fit(FedSagePlus(pretrain_epochs=30, refine_epochs=1), executor)
    added = grown(trainer, federation)
    assert sum(added) > 0
    assert trainer.run.history[-1]["server/generated_neighbors"] == pytest.approx(sum(added) / 5)
    assert not any(name.startswith("generator.") for name in trainer.run.strategy.models)


@both_executors
def test_with_nothing_generated_it_is_fedsage(executor, fit, federation, assert_same) -> None:
    """Nothing is hidden, so that the numbers are learned to be zero; then the completed graphs are the graphs."""

    class Nothing(FedSagePlus):
        def setup(self, federation: Any) -> None:
            super().setup(federation)
            torch.nn.init.constant_(federation.client.net.generator.counter.bias, -100.0)

    with pytest.warns(UserWarning, match="FedSagePlus: no client generates a neighbor, so this is FedSage"):
        plus = fit(Nothing(hidden_fraction=0.0, **FEW), executor)
    plain = fit(FedSage(), executor, kind=ClientModule)
    assert grown(plus, federation) == [0] * 5
    assert [row["val/acc"] for row in plus.run.history] == [row["val/acc"] for row in plain.run.history]
    actual = {n.removeprefix("net."): t for n, t in plus.run.strategy.models.items()}
    assert_same(actual, dict(plain.run.strategy.models))


def test_a_weight_of_the_exchange_is_felt(fit) -> None:
    class Note(Callback):
        def on_stage_end(self, trainer: Any, stage: Any, payload: Any) -> None:
            if stage.name.startswith("compare"):
                trainer.sent = payload.extras["gradient"]

    actual = []
    for weights in ((1.0, 1.0, 1.0), (1.0, 0.0, 1.0)):
        trainer = fit(FedSagePlus(pretrain_epochs=5, refine_epochs=2, loss_weights=weights), callbacks=Note())
        actual.append((trainer.sent, trainer.run.executor.state().parameters["generator.features.2.weight"]))
    assert actual[0][0].any()
    assert not actual[1][0].any()
    assert (actual[0][1] - actual[1][1]).abs().max() > 1e-5


def cut_clients() -> list[ClientGraph]:
    """Features say nothing of a third of the nodes; their neighbors' do, and most of these are lost or hidden away."""
    clients = []
    for client in range(5):
        draw = torch.Generator().manual_seed(client)
        kind_N = torch.arange(80) % 2
        telling_N = torch.rand(80, generator=draw) < 0.5
        x_NF = torch.where(telling_N[:, None], 0.9 * torch.eye(6)[kind_N], 0.0) + 0.05 * torch.randn(
            80, 6, generator=draw
        )
        linked_NN = (torch.rand(80, 80, generator=draw) < 0.08) & (kind_N[:, None] == kind_N)
        linked_NN = linked_NN.triu(1)
        role_N = torch.randperm(80, generator=draw) % 4
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF,
                edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
                y_N=kind_N,
                train_mask_N=role_N == 0,
                val_mask_N=role_N == 1,
                test_mask_N=role_N >= 2,
                node_idx_N=torch.arange(80) + 80 * client,
            )
        )
    return clients


def coded_clients(seed: int, *, num_clients: int = 3, num_nodes: int = 150, num_codes: int = 24) -> list[ClientGraph]:
    """Nodes whose features are a code that stands for a class, and neighbors whose features are the class itself.

    Half of the codes occur among the training nodes, all of which have their two neighbors. Nodes of the other codes
    are tested, of those that have lost both. The neighbors validate, which is to say that they can be hidden.
    """
    draw = torch.Generator().manual_seed(seed)
    clients = []
    for client in range(num_clients):
        code_N = torch.randint(num_codes, (num_nodes,), generator=draw)
        whole_N = torch.rand(num_nodes, generator=draw) < 0.8
        owner_M = whole_N.nonzero().flatten().repeat_interleave(2)
        new_M, total = num_nodes + torch.arange(len(owner_M)), num_nodes + len(owner_M)
        y_N = torch.cat([code_N, code_N[owner_M]]) % 4
        shown_M12 = 0.8 * torch.eye(4)[y_N[new_M]].repeat(1, 3) + 0.1 * torch.randn(len(new_M), 12, generator=draw)
        x_NF = torch.block_diag(1.5 * torch.eye(num_codes)[code_N], shown_M12)
        place_N = torch.arange(total)
        known_N = F.pad(code_N < num_codes // 2, (0, len(new_M)))
        whole_N = F.pad(whole_N, (0, len(new_M)))
        edge_2E = torch.stack([torch.cat([owner_M, new_M]), torch.cat([new_M, owner_M])])
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF,
                edge_index_2E=edge_2E[:, (edge_2E[0] * total + edge_2E[1]).argsort()],
                y_N=y_N,
                train_mask_N=known_N & whole_N & (place_N < num_nodes // 2),
                val_mask_N=place_N >= num_nodes,
                test_mask_N=~known_N & ~whole_N & (place_N < num_nodes),
                node_idx_N=place_N + 1000 * client,
            )
        )
    return clients


def test_generated_neighbors_beat_averaging_where_neighbors_are_cut(given_clients, make_trainer) -> None:
    """Without them the classifier knows nothing of the codes that are tested; nor does a generator that labels teach.

    Of the last round: what validates has its neighbors.
    """
    data = given_clients(coded_clients(seed=0), num_classes=4)
    net, optimizer = functools.partial(GraphSAGE, hidden_channels=16, dropout=0.5), functools.partial(Adam, lr=0.01)
    wide = {"encoder_channels": (32, 32), "generator_channels": (32, 32), "num_slots": 2}
    generating = NeighborGenerationClient(net, optimizer, **wide, generator_dropout=0.0, generator_lr=0.01)
    settings = {"hidden_fraction": 0.75, "pretrain_epochs": 100, "refine_epochs": 1, "loss_weights": (1.0, 50.0, 1.0)}
    actual = []
    for strategy, model in (
        (FedSagePlus(**settings, generator_nodes="all", num_epochs=3), generating),
        (FedSagePlus(**settings, num_epochs=3), generating),
        (FedSage(num_epochs=3), ClientModule(net, optimizer)),
    ):
        trainer = make_trainer(seed=1, num_rounds=25)
        trainer.fit(model, data, strategy)
        actual.append(trainer.run.history[-1]["test/acc"])
    assert actual[0] > 0.7
    assert max(actual[1:]) < 0.5


@pytest.mark.full
def test_the_generator_learns_what_is_hidden(given_clients, fit) -> None:
    """How many neighbors a node has lost is told better than without training."""
    data = given_clients(cut_clients(), num_classes=2)
    settings = {"num_rounds": 1, "data": data}
    before, after = (
        fit(FedSagePlus(pretrain_epochs=epochs, refine_epochs=refined), **settings).run.history[-1]
        for epochs, refined in ((1, 0), (150, 5))
    )
    assert after["server/count_error"] < before["server/count_error"]
    assert 0 < after["server/generated_neighbors"] < before["server/generated_neighbors"]


@pytest.mark.parametrize(("rounding", "number"), [("nearest", [0, 1, 1, 2, 5]), ("down", [0, 0, 1, 1, 5])])
def test_rounding(graphs, rounding: str, number: list[int]) -> None:
    """What NeighGen says of five nodes, by the bias of its counter."""
    batch = one(graphs[0])
    for said, whole in zip((0.4, 0.75, 1.2, 1.8, 9.0), number, strict=True):
        net = NeighborGenerator(6, 3, hidden_channels=(4, 4), generator_channels=(4, 4), rounding=rounding).double()
        torch.nn.init.zeros_(net.counter.weight)
        torch.nn.init.constant_(net.counter.bias, said)
        made = net(batch, batch.example_mask, torch.tensor(3), drops=False)
        assert (made.used.sum(dim=1)[batch.example_mask] == whole).all()


def test_slots_that_nobody_uses_are_not_exchanged(graphs) -> None:
    """The gradient is the same without them."""
    batch, other = one(graphs[0]), one(graphs[1])
    context, key = knows(batch), torch.tensor(5)
    features = torch.rand(len(batch.y), 5, 6, dtype=torch.float64)
    used = torch.arange(5).expand(len(batch.y), 5) < 2
    made = Generated(torch.ones(len(batch.y)), features, used, torch.ones(len(batch.y), 3))
    received = {name: tensor[None] for name, tensor in exchange.shown(made, batch, context, key, 40).items()}
    received |= {"keys": key[None], "key": torch.tensor(9), "other": torch.tensor([True])}
    whole = exchange.foreign_gradient(other, Context(received=received), slots=5, weight=0.5, noise_std=0.0)
    fewer = {**received, "features": received["features"][:, :, :2]}
    gradient = exchange.foreign_gradient(other, Context(received=fewer), slots=5, weight=0.5, noise_std=0.0)
    assert gradient.any()
    assert torch.equal(gradient, whole[:, :, :2])
    assert not whole[:, :, 2:].any()


def test_bytes(fit) -> None:
    class Note(Callback):
        sizes: ClassVar[list[int]] = []

        def on_send(self, trainer: Any, stage: Any, payload: Any) -> None:
            if stage.name.startswith("compare"):
                self.sizes.append(payload.extras["features"].shape[-2])

    note = Note()
    trainer = fit(FedSagePlus(num_shown=4, **FEW), callbacks=[CommunicationLedger(), note])
    model = 2 * 6 * 8 + 8 + 2 * 8 * 8 + 8 + 8 * 3 + 3
    for row in trainer.run.history[1:]:
        assert row["comm/bytes_up"] == row["comm/bytes_down"] == 5 * 4 * model
    shown = 4 * 4 * 5 * 6 + 2 * 8 * 4 + 8  # features in float32, used and lost slots, and the number of nodes
    gradient = [4 * 4 * num_used * 6 for num_used in note.sizes]
    assert max(note.sizes) < 5
    up = trainer.run.history[0]["comm/bytes_up"] - 5 * 4 * model
    assert up == 5 * (3 * shown + 5 * sum(gradient) + 8 + 4 + 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_fraction": 1.5}, r"strategy\.hidden_fraction must be in \[0, 1\], got 1\.5"),
        ({"loss_weights": (1.0, -1.0, 1.0)}, r"strategy\.loss_weights must be three numbers from 0 on"),
        ({"generator_nodes": "hidden"}, r"strategy\.generator_nodes must be 'training' or 'all', got 'hidden'"),
        ({"num_shown": 0}, r"strategy\.num_shown must be at least 1, got 0"),
        ({"noise_std": -1.0}, r"strategy\.noise_std must not be negative, got -1"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedSagePlus(**settings)
    with pytest.raises(ValueError, match=r"model\.rounding must be 'nearest' or 'down', got 'up'"):
        NeighborGenerationClient(rounding="up")  # type: ignore[arg-type]


def test_its_clients_have_generators(fit) -> None:
    with pytest.raises(ValueError, match="FedSagePlus needs clients of the class NeighborGenerationClient"):
        fit(FedSagePlus(), kind=ClientModule)
