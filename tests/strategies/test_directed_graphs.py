"""Strategies on graphs whose edges have directions, weights and attributes."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from both_executors import both_executors
from sites import assert_same_clients, make_sites, server_of
from strategies.test_contract import STRATEGIES, tiny
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.data import ClientGraph, ClientSplit, InMemorySource
from fl_lightning.models import DisentangledGCN, GraphSAGE, PyGNet
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.remote.digests import content_of
from fl_lightning.strategies import (
    FGGP,
    FGSSL,
    S2FGL,
    AdaFGL,
    FedAvg,
    FedGCN,
    FedGNN,
    FedPer,
    FedSagePlus,
    FedSSP,
    FedStruct,
    FedTAD,
)

ON_GRAPHS = [kind for kind in STRATEGIES if kind.needs_graphs or kind is FedAvg]
#: Refuse directed graphs.
BOTH_WAYS = [FedGCN, FedSagePlus, FedSSP, FedStruct, FedTAD, FGGP]


def directed(graphs: Sequence[ClientGraph], *, weighted: bool = False) -> list[ClientGraph]:
    """The graphs without a third of the directed edges, and perhaps with weights."""
    actual = []
    for idx, graph in enumerate(graphs):
        draw = torch.Generator().manual_seed(idx)
        kept_E = torch.rand(graph.num_edges, generator=draw) < 2 / 3
        weight_E = 0.5 + 2 * torch.rand(int(kept_E.sum()), generator=draw) if weighted else None
        edges_2E = graph.edge_index_2E[:, kept_E]
        actual.append(dataclasses.replace(graph, edge_index_2E=edges_2E, edge_weight_E=weight_E))
    return actual


def carrying(graphs: Sequence[ClientGraph], *, weights: bool = False, attributes: bool = False) -> list[ClientGraph]:
    """The graphs with weights of 1 and attributes of 0."""
    return [
        dataclasses.replace(
            graph,
            edge_weight_E=torch.ones(graph.num_edges) if weights else None,
            edge_attr_EK=torch.zeros(graph.num_edges, 2) if attributes else None,
        )
        for graph in graphs
    ]


def test_those_that_need_both_directions_are_known() -> None:
    assert {kind for kind in STRATEGIES if kind.needs_undirected} == set(BOTH_WAYS)
    assert {kind for kind in STRATEGIES if kind.adds_edges} == {FedGCN, FedSagePlus, FedStruct}


@pytest.mark.parametrize("kind", [kind for kind in ON_GRAPHS if kind not in BOTH_WAYS], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:.*not use the graph's edge_weight")
def test_both_executors_agree_on_directed_graphs_with_weights(
    kind, graphs, given_clients, make_model, make_trainer, assert_same
) -> None:
    """Also beside a client whose edges all go both ways."""
    data = given_clients([*directed(graphs[:2], weighted=True), *carrying(graphs[2:3], weights=True)])
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        result = trainer.fit(make_model(kind, dropout=0.3), data, tiny(kind, dropout=False))
        runs.append((result, trainer.run.strategy.state_dict()))
    assert_same(runs[1], runs[0], tolerance=1e-6)


def test_scores_on_the_union_see_directions_and_weights(
    graphs, given_clients, make_model, make_trainer, assert_same
) -> None:
    results = []
    for weighted in (True, False):
        data = given_clients(directed(graphs[:3], weighted=weighted))
        for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
            trainer = make_trainer(num_rounds=2, executor=executor, evaluate_union=True, precision="64-true")
            results.append(trainer.fit(make_model(), data, FedAvg(num_epochs=2)))
    assert any(name.startswith("union/") for name in results[0])
    assert_same(results[1], results[0], tolerance=1e-6)
    assert results[2]["union/val/loss"] != pytest.approx(results[0]["union/val/loss"], rel=1e-3)


@pytest.mark.parametrize("kind", BOTH_WAYS, ids=lambda kind: kind.__name__)
def test_directed_graphs_are_refused_by_name(kind, graphs, given_clients, make_model, make_trainer) -> None:
    data = given_clients(directed(graphs[:3]))
    remedy = "edges lack their reverse: set data.source.undirected to true, or choose another strategy"
    with pytest.raises(ValueError, match=f"^{kind.__name__} is for graphs whose edges go both ways.*{remedy}"):
        make_trainer().fit(make_model(kind), data, tiny(kind))


@pytest.mark.parametrize("carried", [{"weights": True}, {"attributes": True}], ids=["weights", "attributes"])
def test_generated_edges_would_lack_what_others_carry(carried, graphs, given_clients, make_model, make_trainer) -> None:
    data = given_clients(carrying(graphs[:3], **carried))
    what = "edge_weight" if "weights" in carried else "edge_attr"
    with pytest.raises(ValueError, match=f"^FedSagePlus adds edges .* whose {what} are unknown: remove them from"):
        make_trainer().fit(make_model(FedSagePlus), data, tiny(FedSagePlus))


def said(run: Callable[[], Any]) -> list[str]:
    """Warnings of a run that speak of edges."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in actual if "edge_" in str(warning.message)]


@pytest.mark.parametrize(
    ("kind", "net", "names"),
    [
        (FedAvg, None, None),
        (FedAvg, GraphSAGE, "GraphSAGE does"),
        (FedAvg, DisentangledGCN, "DisentangledGCN does"),
        (AdaFGL, None, "AdaFGL does"),
        (FedTAD, None, "FedTAD does"),
        (FGGP, None, "FGGP does"),
        (S2FGL, None, "S2FGL does"),
        (FedGNN, None, "FedGNN does"),
        (S2FGL, GraphSAGE, "GraphSAGE and S2FGL do"),
        (FGSSL, None, None),
    ],
    ids=lambda value: value if isinstance(value, str) or value is None else value.__name__,
)
def test_who_cannot_use_weights_says_so_once(kind, net, names, graphs, given_clients, make_model, make_trainer) -> None:
    data = given_clients(carrying(graphs[:3], weights=True))
    model = make_model(kind) if net is None else ClientModule(functools.partial(net, hidden_channels=8))
    actual = said(lambda: make_trainer(num_rounds=2).fit(model, data, tiny(kind)))
    assert [message.partition(" not use")[0] for message in actual] == ([] if names is None else [names])
    if names:
        verb = "treats" if names.endswith("does") else "treat"
        assert f"edge_weight and {verb} all edges alike. Choose another, or remove edge_weight from" in actual[0]


def test_who_cannot_use_attributes_says_so_once(graphs, given_clients, make_model, make_trainer) -> None:
    data = given_clients(carrying(graphs[:3], attributes=True))
    [actual] = said(lambda: make_trainer(num_rounds=2).fit(make_model(), data, FedAvg(num_epochs=1)))
    assert actual.startswith("GCN does not use the graph's edge_attr")
    gat = functools.partial(
        PyGNet, architecture="torch_geometric.nn.GAT", arguments={"hidden_channels": 4, "num_layers": 2, "edge_dim": 2}
    )
    assert not said(lambda: make_trainer(num_rounds=1).fit(ClientModule(gat), data, FedAvg(num_epochs=1)))


def test_some_clients_with_weights_and_some_without_are_refused(graphs, given_clients) -> None:
    with pytest.raises(
        ValueError, match=r"the clients' has_edge_weights must be alike: \{'client-00': True, 'client-01': False"
    ):
        given_clients([*carrying(graphs[:1], weights=True), *graphs[1:3]])


@both_executors
def test_weights_of_one_change_nothing(executor, graphs, given_clients, make_model, make_trainer, assert_same) -> None:
    runs = [
        make_trainer(executor=executor()).fit(make_model(), given_clients(clients), FedPer(num_epochs=2))
        for clients in (graphs[:3], carrying(graphs[:3], weights=True))
    ]
    assert_same(runs[0], runs[1], tolerance=1e-6)


@pytest.mark.parametrize("kind", [FedAvg, FGSSL], ids=lambda kind: kind.__name__)
def test_sites_compute_with_directions_and_weights(
    kind, graphs, given_clients, make_model, make_trainer, assert_same, tmp_path
) -> None:
    three = given_clients(directed(graphs[:3], weighted=True))
    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    expected = local.fit(make_model(kind), three, tiny(kind))
    sites = make_sites(three.clients, tmp_path / "sites", lambda: (make_model(kind), tiny(kind)))
    remote, strategy = make_trainer(num_rounds=2), tiny(kind)
    data = federate(remote, LoopbackChannel(sites), strategy)
    assert data.registry.is_directed
    assert data.registry.has_edge_weights
    result = remote.fit(make_model(kind), data, strategy)
    assert_same(result, expected)
    assert_same(server_of(remote), server_of(local))
    assert_same_clients(local, sites)


def test_sites_are_refused_as_clients_are(graphs, make_model, make_trainer, tmp_path) -> None:
    mixed = [*carrying(graphs[:1], weights=True), *graphs[1:3]]
    sites = make_sites(mixed, tmp_path / "mixed", lambda: (make_model(), FedAvg()))
    trainer = make_trainer()
    with pytest.raises(ValueError, match="the clients' has_edge_weights must be alike"):
        trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), FedAvg()), FedAvg())

    def make() -> tuple[ClientModule, Any]:
        return make_model(FedTAD), tiny(FedTAD)

    sites = make_sites(directed(graphs[:3]), tmp_path / "directed", make)
    trainer, strategy = make_trainer(), tiny(FedTAD)
    with pytest.raises(ValueError, match="FedTAD is for graphs whose edges go both ways"):
        trainer.fit(make_model(FedTAD), federate(trainer, LoopbackChannel(sites), strategy), strategy)


def test_a_site_with_other_weights_is_another_site(graphs, make_model, tmp_path) -> None:
    digests = set()
    for index, factor in enumerate((1, 2)):
        [graph] = carrying(graphs[:1], weights=True)
        graph = dataclasses.replace(graph, edge_weight_E=factor * graph.edge_weight_E)
        [site] = make_sites([graph], tmp_path, lambda: (make_model(), FedAvg()))
        digests.add(content_of(site.client_data))
        assert index + 1 == len(digests)


def told_by_senders(seed: int, *, turned: bool = False) -> Data:
    """Receivers have the class of the one node that sends to them, and send to three others, which mislead."""
    draw, num_pairs = torch.Generator().manual_seed(seed), 150
    bit_N = torch.randint(2, (num_pairs,), generator=draw)
    sender_N, receiver_N = torch.arange(num_pairs), num_pairs + torch.arange(num_pairs)
    other_3N = torch.randint(num_pairs, (3 * num_pairs,), generator=draw)
    edges_2E = torch.cat([torch.stack([sender_N, receiver_N]), torch.stack([receiver_N.repeat(3), other_3N])], dim=1)
    x_NF = torch.cat([torch.nn.functional.one_hot(bit_N, 2), torch.zeros(num_pairs, 2)]).float()
    y_N = torch.cat([torch.full((num_pairs,), -1), bit_N])
    return Data(x=x_NF, y=y_N, edge_index=edges_2E.flip(0) if turned else edges_2E)


@pytest.mark.parametrize("net", [None, "torch_geometric.nn.GCN"], ids=["ours", "PyG"])
def test_a_class_that_in_edges_tell_is_learned(net, make_model, make_trainer, tmp_path: Path) -> None:
    scores = {}
    for name, turned, undirected in (("in", False, False), ("out", True, False), ("both", False, True)):
        graphs = [InMemorySource(told_by_senders(seed, turned=turned), undirected=undirected) for seed in range(3)]
        data = FederatedDataModule(graphs, None, ClientSplit(0.4, 0.2), cache_dir=str(tmp_path), root=str(tmp_path))
        arguments = {"hidden_channels": 8, "num_layers": 1}
        model = make_model(num_layers=1, dropout=0.0)
        if net is not None:
            factory = functools.partial(PyGNet, architecture=net, arguments=arguments)
            model = ClientModule(factory, model.optimizer_factory)
        trainer = make_trainer(num_rounds=10, executor=StackedExecutor() if net is None else SequentialExecutor())
        scores[name] = trainer.fit(model, data, FedAvg(num_epochs=3))["test/acc"]
    assert scores["in"] > 0.99
    assert scores["out"] < 0.75
    assert scores["both"] < 0.95
