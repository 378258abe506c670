"""Directions, weights and attributes of edges on their way from a source to the clients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data import (
    ClientSplit,
    FederatedDataModule,
    FileSource,
    GivenPartitioner,
    InMemorySource,
    ManyGraphs,
    MetisPartitioner,
    Preparation,
    RandomPartitioner,
    prepare_graph,
)
from fl_lightning.data.partition.record import hash_graph

RAW = Preparation(normalize_features=False, largest_component=False, undirected=False)
BOTH_WAYS = Preparation(normalize_features=False, largest_component=False, undirected=True)


def graph(edges: list[tuple[int, int]] | None = None, num_nodes: int = 5, **attributes: Any) -> Data:
    """Edge 0-1 twice, 1-2 both ways, 3-4 one way."""
    edges = [(0, 1), (0, 1), (1, 2), (2, 1), (3, 4)] if edges is None else edges
    nodes = torch.arange(num_nodes)
    return Data(x=torch.rand(num_nodes, 3), y=nodes % 2, edge_index=torch.tensor(edges).T, **attributes)


def random_graph(num_nodes: int = 40, seed: int = 0) -> Data:
    """Directed, weighted, with attributes that name the ends."""
    draw = torch.Generator().manual_seed(seed)
    edges_2E = (torch.rand(num_nodes, num_nodes, generator=draw) < 0.15).fill_diagonal_(False).nonzero().T
    edges_2E = edges_2E[:, torch.randperm(edges_2E.shape[1], generator=draw)]
    return Data(
        x=torch.rand(num_nodes, 3, generator=draw),
        y=torch.arange(num_nodes) % 3,
        edge_index=edges_2E,
        edge_weight=named(edges_2E),
        edge_attr=edges_2E.T.clone(),
        membership=torch.arange(num_nodes) % 4,
    )


def named(edges_2E: Tensor) -> Tensor:
    """A weight by which an edge is known."""
    return (100 * edges_2E[0] + edges_2E[1]).float()


def module(source: Any, folder: Path, *parts: Any) -> FederatedDataModule:
    data = FederatedDataModule(source, *parts, splitter=ClientSplit(0.5, 0.2), cache_dir=str(folder), root=str(folder))
    data.setup()
    return data


def test_duplicates_are_added_and_directions_averaged() -> None:
    weight, attr = torch.tensor([1.0, 2.0, 4.0, 6.0, 8.0]), torch.tensor([1, 2, 4, 6, 8])
    raw = graph(edge_weight=weight, edge_attr=attr)
    data = prepare_graph(raw, RAW)
    assert data.edge_index.T.tolist() == [[0, 1], [1, 2], [2, 1], [3, 4]]
    assert data.edge_weight.tolist() == [3, 4, 6, 8]
    assert data.edge_attr.tolist() == [[1.5], [4], [6], [8]]
    data = prepare_graph(raw, BOTH_WAYS)
    assert data.edge_index.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1], [3, 4], [4, 3]]
    assert data.edge_weight.tolist() == [3, 3, 5, 5, 8, 8]
    assert data.edge_attr.tolist() == [[1.5], [1.5], [5], [5], [8], [8]]
    assert data.edge_weight.dtype == data.edge_attr.dtype == torch.float32
    assert torch.equal(raw.edge_weight, weight)


def test_a_graph_that_has_both_directions_keeps_its_weights() -> None:
    data = prepare_graph(graph([(0, 1), (1, 0)], edge_weight=torch.tensor([0.3, 0.3])), BOTH_WAYS)
    assert torch.equal(data.edge_weight, torch.tensor([0.3, 0.3]))


def test_the_largest_component_keeps_what_its_edges_carry() -> None:
    raw = graph(edge_weight=torch.arange(5.0), edge_attr=torch.arange(10.0).view(5, 2))
    data = prepare_graph(raw, Preparation(normalize_features=False, undirected=False))
    assert data.edge_index.T.tolist() == [[0, 1], [1, 2], [2, 1]]
    assert data.edge_weight.tolist() == [1, 2, 3]
    assert data.edge_attr.tolist() == [[1, 2], [4, 5], [6, 7]]


def test_self_loops_go_with_a_word() -> None:
    raw = graph([(0, 0), (0, 1)], edge_weight=torch.tensor([5.0, 1.0]))
    with pytest.warns(UserWarning, match=r"mine: 1 self-loops are dropped with their edge_weight; layers that need"):
        data = prepare_graph(raw, RAW, "mine")
    assert data.edge_weight.tolist() == [1]
    prepare_graph(graph([(0, 0), (0, 1)]), RAW)  # loops that carry nothing are as those that layers add


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("edge_weight", torch.ones(4), r"edge_weight is torch.float32 of shape \(4,\) for 5 edges; give a number for"),
        ("edge_weight", torch.ones(5, 2), r"edge_weight has shape \(5, 2\); give a number for each edge"),
        ("edge_weight", [1.0] * 5, "edge_weight is list for 5 edges"),
        (
            "edge_weight",
            torch.tensor([1.0, 1, -2, 1, 1]),
            "edge_weight of edge 2 is -2; weights are not negative.*edge_attr",
        ),
        ("edge_weight", torch.tensor([1.0, 1, 1, torch.nan, 1]), "edge_weight of edge 3 is nan, which is not finite"),
        (
            "edge_weight",
            torch.tensor([1.0, 1, 1, 1e300, 1]).double().mul(1e10),
            "edge_weight of edge 3 is .*finite in float32",
        ),
        ("edge_attr", torch.ones(3, 2), r"edge_attr is torch.float32 of shape \(3, 2\) for 5 edges; give a row"),
        ("edge_attr", torch.ones(5, 0), r"edge_attr has shape \(5, 0\); give a row of numbers"),
        (
            "edge_attr",
            torch.ones(5, 2).index_fill(0, torch.tensor([1]), torch.inf),
            r"edge_attr of edge 1 is \[inf, inf\]",
        ),
    ],
    ids=range(9),
)
def test_unsound_values_are_refused(key: str, value: Any, message: str) -> None:
    raw = graph()
    raw[key] = value
    with pytest.raises(ValueError, match=f"mine: {message}"):
        prepare_graph(raw, RAW, "mine")


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize(
    "partitioner", [GivenPartitioner(), MetisPartitioner(3), RandomPartitioner(3)], ids=lambda p: type(p).__name__
)
def test_every_edge_of_a_client_has_its_own_weight_and_attributes(tmp_path: Path, partitioner, undirected) -> None:
    raw = random_graph()
    data = module(InMemorySource(raw, undirected=undirected), tmp_path, partitioner)
    weight_of = dict(zip(map(tuple, raw.edge_index.T.tolist()), raw.edge_weight.tolist(), strict=True))
    assert sum(client.num_edges for client in data.clients) > 40
    for client in data.clients:
        assert client.is_directed is not undirected
        own_E2 = client.node_idx_N[client.edge_index_2E].T.tolist()
        for (source, target), weight, attr in zip(own_E2, client.edge_weight_E, client.edge_attr_EK, strict=True):
            directions = [(source, target), (target, source)] if undirected else [(source, target)]
            actual = [(weight_of[pair], pair) for pair in directions if pair in weight_of]
            assert float(weight) == sum(each for each, _ in actual) / len(actual)
            assert attr.tolist() == torch.tensor([pair for _, pair in actual]).float().mean(dim=0).tolist()


def test_partitions_and_their_cache_tell_weights_apart(tmp_path: Path) -> None:
    raw = random_graph()
    other = raw.clone()
    other.edge_weight[0] += 1
    first, second = (
        module(InMemorySource(each, undirected=False), tmp_path, GivenPartitioner()) for each in (raw, other)
    )
    assert first.partition_hash != second.partition_hash
    for client, each in zip(first.clients, second.clients, strict=True):
        assert torch.equal(client.edge_index_2E, each.edge_index_2E)


def test_graphs_without_either_keep_their_hash() -> None:
    """That of the records, runs and studies which were made before edges carried anything."""
    path = Data(x=torch.ones(3, 1), y=torch.tensor([0, 1, 0]), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    assert hash_graph(prepare_graph(path, BOTH_WAYS)).startswith("1ee25c4ceeef0006")


def test_edges_that_are_added_are_said(tmp_path: Path) -> None:
    raw = graph()
    torch.save(raw, tmp_path / "mine.pt")
    torch.save([raw, raw], tmp_path / "two.pt")
    said = "undirected adds the missing direction of 2 of 4 edges; set it to false on the source to keep"
    with pytest.warns(UserWarning, match=f"^InMemorySource: {said}"):
        module(raw, tmp_path, RandomPartitioner(1))
    with pytest.warns(UserWarning, match=f"mine.pt'\\): {said}"):
        module(FileSource(str(tmp_path / "mine.pt")), tmp_path, RandomPartitioner(1))
    with pytest.warns(UserWarning, match=f"two.pt'\\), graph 1: {said}"):
        module(FileSource(str(tmp_path / "two.pt")), tmp_path)


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_is_added(tmp_path: Path) -> None:
    module(InMemorySource(graph(), undirected=False), tmp_path, RandomPartitioner(1))
    module(graph([(0, 1), (1, 0)]), tmp_path, RandomPartitioner(1))


@pytest.mark.filterwarnings("ignore:.*largest_component drops 2 of 5 nodes")
def test_each_of_several_graphs_is_prepared_as_it_says(tmp_path: Path) -> None:
    source = ManyGraphs([InMemorySource(graph(), undirected=False), InMemorySource(graph(), undirected=True)])
    directed, undirected = module(source, tmp_path).clients
    assert directed.edge_index_2E.T.tolist() == [[0, 1], [1, 2], [2, 1], [3, 4]]
    assert undirected.num_edges == 6
    torch.save([graph(), graph()], tmp_path / "two.pt")
    with pytest.warns(UserWarning, match="without a val example"):
        data = module(FileSource(str(tmp_path / "two.pt"), largest_component=True, undirected=False), tmp_path)
    assert [client.num_nodes for client in data.clients] == [3, 3]
    assert [client.num_edges for client in data.clients] == [3, 3]


def test_lists_carry_what_all_graphs_have(tmp_path: Path) -> None:
    raw = [random_graph(20, seed=seed) for seed in (1, 2)]
    data = module([InMemorySource(each, undirected=False) for each in raw], tmp_path)
    for client, each in zip(data.clients, raw, strict=True):
        assert torch.equal(client.edge_weight_E, named(client.edge_index_2E))
        assert torch.equal(client.edge_attr_EK, client.edge_index_2E.T.float())
        assert client.num_edges == each.num_edges
    del raw[1].edge_weight
    with pytest.raises(ValueError, match="graph 1 has no edge_weight, but graph 0"):
        module(raw, tmp_path)
    del raw[0].edge_weight
    raw[1].edge_attr = raw[1].edge_attr[:, :1]
    with pytest.raises(ValueError, match="graph 1 has 1 attributes of each edge, the first 2"):
        module(raw, tmp_path)
