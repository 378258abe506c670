import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from example_files import NUM_IMAGES, numbered_images, save, write_example_files

from fl_lightning.data import CompCars, HeterogeneousCIFAR10, RotatedMNIST


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_files(tmp_path_factory.mktemp("root"))


def number_of(image: torch.Tensor) -> int:
    return round(float(image.max()) * 255) - 1


def test_rotated_mnist_shares_out_and_turns(root: Path):
    source = RotatedMNIST(num_clients=8)
    examples = source.load(root, 3)
    turns = source.quarter_turns(3)
    assert turns.bincount().tolist() == [2, 2, 2, 2]
    assert sorted(number_of(image) for x in examples.x for image in x) == list(range(NUM_IMAGES))
    for x, y, turn in zip(examples.x, examples.y, turns.tolist(), strict=True):
        assert x.shape == (15, 1, 28, 28)
        upright = torch.rot90(x, -turn, dims=(2, 3))
        numbers = (upright[:, 0, 0, 5] * 255).round().long() - 1
        assert numbers.min() >= 0  # the numbered pixel is where it was
        assert torch.equal(y, numbers % 10)
    limited = RotatedMNIST(num_clients=8, examples_per_client=4).load(root, 3)
    assert all(torch.equal(few, many[:4]) for few, many in zip(limited.x, examples.x, strict=True))
    with pytest.raises(ValueError, match="the smallest would have 15 images, 16 are needed"):
        RotatedMNIST(num_clients=8, examples_per_client=16).load(root, 0)


@pytest.mark.parametrize("classes", [1, 5, 10])
def test_heterogeneous_cifar10_shares_out_few_classes(classes: int, root: Path):
    examples = HeterogeneousCIFAR10(num_clients=6, classes_per_client=classes).load(root, 0)
    numbers = [[number_of(image) for image in x] for x in examples.x]
    everyone = [number for client in numbers for number in client]
    assert len(everyone) == len(set(everyone))
    held = {number % 10 for number in everyone}
    assert len(everyone) == 12 * len(held)  # all of a class that someone has
    for client, y in zip(numbers, examples.y, strict=True):
        assert [number % 10 for number in client] == y.tolist()
        assert len(set(y.tolist())) == classes
    limited = HeterogeneousCIFAR10(6, classes, examples_per_client=3).load(root, 0)
    assert [len(x) for x in limited.x] == [3] * 6


def write_batches(folder: Path) -> None:
    folder.mkdir(parents=True)
    images, labels = numbered_images(3, 32, 32), np.arange(NUM_IMAGES) % 10
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = slice(20 * number, 20 * number + 20)
        batch = {b"data": images[part].reshape(20, -1), b"labels": labels[part].tolist(), b"batch_label": b"of six"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "CIFAR10/cifar-10-batches-py"])
def test_the_standard_files_of_cifar10(place: str, root: Path, tmp_path: Path):
    write_batches(tmp_path / place)
    expected = HeterogeneousCIFAR10(num_clients=4).load(root, 0)
    actual = HeterogeneousCIFAR10(num_clients=4).load(tmp_path, 0)
    assert all(torch.equal(a, b) for a, b in zip(actual.x, expected.x, strict=True))
    (tmp_path / place / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*test_batch; expected CIFAR-10's Python version"):
        HeterogeneousCIFAR10().load(tmp_path, 0)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path):
    write_batches(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py/data_batch_2").write_bytes(pickle.dumps({b"data": os.system}))
    with pytest.raises(ValueError, match=r"data_batch_2 cannot be read .*it holds a posix\.system"):
        HeterogeneousCIFAR10().load(tmp_path, 0)


def test_compcars_clients_and_relations(root: Path, tmp_path: Path):
    examples = CompCars().load(root, 0)
    assert len(examples.names) == 30
    assert [len(x) for x in examples.x] == [1] * 30
    assert number_of(examples.x[examples.names.index("front-side-2010")][0]) + 1 == 3 * 6 + 1

    assert examples.relation_CC is not None

    def related(one: str, other: str) -> bool:
        assert examples.relation_CC is not None
        return bool(examples.relation_CC[examples.names.index(one), examples.names.index(other)])

    assert related("front-2009", "rear-2010")
    assert related("front-2009", "front-2014")
    assert related("side-2009", "front-side-2014")
    assert not related("front-2009", "side-2011")
    assert not related("rear-2009", "side-2014")
    arrays = dict(np.load(root / "compcars/compcars.npz"))
    save(tmp_path, "compcars/compcars", **{name: array[:5] for name, array in arrays.items()})
    with pytest.raises(ValueError, match="30 clients: the smallest would have 0 images"):
        CompCars().load(tmp_path, 0)
