import time

import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import Preparation, prepare_graph
from fl_lightning.data.adjacency import adjacency_matrix, clustering_coefficient
from fl_lightning.data.preparation import Dropped, _checked_copy, checked_edges, dropped

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


def test_features_are_divided_by_their_sum_alone():
    x = torch.tensor([[1.0, 3.0], [2.0, 2.0], [0.125, 0.125], [0.0, 0.0], [4.0, 1.0]])
    for smallest in (0.0, 1.0):
        data = prepare_graph(raw_graph(x=x + smallest), Preparation(largest_component=False))
        expected = torch.tensor([1.0, 1.0, 1.0, smallest > 0, 1.0])
        torch.testing.assert_close(data.x.sum(dim=1), expected)
        torch.testing.assert_close(data.x[0, 0], (1 + smallest) / (4 + 2 * torch.tensor(smallest)))


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
        (torch.zeros(5, 2, 2), "one row per node"),
        (torch.tensor([0.5, float("inf"), 1, 0, 0]), "finite numbers"),
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


def changed_features(row: int, column: int, value: float) -> torch.Tensor:
    x = raw_graph().x.clone()
    x[row, column] = value
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": changed_features(3, 1, float("nan"))}, "G: feature 1 of node 3 is nan.*nan_to_num"),
        ({"x": changed_features(2, 0, float("inf"))}, "G: feature 0 of node 2 is inf"),
        (
            {"x": changed_features(2, 0, 1.0).double() * 1e300},
            "G: feature 0 of node 0 is 1e.300, which no float32 holds",
        ),
        ({"x": changed_features(4, 1, float("nan")).to_sparse()}, "G: feature 1 of node 4 is nan"),
        ({"x": torch.ones(5)}, r"G: the features x are torch.float32 of shape \(5,\).*data.x\[:, None\]"),
        ({"x": torch.ones(5, 0)}, r"G: the features x are .* of shape \(5, 0\)"),
        ({"x": torch.ones(5, 2) * 1j}, "G: the features x are torch.complex64"),
        ({"x": torch.ones(4, 2), "num_nodes": torch.tensor(5)}, "G: x has 4 rows for 5 nodes"),
        (
            {"y": torch.tensor([0, 1, 10**6, 0, 1])},
            "G: the label of node 2 is 1000000, but only 3 different .*return_inv",
        ),
        ({"y": torch.tensor([0, 1, float("inf"), 0, 1])}, "G: the label of node 2 is inf; labels are integers"),
        ({"y": torch.tensor([0.0, 0.5, 1, 0, 1]), "task": "classes"}, "G: the label of node 1 is 0.5"),
        ({"y": torch.tensor([0.0, 2.0, 1, 0, 1]), "task": "labels"}, "G: the targets y are .* not classes .* labels"),
        ({"task": "counting"}, "G: task is 'counting'; it says what y holds: classes, labels or numbers"),
        ({"y": torch.full((5,), -1)}, "G: no node has a label"),
        ({"edge_index": raw_graph().edge_index.float()}, r"G: edge_index is torch.float32.*edge_index.long\(\)"),
        ({"edge_index": raw_graph().edge_index.T}, r"G: edge_index is torch.int64 of shape \(5, 2\).*transpose"),
        ({"edge_index": torch.tensor([[0, 1, 5], [1, 2, 0]])}, r"G: edge 2 joins nodes \[5, 0\], but .* 0 to 4"),
        ({"edge_index": torch.tensor([[0, -1], [1, 2]])}, r"G: edge 1 joins nodes \[-1, 2\]"),
        ({"edge_index": torch.tensor([[0, 1], [0, 1]])}, r"G has no edges \(self-loops do not count\)"),
        ({"edge_index": torch.empty(2, 0, dtype=torch.int64)}, "G has no edges"),
        ({"x": changed_features(4, 1, -0.5)}, "G: normalize_features is for .*feature 1 of node 4 is -0.5.*to false"),
    ],
)
def test_unsound_graphs_are_refused_with_the_place(changes: dict[str, torch.Tensor], message: str):
    if "num_nodes" in changes:
        changes["num_nodes"] = int(changes["num_nodes"])  # type: ignore[assignment]
    preparation = Preparation(largest_component=False, undirected=False)
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        prepare_graph(raw_graph(**changes), preparation, "G")
    assert "\n" not in str(refusal.value)


def test_negative_labels_are_unlabeled_nodes_and_whole_numbers_of_any_type_do():
    graph = raw_graph(y=torch.tensor([-1, -7, 0, 1, 1], dtype=torch.int8), edge_index=raw_graph().edge_index.int())
    data = prepare_graph(graph, RAW)
    assert data.y.tolist() == [-1, -7, 0, 1, 1]
    assert data.edge_index.dtype == torch.int64


def test_large_sums_of_sound_features_are_sound():
    data = prepare_graph(raw_graph(x=torch.full((5, 2), 3e38)), RAW)
    assert bool(data.x.isfinite().all())


def test_nodes_keep_the_numbers_that_they_have_in_the_source():
    edges = torch.tensor([[0, 2, 2, 4], [1, 3, 4, 3]])
    data = prepare_graph(raw_graph(edge_index=edges), Preparation())
    assert data.source_idx.tolist() == [2, 3, 4]
    lost = dropped(raw_graph(edge_index=edges, y=torch.tensor([2, 0, 1, 1, 0])), data, Preparation())
    assert (lost.num_nodes, lost.num_edges) == (2, 1)
    assert dropped(raw_graph(), prepare_graph(raw_graph(), RAW), RAW) == Dropped()


def test_flags_are_flags():
    with pytest.raises(ValueError, match="largest_component must be true or false, got 'no'"):
        Preparation(largest_component="no")  # type: ignore[arg-type]


def test_checks_cost_little_on_a_graph_of_the_size_of_arxiv():
    """Against the work that there is anyway: cleaning the edges."""
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(169_343, (2, 1_166_243), generator=draw)
    graph = Data(x=torch.randn(169_343, 128, generator=draw), edge_index=edges, y=torch.arange(169_343) % 40)
    start = time.process_time()
    _checked_copy(graph, "G")
    checked_edges(edges, 169_343, "G")
    assert time.process_time() - start < 0.5
