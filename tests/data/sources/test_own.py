"""Graphs of one's own: in memory, in files, and many that are a client each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import FakeDataset

from fl_lightning.data import (
    FederatedDataModule,
    FileSource,
    GivenSplit,
    GlobalSplit,
    InMemorySource,
    ManyGraphs,
    RandomPartitioner,
)


def graph(num_nodes: int, num_features: int = 3, **attributes: Any) -> Data:
    nodes = torch.arange(num_nodes)
    x = torch.rand(num_nodes, num_features, generator=torch.Generator().manual_seed(num_nodes))
    return Data(x=x, y=nodes % 2, edge_index=torch.stack([nodes, (nodes + 1) % num_nodes]), **attributes)


def module(source: Any, folder: Path, *parts: Any, **settings: Any) -> FederatedDataModule:
    data = FederatedDataModule(source, *parts, cache_dir=str(folder), root=str(folder), **settings)
    data.setup()
    return data


def test_a_graph_in_memory_is_cut_into_clients(tmp_path: Path) -> None:
    data = module(graph(20), tmp_path, RandomPartitioner(num_clients=4))
    assert [client.num_nodes for client in data.clients] == [5] * 4
    assert isinstance(data.source, InMemorySource)
    other = module(graph(24), tmp_path, RandomPartitioner(num_clients=4))
    assert data.partition_hash != other.partition_hash


def test_each_of_a_list_is_a_client(tmp_path: Path) -> None:
    graphs = [graph(12), graph(10), graph(8)]
    for source in (graphs, tuple(graphs), [InMemorySource(each) for each in graphs]):
        data = module(source, tmp_path / str(type(source[0]).__name__))
        assert [client.num_nodes for client in data.clients] == [12, 10, 8]
        assert [client.num_edges for client in data.clients] == [24, 20, 16]  # both directions
        for client, each in zip(data.clients, graphs, strict=True):
            assert torch.equal(client.x_NF, each.x)
            assert torch.equal(client.y_N, each.y)
        assert data.source_idx_N(1).tolist() == list(range(10))
        assert data.statistics().rows[0].edges_lost == 0


def test_a_file_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save([graph(12), graph(10)], tmp_path / "all.pt")
    assert [client.num_nodes for client in module("~/all.pt", tmp_path).clients] == [12, 10]


def test_a_file_with_a_list_and_a_list_of_files(tmp_path: Path) -> None:
    graphs = [graph(12), graph(10)]
    torch.save(graphs, tmp_path / "all.pt")
    for idx, each in enumerate(graphs):
        torch.save(each, tmp_path / f"{idx}.pt")
    files = FileSource([str(tmp_path / "0.pt"), str(tmp_path / "1.pt")])
    many = ManyGraphs([FileSource(str(tmp_path / f"{idx}.pt")) for idx in (0, 1)], names=["north", "south"])
    actual = [
        module(source, tmp_path)
        for source in (FileSource(str(tmp_path / "all.pt")), [str(tmp_path / "0.pt"), tmp_path / "1.pt"], many, files)
    ]
    for data in actual:
        assert [client.num_nodes for client in data.clients] == [12, 10]
        assert torch.equal(data.clients[1].x_NF, graphs[1].x)
    assert [client.name for client in actual[0].clients] == ["client-00", "client-01"]
    assert [client.name for client in actual[2].clients] == ["north", "south"]
    assert [client.name for client in actual[3].clients] == ["0", "1"]
    assert actual[0].partition_hash != actual[3].partition_hash
    with pytest.raises(ValueError, match=r"all.pt' holds a list, but it is one of several files"):
        module(FileSource([str(tmp_path / "0.pt"), str(tmp_path / "all.pt")]), tmp_path)
    with pytest.raises(ValueError, match="path is an empty list: give at least one file"):
        FileSource([])


def test_masks_that_all_graphs_have_are_kept(tmp_path: Path) -> None:
    graphs = []
    for size in (12, 10):
        role = torch.arange(size) % 3
        graphs.append(graph(size, train_mask=role == 0, val_mask=role == 1, test_mask=role == 2))
    data = module(graphs, tmp_path, None, GivenSplit())
    for client, each in zip(data.clients, graphs, strict=True):
        assert torch.equal(client.train_mask_N, each.train_mask)
        assert torch.equal(client.test_mask_N, each.test_mask)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([graph(12), graph(12, num_features=4)], "^graph 1 has 4 features of each node, the first 3"),
        ([], "give a source for each client"),
        ([graph(12), 3], r"holds a int, which is not a source of a graph: give a source, a graph \(torch_geometric"),
        (graph(12), "data.partitioner is missing: InMemorySource is one graph"),
        ([graph(12), Data(x=torch.rand(3, 3))], "^graph 1 has no edge_index, y"),
        (7, "data.source is a int, which is not a source: give a source, a graph .* pair of inputs and targets"),
        (HeteroData(), r"several types of nodes or edges: give data.to_homogeneous\(\)"),
        (FakeDataset(3), r"FakeDataset of 3 graphs: give list\(dataset\) if .*InMemoryGraphSet\(list\(dataset\)\)"),
        (
            [graph(12), Data(x=torch.eye(3), adj_t=torch.eye(3).to_sparse())],
            "^graph 1 has adj_t and no edge_index",
        ),
    ],
)
def test_mistakes(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        module(source, tmp_path)


def test_names_are_one_for_each() -> None:
    with pytest.raises(ValueError, match="give each of the 2 graphs its own"):
        ManyGraphs([InMemorySource(graph(9)), InMemorySource(graph(9))], names=["a", "a"])


def test_a_data_set_of_pyg_with_one_graph_and_a_dictionary_of_graphs(tmp_path: Path) -> None:
    assert len(module(FakeDataset(1, avg_num_nodes=60, task="node"), tmp_path, RandomPartitioner(2)).clients) == 2
    data = module({"bank": graph(12), "shop": graph(14)}, tmp_path)
    assert [(client.name, client.num_nodes) for client in data.clients] == [("bank", 12), ("shop", 14)]
    sets = {name: list(FakeDataset(6, task="graph")) for name in ("bank", "shop")}
    data = module(sets, tmp_path, None, GlobalSplit())
    assert [client.name for client in data.clients] == ["bank", "shop"]
    assert str(data.task) == "GraphClassification"


def test_masks_that_the_default_split_does_not_use_are_named(tmp_path: Path) -> None:
    role = torch.arange(60) % 3
    masked = graph(60, train_mask=role == 0, val_mask=role == 1, test_mask=role == 2)
    with pytest.warns(UserWarning, match=r"train_mask, val_mask, test_mask are not used, .* set data.splitter to G"):
        module(masked, tmp_path, RandomPartitioner(2))
    for splitter in (GivenSplit(), GlobalSplit()):
        module(masked, tmp_path, RandomPartitioner(2), splitter)
