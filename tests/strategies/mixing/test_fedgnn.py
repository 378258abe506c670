"""FedGNN: who is matched, what is drawn and blended, what it reduces to, and a graph whose edges the cut took away."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from torch.func import functional_call
from torch.optim import Adam

from fl_lightning import ClientModule, Participation, Payload
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.callbacks.neighbor_ids import neighbor_ids
from fl_lightning.data import ClientGraph
from fl_lightning.federation import Federation
from fl_lightning.models import ExpandedGCN
from fl_lightning.strategies import FedAvg, FedGNN

SIZES = (30, 24, 18, 12, 8)
MODEL = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3


@pytest.fixture
def fit(fit):
    """Runs on the graphs with this strategy's net."""
    return functools.partial(fit, kind=FedGNN)


def set_up(num_clients: int = 3, training: tuple[int, ...] | None = None, **settings: Any) -> FedGNN:
    strategy = FedGNN(**settings)
    parameters = {"convs.0.weight": torch.zeros(6, 2, dtype=torch.float64)}
    known = {"num_features": 6, "seed": 0, "device": torch.device("cpu"), "num_outputs": 3}
    training = training or tuple(range(num_clients))
    strategy.setup(Federation(num_clients=num_clients, training_clients=training, parameters=parameters, **known))
    return strategy


def send(strategy: FedGNN, name: str, clients: tuple[int, ...], rows: Any, *, admit: bool = False) -> None:
    """Let clients register or send their hidden layers, with as many nodes each."""
    stage = strategy.initial_stages()[0] if name == "ids" else strategy.exchange()
    tensor = torch.tensor(rows, dtype=torch.int64 if name == "ids" else torch.float64)
    lengths = {name: torch.full((len(clients),), tensor.shape[1])}
    take = strategy.onboard if admit else strategy.aggregate
    take(stage, Payload(clients=clients, extras={name: tensor}, lengths=lengths))


#: Node 0 of client 0 and node 1 of client 1 have the same neighbors; node 1 of client 2 has one of them; node 0 of
#: client 1 has one in common with node 1 of its own client, and with nobody else.
IDS = [[[5, 7, 0], [0, 0, 0]], [[7, 9, 0], [5, 7, 0]], [[3, 0, 0], [5, 8, 0]]]


def test_twins_receive_each_other() -> None:
    strategy = set_up(rule="same_neighbors")
    send(strategy, "ids", (0, 1, 2), IDS)
    send(strategy, "hidden", (0, 1, 2), [[[1.0, 2], [0, 0]], [[3, 4], [5, 6]], [[7, 8], [9, 9]]])
    assert strategy.sent["received"][0, 0].tolist() == [5, 6]
    assert strategy.sent["received"][1, 1].tolist() == [1, 2]
    assert strategy.sent["number"].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert strategy.metrics() == {"server/matched": 2 / 6, "server/drawn": 1.0}


def test_means_of_what_was_sent_last() -> None:
    strategy = set_up()
    send(strategy, "ids", (0, 1, 2), IDS)
    send(strategy, "hidden", (0, 1), [[[1.0, 2], [0, 0]], [[3, 4], [5, 6]]])  # client 2 has not sent anything yet
    assert strategy.sent["received"][0, 0].tolist() == [4, 5]
    assert strategy.sent["received"][2, 1].tolist() == [3, 4]
    send(strategy, "hidden", (2,), [[[7.0, 8], [9, 9]]])  # the others lend what they sent before
    torch.testing.assert_close(strategy.sent["received"][0, 0], torch.tensor([17 / 3, 19 / 3]).double())
    assert strategy.sent["number"].tolist() == [[3, 0], [1, 2], [0, 2]]


def test_an_unseen_client_borrows_and_changes_nothing_for_the_others() -> None:
    strategy = set_up(training=(0, 1))
    send(strategy, "ids", (0, 1), IDS[:2])
    send(strategy, "hidden", (0, 1), [[[1.0, 2], [0, 0]], [[3, 4], [5, 6]]])
    before = {name: tensor[:2].clone() for name, tensor in strategy.sent.items()}
    assert strategy.expanded(Payload(clients=(2,))).extras["number"].tolist() == [[0, 0]]
    send(strategy, "ids", (2,), IDS[2:], admit=True)
    send(strategy, "hidden", (2,), [[[7.0, 8], [9, 9]]], admit=True)
    lent = strategy.expanded(Payload(clients=(2,)))
    assert lent.extras["number"].tolist() == [[0, 2]]
    assert lent.extras["received"][0, 1].tolist() == [3, 4]
    assert lent.lengths["number"].tolist() == [2]
    assert all(torch.equal(strategy.sent[name][:2], tensor) for name, tensor in before.items())


def test_at_most_so_many_are_drawn_and_anew_each_time() -> None:
    strategy = set_up(num_clients=2, num_neighbors=3)
    send(strategy, "ids", (0, 1), [[[1]] * 8, [[1]] * 8])
    seen = set()
    for _ in range(6):
        send(strategy, "hidden", (0, 1), [[[2.0**v, 0] for v in range(8)]] * 2)
        assert (strategy.sent["number"] == 3).all()
        total = (3 * strategy.sent["received"][0, 0, 0]).round().int().item()
        assert bin(total).count("1") == 3
        seen.add(total)
    assert len(seen) > 3


def test_the_second_convolution_hears_of_others(graphs) -> None:
    torch.manual_seed(0)
    net = ExpandedGCN(6, 3, hidden_channels=4).double().eval()
    batch = single(GraphCollator(graphs[:1], device=torch.device("cpu"), dtype=torch.float64)([0]))
    received, share = torch.randn(30, 4).double(), torch.rand(30).double()
    a = batch.adjacency.matrix.to_dense()
    h = (a @ graphs[0].x_NF.double() @ net.convs[0].weight + net.convs[0].bias).relu()
    mixed = (1 - share)[:, None] * (a @ h) + share[:, None] * received
    logits = net.head((mixed @ net.convs[1].weight + net.convs[1].bias).relu())
    torch.testing.assert_close(net(batch, received, share).logits, logits)
    plain = functional_call(net, dict(net.named_parameters()), (batch, received, torch.zeros(30).double()))
    assert torch.equal(plain.logits, net(batch).logits)


def test_one_convolution_is_too_few() -> None:
    with pytest.raises(ValueError, match="num_layers must be at least 2, got 1"):
        ExpandedGCN(6, 3, num_layers=1)


@both_executors
def test_in_the_warm_up_it_is_fedavg(executor, fit, assert_same) -> None:
    runs = [fit(each, executor) for each in (FedGNN(num_warmup_rounds=3), FedAvg())]
    assert_same(*(dict(run.run.executor.state().tensors()) for run in runs))
    later = fit(FedGNN(num_warmup_rounds=0), executor).run.executor.state().parameters
    assert (later["head.weight"] - runs[1].run.executor.state().parameters["head.weight"]).abs().max() > 1e-3


@both_executors
def test_where_nobody_is_matched_it_is_fedavg(executor, fit, graphs, given_clients, assert_same) -> None:
    strangers = [
        dataclasses.replace(graph, neighbor_ids_NM=torch.full((graph.num_nodes, 1), 1 + client))
        for client, graph in enumerate(graphs)
    ]
    data = given_clients(strangers)
    runs = [fit(each, executor, data) for each in (FedGNN(num_warmup_rounds=0), FedAvg())]
    assert_same(*(dict(run.run.executor.state().tensors()) for run in runs))
    assert [row["test/acc"] for row in runs[0].run.history] == [row["test/acc"] for row in runs[1].run.history]


def test_clients_that_know_no_ids_are_reported(fit, graphs, given_clients) -> None:
    data = given_clients([dataclasses.replace(graph, neighbor_ids_NM=None) for graph in graphs])
    with pytest.warns(UserWarning, match=r"so this is FedAvg: add fl_lightning\.callbacks\.NeighborIds to"):
        trainer = fit(FedGNN(num_warmup_rounds=0), data=data)
    assert trainer.run.history[-1]["server/matched"] == 0


@both_executors
def test_labels_outside_the_training_nodes_are_not_used(executor, relabeled, fit, assert_same) -> None:
    states = []
    for data in relabeled:
        trainer = fit(FedGNN(num_warmup_rounds=0), executor, data)
        states.append([trainer.run.strategy.state_dict(), dict(trainer.run.executor.state().tensors())])
    assert_same(*states)


def test_bytes(fit) -> None:
    """A row for each node up in an exchange; down it and the number of nodes that it is of, in every round after."""
    strategy = FedGNN(num_warmup_rounds=1, refresh_every=2)
    history = fit(strategy, callbacks=CommunicationLedger(), num_rounds=4).run.history
    ids = sum(SIZES) * 8 * strategy.sent["ids"].shape[2]
    row, nodes = 8 * 4, sum(SIZES)
    for number, metrics in enumerate(history):
        exchanges = number % 2 == 1
        assert metrics["comm/bytes_up"] == 5 * 4 * MODEL + exchanges * nodes * row + (ids if number == 0 else 0)
        down = 5 * 4 * MODEL * (2 if exchanges else 1) + (nodes * (row + 8) if number else 0)
        assert metrics["comm/bytes_down"] == down


@both_executors
def test_some_clients_are_absent(executor, fit) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2)
    history = fit(FedGNN(num_warmup_rounds=0, refresh_every=1), executor, participation=busy, num_rounds=6).run.history
    assert 0 < history[-1]["server/matched"] <= 1
    assert history[-1]["server/drawn"] <= 10


def scattered_clients(seed: int, *, num_clients: int = 6, num_nodes: int = 480) -> list[ClientGraph]:
    """A graph of four communities whose nodes were given out at random: five of six edges are cut."""
    draw = torch.Generator().manual_seed(seed)
    y_N = torch.randint(4, (num_nodes,), generator=draw)
    x_NF = torch.randn(4, 16, generator=draw)[y_N] + 3.0 * torch.randn(num_nodes, 16, generator=draw)
    alike_NN = y_N[:, None] == y_N
    linked_NN = (torch.rand(num_nodes, num_nodes, generator=draw) < torch.where(alike_NN, 0.04, 0.002)).triu(1)
    linked_NN = linked_NN | linked_NN.T
    ids_NM = neighbor_ids(linked_NN.nonzero().T, num_nodes, secret="test", max_ids=100)
    owner_N = torch.randperm(num_nodes, generator=draw) % num_clients
    role_N = torch.randperm(num_nodes, generator=draw) % 5
    clients = []
    for client in range(num_clients):
        own = (owner_N == client).nonzero().flatten()
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF[own],
                edge_index_2E=linked_NN[own][:, own].nonzero().T,
                y_N=y_N[own],
                train_mask_N=role_N[own] == 0,
                val_mask_N=role_N[own] == 1,
                test_mask_N=role_N[own] >= 2,
                node_idx_N=own,
                neighbor_ids_NM=ids_NM[own],
            )
        )
    return clients


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_helps_where_neighbors_were_cut_away(seed, given_clients, make_trainer) -> None:
    actual = []
    for strategy in (FedAvg(), FedGNN(num_warmup_rounds=2)):
        net = functools.partial(ExpandedGCN, hidden_channels=16)
        model = ClientModule(net, functools.partial(Adam, lr=0.02))
        trainer = make_trainer(num_rounds=20)
        data = given_clients(scattered_clients(seed), num_classes=4)
        actual.append(trainer.fit(model, data, strategy)["test/acc"])
    assert actual[1] > actual[0] + 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_neighbors": 0}, r"strategy\.num_neighbors must be at least 1, got 0"),
        ({"num_warmup_rounds": -1}, r"strategy\.num_warmup_rounds must not be negative, got -1"),
        ({"rule": "all"}, r"strategy\.rule must be 'common_neighbor' or 'same_neighbors', got 'all'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedGNN(**settings)


def test_another_net_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"FedGNN needs a net for expanded graphs: set model\.net to"):
        make_trainer().fit(make_model(), federation, FedGNN())
