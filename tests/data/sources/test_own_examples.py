"""Your own tables, series and images."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from torch_geometric.datasets import FakeDataset

import fl_lightning as fl
from fl_lightning.data import ExampleFile, InMemoryExamples
from fl_lightning.tasks import ExampleClassification, ExampleRegression

X = torch.randn(50, 2, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 3


def module(source: Any, **settings: Any) -> fl.FederatedDataModule:
    data = fl.FederatedDataModule(source, **settings)
    data.setup()
    return data


@pytest.mark.parametrize(
    "source",
    [
        [(X[:20], Y[:20]), (X[20:], Y[20:])],
        [(X[:20].numpy(), Y[:20].numpy()), (X[20:].double(), Y[20:].int())],
        [TensorDataset(X[:20], Y[:20]), Subset(TensorDataset(X, Y), range(20, 50))],
        [[(x, int(y)) for x, y in zip(X[:20], Y[:20], strict=True)]],
        InMemoryExamples([(X[:20], Y[:20]), (X[20:], Y[20:, None])], names=["client-00", "client-01"]),
    ],
)
def test_clients_hold_what_was_given(source) -> None:
    if isinstance(source, list) and isinstance(source[0], list):
        source = [_Listed(source[0]), (X[20:], Y[20:])]
    data = module(source)
    assert data.task == ExampleClassification()
    assert data.num_features == (2, 4, 4)
    assert data.registry.num_outputs == 3
    assert [client.name for client in data.clients] == ["client-00", "client-01"]
    for client, chosen in zip(data.clients, (slice(0, 20), slice(20, 50)), strict=True):
        assert torch.equal(client.x_NX, X[chosen])
        assert client.y_N.tolist() == Y[chosen].tolist()


class _Listed(torch.utils.data.Dataset):
    """A map-style data set of one's own."""

    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


@pytest.mark.parametrize(
    ("y", "task", "num_outputs", "given"),
    [
        (torch.rand(50), ExampleRegression(), 1, None),
        (torch.rand(50, 2), ExampleRegression(), 2, None),
        (Y, ExampleRegression(), 1, "numbers"),
        ((torch.rand(50, 3, generator=torch.Generator().manual_seed(1)) > 0.5).float(), None, 3, None),
        (torch.where(torch.rand(50, 2) < 0.3, torch.nan, torch.rand(50, 2)), ExampleRegression(), 2, None),
    ],
)
def test_the_task_follows_from_the_targets(y, task, num_outputs, given) -> None:
    clients = {"north": (X[:, 0, 0], y), "south": (X[:, 1, 0], y)}
    data = module(clients if given is None else InMemoryExamples(clients, task=given))
    assert data.task == (task or ExampleClassification(multi_label=True))
    assert data.registry.num_outputs == num_outputs
    assert [client.name for client in data.clients] == ["north", "south"]


def test_other_examples_make_another_partition() -> None:
    first, again = (module([(X, Y), (X, Y)]).partition_hash for _ in range(2))
    assert first == again != module([(X + 1, Y), (X, Y)]).partition_hash


def test_a_file(tmp_path: Path) -> None:
    torch.save({"a": (X[:20], Y[:20]), "b": (X[20:], Y[20:])}, tmp_path / "mine.pt")
    data = module(ExampleFile(str(tmp_path / "mine.pt")))
    other = module({"a": (X[:20], Y[:20]), "b": (X[20:], Y[20:])})
    for client, expected in zip(data.clients, other.clients, strict=True):
        assert client.name == expected.name
        assert torch.equal(client.x_NX, expected.x_NX)
        assert torch.equal(client.train_mask_N, expected.train_mask_N)
    torch.save([X], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"it holds a list.*a dictionary of pairs of tensors"):
        module(ExampleFile(str(tmp_path / "list.pt")))
    with pytest.raises(FileNotFoundError, match=r"none.pt.* is not a file. Write one with `torch.save"):
        module(ExampleFile(str(tmp_path / "none.pt")))


class Ragged(Dataset):
    """Images of different sizes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[0, :, : index + 1], 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InMemoryExamples([]), "clients are 0, names None: give at least one client"),
        (lambda: InMemoryExamples([(X, Y)], names=["a", "b"]), "clients are 1, names .*: give .* each its name"),
        (lambda: InMemoryExamples([(X, Y)], task="ranks"), "task must be one of classes, labels, numbers"),
        (lambda: InMemoryExamples([(X, Y), X]), "client-01 has a Tensor: give a pair of inputs and targets"),
        (lambda: [TensorDataset(X)], "client-00 has a TensorDataset: give a pair of inputs and targets"),
        (lambda: [FakeDataset(3)], r"ManyGraphs.sources holds a FakeDataset, which is not a source of a graph"),
        (
            lambda: [(X, np.array(["a"] * 50))],
            r"client-00: y holds <U1, not numbers: number categories, e.g. by ",
        ),
        (lambda: [Ragged(), Ragged()], "client-00: the examples of Ragged cannot be stacked .*: give tensors of one"),
        (lambda: [Subset(FakeDataset(3), [0, 1])], r"examples of Subset cannot .*; of graphs list\(dataset\)"),
        (lambda: [(X, Y[:9]), (X, Y)], r"client-00: x is \(50, 2, 4, 4\) and y \(9,\): give a row of both"),
        (lambda: [(X, Y), (X[:, 0], Y)], "client-01: x is .* the X of the other clients"),
        (lambda: [(X, Y), (X, torch.rand(50, 2))], "the clients' targets have rows of the shapes"),
        (lambda: [(X * torch.nan, Y)], "client-00: the x of example 0 is not finite"),
        (lambda: [(X, Y - 9)], "no example has a label"),
        (
            lambda: [(X, F.one_hot(Y).float())],
            r"Convert one-hot labels by `y = y\.argmax\(dim=1\)`; if one example may have several .* task='labels'",
        ),
        (lambda: [(X, 5000 * Y)], r"by `y = y\.unique\(return_inverse=True\)\[1\]`"),
        (lambda: [(X.tolist(), Y.tolist())], "inputs and targets of examples are tensors or arrays"),
    ],
)
def test_what_does_not_fit_is_named(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        module(make())


def test_own_tensors_and_a_net_of_pytorch_make_a_federation(make_trainer) -> None:
    clients = [(np.float32(np.random.default_rng(n).normal(size=(40, 3))) + n % 2, np.arange(40) % 2) for n in range(4)]
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    data = fl.FederatedDataModule(clients, batch_size=10)
    result = make_trainer(num_rounds=2).fit(fl.ClientModule(net), data, fl.strategies.FedAvg(num_epochs=1))
    assert 0 < result["val/acc"] <= 1


def test_tables_of_pandas_and_targets_that_are_true_or_false() -> None:
    table = pd.DataFrame({"age": np.arange(20.0), "sex": np.arange(20) % 2})
    data = module([(table, table["sex"] == 1), (table, table["sex"])])
    assert data.num_features == 2
    assert data.clients[0].y_N.tolist() == data.clients[1].y_N.tolist() == [0, 1] * 10
