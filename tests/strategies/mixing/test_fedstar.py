"""FedStar: both channels by hand, what leaves a client, and clients whose features mean different things."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from both_executors import both_executors
from task_data import graph_data
from torch.optim import SGD, Adam
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.batches.graph_sets import GraphSetCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.data import ClientSplit
from fl_lightning.models import DecoupledGIN, PooledGCN
from fl_lightning.strategies import FedPer, FedStar, Local
from fl_lightning.testing import check_strategy

KEPT = ("features.*", "convs.*", "joint.*", "hidden.*", "head.*")


@pytest.fixture(scope="module")
def graph_sets() -> FederatedDataModule:
    return graph_data(batch_size=4)


def net(num_features: int = 3, **settings: Any) -> DecoupledGIN:
    torch.manual_seed(0)
    given = {"hidden_channels": 4, "num_layers": 2, "num_walk_steps": 3, "num_degrees": 2, **settings}
    return DecoupledGIN(num_features, 2, **given).double().eval()


def test_the_net_by_hand(graph_sets) -> None:
    """Graph by graph, with dense matrices; edges have weights, which only the structure channel's convolutions use."""
    collator = GraphSetCollator(graph_sets.clients, device=torch.device("cpu"), dtype=torch.float64)
    batch, held = single(collator([1])), graph_sets.clients[1]
    model = net()
    p = dict(model.named_parameters())
    output = model(batch)
    first = 0
    for graph, count in enumerate(held.num_nodes_G.tolist()):
        own = slice(first, first + count)
        first += count
        weight = batch.adjacency.matrix.to_dense()[own, own]
        edges = ((weight != 0) & ~torch.eye(count, dtype=torch.bool)).double()
        degree = edges.sum(dim=0)
        walk = edges / degree
        powers = [walk, walk @ walk, walk @ walk @ walk]
        one_hot = [(degree < 2).double(), (degree > 1).double()]
        embedded = torch.stack([*(power.diagonal() for power in powers), *one_hot], dim=1)
        s = embedded @ p["structure.first.weight"].T + p["structure.first.bias"]
        x = held.union.x_NF[own].double() @ p["features.weight"] + p["features.bias"]
        for layer in range(2):
            h = torch.cat([x, s], dim=1)
            h = h + edges @ h
            h = (h @ p[f"convs.{layer}.first.weight"].T + p[f"convs.{layer}.first.bias"]).relu()
            x = (h @ p[f"convs.{layer}.last.weight"].T + p[f"convs.{layer}.last.bias"]).relu()
            s = (weight @ s @ p[f"structure.convs.{layer}.weight"] + p[f"structure.convs.{layer}.bias"]).tanh()
        pooled = (torch.cat([x, s], dim=1) @ p["joint.weight"].T + p["joint.bias"]).sum(dim=0)
        hidden = pooled @ p["hidden.weight"].T + p["hidden.bias"]
        torch.testing.assert_close(output.embedding[graph], hidden)
        torch.testing.assert_close(output.logits[graph], hidden.relu() @ p["head.weight"].T + p["head.bias"])


def test_the_structure_channel_is_the_same_whatever_features_there_are(graph_sets) -> None:
    shapes = [{n: q.shape for n, q in net(width).structure.named_parameters()} for width in (3, 700)]
    assert shapes[0] == shapes[1]
    batch = single(GraphSetCollator(graph_sets.clients, device=torch.device("cpu"), dtype=torch.float64)([0]))
    for own, other in zip(*(net().structure(b) for b in (batch, batch.replace({"x": batch.x + 1}))), strict=True):
        assert torch.equal(own, other)


@both_executors
def test_it_is_fedper_with_the_rest_at_home(executor, graph_sets, make_trainer, assert_same) -> None:
    states = []
    for strategy in (FedStar(), FedPer(personal=KEPT, num_epochs=1)):
        trainer = make_trainer(executor=executor(), precision="64-true")
        client = ClientModule(functools.partial(DecoupledGIN, hidden_channels=8), functools.partial(SGD, lr=0.01))
        trainer.fit(client, graph_sets, strategy)
        states.append(trainer.run.executor.state().parameters)
    assert_same(*states)


def test_what_leaves_is_the_structure_channel_alone(graph_sets, make_trainer) -> None:
    trainer = make_trainer(callbacks=CommunicationLedger())
    trainer.fit(None, graph_sets, FedStar())
    assert set(trainer.run.strategy.shared) == {n for n in trainer.run.architectures[0] if n.startswith("structure.")}
    row, (numbers, kept) = trainer.run.history[-1], (32 * 64 + 64 + 3 * (64 * 64 + 64), trainer.run.executor.state())
    assert row["comm/bytes_total"] == 3 * 2 * 3 * 4 * numbers  # rounds, there and back, clients, float32
    for name, value in kept.parameters.items():
        apart = not torch.equal(value[0], value[1])
        assert apart or name.startswith("structure.")


def test_another_net_is_refused(graph_sets, make_trainer) -> None:
    with pytest.raises(ValueError, match="FedStar needs a net with a structure channel: set"):
        make_trainer().fit(ClientModule(PooledGCN), graph_sets, FedStar())


@pytest.mark.parametrize(("setting", "value"), [("num_walk_steps", 0), ("num_degrees", 0), ("pooling", "first")])
def test_settings_of_the_net(setting, value) -> None:
    with pytest.raises(ValueError, match=setting):
        net(**{setting: value})


@pytest.mark.full
def test_the_contract_on_sets_of_graphs() -> None:
    client = ClientModule(functools.partial(DecoupledGIN, hidden_channels=8), functools.partial(SGD, lr=0.01))
    check_strategy(FedStar(), client=client, data=five_sets())


def five_sets() -> FederatedDataModule:
    """Five clients with graphs."""
    from task_data import graphs_of

    data = FederatedDataModule(graphs_of(5), batch_size=6)
    data.setup()
    return data


def shapes(num_clients: int, count: int) -> Sequence[Sequence[Data]]:
    """Prisms and K₃,₃, which are 3-regular, and random edges; features tell a little, in each client in its own way."""
    draw = torch.Generator().manual_seed(1)
    prism = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2], [1, 2, 0, 4, 5, 3, 3, 4, 5]])
    bipartite = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [3, 4, 5] * 3])
    clients = []
    for client in range(num_clients):
        own = []
        for number in range(count):
            kind = number % 2
            edges = bipartite if kind else prism
            more = torch.randint(0, 12, (2, 6), generator=draw)
            x = torch.randn(12, 3, generator=draw)
            x[:, client % 3] += (1 if client < 3 else -1) * (2 * kind - 1) * 0.1
            edges = torch.cat([edges, edges + 6, more[:, more[0] != more[1]]], dim=1)
            own.append(Data(x=x, edge_index=edges, y=torch.tensor([kind])))
        clients.append(own)
    return clients


@pytest.mark.full
def test_shapes_are_learned_together_where_features_cannot_be(make_trainer) -> None:
    """Nine graphs a client are too few to learn shapes from."""
    data = FederatedDataModule(shapes(6, 44), splitter=ClientSplit(0.2, 0.4))  # type: ignore[arg-type]
    data.setup()
    found: dict[type, list[float]] = {FedStar: [], Local: []}
    for kind, seed in itertools.product(found, range(4)):
        trainer = make_trainer(num_rounds=50, seed=seed, executor=StackedExecutor(max_padding=0.9))
        model = functools.partial(DecoupledGIN, hidden_channels=16, num_layers=2, pooling="mean")
        result = trainer.fit(ClientModule(model, functools.partial(Adam, lr=0.01)), data, kind(num_epochs=3))
        found[kind].append(result["test/acc"])
    assert sum(found[FedStar]) / 4 > sum(found[Local]) / 4 + 0.03
