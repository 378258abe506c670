import pytest
import torch

from fl_lightning.relations.edges import opposite_pairs
from fl_lightning.strategies.hypernetwork import collaboration_graph
from fl_lightning.strategies.hypernetwork.collaboration_graph import knn_graph


def edges(edge_index: torch.Tensor) -> set[tuple[int, int]]:
    return set(map(tuple, edge_index.T.tolist()))


def test_neighbors_by_hand_are_joined_in_both_directions() -> None:
    angle = torch.tensor([0.0, 0.1, 0.3, 2.0])  # nearest: 0 -> 1, 1 -> 0, 2 -> 1, 3 -> 2
    length = torch.tensor([[1.0], [50.0], [0.01], [3.0]])  # must not matter
    embedding = length * torch.stack([angle.cos(), angle.sin()], dim=1)

    graph = knn_graph(embedding, num_neighbors=1)

    assert graph.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    assert graph.dtype == torch.int64


@pytest.mark.parametrize("num_neighbors", [1, 3, 8])
def test_graph_is_symmetric_coalesced_and_without_self_loops(num_neighbors: int) -> None:
    embedding = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))

    graph = knn_graph(embedding, num_neighbors)

    actual = edges(graph)
    assert len(actual) == graph.shape[1]
    assert all((m, n) in actual and n != m for n, m in actual)
    assert graph[0].bincount(minlength=9).min() >= num_neighbors


def test_all_others_give_the_complete_graph() -> None:
    assert edges(knn_graph(torch.ones(4, 2), 3)) == {(n, m) for n in range(4) for m in range(4) if n != m}


def test_ties_go_to_the_lower_index() -> None:
    assert edges(knn_graph(torch.full((6, 3), 0.3), 1)) == {(0, n) for n in range(1, 6)} | {(n, 0) for n in range(1, 6)}


def test_rows_of_zeros_are_equally_near_to_everyone() -> None:
    embedding = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])

    # Client 2 has similarity 0 to both: the lower index wins. It is nearer to clients 0 and 1 than they to each other.
    assert edges(knn_graph(embedding, 1)) == {(0, 2), (2, 0), (1, 2), (2, 1)}


def test_permuting_clients_permutes_the_graph() -> None:
    embedding = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))

    assert edges(order[knn_graph(embedding[order], 3)]) == edges(knn_graph(embedding, 3))


def test_blocks_of_rows_do_not_change_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.randn(11, 4, generator=torch.Generator().manual_seed(3))
    whole = knn_graph(embedding, 2)

    monkeypatch.setattr(collaboration_graph, "_BLOCK_ROWS", 3)

    assert torch.equal(knn_graph(embedding, 2), whole)


@pytest.mark.parametrize("num_neighbors", [0, 3, 7])
def test_impossible_number_of_neighbors(num_neighbors: int) -> None:
    with pytest.raises(ValueError, match=f"num_neighbors={num_neighbors} .* 3 clients.* between 1 and"):
        knn_graph(torch.ones(3, 2), num_neighbors)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embeddings_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"clients \[1\] contain NaN"):
        knn_graph(torch.tensor([[1.0], [value], [2.0]]), 1)


def test_opposite_pairs_of_an_unsorted_graph() -> None:
    graph = torch.tensor([[2, 0, 1, 2, 1, 0], [0, 1, 2, 1, 0, 2]])

    opposite = opposite_pairs(graph, 3)

    assert torch.equal(graph[:, opposite], graph.flip(0))
    assert torch.equal(opposite[opposite], torch.arange(6))


@pytest.mark.parametrize("graph", [[[0, 1], [1, 2]], [[0, 1, 1], [1, 0, 1]], [[0], [1]]])
def test_opposite_pairs_needs_an_undirected_graph(graph: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="undirected"):
        opposite_pairs(torch.tensor(graph), 3)
