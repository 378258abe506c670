"""FedGCN: its first layer is that of the whole graph, its sums by hand, and a graph whose edges the cut took away."""

import functools

import pytest
import torch
from torch.optim import Adam
from torch_geometric.data import Data

from fl_lightning import (
    Callback,
    ClientModule,
    FederatedDataModule,
    Participation,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.batches.base import single
from fl_lightning.data import ClientSplit, GivenPartitioner, GlobalSplit, OverlappingMetisPartitioner, RandomPartitioner
from fl_lightning.data.partition.cross_edges import cross_edges
from fl_lightning.models import GAT, GCN
from fl_lightning.models.gcn import convolve
from fl_lightning.strategies import FedAvg, FedGCN
from fl_lightning.strategies.mixing.neighbor_sums import NeighborSum, own_part, with_neighbors
from fl_lightning.testing.federations import small_graphs

pytestmark = pytest.mark.filterwarnings("ignore:ClientSplit leaves clients")
both_executors = pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])


def path_data(tmp_path, **settings) -> FederatedDataModule:
    """0 - 1 - 2 - 3 and 1 - 3, of which 0, 1 are a client's and 2, 3 another's."""
    graph = Data(
        x=torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [2.0, 2.0]]),
        edge_index=torch.tensor([[0, 1, 2, 1], [1, 2, 3, 3]]),
        y=torch.tensor([0, 1, 0, 1]),
        membership=torch.tensor([0, 0, 1, 1]),
    )
    settings = {"cross_edges": True, **settings}
    data = FederatedDataModule(graph, GivenPartitioner(), ClientSplit(1.0, 0.0), cache_dir=str(tmp_path), **settings)
    data.setup()
    return data


def noisy_neighbors(tmp_path, num_hops: int = 1, **settings) -> FederatedDataModule:
    """A node's class is the sign of a feature's sum within some hops; parts are random, so most lie elsewhere."""
    draw = torch.Generator().manual_seed(5)
    count = 400
    x = torch.randn(count, 4, generator=draw)
    edges = torch.randint(count, (2, 3 * count), generator=draw)
    edges = edges[:, edges[0] != edges[1]]
    both, sums = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1), x
    for _ in range(num_hops):
        sums = sums.index_add(0, both[1], sums[both[0]])
    graph = Data(x=x, edge_index=edges, y=(sums[:, 0] > 0).long())
    settings = {"cross_edges": True, **settings}
    data = FederatedDataModule(graph, RandomPartitioner(6), GlobalSplit(0.5, 0.2), cache_dir=str(tmp_path), **settings)
    data.setup()
    return data


def whole_operator(data: FederatedDataModule) -> torch.Tensor:
    """Â of the whole graph, dense."""
    whole = data.whole_graph()
    a_NN = torch.eye(whole.num_nodes)
    a_NN[tuple(whole.edge_index)] = 1
    scale_N = a_NN.sum(dim=1).rsqrt()
    return scale_N[:, None] * a_NN * scale_N


@both_executors
@pytest.mark.parametrize("num_hops", [1, 2])
def test_the_first_layer_is_that_of_the_whole_graph(num_hops, executor, make_trainer, tmp_path) -> None:
    """With 2 hops so is the second."""
    data = noisy_neighbors(tmp_path)
    trainer = make_trainer(num_rounds=1, executor=executor())
    trainer.fit(ClientModule(functools.partial(GCN, hidden_channels=8)), data, FedGCN(num_hops=num_hops))
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(4, 5, generator=draw), torch.randn(5, generator=draw)
    a_NN = whole_operator(data)
    expected = a_NN @ data.whole_graph().x @ weight + bias
    for number, client in enumerate(data.clients):
        batch = single(trainer.run.executor.collator([number]))
        first = convolve(None, weight, bias, batch)
        nodes = client.node_idx_N
        torch.testing.assert_close(first[: len(nodes)], expected[nodes], atol=1e-5, rtol=0)
        second = convolve(first.relu(), torch.eye(5), None, batch)
        apart = (second[: len(nodes)] - (a_NN @ expected.relu())[nodes]).abs().max()
        assert (apart < 1e-5) == (num_hops == 2)


def test_sums_by_hand(tmp_path) -> None:
    """1 and 2, and 1 and 3, are joined over the cut; degrees are 1, 3, 2, 2."""
    data = path_data(tmp_path)
    first, second = map(with_neighbors, data.clients)
    assert first.node_idx_N.tolist() == [0, 1, -4, -5]
    assert first.edge_index_2E.tolist() == [[0, 1, 1, 1, 2, 3], [1, 0, 2, 3, 1, 1]]
    assert second.node_idx_N.tolist() == [2, 3, -3]
    strategy = FedGCN()
    batch = single(data.collator([first], device=torch.device("cpu"), dtype=torch.float64)([0]))
    assert batch.node_id.tolist() == [1, 2, -3, -4]
    x = data.whole_graph().x.double() * torch.tensor([2.0, 4.0, 3.0, 3.0])[:, None].rsqrt()
    expected = torch.stack([x[0] + x[1], x[0] + x[1], x[1], x[1]])
    degree = torch.tensor([[1.0], [3.0], [0.0], [0.0]])
    actual = NeighborSum(strategy, 0)(ClientModule(GCN), {}, batch, None)
    torch.testing.assert_close(actual, torch.cat([degree, expected], dim=1), check_dtype=False)
    again = own_part(first)
    assert torch.equal(again.edge_index_2E, data.clients[0].edge_index_2E)
    assert torch.equal(again.x_NF, data.clients[0].x_NF)


def test_without_hops_it_is_fedavg(make_trainer, assert_same, tmp_path) -> None:
    runs = []
    for strategy, cross in ((FedGCN(num_hops=0), False), (FedAvg(), False), (FedGCN(num_hops=0), True)):
        trainer = make_trainer(num_rounds=2)
        result = trainer.fit(ClientModule(GCN), noisy_neighbors(tmp_path, cross_edges=cross), strategy)
        runs.append((result, trainer.run.history))
    assert_same(runs[0], runs[1])
    assert_same(runs[2], runs[1])


@pytest.mark.parametrize("num_hops", [1, 2])
def test_it_learns_what_lies_at_other_clients(num_hops, make_trainer, tmp_path) -> None:
    found = {}
    for strategy in (FedAvg(), FedGCN(num_hops=num_hops)):
        net = functools.partial(GCN, hidden_channels=16, num_layers=num_hops, dropout=0.0)
        client, data = ClientModule(net, functools.partial(Adam, lr=0.03)), noisy_neighbors(tmp_path, num_hops)
        found[type(strategy)] = make_trainer(num_rounds=15).fit(client, data, strategy)["test/acc"]
    assert found[FedGCN] > found[FedAvg] + 0.15


class LosesSums(Callback):
    """Loses what the second client sends before the first round."""

    def on_upload(self, trainer, stage, payload):
        return payload.rows([c for c in payload.clients if c != 1]) if stage.name == "send-0" else payload


@both_executors
@pytest.mark.filterwarnings("ignore:.*its update was lost")
@pytest.mark.parametrize("num_hops", [1, 2])
def test_whose_sums_are_lost_trains_on_its_own_nodes(num_hops, executor, make_trainer, tmp_path) -> None:
    data = noisy_neighbors(tmp_path)
    trainer = make_trainer(num_rounds=2, executor=executor(), callbacks=LosesSums())
    trainer.fit(ClientModule(GCN), data, strategy := FedGCN(num_hops=num_hops))
    graphs = [trainer.run.executor.collator.client_data(number) for number in range(len(data.clients))]
    assert not strategy.lost
    assert torch.equal(graphs[1].x_NF, data.clients[1].x_NF)
    assert torch.equal(graphs[1].edge_index_2E, data.clients[1].edge_index_2E)
    assert [graph.propagated_NF is not None for graph in graphs] == [n != 1 for n in range(len(graphs))]
    others = [len(graph.x_NF) > len(own.x_NF) for graph, own in zip(graphs, data.clients, strict=True)]
    assert others == [num_hops == 2 and n != 1 for n in range(len(graphs))]


def test_unseen_clients_receive_what_others_have_sent(make_trainer, tmp_path) -> None:
    data = noisy_neighbors(tmp_path)
    trainer = make_trainer(num_rounds=2, participation=Participation(held_out_fraction=0.34))
    result = trainer.fit(ClientModule(GCN), data, FedGCN())
    assert 0 <= result["unseen/test/acc"] <= 1
    a_NN, whole = whole_operator(data), data.whole_graph()
    unseen = trainer.run.unseen_clients
    last = unseen[-1]
    batch = single(trainer.run.executor.collator([last]))
    nodes = data.clients[last].node_idx_N
    torch.testing.assert_close(batch.propagated_x[: len(nodes)], (a_NN @ whole.x)[nodes], atol=1e-5, rtol=0)


def test_what_is_known_of_edges_between_clients(tmp_path) -> None:
    data, other = path_data(tmp_path), path_data(tmp_path, cross_edges=False)
    assert data.clients[0].cross_edge_2X.tolist() == [[1, 1, 2, 3], [2, 3, 1, 1]]
    assert torch.equal(data.clients[0].cross_edge_2X, data.clients[1].cross_edge_2X)
    assert other.clients[0].cross_edge_2X is None
    assert data.partition_hash != other.partition_hash
    assert data.registry.has_cross_edges
    assert not other.registry.has_cross_edges
    again = path_data(tmp_path)  # from the cache
    assert torch.equal(again.clients[0].cross_edge_2X, data.clients[0].cross_edge_2X)
    assert again.partition_hash == data.partition_hash
    whole = data.whole_graph()
    lost = [sum(data.allocation.edges_lost), sum(other.allocation.edges_lost)]
    [first, second] = cross_edges(whole, [each.node_idx_N for each in data.clients], "cross_edges")
    assert lost == [first.shape[1], second.shape[1]]


def test_what_it_is_not_for_is_named(make_trainer, tmp_path) -> None:
    with pytest.raises(ValueError, match="FedGCN needs the edges between the clients, but these do not know"):
        make_trainer().fit(ClientModule(GCN), path_data(tmp_path, cross_edges=False), FedGCN())
    with pytest.raises(ValueError, match="FedGCN exchanges the input of a graph convolution, with which GAT does"):
        make_trainer().fit(ClientModule(GAT), path_data(tmp_path), FedGCN())
    with pytest.raises(ValueError, match=r"strategy.num_hops must be in \[0, 2\], got 3"):
        FedGCN(num_hops=3)
    data = small_graphs(tmp_path)
    with pytest.raises(ValueError, match=r"data.cross_edges is for disjoint clients, but node \d+ is at clients"):
        FederatedDataModule(
            data.source, OverlappingMetisPartitioner(2, 2, 0.9), cross_edges=True, cache_dir=str(tmp_path)
        ).setup()


@pytest.mark.filterwarnings("ignore:client-")
def test_a_failed_exchange_is_told_and_the_client_goes_on_alone(make_trainer, tmp_path) -> None:
    class Fails(FedGCN):
        def messages(self, batch, number):
            if len(batch.y) > 0 and bool((batch.node_id == 1).any()):
                raise RuntimeError("no power")
            return super().messages(batch, number)

    trainer = make_trainer(num_rounds=2, executor=SequentialExecutor())
    trainer.fit(ClientModule(GCN), noisy_neighbors(tmp_path), Fails())
    assert sum(trainer.run.num_failures.values()) == 1
    graphs = [trainer.run.executor.collator.client_data(client) for client in range(6)]
    assert sum(graph.propagated_NF is None for graph in graphs) == 1
