"""Clients and sets that come with a split of their own keep it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from torch_geometric.data import Data

import fl_lightning as fl
from fl_lightning.data import ClientSplit, ExampleFile, ExampleSetFile, GivenSplit, RandomPartitioner

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
    with pytest.raises(ValueError, match="1 of 2 clients say what trains and what tests: give that of all clients"):
        data_of([source["a"], make(4)], tmp_path)


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
    full = [{"train": rows(4), "val": rows(2, 4), "test": rows(3, 6)}]
    with pytest.raises(ValueError, match="GivenSplit's val is for data without anything to validate on"):
        data_of(full, tmp_path, None, GivenSplit(val=0.2))
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
    with pytest.raises(ValueError, match=r"says what trains and what tests"):
        data_of(file, tmp_path, RandomPartitioner(1))
    parts = parts_of(data_of(file, tmp_path, RandomPartitioner(1), GivenSplit()).clients[0])
    assert parts == {"train": [0, 3, 6], "val": [1, 4, 7], "test": [2, 5]}


def test_what_does_not_fit_is_named(tmp_path) -> None:
    for source, message in (
        (
            [{"train": rows(4), "valid": rows(2)}],
            "has 'train' and 'valid': call what trains, validates and tests 'train'",
        ),
        (
            [{"train": rows(4), "test": (torch.ones(2, 3), torch.ones(2))}],
            r"x has rows of the shapes \{'train': \(2,\)",
        ),
        ([{"train": rows(4), "test": (torch.ones(2, 2), torch.ones(3))}], "client-00, test: x is .* and y"),
    ):
        with pytest.raises(ValueError, match=message):
            data_of(source, tmp_path)
    with pytest.raises(ValueError, match=r"GivenSplit needs examples that come with a split, as \{'train': "):
        data_of([rows(4)], tmp_path, None, GivenSplit())
    with pytest.raises(ValueError, match="GivenSplit needs graphs that come with a split"):
        data_of([graphs(4)], tmp_path, None, GivenSplit())


def test_such_clients_train(tmp_path, make_trainer) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=draw)
    y = (x[:, 0] > 0).long()
    client = {"train": (x[:100], y[:100]), "val": (x[100:150], y[100:150]), "test": (x[150:], y[150:])}
    trainer = make_trainer(num_rounds=30)
    result = trainer.fit(None, data_of([client, client], tmp_path), fl.strategies.FedAvg(num_epochs=5))
    assert result["test/acc"] > 0.9
