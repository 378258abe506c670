"""One table or set of images that a partitioner shares out."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import fl_lightning as fl
from fl_lightning.data import (
    DirichletPartitioner,
    ExampleSetFile,
    GivenPartitioner,
    ImageSet,
    InMemoryExampleSet,
    MetisPartitioner,
    RandomPartitioner,
    SortedPartitioner,
)
from fl_lightning.models import MLP
from fl_lightning.strategies import FedAvg
from fl_lightning.tasks import ExampleClassification, ExampleRegression

X = torch.randn(120, 3, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(120) % 6
CITIES = ["Bern", "Aachen", "Chur"] * 40


def module(source: Any, partitioner: Any = None, **settings: Any) -> fl.FederatedDataModule:
    data = fl.FederatedDataModule(source, partitioner, **settings)
    data.setup()
    return data


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        [X.numpy(), Y.numpy()],
        TensorDataset(X, Y),
        InMemoryExampleSet((X, Y)),
    ],
)
def test_each_example_is_at_one_client(source) -> None:
    data = module(source, DirichletPartitioner(3, alpha=0.5, min_nodes=5))
    assert data.task == ExampleClassification()
    assert data.num_features == (3, 4, 4)
    assert data.registry.num_outputs == 6
    indices = torch.cat(list(data.allocation.source_idx))
    assert indices.sort().values.tolist() == list(range(120))
    for client, index in zip(data.clients, data.allocation.source_idx, strict=True):
        assert torch.equal(client.x_NX, X[index])
        assert torch.equal(client.y_N, Y[index])
        assert bool((client.train_mask_N.int() + client.val_mask_N.int() + client.test_mask_N.int() == 1).all())
    assert data.partition_hash == module((X, Y), DirichletPartitioner(3, alpha=0.5, min_nodes=5)).partition_hash
    assert data.partition_hash != module((X, Y), DirichletPartitioner(3, alpha=0.5, min_nodes=5), seed=1).partition_hash
    assert data.partition_hash != module((X + 1, Y), DirichletPartitioner(3, alpha=0.5, min_nodes=5)).partition_hash


def test_labels_are_skewed_as_asked() -> None:
    skewed, even = (
        module((X, Y), DirichletPartitioner(4, alpha=alpha, min_nodes=3)).statistics().heterogeneity
        for alpha in (0.1, 100.0)
    )
    assert skewed > 3 * even


def test_a_column_makes_clients_and_names_them(tmp_path) -> None:
    table = pd.DataFrame({"age": np.arange(120.0), "weight": np.arange(120.0)[::-1]})
    source = InMemoryExampleSet((table, pd.Series(np.arange(120) * 0.5)), columns={"city": CITIES})
    data = module(source, GivenPartitioner("city"))
    assert data.task == ExampleRegression()
    assert [client.name for client in data.clients] == ["Aachen", "Bern", "Chur"]
    assert data.clients[1].x_NX[:, 0].tolist() == list(range(0, 120, 3))
    by_number = InMemoryExampleSet((X, Y), columns={"site": (torch.arange(120) % 2 * 7).tolist()})
    assert [client.name for client in module(by_number, GivenPartitioner("site")).clients] == ["0", "7"]
    by_mean = module((X, Y), SortedPartitioner(3, by="features"))
    ends = [each.x_NX.flatten(1).mean(dim=1).aminmax() for each in by_mean.clients]
    assert ends[0].max <= ends[1].min <= ends[1].max <= ends[2].min


def test_columns_of_pandas_may_have_gaps_and_any_index() -> None:
    cities = pd.Series(["Bern", None, "Aachen", float("nan")] * 30, index=range(500, 620))
    data = module(InMemoryExampleSet((X, Y), {"city": cities}), GivenPartitioner("city", leave_out_negative=True))
    assert [(client.name, client.size) for client in data.clients] == [("Aachen", 30), ("Bern", 30)]
    dates = InMemoryExampleSet((X, Y), {"day": pd.date_range("2020-01-01", periods=120)})
    for texts in (dates, InMemoryExampleSet((X, Y), {"day": [1, *CITIES[1:]]})):
        with pytest.raises(ValueError, match=r"columns: 'day' has .*: give texts or numbers alone, and None where"):
            module(texts, RandomPartitioner(2))


def test_what_has_no_role_is_left_out() -> None:
    unknown = torch.where(torch.arange(120) < 30, -1, Y)
    data = module((X, unknown), RandomPartitioner(2))
    assert sum(client.size for client in data.clients) == 90
    for client, index in zip(data.clients, data.allocation.source_idx, strict=True):
        assert bool((index >= 30).all())
        assert torch.equal(client.x_NX, X[index])


def saved(path: Path) -> str:
    if path.suffix == ".npz":
        np.savez(path, x=X.numpy(), y=Y.numpy(), city=np.array(CITIES))
    else:
        torch.save({"x": X, "y": Y, "city": CITIES}, path)
    return str(path)


@pytest.mark.parametrize("name", ["set.pt", "set.npz"])
def test_a_file_holds_the_same(name, tmp_path) -> None:
    data = module(ExampleSetFile(saved(tmp_path / name)), GivenPartitioner("city"))
    assert [client.name for client in data.clients] == ["Aachen", "Bern", "Chur"]
    assert torch.equal(data.clients[0].x_NX, X[1::3])
    (tmp_path / "moved").mkdir()
    moved = module(ExampleSetFile(saved(tmp_path / "moved" / name)), GivenPartitioner("city"))
    assert moved.partition_hash == data.partition_hash


@pytest.mark.parametrize(
    ("source", "partitioner", "message"),
    [
        ((X, Y), None, "data.partitioner is missing: InMemoryExampleSet is one set of examples"),
        ((X, Y), MetisPartitioner(2), "InMemoryExampleSet is a set of examples: choose RandomPartitioner"),
        ((X, Y.float() / 7), DirichletPartitioner(2), "shares examples out by their classes, but these have numbers"),
        ((X, Y[:7]), RandomPartitioner(2), r"x is \(120, 3, 4, 4\) and y \(7,\): give a row of both"),
        ((X * torch.inf, Y), RandomPartitioner(2), "InMemoryExampleSet: the set: the x of example 0 is not finite"),
        (
            InMemoryExampleSet((X, Y), columns={"city": ["Bern"]}),
            GivenPartitioner("city"),
            "'city' has 1 entries for 120 examples",
        ),
        (
            InMemoryExampleSet((X, Y), columns={"features": CITIES}),
            GivenPartitioner("features"),
            "columns has 'features', which every set has",
        ),
    ],
)
def test_what_is_not_sound_is_named(source, partitioner, message) -> None:
    with pytest.raises(ValueError, match=message):
        module(source, partitioner)


def test_files_that_hold_something_else_are_named(tmp_path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt cannot be read .*does not hold x and y"):
        module(ExampleSetFile(str(tmp_path / "list.pt")), RandomPartitioner(2))
    with pytest.raises(ValueError, match="task must be one of classes, labels, numbers"):
        InMemoryExampleSet((X, Y), task="class")
    with pytest.raises(ValueError, match="name is 'cifar': give MNIST or CIFAR10"):
        ImageSet("cifar")


def test_images_of_the_known_sets(tmp_path) -> None:
    for folder, name, shape in (("MNIST", "mnist", (28, 28)), ("CIFAR10", "cifar10_subset", (3, 32, 32))):
        images = np.random.default_rng(0).integers(0, 256, (60, *shape), dtype=np.uint8)
        (tmp_path / folder).mkdir()
        y = np.arange(60) % 10
        arrays = {"x_train": images[:40], "y_train": y[:40], "x_test": images[40:], "y_test": y[40:]}
        np.savez(tmp_path / folder / f"{name}.npz", **arrays)
        data = module(ImageSet(folder), RandomPartitioner(3), root=str(tmp_path))
        assert data.registry.num_outputs == 10
        index = data.allocation.source_idx[1]
        expected = torch.from_numpy(images).reshape(60, *((1, *shape) if folder == "MNIST" else shape))[index] / 255
        assert torch.allclose(data.clients[1].x_NX, expected)
        assert (data.allocation.class_names is None) == (folder == "MNIST")


def test_it_trains(make_trainer) -> None:
    rows = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    data = module((rows, (rows[:, 0] > 0).long()), DirichletPartitioner(4, alpha=0.5, min_nodes=20), batch_size=16)
    result = make_trainer(num_rounds=20).fit(fl.ClientModule(MLP), data, FedAvg(num_epochs=5))
    assert result["test/acc"] > 0.85
