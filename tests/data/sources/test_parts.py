"""Clients and sets that come with a split of their own keep it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from torch_geometric.data import Data

import fl_lightning as fl
from fl_lightning.data import (
    ClientSplit,
    ExampleFile,
    ExampleSetFile,
    GivenSplit,
    GraphSetSource,
    InMemoryGraphSet,
    ManyGraphSets,
    RandomPartitioner,
)
from fl_lightning.data.graph_sets import LoadedGraphs

pytestmark = pytest.mark.filterwarnings("ignore:GivenSplit leaves clients")


def rows(number: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are their own numbers."""
    index = torch.arange(first, first + number)
    return index[:, None] + torch.zeros(number, 2), index % 2


def graphs(number: int, first: int = 0) -> list[Data]:
    edge_index = torch.tensor([[0, 1], [1, 0]])
    return [
        Data(x=torch.full((2, 3), float(first + i)), edge_index=edge_index, y=(first + i) % 2) for i in range(number)
    ]


def data_of(source: Any, tmp_path: Any, *more: Any, **settings: Any) -> Any:
    data = fl.FederatedDataModule(source, *more, cache_dir=str(tmp_path), **settings)
    data.setup()
    return data


def parts_of(client: Any) -> dict[str, list[float]]:
    """The numbers of what trains, validates and tests."""
    masks = {part: getattr(client, f"{part}_mask_N") for part in ("train", "val", "test")}
    number_N = client.x_NX[:, 0] if hasattr(client, "x_NX") else client.union.x_NF[::2, 0]  # of two nodes each
    return {part: number_N[mask_N].tolist() for part, mask_N in masks.items()}


@pytest.mark.parametrize("make", [rows, graphs])
def test_clients_keep_their_own_split(make, tmp_path) -> None:
    source = {
        "a": {"train": make(4), "val": make(2, 4), "test": make(3, 6)},
        "b": {"test": make(2, 20), "train": make(3, 30)},
    }
    data = data_of(source, tmp_path)
    assert isinstance(data.splitter, GivenSplit)
    assert parts_of(data.clients[0]) == {"train": [0, 1, 2, 3], "val": [4, 5], "test": [6, 7, 8]}
    assert parts_of(data.clients[1]) == {"train": [30, 31, 32], "val": [], "test": [20, 21]}
    assert data.partition_hash != data_of({**source, "b": {"train": make(5, 20)}}, tmp_path).partition_hash
    drawn = data_of(list(source.values()), tmp_path, None, ClientSplit(train=0.5, val=0.2))
    assert len(parts_of(drawn.clients[0])["train"]) in (4, 5)
    with pytest.raises(ValueError, match="that come with a split at all clients"):
        data_of([source["a"], make(4)], tmp_path)
    drawn = data_of([source["a"], make(4)], tmp_path, None, ClientSplit(train=0.5, val=0.25))
    assert len(parts_of(drawn.clients[1])["train"]) == 2


@pytest.mark.parametrize("make", [rows, graphs])
def test_a_set_keeps_its_split_at_every_client(make, tmp_path) -> None:
    data = data_of({"train": make(20), "test": make(10, 20)}, tmp_path, RandomPartitioner(2))
    assert isinstance(data.splitter, GivenSplit)
    parts = [parts_of(client) for client in data.clients]
    assert sorted(parts[0]["train"] + parts[1]["train"]) == list(range(20))
    assert sorted(parts[0]["test"] + parts[1]["test"]) == list(range(20, 30))


def test_some_of_what_trains_validates(tmp_path) -> None:
    source = [{"train": rows(20), "test": rows(5, 20)}, {"train": rows(10, 30), "test": rows(5, 40)}]
    data = data_of(source, tmp_path, None, GivenSplit(val=0.2))
    for client, number in zip(data.clients, (20, 10), strict=True):
        parts = parts_of(client)
        assert [len(parts[part]) for part in ("train", "val", "test")] == [0.8 * number, 0.2 * number, 5]
    assert data.has_validation
    assert parts_of(data_of(source, tmp_path, None, GivenSplit(val=0.2)).clients[0]) == parts_of(data.clients[0])
    assert parts_of(data_of(source, tmp_path, None, GivenSplit(val=0.2), seed=1).clients[0]) != parts_of(
        data.clients[0]
    )
    mixed = [{"train": rows(10), "val": rows(2, 10), "test": rows(3, 12)}, source[1]]
    data = data_of(mixed, tmp_path, None, GivenSplit(val=0.2))
    assert [len(parts_of(client)["val"]) for client in data.clients] == [2, 2]  # drawn where there is none
    graph = Data(x=torch.ones(9, 2), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.arange(9) % 2)
    graph.train_mask, graph.test_mask = torch.arange(9) < 6, torch.arange(9) >= 6
    with pytest.raises(
        ValueError, match=r"graph's val_mask, which it lacks .* or GivenSplit's val to draw it from what"
    ):
        data_of(graph, tmp_path, RandomPartitioner(1), GivenSplit())
    [client] = data_of(graph, tmp_path, RandomPartitioner(1), GivenSplit(val=0.5)).clients
    assert [int(mask.sum()) for mask in (client.train_mask_N, client.val_mask_N, client.test_mask_N)] == [3, 3, 3]
    assert GivenSplit().identity() == {"splitter": "GivenSplit", "column": 0}  # as before something could be drawn


def test_data_sets_and_arrays_are_parts(tmp_path) -> None:
    x, y = rows(6)
    source = [{"train": TensorDataset(x, y), "test": (np.asarray(x), np.asarray(y))}]
    assert parts_of(data_of(source, tmp_path).clients[0]) == {
        "train": [0, 1, 2, 3, 4, 5],
        "val": [],
        "test": x[:, 0].tolist(),
    }


def test_files(tmp_path) -> None:
    torch.save({"a": {"train": rows(4), "test": rows(2, 4)}}, tmp_path / "clients.pt")
    source = ExampleFile(str(tmp_path / "clients.pt"))
    with pytest.raises(ValueError, match=r"says what trains and what tests: set data\.splitter to GivenSplit"):
        data_of(source, tmp_path)
    assert parts_of(data_of(source, tmp_path, None, GivenSplit()).clients[0])["test"] == [4, 5]
    x, y = rows(8)
    masks = {f"{part}_mask": (torch.arange(8) % 3 == i).long() for i, part in enumerate(("train", "val", "test"))}
    torch.save({"x": x, "y": y, **masks}, tmp_path / "set.pt")
    file = ExampleSetFile(str(tmp_path / "set.pt"))
    with pytest.warns(
        UserWarning, match=r"columns train_mask, val_mask, test_mask are not used, the split is ClientSplit"
    ):
        data_of(file, tmp_path, RandomPartitioner(1))
    parts = parts_of(data_of(file, tmp_path, RandomPartitioner(1), GivenSplit()).clients[0])
    assert parts == {"train": [0, 3, 6], "val": [1, 4, 7], "test": [2, 5]}
    torch.save(
        {"x": x, "y": y, "train_mask": masks["train_mask"], "test_mask": masks["test_mask"]}, tmp_path / "set.pt"
    )
    parts = parts_of(data_of(file, tmp_path, RandomPartitioner(1), GivenSplit()).clients[0])
    assert parts == {"train": [0, 3, 6], "val": [], "test": [2, 5]}
    torch.save({"train": rows(4), "test": rows(2, 4)}, tmp_path / "clients.pt")
    with pytest.raises(ValueError, match="it holds one set with a split: give its clients by name"):
        data_of(source, tmp_path, None, GivenSplit())


def test_clients_may_have_these_names(tmp_path) -> None:
    graph = Data(x=torch.ones(20, 2), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.arange(20) % 2)
    for source in ({"train": graph, "test": graph}, {"train": rows(9), "elsewhere": rows(9)}):
        data = data_of(source, tmp_path)
        assert [client.name for client in data.clients] == list(source)


def test_empty_parts_and_none_are_left_out(tmp_path) -> None:
    for make in (rows, graphs):
        data = data_of([{"train": make(4), "val": None, "test": make(2, 4)}], tmp_path)
        assert parts_of(data.clients[0]) == {"train": [0, 1, 2, 3], "val": [], "test": [4, 5]}
    empty = (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    data = data_of([{"train": rows(4), "val": empty, "test": rows(2, 4)}], tmp_path)
    assert parts_of(data.clients[0]) == {"train": [0, 1, 2, 3], "val": [], "test": [4, 5]}


def test_sets_with_a_public_split_are_split_as_before(tmp_path) -> None:
    class Public(GraphSetSource):
        default_splitter = GivenSplit()

        def load(self, root: Any, cache_dir: Any = None) -> LoadedGraphs:
            return LoadedGraphs(graphs=graphs(12), roles=(torch.arange(12) % 3 + 1).to(torch.int8))

    data = data_of(ManyGraphSets([Public(), Public()]), tmp_path)
    assert isinstance(data.splitter, ClientSplit)
    data_of(ManyGraphSets([Public(), InMemoryGraphSet(graphs(12))]), tmp_path)
    data = data_of(ManyGraphSets([Public(), Public()]), tmp_path, None, GivenSplit())
    assert parts_of(data.clients[1])["train"] == [0, 3, 6, 9]


def test_what_does_not_fit_is_named(tmp_path) -> None:
    for source, message in (
        (
            [{"train": rows(4), "valid": rows(2)}],
            "data.source has 'valid': call what trains, validates and tests 'train'",
        ),
        (
            [{"train": rows(4), "test": (torch.ones(2, 3), torch.ones(2))}],
            r"x has rows of the shapes \{'train': \(2,\)",
        ),
        ([{"train": rows(4), "test": (torch.ones(2, 2), torch.ones(3))}], "client-00, test: x is .* and y"),
    ):
        with pytest.raises(ValueError, match=message):
            data_of(source, tmp_path)
    for source, message in (
        ({"train": graphs(3), "Test": graphs(2)}, "data.source has 'Test': call what"),
        ([{"train": rows(0), "test": rows(3)}], "'train' is empty in what has 'train', 'test': say what trains"),
        ([{"val": rows(3), "test": rows(3)}], "nothing is called 'train' in what has 'val', 'test': say what trains"),
    ):
        with pytest.raises(ValueError, match=message):
            data_of(source, tmp_path, None)
    with pytest.raises(ValueError, match=r"a set of graphs is a list, or lists called 'train', 'val' and 'test'; got"):
        InMemoryGraphSet({"a": graphs(3)})
    with pytest.raises(
        ValueError, match=r"GivenSplit needs examples that come with a split at all clients, as \{'train': "
    ):
        data_of([rows(4)], tmp_path, None, GivenSplit())
    with pytest.raises(ValueError, match="GivenSplit needs graphs that come with a split at all"):
        data_of([graphs(4)], tmp_path, None, GivenSplit())


def test_such_clients_train(tmp_path, make_trainer) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=draw)
    y = (x[:, 0] > 0).long()
    client = {"train": (x[:100], y[:100]), "val": (x[100:150], y[100:150]), "test": (x[150:], y[150:])}
    trainer = make_trainer(num_rounds=30)
    result = trainer.fit(None, data_of([client, client], tmp_path), fl.strategies.FedAvg(num_epochs=5))
    assert result["test/acc"] > 0.9
