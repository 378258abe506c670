"""Pooled: one training on all clients' data, against the trainings that it must be equal to."""

import dataclasses
import functools

import pytest
import torch
from task_data import graph_data, node_data
from torch.optim import Adam
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.data import (
    GivenPartitioner,
    GlobalSplit,
    OverlappingMetisPartitioner,
    PlantedCommunities,
)
from fl_lightning.data.pool import merged, pool_of
from fl_lightning.models import GCN, MLP
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.remote.job_schema import NotAJob, job_of
from fl_lightning.remote.registry import Registry
from fl_lightning.strategies import Local, Pooled
from fl_lightning.testing import check_strategy
from fl_lightning.testing.checks import (
    check_checkpoint_scores_as_reported,
    check_executors_agree,
    check_resume_is_exact,
    check_server_state_is_complete,
    check_unseen_clients_do_not_train_the_server,
)
from fl_lightning.testing.federations import SIZES, _Slices, small_examples, small_graphs

EXECUTORS = {"sequential": SequentialExecutor, "stacked": StackedExecutor}


def model_of(trainer):
    return {name: tensor[0] for name, tensor in trainer.run.executor.state().parameters.items()}


@pytest.mark.parametrize("graph", ["cut", "whole"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_of_one_client_it_is_local(graph, executor, tmp_path, make_model, make_trainer, assert_same) -> None:
    source = PlantedCommunities(num_nodes=sum(SIZES), num_communities=5, num_classes=3, num_features=6)
    data = FederatedDataModule(source, _Slices((sum(SIZES),)), cache_dir=str(tmp_path))
    trainers = [make_trainer(executor=EXECUTORS[executor]()) for _ in range(2)]
    results = [
        trainer.fit(make_model(dropout=0.5), data, strategy)
        for trainer, strategy in zip(trainers, (Pooled(graph=graph), Local()), strict=True)
    ]
    assert_same(*map(model_of, trainers))
    if graph == "cut":
        assert_same(*[[{k: v for k, v in row.items() if k != "seconds"} for row in t.run.history] for t in trainers])
    assert_same(*results, tolerance=1e-6)


def test_the_whole_graph_is_a_centralized_training(tmp_path, make_model, make_trainer, assert_same) -> None:
    data = small_graphs(tmp_path / "cache")
    everything = FederatedDataModule(data.source, _Slices((sum(SIZES),)), GlobalSplit(), cache_dir=str(tmp_path))
    pooled, centralized = make_trainer(), make_trainer()
    result = pooled.fit(make_model(dropout=0.5), data, Pooled(graph="whole"))
    expected = centralized.fit(make_model(dropout=0.5), everything, Local())
    assert_same(model_of(pooled), model_of(centralized))
    last, other = pooled.run.history[-1], centralized.run.history[-1]
    assert last["test/acc_weighted"] == pytest.approx(other["test/acc"])
    assert len(pooled.run.scores[""].clients) == len(SIZES)
    assert result["test/acc"] != expected["test/acc"]  # a mean over clients


def two_rings(tmp_path, *, bridge: bool):
    """Two rings, a client each, with or without edges between them."""
    nodes = torch.arange(20)
    ring = torch.stack([nodes, (nodes + 1) % 10 + nodes // 10 * 10])
    edges = torch.cat([ring, torch.tensor([[0, 3], [10, 15]])], dim=1) if bridge else ring
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, generator=draw), torch.arange(20) % 3
    graph = Data(x=x, edge_index=edges, y=y, membership=nodes // 10)
    data = FederatedDataModule(graph, GivenPartitioner(), cache_dir=str(tmp_path), root=str(tmp_path))
    data.setup()
    return data


@pytest.mark.parametrize("bridge", [False, True])
def test_whole_is_cut_where_no_edge_was_cut(bridge, tmp_path, make_model, make_trainer, assert_same) -> None:
    data = two_rings(tmp_path, bridge=bridge)
    trainers = make_trainer(), make_trainer()
    for trainer, graph in zip(trainers, ("cut", "whole"), strict=True):
        trainer.fit(make_model(dropout=0.5), data, Pooled(graph=graph))
    if bridge:
        with pytest.raises(AssertionError):
            assert_same(*map(model_of, trainers))
    else:
        assert_same(*map(model_of, trainers))
        assert trainers[0].run.history[-1]["test/loss"] == pytest.approx(trainers[1].run.history[-1]["test/loss"])


def test_a_whole_graph_has_every_edge_and_every_node_once(tmp_path) -> None:
    source = PlantedCommunities(num_nodes=90, num_communities=3)
    data = FederatedDataModule(
        source, OverlappingMetisPartitioner(6, draws_per_part=2), GlobalSplit(), cache_dir=str(tmp_path)
    )
    data.setup()
    graph = data.whole_graph()
    pool = pool_of(data.clients, range(6), graph)
    whole = pool.client_data
    held = torch.cat([client.node_idx_N for client in data.clients]).unique()
    assert whole.node_idx_N.sort().values.equal(held)
    for client, row_N in zip(data.clients, pool.rows, strict=True):
        assert whole.node_idx_N[row_N].equal(client.node_idx_N)
        assert whole.x_NF[row_N].equal(client.x_NF)
        assert whole.train_mask_N[row_N].equal(client.train_mask_N)  # nodes have one role
    assert pool.num_contradictory == 0
    edges = {tuple(edge) for edge in whole.node_idx_N[whole.edge_index_2E].T.tolist()}
    known = set(held.tolist())
    assert edges == {tuple(edge) for edge in graph.edge_index.T.tolist() if set(edge) <= known}
    source_E, target_E = whole.edge_index_2E
    assert (source_E * 90 + target_E).diff().gt(0).all()


def test_weights_of_edges_come_along() -> None:
    data = graph_data()
    union = type(data.clients[0]).pooled(data.clients)
    assert union.size == sum(client.size for client in data.clients)
    assert int(union.num_nodes_G.sum()) == union.union.num_nodes
    first, second = data.clients[0].union, data.clients[1].union
    chosen = slice(first.num_edges, first.num_edges + second.num_edges)
    assert union.union.edge_weight_E[chosen].equal(second.edge_weight_E)
    assert union.union.edge_index_2E[:, chosen].equal(second.edge_index_2E + first.num_nodes)

    graph = Data(
        edge_index=torch.tensor([[2, 0, 1], [0, 1, 2]]), edge_weight=torch.tensor([3.0, 1.0, 2.0]), num_nodes=3
    )
    node = dataclasses.replace(
        first,
        **{name: getattr(first, name)[:3] for name in ("x_NF", "y_N", "train_mask_N", "val_mask_N", "test_mask_N")},
        node_idx_N=torch.tensor([2, 0, 1]),
        edge_index_2E=torch.empty(2, 0, dtype=torch.int64),
        edge_weight_E=torch.empty(0),
    )
    whole, _ = merged(node, graph)
    assert whole.edge_index_2E.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert whole.edge_weight_E.tolist() == [3.0, 1.0, 2.0]
    assert whole.is_directed


@pytest.mark.parametrize("graph", ["cut", "whole"])
def test_nodes_of_contradictory_roles_are_left_out_and_said(graph, tmp_path, make_model, make_trainer) -> None:
    source = PlantedCommunities(num_nodes=300, num_communities=3)
    partitioner = OverlappingMetisPartitioner(6, draws_per_part=2)
    data = FederatedDataModule(source, partitioner, GlobalSplit(train=0.6), cache_dir=str(tmp_path))
    data.setup()
    first = data.clients[0]
    swapped = dataclasses.replace(first, train_mask_N=first.test_mask_N, test_mask_N=first.train_mask_N)
    data._allocation = dataclasses.replace(data.allocation, clients=(swapped, *data.clients[1:]))
    trainer = make_trainer(num_rounds=1)
    with pytest.warns(UserWarning, match=r"Pooled leaves \d+ examples out of its training, .*GlobalSplit") as said:
        trainer.fit(make_model(), data, Pooled(graph=graph))
    assert sum("Pooled leaves" in str(each.message) for each in said) == 1
    pool = trainer.run.executor.pool.client_data(0)
    trained = set(pool.node_idx_N[pool.train_mask_N].tolist())
    scored = {n for each in data.clients for n in each.node_idx_N[each.val_mask_N | each.test_mask_N].tolist()}
    wanted = {node for each in data.clients for node in each.node_idx_N[each.train_mask_N].tolist()}
    assert trained == wanted - scored
    assert trained < wanted


def test_where_all_roles_contradict_each_other_it_is_refused(tmp_path, make_model, make_trainer) -> None:
    data = two_rings(tmp_path, bridge=True)
    first = data.clients[0]
    same = dataclasses.replace(
        first, name="again", train_mask_N=first.test_mask_N, test_mask_N=first.train_mask_N, val_mask_N=first.val_mask_N
    )
    with pytest.raises(
        ValueError, match=r"all \d+ training examples .* so none is left .*: set data.splitter to GlobalSpl"
    ):
        pool_of([first, same], (0, 1))


def test_it_is_refused_where_it_has_no_meaning(graphs, given_clients, tmp_path, make_model, make_trainer) -> None:
    with pytest.raises(
        ValueError, match=r"strategy.graph is 'whole', but what is learned is of examples, .* set it to 'cu"
    ):
        make_trainer().fit(ClientModule(), small_examples(tmp_path), Pooled(graph="whole"))
    data = two_rings(tmp_path, bridge=False)
    apart = FederatedDataModule([data.whole_graph()] * 2, cache_dir=str(tmp_path), root=str(tmp_path))
    with pytest.raises(ValueError, match="ManyGraphs is no graph that was cut into clients: set it to 'cut'"):
        make_trainer().fit(make_model(), apart, Pooled(graph="whole"))
    with pytest.raises(ValueError, match=r"evaluate_union is true, but Pooled"):
        make_trainer(evaluate_union=True).fit(make_model(), data, Pooled(graph="whole"))
    with pytest.raises(ValueError, match=r"model.net lists 2 nets, but Pooled needs"):
        make_trainer().fit(ClientModule([GCN, GCN]), data, Pooled())
    with pytest.raises(ValueError, match=r"strategy.graph must be 'cut' or 'whole', got 'all'"):
        Pooled(graph="all")


def test_sites_are_refused_by_name(make_trainer) -> None:
    with pytest.raises(
        ValueError, match=r"strategy Pooled trains on the data of all clients together, .* choose another"
    ):
        federate(make_trainer(), LoopbackChannel([]), Pooled())
    job = job_of({"strategy": "Pooled"}, name="wards", sites=["a", "b"])[0]
    with pytest.raises(NotAJob, match="strategy Pooled trains on the data of all clients together"):
        job.check(Registry())


def test_running_statistics_are_the_pools(tmp_path, make_trainer) -> None:
    data, net = small_examples(tmp_path), functools.partial(MLP, hidden_channels=8, batch_norm=True)
    with pytest.raises(ValueError, match=r"model.running_statistics is 'personal': set it to 'shared'"):
        make_trainer().fit(ClientModule(net), data, Pooled())
    trainer = make_trainer()
    trainer.fit(ClientModule(net, running_statistics="shared"), data, Pooled())
    names = [name for name in trainer.run.strategy.model if "running" in name]
    assert names
    assert all(trainer.run.strategy.model[name].ne(0).any() for name in names)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["examples", "graphs", "numbers", "labels"])
def test_every_task_is_trained(kind, tmp_path, make_trainer) -> None:
    data = {
        "examples": lambda: small_examples(tmp_path),
        "graphs": lambda: graph_data(cache_dir=str(tmp_path)),
        "numbers": lambda: node_data("numbers", tmp_path),
        "labels": lambda: node_data("labels", tmp_path),
    }[kind]()
    results = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        trainer = make_trainer(executor=executor, num_rounds=5)
        results.append(trainer.fit(ClientModule(optimizer=functools.partial(Adam, lr=0.02)), data, Pooled()))
        rows = trainer.run.history
        assert rows[-1]["train/loss"] < rows[0]["train/loss"]
        assert trainer.run.scores[""].clients == tuple(range(data.num_clients))
        expected = torch.tensor([client.test_mask_N.sum() for client in data.clients])
        assert trainer.run.scores[""].extras["test/loss"][:, 1].equal(expected.float())
    assert results[0]["test/loss"] == pytest.approx(results[1]["test/loss"], rel=1e-4)


@pytest.mark.full
def test_nothing_is_sent(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(default_callbacks=True, num_rounds=2)
    trainer.fit(make_model(), federation, Pooled())
    assert trainer.run.history[-1]["comm/bytes_total"] == 0


@pytest.mark.full
def test_the_contract_over_the_whole_graph(federation, make_model) -> None:
    checks = [
        check_executors_agree,
        check_server_state_is_complete,
        check_resume_is_exact,
        check_checkpoint_scores_as_reported,
        check_unseen_clients_do_not_train_the_server,
    ]
    check_strategy(Pooled(graph="whole"), client=make_model(dropout=0.5), data=federation, checks=checks)
