"""Graphs with directions and weights in batches: messages go from source to target, as in PyG."""

import dataclasses

import pytest
import torch
from directed_graph import batch_of, directed_graph, normalized, one_batch

from fl_lightning.batches import ClientGraph, GraphCollator
from fl_lightning.batches.plain_graph import PlainGraph
from fl_lightning.batches.union import UnionCollator
from fl_lightning.kernels.block_sparse import block_matmul
from fl_lightning.kernels.edges import drop_edges

weighted_or_not = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def undirected(graph: ClientGraph) -> ClientGraph:
    """The graph with every edge both ways, of the weight that it has from the lower to the higher node."""
    source, target = graph.edge_index_2E
    weights = None if graph.edge_weight_E is None else graph.edge_weight_E[source < target].repeat(2)
    half = graph.edge_index_2E[:, source < target]
    return dataclasses.replace(
        graph, edge_index_2E=torch.cat([half, half.flip(0)], dim=1), edge_weight_E=weights, is_directed=False
    )


@weighted_or_not
def test_the_operator_is_that_of_gcn_norm_with_targets_as_rows(weighted) -> None:
    graph = directed_graph(weighted=weighted)
    batch = one_batch(graph)
    adjacency_NN = normalized(graph)
    assert not torch.allclose(adjacency_NN, adjacency_NN.T)
    torch.testing.assert_close(batch.adjacency.matrix.to_dense(), adjacency_NN)
    torch.testing.assert_close(batch.adjacency.transposed.to_dense(), adjacency_NN.T)
    torch.testing.assert_close(batch.propagated_x, adjacency_NN @ graph.x_NF.double())


def test_one_edge_by_hand() -> None:
    edge = {"edge_index_2E": torch.tensor([[0], [1]]), "edge_weight_E": torch.tensor([3.0])}
    batch = one_batch(dataclasses.replace(directed_graph(2), **edge))
    expected = torch.tensor([[1.0, 0.0], [3 / 2, 1 / 4]], dtype=torch.float64)  # degrees with loops: 1 and 3 + 1
    torch.testing.assert_close(batch.adjacency.matrix.to_dense(), expected)
    assert batch.degree.tolist() == [0, 1]


@weighted_or_not
def test_neighbors_are_the_sources_and_count_alike(weighted) -> None:
    graph = directed_graph(weighted=weighted)
    batch = one_batch(graph)
    links_NN = torch.zeros(9, 9, dtype=torch.float64)
    links_NN[graph.edge_index_2E[1], graph.edge_index_2E[0]] = 1
    x_NF = graph.x_NF.double().requires_grad_()
    found_NF = batch.sum_neighbors(x_NF)
    torch.testing.assert_close(found_NF, links_NN @ x_NF)
    torch.testing.assert_close(batch.sum_with_neighbors(x_NF), x_NF + links_NN @ x_NF)
    assert batch.degree.tolist() == links_NN.sum(dim=1).long().tolist()
    [gradient] = torch.autograd.grad((found_NF * x_NF.detach()).sum(), x_NF)
    torch.testing.assert_close(gradient, links_NN.T @ x_NF)


@weighted_or_not
def test_undirected_graphs_are_one_matrix_with_its_transpose(weighted) -> None:
    graph = undirected(directed_graph(weighted=weighted))
    assert not graph.is_directed
    batch = one_batch(graph)
    assert batch.adjacency.transposed is batch.adjacency.matrix
    assert batch.links is None or batch.links.transposed is batch.links.matrix
    assert torch.equal(batch.adjacency.matrix.to_dense(), batch.adjacency.matrix.to_dense().T)


def test_a_graph_knows_whether_it_is_directed() -> None:
    graph = directed_graph(weighted=True)
    both_ways = undirected(graph)
    assert graph.is_directed
    assert both_ways.edge_weight_E is not None
    unlike = both_ways.edge_weight_E.clone()
    unlike[2] += 1
    assert dataclasses.replace(both_ways, edge_weight_E=unlike).is_directed
    assert not dataclasses.replace(both_ways, edge_weight_E=None).is_directed
    assert dataclasses.replace(both_ways, edge_index_2E=both_ways.edge_index_2E[:, 1:], edge_weight_E=None).is_directed


def test_there_is_a_weight_for_each_edge() -> None:
    graph = directed_graph()
    with pytest.raises(ValueError, match=f"edge_weight_E has 3 rows for {graph.num_edges} edges"):
        dataclasses.replace(graph, edge_weight_E=torch.ones(3))
    with pytest.raises(ValueError, match=f"edge_attr_EK has 3 rows for {graph.num_edges} edges"):
        dataclasses.replace(graph, edge_attr_EK=torch.ones(3, 2))


def test_all_clients_have_weights_or_none() -> None:
    with pytest.raises(ValueError, match="1 of 2 clients have edge weights"):
        batch_of(directed_graph(), directed_graph(weighted=True))


@weighted_or_not
def test_a_client_of_a_stack_has_what_it_has_alone(weighted) -> None:
    graphs = [directed_graph(size, weighted=weighted, seed=size) for size in (5, 9, 7)]
    graphs[2] = undirected(graphs[2])
    stack = batch_of(*graphs)
    draw_CNF = torch.randn(3, 9, 2, dtype=torch.float64)
    for row in ([0, 1, 2], [2, 0], [1]):
        chosen = stack.select(torch.tensor(row))
        size = chosen.y.shape[1]
        x_CND = draw_CNF[row, :size]
        for index, client in enumerate(row):
            alone, own = one_batch(graphs[client]), graphs[client].num_nodes
            for name in ("adjacency", "links") if weighted else ("adjacency",):
                for transpose in (False, True):
                    whole = block_matmul(getattr(chosen, name), x_CND, transpose=transpose)
                    part = block_matmul(getattr(alone, name), x_CND[index, :own], transpose=transpose)
                    assert torch.equal(whole[index, :own], part)


@weighted_or_not
@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_edges_are_dropped_and_the_rest_is_normalized_as_by_gcn_norm(weighted, probability) -> None:
    graphs = [directed_graph(size, weighted=weighted, seed=size) for size in (9, 6)]
    batch, keys = batch_of(*graphs), torch.tensor([3, 4])
    actual, degree_CN, links = drop_edges(keys, batch.adjacency, probability, batch.links)
    for row, graph in enumerate(graphs):
        inside = slice(9 * row, 9 * row + graph.num_nodes)
        own = (links or actual).matrix.to_dense()[inside, inside]
        kept_E = own[graph.edge_index_2E[1], graph.edge_index_2E[0]] > 0
        weight_E = None if graph.edge_weight_E is None else graph.edge_weight_E[kept_E]
        expected_NN = normalized(graph, graph.edge_index_2E[:, kept_E], weight_E)
        torch.testing.assert_close(actual.matrix.to_dense()[inside, inside], expected_NN)
        torch.testing.assert_close(actual.transposed.to_dense()[inside, inside], expected_NN.T)
        received_N = graph.edge_index_2E[1, kept_E].bincount(minlength=graph.num_nodes)
        assert torch.equal(degree_CN[row, : graph.num_nodes], received_N)
        assert bool(kept_E.all()) == (probability == 0)
        assert bool(kept_E.any()) == (probability < 1)
        alone = one_batch(graph)
        values = drop_edges(keys[row], alone.adjacency, probability, alone.links)[0].matrix.to_dense()
        torch.testing.assert_close(values, expected_NN)
    if links is not None:
        assert torch.equal(links.transposed.to_dense(), links.matrix.to_dense().T)


@weighted_or_not
def test_views_are_the_same_alone_on_a_stack_and_under_vmap(weighted) -> None:
    batch = batch_of(*(directed_graph(size, weighted=weighted, seed=size) for size in (9, 6)))
    batch = batch.replace({"key": torch.tensor([5, 6])})
    x_CND = torch.randn(2, 9, 2, dtype=torch.float64)

    def seen(tensors, x_ND):
        view = batch.replace(tensors).augmented(1, edge_dropout=0.5, feature_dropout=0.5)
        received = block_matmul(view.adjacency, x_ND, owner=view.example_mask)
        return received, view.sum_neighbors(x_ND), view.transform(torch.eye(4, dtype=torch.float64)), view.degree

    mapped = torch.vmap(seen)(batch.tensors(), x_CND)
    for actual, expected in zip(mapped, seen(batch.tensors(), x_CND), strict=True):
        torch.testing.assert_close(actual, expected)


def test_every_client_meets_the_weights_of_all_in_the_union() -> None:
    graphs = [directed_graph(size, weighted=True, seed=size) for size in (9, 6)]
    layout = {"sparse_features": False}
    collator = GraphCollator(graphs, layout=layout, device=torch.device("cpu"), dtype=torch.float64)
    parts = list(UnionCollator(collator, (0, 1))([0, 1]).parts())
    for row in (0, 1):
        seen = [part.adjacency.matrix.to_dense()[9 * row : 9 * row + 9, 9 * row : 9 * row + 9] for part in parts]
        sizes = [int(part.example_mask[row].sum()) for part in parts]
        assert sorted(sizes) == [6, 9]
        for actual, size in zip(seen, sizes, strict=True):
            torch.testing.assert_close(actual[:size, :size], normalized(graphs[0 if size == 9 else 1]))


def test_nets_of_pyg_get_weights_and_attributes() -> None:
    graph = directed_graph(weighted=True)
    plain = PlainGraph(graph, device=torch.device("cpu"), dtype=torch.float64)
    assert plain.edge_weight is not None
    assert plain.edge_weight.dtype == torch.float64
    assert torch.equal(plain.edge_weight.float(), graph.edge_weight_E)
    assert plain.edge_attr is None
    attr_EK = torch.arange(2.0 * graph.num_edges).view(-1, 2)
    graph = dataclasses.replace(graph, edge_weight_E=None, edge_attr_EK=attr_EK)
    plain = PlainGraph(graph, device=torch.device("cpu"), dtype=torch.float64)
    assert plain.edge_weight is None
    assert torch.equal(plain.edge_attr, attr_EK.double())
