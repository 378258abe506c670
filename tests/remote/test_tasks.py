"""Tasks at sites: they are enrolled with, compared, and come to the same numbers as in one process."""

import csv
import dataclasses
import functools

import pytest
import torch
from sites import OPEN, assert_same_clients, make_sites
from task_data import LabeledRows, graph_data, link_data, node_data, relational_graph
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor
from fl_lightning.data import InMemorySource, NeighborSampler
from fl_lightning.models import GCN, MLP, LinkGCN, PooledGCN
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import LoopbackChannel, Message, SitePolicy, federate
from fl_lightning.remote.digests import content_of
from fl_lightning.strategies import FedAvg, FedProto
from fl_lightning.tasks import Drawing, LinkPrediction, NodeClassification, NodeRegression, Task


def plain(net) -> ClientModule:
    return ClientModule(functools.partial(net, hidden_channels=8), functools.partial(SGD, lr=0.05))


def model(net, task: Task) -> ClientModule:
    made = plain(net)
    made.take_task(task)
    return made


def strategy() -> FedAvg:
    return FedAvg(num_epochs=2)


@pytest.mark.parametrize("kind", ["numbers", "labels", "rows", "graphs", "links", "parts"])
def test_sites_come_to_the_same(kind, make_trainer, tmp_path) -> None:
    drawing = Drawing(batch_size=5) if kind in ("rows", "graphs", "links") else Drawing()
    if kind == "rows":
        data, net = FederatedDataModule(LabeledRows(), batch_size=5), MLP
        data.setup()
    elif kind == "graphs":
        data, net = graph_data(batch_size=5), PooledGCN
    elif kind == "links":
        data, net = link_data(tmp_path / "cache", batch_size=5), LinkGCN
    else:
        data, net = node_data("numbers" if kind == "parts" else kind, tmp_path / "cache"), GCN
    if kind == "parts":
        data.sampler, data.batch_size = NeighborSampler([2, 2]), 5
        drawing = data.drawing
    sites = make_sites(
        data.clients, tmp_path / "sites", lambda: (model(net, data.task), strategy()), OPEN, drawing=drawing
    )
    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    expected = local.fit(plain(net), data, strategy())
    remote, the_strategy = make_trainer(num_rounds=2), strategy()
    elsewhere = federate(remote, LoopbackChannel(sites), the_strategy, relation_graph=Ring())
    assert elsewhere.registry.task == data.task
    result = remote.fit(plain(net), elsewhere, the_strategy)
    assert result == expected
    assert_same_clients(local, sites)
    if kind == "numbers":
        assert result["val/mse"] == min(row["val/mse"] for row in remote.run.history)
        remote.run.executor.predict(the_strategy.evaluations([0, 1, 2])[""], [0, 1, 2], 1)
        with (sites[0].folder / "predictions.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == data.clients[0].size
        assert list(rows[0])[2:] == ["split", "target_0", "prediction_0", "target_1", "prediction_1"]


@pytest.mark.parametrize("kind", ["nodes", "rows", "graphs", "links"])
def test_a_digest_is_of_all_data_of_a_client(kind, tmp_path) -> None:
    """Of links and of sets of graphs it was of examples and roles alone: other features and edges made none."""
    if kind == "rows":
        data = FederatedDataModule(LabeledRows())
        data.setup()
    else:
        data = {
            "nodes": lambda: node_data("numbers", tmp_path / "cache"),
            "graphs": graph_data,
            "links": lambda: link_data(tmp_path / "cache"),
        }[kind]()
    own = data.clients[0]
    changed = [own.with_inputs(own.inputs + 1.0)]
    if kind in ("graphs", "links"):
        name = "union" if kind == "graphs" else "graph"
        graph = getattr(own, name)
        fewer = dataclasses.replace(graph, edge_index_2E=graph.edge_index_2E[:, :0], edge_weight_E=None)
        changed.append(dataclasses.replace(own, **{name: fewer}))
    assert content_of(own) not in map(content_of, changed)
    assert content_of(own) == content_of(dataclasses.replace(own, name="another"))


def test_a_comparison_with_few_links_says_nothing(make_trainer, tmp_path) -> None:
    """A client's AUROC counts pairs without a link as well, but one over a single link is about a single link."""
    data = link_data(tmp_path / "cache")
    clients = []
    for client, kept in zip(data.clients, (4, 5, 5), strict=True):
        link_P = client.test_mask_N & (client.y_N[:, 0] > 0.5)
        test_N = client.test_mask_N & (~link_P | (link_P.cumsum(0) <= kept))
        clients.append(dataclasses.replace(client, test_mask_N=test_N))
    sites = make_sites(clients, tmp_path / "sites", lambda: (model(LinkGCN, data.task), strategy()), SitePolicy())
    trainer, the_strategy = make_trainer(num_rounds=1), strategy()
    trainer.fit(plain(LinkGCN), federate(trainer, LoopbackChannel(sites), the_strategy), the_strategy)
    scores = trainer.run.scores[""].extras
    for name in ("auroc", "average_precision", "mrr"):
        assert (scores[f"test/{name}"][:, 1] > 0).tolist() == [False, True, True]
    assert scores["test/acc"][:, 1].tolist() == [64, 65, 65]


def relational_sites(folder):
    """Three clients, the last with links of the relation 0 alone, and a site for each as it sees its own data."""
    graph = relational_graph()
    graph.edge_type[graph.edge_index[0] >= 60] = 0
    data = link_data(folder / "cache", source=InMemorySource(graph))
    counts = [int(client.relation_P.max()) + 1 for client in data.clients]
    assert counts == [2, 2, 1]

    def sites(clients):
        tasks = iter([LinkPrediction(num_relations=count) for count in counts])
        return make_sites(clients, folder / "sites", lambda: (client_of(next(tasks)), strategy()))

    return data, sites


def client_of(task: Task) -> ClientModule:
    made = ClientModule(None, functools.partial(SGD, lr=0.05))  # the default net tells relations apart
    made.take_task(task)
    return made


def test_all_nets_tell_the_relations_of_all_sites_apart(make_trainer, caplog, tmp_path) -> None:
    data, sites = relational_sites(tmp_path)
    expected = make_trainer(num_rounds=1, executor=SequentialExecutor()).fit(client_of(data.task), data, strategy())
    trainer, the_strategy, made = make_trainer(num_rounds=1), strategy(), sites(data.clients)
    for _ in range(2):  # whoever has been in a federation says the same of the own data
        result = trainer.fit(client_of(data.task), federate(trainer, LoopbackChannel(made), the_strategy), the_strategy)
        assert result == expected
        assert "site-0 has 2 relations, other sites as few as 1: all nets have 2; number them alike" in caplog.text
        caplog.clear()


def test_a_site_without_relations_is_refused_where_others_have_some(make_trainer, tmp_path) -> None:
    data, sites = relational_sites(tmp_path)
    made = sites([*data.clients[:2], dataclasses.replace(data.clients[2], relation_P=None)])
    trainer, the_strategy = make_trainer(num_rounds=1), strategy()
    elsewhere = federate(trainer, LoopbackChannel(made), the_strategy)
    with pytest.raises(
        ValueError, match="client-02: the links of the federation are of 2 relations, and those here of"
    ):
        trainer.fit(client_of(data.task), elsewhere, the_strategy)
    with pytest.raises(ValueError, match=r"site-0: its data have 2 relations, but policy.max_outputs is 1 at the serv"):
        federate(trainer, LoopbackChannel(made), the_strategy, max_outputs=1).prepare_data()


def test_sites_of_different_tasks_are_refused(make_trainer, tmp_path) -> None:
    data = node_data("labels", tmp_path / "cache")
    tasks = iter([NodeClassification(multi_label=True), NodeRegression(), NodeRegression()])
    sites = make_sites(data.clients, tmp_path / "sites", lambda: (model(GCN, next(tasks)), strategy()))
    with pytest.raises(
        ValueError, match=r"the sites' task must be the same: .*'multi_label': True, 'name': 'NodeClassification'"
    ):
        federate(make_trainer(), LoopbackChannel(sites), strategy()).prepare_data()


def test_a_site_refuses_another_task_than_its_own(make_trainer, tmp_path) -> None:
    data = node_data("numbers", tmp_path / "cache")
    sites = make_sites(data.clients, tmp_path / "sites", lambda: (model(GCN, data.task), strategy()))
    seen = []

    class Recorded(LoopbackChannel):
        def ask(self, messages):
            seen.extend(messages.values())
            yield from super().ask(messages)

    trainer, the_strategy = make_trainer(num_rounds=1), strategy()
    elsewhere = federate(trainer, Recorded(sites), the_strategy)
    trainer.fit(plain(GCN), elsewhere, the_strategy)
    start = next(message for message in seen if message.kind == "start")
    for task, why in (
        ({"name": "NodeClassification", "multi_label": False}, "its task cannot be this site's"),
        ({"name": "Guessing"}, "task must be one of NodeClassification, NodeRegression"),
        ("NodeRegression", "task must be one of"),
        ({"name": "NodeRegression", "multi_label": False}, "task must have name and nothing else"),
        (
            {"name": "LinkPrediction", "num_relations": True, "across_clients": False},
            "num_relations must be an integer",
        ),
    ):
        wrong = Message(kind="start", about={**start.about, "task": task}, tensors=start.tensors)
        response = Message.read(sites[0].respond(wrong.wire))
        assert response.kind == "failure"
        assert why in response.about["why"]


def test_a_site_whose_data_have_another_task_now_begins_anew(make_trainer, tmp_path) -> None:
    """The message that was kept from before made it take the old task, so that it could not even enroll."""
    numbers = node_data("numbers", tmp_path / "cache")
    before = make_sites(numbers.clients[:1], tmp_path / "sites", lambda: (model(GCN, numbers.task), strategy()))
    trainer, the_strategy = make_trainer(num_rounds=1), strategy()
    trainer.fit(plain(GCN), federate(trainer, LoopbackChannel(before), the_strategy), the_strategy)
    classes = dataclasses.replace(numbers.clients[0], y_N=torch.arange(numbers.clients[0].size) % 3)
    (now,) = make_sites([classes], tmp_path / "sites", lambda: (model(GCN, NodeClassification()), strategy()))
    card = Message.read(now.respond(Message(kind="enroll", about={"strategy": "FedAvg"}).wire))
    assert not now.is_started
    assert (card.kind, card.about.get("task")) == ("response", NodeClassification().plain)
    (again,) = make_sites(numbers.clients[:1], tmp_path / "sites", lambda: (model(GCN, numbers.task), strategy()))
    assert again.is_started


def test_sites_with_other_features_are_refused(make_trainer, tmp_path) -> None:
    data = graph_data()
    wide = data.clients[1]
    wide = dataclasses.replace(wide, union=dataclasses.replace(wide.union, x_NF=wide.union.x_NF.repeat(1, 2)))
    clients = [data.clients[0], wide]
    sites = make_sites(clients, tmp_path / "sites", lambda: (model(PooledGCN, data.task), strategy()))
    match = r"the sites' num_features must be the same: {.*: 3, .*: 6}. Give all sites the same features, or"
    with pytest.raises(ValueError, match=match):
        federate(make_trainer(), LoopbackChannel(sites), strategy()).prepare_data()


def test_strategies_for_classes_refuse_sites_with_numbers(make_trainer, tmp_path) -> None:
    data = node_data("numbers", tmp_path / "cache")
    sites = make_sites(data.clients, tmp_path / "sites", lambda: (model(GCN, data.task), FedProto()))
    trainer, strategy = make_trainer(), FedProto()
    with pytest.raises(ValueError, match="FedProto is for classes, but the targets are numbers"):
        trainer.fit(ClientModule(), federate(trainer, LoopbackChannel(sites), strategy), strategy)
