"""Clients that are made when they are needed: as many as one likes, and the same as if all were in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fl_lightning as fl
from fl_lightning.batches.lazy_clients import LazyClients, NumberedNames
from fl_lightning.data import FederatedDataModule, GeneratedClients, GlobalSplit, LazySource, ShardSource
from fl_lightning.executors import SequentialExecutor, StackedExecutor
from fl_lightning.models import MLP
from fl_lightning.strategies import FedPer


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Three clients of 5, 10 and 20 examples."""
    draw = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", draw.normal(size=(35, 4)).astype(np.float32))
    np.save(tmp_path / "y.npy", draw.integers(0, 3, 35))
    np.save(tmp_path / "offsets.npy", np.array([0, 5, 15, 35]))
    return tmp_path


def module(source: LazySource, folder: Path, **settings) -> FederatedDataModule:
    result = FederatedDataModule(source, root=str(folder), cache_dir=str(folder / "cache"), **settings)
    result.setup()
    return result


def test_a_shard(shard: Path) -> None:
    data = module(ShardSource(str(shard), num_classes=3), shard)
    assert isinstance(data.clients, LazyClients)
    assert list(data.registry.names) == ["client-00", "client-01", "client-02"]
    assert list(data.registry.sizes) == [5, 10, 20]
    client = data.clients[1]
    assert torch.equal(client.inputs, torch.from_numpy(np.load(shard / "x.npy")[5:15]))
    assert torch.equal(client.y_N, torch.from_numpy(np.load(shard / "y.npy")[5:15]))
    assert [each.num_examples for each in data.clients] == list(data.clients.num_examples) == [3, 6, 12]
    assert [int(each.val_mask_N.sum()) for each in data.clients] == [1, 2, 4]
    assert all(torch.equal(a.train_mask_N, b.train_mask_N) for a, b in zip(data.clients, data.clients, strict=True))
    before = data.partition_hash
    np.save(shard / "y.npy", np.load(shard / "y.npy")[::-1])
    assert module(ShardSource(str(shard), num_classes=3), shard).partition_hash != before


def test_a_shard_in_the_users_folder(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shard.parent))
    data = module(ShardSource(f"~/{shard.name}", num_classes=3), shard / "elsewhere")
    assert list(data.registry.sizes) == [5, 10, 20]
    assert torch.equal(data.clients[1].inputs, torch.from_numpy(np.load(shard / "x.npy")[5:15]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.array([0, 5, 5, 35])}, "offsets.npy must ascend from 0 to the 35 examples"),
        ({"offsets": np.array([0, 20, 10, 35], np.uint64)}, "offsets.npy must ascend from 0 to the 35 examples"),
        ({"offsets": np.array([[0, 35]])}, "offsets.npy must ascend from 0 to the 35 examples"),
        ({"offsets": np.array([0.0, 20.5, 35.0])}, r"offsets\.npy cannot be read .*float64.*whole numbers of int64"),
        ({"y": np.zeros(34, int)}, "y.npy has 34 rows for 35 of x.npy"),
        ({"y": np.full(35, 1.7)}, r"y\.npy cannot be read .*it holds float64 of shape \(35,\).*whole numbers of int64"),
        ({"y": np.array(["0"] * 35)}, r"y\.npy cannot be read .*it holds <U1"),
        ({"x": np.full((35, 4), 1j)}, r"x\.npy cannot be read .*it holds complex128"),
        ({"x": b""}, r"x\.npy cannot be read .*EOFError"),
        ({"x": b"\x93NUMPY\x01\x00v\x00"}, r"x\.npy cannot be read .*header"),
        ({"x": b"hello"}, r"x\.npy cannot be read \(((?!trust).)*\): it is damaged, or does not hold numbers"),
    ],
    ids=str,
)
def test_a_shard_that_does_not_fit(change, message: str, shard: Path) -> None:
    for name, value in change.items():
        if isinstance(value, bytes):
            (shard / f"{name}.npy").write_bytes(value)
        else:
            np.save(shard / f"{name}.npy", value)
    with pytest.raises(ValueError, match=message):
        module(ShardSource(str(shard), num_classes=3), shard)


def test_classes_beyond_the_last_and_splits_of_all_are_refused(shard: Path) -> None:
    with pytest.raises(ValueError, match=r"client-00: ShardSource gives .* classes below 2"):
        list(module(ShardSource(str(shard), num_classes=2), shard).clients)
    with pytest.raises(ValueError, match="splitter is GlobalSplit, but ShardSource makes one client at a time"):
        module(ShardSource(str(shard), num_classes=3), shard, splitter=GlobalSplit())


def test_one_replaced_client(tmp_path: Path) -> None:
    clients = module(GeneratedClients(num_clients=5), tmp_path).clients
    other = clients.replaced(3, clients[0])
    assert torch.equal(other[3].inputs, clients[0].inputs)
    assert torch.equal(other[2].inputs, clients[2].inputs)
    assert not torch.equal(clients[3].inputs, clients[0].inputs)
    assert clients[-1].name == "client-04"


class InMemory(GeneratedClients):
    """The same clients, all of them made at once."""

    def allocate(self, asked, prepared):
        import dataclasses

        lazy = super().allocate(asked, prepared)
        return dataclasses.replace(lazy, clients=tuple(lazy.clients))

    def identity(self):
        return {**super().identity(), "source": "GeneratedClients"}


@pytest.mark.parametrize("executor", [StackedExecutor, pytest.param(SequentialExecutor, marks=pytest.mark.full)])
def test_training_is_that_of_clients_in_memory(executor, tmp_path: Path) -> None:
    results = []
    for source in (GeneratedClients(num_clients=20), InMemory(num_clients=20)):
        trainer = fl.FederatedTrainer(
            num_rounds=3,
            executor=executor(),
            participation=fl.Participation(num_clients=4, evaluation_clients=5),
            accelerator="cpu",
            logger=False,
            default_callbacks=False,
            default_root_dir=str(tmp_path),
        )
        client = fl.ClientModule(MLP, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        results.append(trainer.fit(client, module(source, tmp_path, batch_size=4), FedPer()))
    assert results[0] == results[1]


def test_a_run_makes_the_clients_that_it_needs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,000 clients two rounds need forty; a pass over all of them takes minutes and gigabytes for a million."""
    made: list[int] = []
    make = GeneratedClients.examples_of
    monkeypatch.setattr(GeneratedClients, "examples_of", lambda *args: made.append(args[1]) or make(*args))
    trainer = fl.FederatedTrainer(
        num_rounds=2,
        participation=fl.Participation(num_clients=10, evaluation_clients=10),
        accelerator="cpu",
        logger=False,
        default_callbacks=False,
        default_root_dir=str(tmp_path),
    )
    client = fl.ClientModule(MLP, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    trainer.fit(client, FederatedDataModule(GeneratedClients(num_clients=3000)), FedPer())
    assert len(set(made)) <= 40
    assert len(made) <= 150


def test_names_of_a_million() -> None:
    names = NumberedNames("client", 1_000_000)
    assert (names[0], names[-1], len(names)) == ("client-000000", "client-999999", 1_000_000)
    assert names[5:7] == ("client-000005", "client-000006")
    with pytest.raises(IndexError):
        names[1_000_000]


def test_a_missing_file_of_a_shard_is_named(shard: Path) -> None:
    (shard / "y.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*y\.npy; expected classes, whole numbers of int64"):
        module(ShardSource(str(shard), num_classes=3), shard)
