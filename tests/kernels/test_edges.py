"""Random neighbors, edges and columns: what is drawn, that padding and the other clients do not matter."""

import pytest
import torch
from torch import Tensor

from fl_lightning.batches import GraphBatch
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.kernels.edges import drop_edges, kept_columns, mask_columns, sample_neighbors

KEYS = torch.tensor([11, 2**40 + 5, 3])
CLIENTS = [0, 2, 4]


@pytest.fixture
def collator(graphs) -> GraphCollator:
    return GraphCollator(graphs, layout={"sparse_features": True}, device=torch.device("cpu"), dtype=torch.float64)


def dense(matrix: Tensor, row: int, batch: GraphBatch) -> Tensor:
    """A client's block."""
    size, width = (length // len(batch.y) for length in matrix.shape)
    return matrix.to_dense()[row * size : (row + 1) * size, row * width : (row + 1) * width]


def test_neighbors_are_drawn_without_replacement(collator) -> None:
    batch = collator(CLIENTS)
    allowed_CN = batch.example_mask & (torch.arange(30) % 3 > 0)
    actual = sample_neighbors(KEYS, allowed_CN, batch.adjacency, 2)
    for row in range(3):
        linked_NN = (dense(batch.adjacency.matrix, row, batch) > 0) & ~torch.eye(30, dtype=torch.bool)
        usable_NN = linked_NN & allowed_CN[row]
        for node in range(30):
            drawn = actual[row, node][actual[row, node] >= 0].tolist()
            assert len(drawn) == len(set(drawn)) == min(2, int(usable_NN[node].sum()))
            assert usable_NN[node, drawn].all()


def test_a_client_alone_and_under_vmap_draws_the_same(collator) -> None:
    batch = collator(CLIENTS)
    stacked = sample_neighbors(KEYS, batch.example_mask, batch.adjacency, 3)
    mapped = torch.vmap(lambda key, mask: sample_neighbors(key, mask, batch.adjacency, 3))(KEYS, batch.example_mask)
    assert torch.equal(mapped, stacked)
    for row, client in enumerate(CLIENTS):
        alone = single(collator([client]))
        size = len(alone.y)
        own = sample_neighbors(KEYS[row], alone.example_mask, alone.adjacency, 3)
        assert torch.equal(own, stacked[row, :size])
    assert not torch.equal(sample_neighbors(KEYS + 1, batch.example_mask, batch.adjacency, 3), stacked)


@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
def test_edges_are_dropped_both_ways_and_the_rest_is_normalized(probability, collator) -> None:
    batch = collator(CLIENTS)
    operator, degree_CN, _ = drop_edges(KEYS, batch.adjacency, probability)
    for row in range(3):
        actual, before = (dense(each.matrix, row, batch) for each in (operator, batch.adjacency))
        kept = (actual > 0).double()
        assert torch.equal(kept, kept.T)
        assert ((kept > 0) <= (before > 0)).all()
        assert torch.equal(kept.diagonal(), batch.example_mask[row].double())
        scale = kept.sum(dim=1).clamp(min=1).rsqrt()
        torch.testing.assert_close(actual, scale[:, None] * kept * scale)
        assert torch.equal(degree_CN[row], (kept.sum(dim=1) - kept.diagonal()).long())
        share = (kept.sum() - kept.diagonal().sum()) / degree_of(before)
        assert abs(float(share) - (1 - probability)) < 0.25
    if probability == 0:
        torch.testing.assert_close(operator.matrix.values(), batch.adjacency.matrix.values())


def degree_of(matrix: Tensor) -> Tensor:
    return (matrix > 0).sum() - (matrix.diagonal() > 0).sum()


def test_columns_are_masked_in_the_matrix_and_its_transpose(collator) -> None:
    batch = collator(CLIENTS)
    actual = mask_columns(KEYS, batch.sparse_x, 0.5)
    kept_CF = kept_columns(KEYS, 6, 0.5)
    for row in range(3):
        expected = dense(batch.sparse_x.matrix, row, batch) * kept_CF[row]
        torch.testing.assert_close(dense(actual.matrix, row, batch), expected)
    torch.testing.assert_close(actual.transposed.to_dense(), actual.matrix.to_dense().T)


@pytest.mark.parametrize("sparse", [True, False])
def test_views_are_the_same_alone_and_on_a_stack(sparse, graphs) -> None:
    layout = {"sparse_features": sparse}
    collator = GraphCollator(graphs, layout=layout, device=torch.device("cpu"), dtype=torch.float64)
    batch = collator(CLIENTS).replace({"key": KEYS})
    weight_FD = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value(tensors: dict[str, Tensor]) -> Tensor:
        view = batch.replace(tensors).augmented(1, edge_dropout=0.3, feature_dropout=0.5)
        return view.sum_neighbors(view.transform(weight_FD))

    stacked = torch.vmap(value)(batch.tensors())
    for row, client in enumerate(CLIENTS):
        alone = single(collator([client])).replace({"key": KEYS[row]})
        view = alone.augmented(1, edge_dropout=0.3, feature_dropout=0.5)
        torch.testing.assert_close(view.sum_neighbors(view.transform(weight_FD)), stacked[row, : len(alone.y)])


def test_sums_with_the_node_itself(graphs) -> None:
    """Of undirected graphs, whose operator has loops."""
    layout = {"sparse_features": False}
    batch = GraphCollator(graphs, layout=layout, device=torch.device("cpu"), dtype=torch.float64)(CLIENTS)
    value_CND = torch.randn(*batch.node_mask.shape, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value_CND *= batch.node_mask.unsqueeze(-1)
    torch.testing.assert_close(batch.sum_with_neighbors(value_CND), value_CND + batch.sum_neighbors(value_CND))


def test_every_matrix_needs_a_key(collator) -> None:
    with pytest.raises(ValueError, match="1 keys for 3 matrices: give each matrix a key of its own"):
        drop_edges(KEYS[0], collator(CLIENTS).adjacency, 0.5)
