"""FedSpray: teacher, proxies and their optimizer by hand, what it reduces to, and clients that neighbors mislead."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from torch.optim import Adam

from fl_lightning import ClientModule, Payload, SequentialExecutor
from fl_lightning.batches import GraphBatch
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.data import ClientGraph
from fl_lightning.federation import Federation
from fl_lightning.models import ProxySAGE
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, FedSpray, Local

FEATURES = 6 * 64 + 64 + 2 * (3 * 64 + 3)


@pytest.fixture
def fit(fit):
    """Runs on the graphs with this strategy's net."""
    return functools.partial(fit, kind=FedSpray)


@pytest.fixture
def batch(graphs) -> GraphBatch:
    return single(GraphCollator(graphs[:1], device=torch.device("cpu"), dtype=torch.float64)([0]))


@pytest.fixture
def client() -> ClientModule:
    torch.manual_seed(0)
    client = ClientModule(functools.partial(ProxySAGE, hidden_channels=8, proxy_channels=4))
    client.build(6, 3)
    return client.double().eval()


def set_up(client: ClientModule, num_clients: int = 2, **settings: Any) -> FedSpray:
    strategy = FedSpray(**settings)
    parameters = {name: tensor.detach() for name, tensor in client.parameter_dict().items()}
    known = {"num_features": 6, "seed": 0, "device": torch.device("cpu"), "num_outputs": 3}
    training = tuple(range(num_clients))
    strategy.setup(Federation(num_clients=num_clients, training_clients=training, parameters=parameters, **known))
    return strategy


def situation(client: ClientModule, strategy: FedSpray, batch: GraphBatch) -> Context:
    """Proxies drawn at random, and the parameters as both what was received and what the client has."""
    draw = torch.Generator().manual_seed(3)
    num_nodes = len(batch.y)
    client_state = {
        name: spec.initial.expand(num_nodes, *spec.initial.shape) if spec.per_example else spec.initial
        for name, spec in strategy.client_state().items()
    }
    client_state["proxy/value"] = torch.randn(num_nodes, 4, generator=draw, dtype=torch.float64)
    client_state["gnn"] = torch.randn(num_nodes, 3, generator=draw, dtype=torch.float64)
    anchor = {name: tensor.detach() for name, tensor in client.parameter_dict().items()}
    received = {"proxies": torch.randn(3, 4, generator=draw, dtype=torch.float64)}
    return Context(anchor=anchor, received=received, client_state=client_state)


def test_the_teacher(client, batch, graphs) -> None:
    strategy = set_up(client, confidence=0.4)
    context = situation(client, strategy, batch)
    p, x = context.anchor, graphs[0].x_NF.double()
    e = (x @ p["features.weight"] + p["features.bias"]).relu()
    o = (e @ p["features.first_head.weight"].T + p["features.first_head.bias"]).softmax(dim=1)
    logits, reliable = strategy.teacher(client, batch, context)
    for v in range(len(x)):
        trains = bool(batch.train_mask[v])
        q = context.client_state["proxy/value"][v] if trains else o[v] @ context.received["proxies"]
        torch.testing.assert_close(logits[v], p["features.head.weight"] @ (e[v] + q) + p["features.head.bias"])
        assert bool(reliable[v]) == (trains or bool(o[v].max() > 0.4))
    assert reliable.sum() not in (batch.train_mask.sum(), len(x))  # the confidence says yes and no


def test_the_gnns_loss(client, batch) -> None:
    strategy = set_up(client, alignment_weight=2.0, confidence=0.4)
    context = situation(client, strategy, batch)
    teacher, reliable = strategy.teacher(client, batch, context)
    own = client.output(context.anchor, batch).logits
    p, g = teacher.softmax(dim=1)[reliable], own.softmax(dim=1)[reliable]
    labeled = torch.nn.functional.cross_entropy(own[batch.train_mask], batch.y[batch.train_mask])
    expected = labeled + 2 * (p * (p / g).log()).sum(dim=1).mean()
    torch.testing.assert_close(strategy.taught_loss(client, context.anchor, batch, context), expected)


def test_proxies_take_steps_of_adam(client, batch) -> None:
    """Against autograd and PyTorch's optimizer; nodes without a label keep theirs."""
    strategy = set_up(client, proxy_lr=0.05)
    context = situation(client, strategy, batch)
    q = context.client_state["proxy/value"].clone().requires_grad_()
    optimizer = Adam([q], lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        ours = Context(anchor=context.anchor, client_state={**context.client_state, "proxy/value": q})
        strategy.feature_loss(client, context.anchor, batch, ours).backward()
        optimizer.step()
        new = strategy.step_proxies(client, context.anchor, {}, batch, context).client_state
        client_state = {**context.client_state, **{name: value.detach() for name, value in new.items()}}
        kept = ~batch.train_mask
        assert torch.equal(client_state["proxy/value"][kept], context.client_state["proxy/value"][kept])
        context = dataclasses.replace(context, client_state=client_state)
        torch.testing.assert_close(client_state["proxy/value"], q.detach())


def test_the_loss_of_the_model_of_features_trains_all_of_it(client, batch) -> None:
    strategy = set_up(client)
    context = situation(client, strategy, batch)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in context.anchor.items()}
    loss = strategy.feature_loss(client, parameters, batch, context)
    gradient = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    moved = {name for name, each in zip(parameters, gradient, strict=True) if each is not None and each.any()}
    assert moved == set(strategy.shared)


def test_the_class_proxies(client, batch) -> None:
    strategy = set_up(client)
    context = situation(client, strategy, batch)
    batch = batch.replace({"train_mask": batch.train_mask & (batch.y != 1)})
    actual = strategy.class_proxies(client, {}, batch, context)
    of_two = batch.train_mask & (batch.y == 2)
    torch.testing.assert_close(actual["proxies"][2], context.client_state["proxy/value"][of_two].mean(dim=0))
    assert actual["counts"].tolist() == [int((batch.train_mask & (batch.y == k)).sum()) for k in range(3)]
    assert not actual["proxies"][1].any()


@pytest.mark.parametrize(("weighting", "share"), [("shares", 0.5 / (0.5 + 0.25)), ("examples", 2 / (2 + 10))])
def test_the_servers_proxies(weighting, share, client) -> None:
    strategy = set_up(client, proxy_weighting=weighting)
    before = strategy.proxies_KP
    torch.testing.assert_close(before[:, 0], torch.tensor([0, 0.01, 0.02]).double())
    sent = torch.arange(24).double().view(2, 3, 4) * torch.tensor([[1, 0, 0], [1, 1, 0]])[..., None]
    upload = Payload(
        clients=(0, 1),
        parameters={name: model.expand(2, *model.shape[1:]) for name, model in strategy.models.items()},
        extras={"class/proxies": sent, "class/counts": torch.tensor([[2, 0, 0], [10, 30, 0]]).double()},
        num_examples=torch.tensor([4, 40]),
    )
    strategy.aggregate(strategy.stages(0)[1], upload)
    torch.testing.assert_close(strategy.proxies_KP[0], share * sent[0, 0] + (1 - share) * sent[1, 0])
    torch.testing.assert_close(strategy.proxies_KP[1], sent[1, 1])  # who has no such node does not count
    assert torch.equal(strategy.proxies_KP[2], before[2])
    drift = (strategy.proxies_KP - before).norm(dim=1).mean()
    assert strategy.metrics()["server/proxy_drift"] == pytest.approx(float(drift))


@both_executors
def test_without_alignment_it_is_local(executor, fit, assert_same) -> None:
    alone = fit(Local(num_epochs=3), executor)
    beside = fit(FedSpray(num_epochs=3, alignment_weight=0.0), executor)
    states = [run.run.executor.state().parameters for run in (beside, alone)]
    for name in ("convs.0.weight", "convs.1.neighbor_weight", "head.weight"):
        assert torch.equal(states[0][name], states[1][name])
    assert [row["test/acc"] for row in beside.run.history] == [row["test/acc"] for row in alone.run.history]
    taught = fit(FedSpray(num_epochs=3), executor).run.executor.state().parameters
    assert (taught["head.weight"] - states[1]["head.weight"]).abs().max() > 1e-3


@both_executors
def test_one_client_is_a_federation(executor, graphs, given_clients, fit) -> None:
    history = fit(FedSpray(), executor, given_clients(graphs[:1])).run.history
    assert history[-1]["train/loss"] < history[0]["train/loss"]


@both_executors
def test_a_class_that_nobody_trains_on(executor, graphs, given_clients, fit) -> None:
    clients = [dataclasses.replace(g, train_mask_N=g.train_mask_N & (g.y_N != 2)) for g in graphs]
    strategy = FedSpray()
    fit(strategy, executor, given_clients(clients))
    assert (strategy.proxies_KP[2] == 0.02).all()
    assert (strategy.proxies_KP[:2] - torch.tensor([[0.0], [0.01]])).abs().min() > 0
    assert strategy.proxies_KP.isfinite().all()


@both_executors
def test_labels_outside_the_training_nodes_are_not_used(executor, relabeled, fit, assert_same) -> None:
    states = []
    for data in relabeled:
        trainer = fit(FedSpray(), executor, data)
        states.append([trainer.run.strategy.state_dict(), dict(trainer.run.executor.state().tensors())])
    assert_same(*states)


def test_bytes(fit) -> None:
    """The model of features and three proxies down; up it, class means, counts, and two metrics."""
    history = fit(FedSpray(), callbacks=CommunicationLedger()).run.history
    for row in history:
        assert row["comm/bytes_down"] == 5 * 4 * (FEATURES + 3 * 64)
        assert row["comm/bytes_up"] == 5 * 4 * (FEATURES + 3 * 64 + 3 + 2)
        assert {"server/alignment", "server/reliable", "server/proxy_drift", "features/test/acc"} <= row.keys()


def misled_clients(seed: int, num_nodes: int = 120, num_train: int = 12) -> list[ClientGraph]:
    """Classes are linked in pairs that differ from client to client, so that one GNN can make nothing of neighbors.

    Features tell the class, but to nobody who has few labels.
    """
    draw = torch.Generator().manual_seed(seed)
    center_KF = torch.randn(4, 24, generator=draw)
    clients = []
    for client in range(6):
        y_N = torch.randint(4, (num_nodes,), generator=draw)
        x_NF = center_KF[y_N] + 2.4 * torch.randn(num_nodes, 24, generator=draw)
        paired_NN = (y_N ^ (1 + client % 3))[:, None] == y_N
        linked_NN = ((torch.rand(num_nodes, num_nodes, generator=draw) < 0.12) & paired_NN).triu(1)
        role_N = torch.randperm(num_nodes, generator=draw)
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF,
                edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
                y_N=y_N,
                train_mask_N=role_N < num_train,
                val_mask_N=(role_N >= num_train) & (role_N < num_train + 30),
                test_mask_N=role_N >= num_train + 30,
                node_idx_N=torch.arange(num_nodes),
            )
        )
    return clients


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_helps_where_neighbors_mislead(seed, given_clients, make_trainer) -> None:
    """One GNN for all is behind, and so is one that only its own few labels teach."""
    actual = {}
    for strategy in (FedAvg(num_epochs=5), Local(num_epochs=5), FedSpray()):
        net = functools.partial(ProxySAGE, hidden_channels=32, num_layers=1)
        model = ClientModule(net, functools.partial(Adam, lr=0.01))
        trainer = make_trainer(num_rounds=12)
        result: dict[str, float] = trainer.fit(model, given_clients(misled_clients(seed), num_classes=4), strategy)
        actual[type(strategy)] = result["test/acc"]
    assert actual[FedSpray] > actual[FedAvg] + 0.05
    assert actual[FedSpray] > actual[Local]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alignment_weight": -1}, r"strategy\.alignment_weight must not be negative, got -1"),
        ({"confidence": 1.5}, r"strategy\.confidence must be in \[0, 1\], got 1\.5"),
        ({"proxy_weighting": "size"}, r"strategy\.proxy_weighting must be 'shares' or 'examples', got 'size'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedSpray(**settings)


def test_a_net_without_features_is_refused(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=SequentialExecutor())
    with pytest.raises(ValueError, match=r"FedSpray needs a net with a model of features: set model\.net to"):
        trainer.fit(make_model(), federation, FedSpray())
