"""Many graphs of a client as one block-diagonal graph, and mini-batches of whole graphs."""

import pytest
import torch
from task_data import graph_data, graphs_of
from torch_geometric.data import Data

from fl_lightning import FederatedDataModule
from fl_lightning.batches import ClientGraph, ClientGraphs, GraphSetCollator
from fl_lightning.batches.base import single
from fl_lightning.data import GraphSets
from fl_lightning.kernels.randomness import random_order
from fl_lightning.models import GIN, GINE

CPU = torch.device("cpu")


def collator(data: FederatedDataModule, **settings) -> GraphSetCollator:
    return GraphSetCollator(data.clients, **settings, device=CPU, dtype=torch.float64)


def only(client: ClientGraphs, chosen: torch.Tensor) -> ClientGraphs:
    """Some of a client's graphs, in the given order, put together anew."""
    first = client.num_nodes_G.cumsum(0) - client.num_nodes_G
    nodes = torch.cat([first[g] + torch.arange(int(client.num_nodes_G[g])) for g in chosen.tolist()])
    new = torch.full((client.union.num_nodes,), -1)
    new[nodes] = torch.arange(len(nodes))
    edges, weight = new[client.union.edge_index_2E], client.union.edge_weight_E
    kept = (edges >= 0).all(dim=0)
    order = (edges[0] * len(new) + edges[1])[kept].argsort()
    nobody = torch.zeros(len(nodes), dtype=torch.bool)
    union = ClientGraph(
        name="some",
        x_NF=client.union.x_NF[nodes],
        edge_index_2E=edges[:, kept][:, order],
        y_N=torch.full((len(nodes),), -1),
        train_mask_N=nobody,
        val_mask_N=nobody,
        test_mask_N=nobody,
        node_idx_N=torch.arange(len(nodes)),
        edge_weight_E=weight[kept][order],
    )
    masks = {name: getattr(client, name)[chosen] for name in ("train_mask_N", "val_mask_N", "test_mask_N")}
    return ClientGraphs(
        name="some", union=union, num_nodes_G=client.num_nodes_G[chosen], y_N=client.y_N[chosen], **masks
    )


def test_pooling_by_hand() -> None:
    batch = collator(graph_data())([0, 1])
    value = torch.randn(2, batch.node_mask.shape[1], 3, dtype=torch.float64) - 5.0
    for how, measure in (("sum", torch.sum), ("mean", torch.mean), ("max", torch.amax)):
        pooled = batch.pool(value, how)
        assert pooled.shape == (2, batch.example_mask.shape[1], 3)
        for client in range(2):
            sizes = [int(size) for size in batch.num_nodes[client] if size]
            for number, nodes in enumerate(value[client, : sum(sizes)].split(sizes)):
                assert torch.allclose(pooled[client, number], measure(nodes, dim=0))
            assert not pooled[client, len(sizes) :].any()
        mapped = torch.vmap(lambda t, v, how=how: batch.replace(t).pool(v, how))(batch.tensors(), value)
        assert torch.equal(mapped, pooled)


def test_some_clients_are_as_if_they_were_alone() -> None:
    make = collator(graph_data())
    whole, few = make([0, 1, 2]), make([1, 0])
    chosen = whole.select(torch.tensor([1, 0]))
    for name, tensor in few.tensors().items():
        assert torch.equal(getattr(chosen, name), tensor), name
    for name in ("adjacency", "links"):
        assert torch.equal(getattr(chosen, name).matrix.to_dense(), getattr(few, name).matrix.to_dense())


@pytest.mark.parametrize("edge_attributes", [0, 2])
def test_a_padded_client_is_as_beside_a_larger_one(edge_attributes: int) -> None:
    make = collator(graph_data(edge_attributes=edge_attributes))
    alone = make([1])
    padded = alone.padded()
    assert {axis: mask.sum().item() for axis, mask in padded.masks().items()} == {
        axis: mask.numel() for axis, mask in alone.masks().items()
    }
    assert all(padded.masks()[axis].numel() > mask.numel() for axis, mask in alone.masks().items())
    value = torch.randn(1, padded.node_mask.shape[1], 3, dtype=torch.float64)
    sums, pooled = padded.sum_neighbors(value), padded.pool(value)
    chosen = padded.select(torch.tensor([0]))
    for name, tensor in alone.tensors().items():
        assert torch.equal(getattr(chosen, name), tensor), name
    size, graphs = alone.node_mask.shape[1], alone.example_mask.shape[1]
    torch.testing.assert_close(sums[:, :size], alone.sum_neighbors(value[:, :size]))
    torch.testing.assert_close(pooled[:, :graphs], alone.pool(value[:, :size]))
    assert not pooled[:, graphs:].any()
    if edge_attributes:
        assert torch.equal(chosen.edge_sources.matrix.to_dense(), alone.edge_sources.matrix.to_dense())


@pytest.mark.parametrize("sampling", [False, True])
def test_a_drawn_batch_is_that_of_its_graphs_alone(sampling) -> None:
    data = graph_data()
    make = collator(data, batch_size=4, steps_per_epoch=3 if sampling else None)
    whole = make([0, 1, 2])
    keys = torch.arange(12).view(4, 3) + 100
    for step, drawn in enumerate(whole.draws(keys)):
        assert drawn.adjacency.matrix.shape == (3 * drawn.node_mask.shape[1],) * 2
        for client in range(3):
            alone = [each for _, each in zip(range(step + 1), single_draws(make, client, keys), strict=False)][-1]
            count, nodes = int(alone.example_mask.sum()), int(alone.node_mask.sum())
            mine = drawn.select(torch.tensor([client]))
            assert int(mine.example_mask.sum()) == count
            for name in ("y", "num_nodes", "train_mask"):
                assert torch.equal(getattr(mine, name)[0, :count], getattr(alone, name)[:count]), name
            for name in ("x", "propagated_x", "graph_of", "degree"):
                assert torch.equal(getattr(mine, name)[0, :nodes], getattr(alone, name)[:nodes]), name
            if sampling:
                most = min(4, whole.train_mask.shape[-1])
                order = random_order(keys[step, client], whole.train_mask[client], most)[0]
                expected = GraphSetCollator(
                    [only(data.clients[client], order[:count])], device=CPU, dtype=torch.float64
                )
                by_hand = expected([0])
                for name in ("y", "x", "propagated_x", "graph_of", "num_nodes"):
                    assert torch.allclose(getattr(by_hand, name), getattr(mine, name)), name
                for name in ("adjacency", "links"):
                    actual = getattr(mine, name).matrix.to_dense()
                    assert torch.allclose(actual, getattr(by_hand, name).matrix.to_dense()), name
                    assert torch.allclose(getattr(mine, name).transposed.to_dense(), actual.T)


def single_draws(make, client, keys):
    return single(make([client])).draws(keys[:, client])


@pytest.mark.parametrize("of_edges", [False, True])
def test_a_model_is_scored_in_parts_as_on_the_whole(of_edges, monkeypatch) -> None:
    data = graph_data(edge_attributes=2 if of_edges else 0)
    torch.manual_seed(0)
    net = (GINE(3, 2, edge_channels=2) if of_edges else GIN(3, 2, batch_norm=True)).double().eval()
    whole = collator(data)([0, 1, 2])  # of 9, 13 and 17 graphs
    assert list(whole.parts()) == [whole]
    parameters = {name: tensor.expand(3, *tensor.shape) for name, tensor in net.state_dict().items()}

    def logits(batch):
        return torch.func.functional_call(net, parameters, (batch,)).logits

    expected = logits(whole)
    monkeypatch.setattr("fl_lightning.batches.graph_sets.PART_GRAPHS", 5)
    parts = list(whole.parts())
    assert [part.y.shape[1] for part in parts] == [5, 5, 5, 2]
    assert max(part.node_mask.shape[1] for part in parts) < whole.node_mask.shape[1] / 2
    for name in ("y", "example_mask", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name)), name
    actual = torch.cat([logits(part) for part in parts], dim=1)
    assert torch.allclose(actual[whole.example_mask], expected[whole.example_mask], rtol=1e-10)
    alone = list(single(whole.select(torch.tensor([1]))).parts())
    for part, of_stack in zip(alone, parts, strict=False):
        count = len(part.y)
        assert torch.allclose(net(part).logits, logits(of_stack)[1, :count], rtol=1e-10)


def test_directed_graphs_are_moved_with_their_transpose() -> None:
    data = FederatedDataModule(GraphSets(graphs_of(), undirected=False))
    data.setup()
    assert data.registry.is_directed
    for drawn in collator(data, batch_size=3)([0, 1, 2]).draws(torch.arange(6).view(2, 3)):
        dense = drawn.adjacency.matrix.to_dense()
        assert not torch.allclose(dense, dense.T)
        assert torch.allclose(drawn.adjacency.transposed.to_dense(), dense.T)


def test_what_clients_hold() -> None:
    data = graph_data()
    graphs = graphs_of()
    assert [client.size for client in data.clients] == [9, 13, 17]
    assert data.num_features == 3
    assert data.has_validation
    for client, own in zip(data.clients, graphs, strict=True):
        assert client.num_nodes_G.tolist() == [graph.num_nodes for graph in own]
        assert client.y_N.tolist() == [int(graph.y) for graph in own]
        assert torch.equal(client.union.x_NF, torch.cat([graph.x for graph in own]))
        assert client.cost == client.union.num_nodes + client.union.num_edges
    other = graph_data(seed=1)
    assert data.partition_hash == graph_data().partition_hash != other.partition_hash
    assert [row.num_graphs for row in data.statistics().rows] == [9, 13, 17]


def test_what_is_no_set_of_graphs_is_refused() -> None:
    graph = graphs_of()[0][0]
    with pytest.raises(ValueError, match=r"GraphSets.clients\[1\] has no graphs: give at least one"):
        FederatedDataModule([[graph], []])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="give each of the 1 clients its own"):
        GraphSets([[graph]], names=["a", "b"])
    wide = Data(x=torch.rand(4, 9), edge_index=torch.tensor([[0], [1]]), y=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"client-00, graph 5 has 9 features of each node, the first 3"):
        FederatedDataModule([[*[graph] * 5, wide]]).setup()
