import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import Preparation, prepare_graph
from fl_lightning.data.adjacency import adjacency_matrix, clustering_coefficient

RAW = Preparation(normalize_features=False, largest_component=False, undirected=False)


def raw_graph(**changes: torch.Tensor) -> Data:
    """Two components, a self-loop at 1, edge 0-1 twice, edge 1-2 in one direction only."""
    graph = {
        "x": torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.0, 8.0], [1.0, 1.0], [4.0, 0.0]]),
        "edge_index": torch.tensor([[0, 0, 1, 1, 3], [1, 1, 1, 2, 4]]),
        "y": torch.tensor([0, 1, 0, 1, 1]),
    }
    return Data(**{**graph, **changes})


def edges_of(data: Data) -> list[list[int]]:
    return data.edge_index.T.tolist()


def test_all_steps():
    data = prepare_graph(raw_graph(membership=torch.tensor([5, 6, 7, 8, 9])), Preparation())
    assert edges_of(data) == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert data.membership.tolist() == [5, 6, 7]
    torch.testing.assert_close(data.x.sum(dim=1), torch.ones(3))


def test_self_loops_and_duplicates_always_go():
    data = prepare_graph(raw_graph(), RAW)
    assert edges_of(data) == [[0, 1], [1, 2], [3, 4]]
    assert data.num_nodes == 5
    assert torch.equal(data.x, raw_graph().x)


def test_the_raw_graph_is_left_alone():
    raw = raw_graph()
    prepare_graph(raw, Preparation())
    assert torch.equal(raw.x, raw_graph().x)
    assert torch.equal(raw.edge_index, raw_graph().edge_index)


def test_types_of_features_and_labels():
    y = torch.tensor([[0.0], [1.0], [float("nan")], [1.0], [0.0]])
    data = prepare_graph(raw_graph(x=raw_graph().x.double().to_sparse(), y=y), RAW)
    assert data.x.dtype == torch.float32
    assert data.x.layout == torch.strided
    assert data.y.tolist() == [0, 1, -1, 1, 0]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.zeros(5, 2), "one class per node"),
        (torch.tensor([0.5, 1, 1, 0, 0]), "whole numbers"),
    ],
)
def test_unusable_labels(y: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        prepare_graph(raw_graph(y=y), RAW)


def test_missing_attributes_are_named():
    with pytest.raises(ValueError, match="no x, y"):
        prepare_graph(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), RAW)


@pytest.mark.parametrize("products", [1, 7, 10**9])
def test_clustering_agrees_with_networkx_in_any_blocks(monkeypatch: pytest.MonkeyPatch, products: int):
    import networkx

    monkeypatch.setattr("fl_lightning.data.adjacency._MAX_PRODUCTS", products)
    graph = networkx.gnp_random_graph(40, 0.2, seed=1)
    graph.add_node(40)
    edges = torch.tensor(list(graph.to_directed().edges)).T
    expected = networkx.average_clustering(graph)
    assert clustering_coefficient(adjacency_matrix(edges, 41)) == pytest.approx(expected, abs=1e-6)
