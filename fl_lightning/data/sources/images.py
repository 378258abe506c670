"""Images shared out to clients that differ by design: in rotation, in their classes, or in viewpoint and year.

Shape legend: C clients, M images of all clients, K classes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.data.columns import Column
from fl_lightning.data.settings import check_count
from fl_lightning.data.sources.array_file import read_arrays
from fl_lightning.data.sources.cifar_batches import has_cifar10_batches, read_cifar10_batches
from fl_lightning.data.sources.example_sets import ExampleSetSource
from fl_lightning.data.sources.examples import Examples, ExampleSource, client_names
from fl_lightning.kernels.randomness import generator

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class ImageSet(ExampleSetSource):
    """MNIST or CIFAR-10, training and test images pooled, for a partitioner.

    x (1, 28, 28) or (3, 32, 32) in [0, 1].

    Files: those of :class:`RotatedMNIST` and :class:`HeterogeneousCIFAR10`.

    Args:
        name: ``MNIST`` or ``CIFAR10``.

    Source: shared out by a :class:`DirichletPartitioner`, the usual label skew (Hsu, Qi, Brown: "Measuring the Effects
    of Non-Identical Data Distribution for Federated Visual Classification", 2019).
    """

    noun = "images"

    def __init__(self, name: str = "MNIST") -> None:
        super().__init__("classes")
        if name not in ("MNIST", "CIFAR10"):
            raise ValueError(f"name is {name!r}: give MNIST or CIFAR10")
        self.name = name
        self.class_names = CIFAR10_CLASSES if name == "CIFAR10" else None

    def __str__(self) -> str:
        """With the name."""
        return f"ImageSet({self.name!r})"

    def load(self, root: Path) -> tuple[Any, Mapping[str, Column]]:  # noqa: D102
        image_M, y_M = _cifar10(root) if self.name == "CIFAR10" else _mnist(root)
        return (_scaled(image_M), y_M), {}

    def identity(self) -> dict[str, Any]:
        """Also the name."""
        return {**super().identity(), "name": self.name}


class RotatedMNIST(ExampleSource):
    """MNIST shuffled and shared out evenly; four random groups of clients see it turned by 0, 90, 180, 270 degrees.

    x (1, 28, 28) in [0, 1]. Training and test images are pooled: with 40 clients each has 1,750.

    File: ``MNIST/mnist.npz`` with ``x_train`` (M, 28, 28), ``y_train`` (M,), ``x_test``, ``y_test`` (as Keras has it).

    Args:
        num_clients: Clients; the groups are equal where it is a multiple of 4.
        examples_per_client: Keep this many of a client's images; None for all. (The paper has 1,500 training images a
            client, which are MNIST's 60,000 shared out over 40.)

    Source: Sheaf-FMTL, appendix F, after Liu et al., 2022.
    """

    def __init__(self, num_clients: int = 40, examples_per_client: int | None = None) -> None:
        _check_sizes(num_clients, examples_per_client)
        self.num_clients = num_clients
        self.examples_per_client = examples_per_client

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        image_M, y_M = _mnist(root)
        order_M = torch.randperm(len(y_M), generator=generator(seed, "rotated MNIST"))
        shares = [idx[: self.examples_per_client] for idx in order_M.tensor_split(self.num_clients)]
        _check_shares(shares, self.examples_per_client)
        turns = self.quarter_turns(seed).tolist()
        return Examples(
            names=client_names("client", self.num_clients),
            x=tuple(
                torch.rot90(_scaled(image_M[idx]), turn, dims=(2, 3)).contiguous()
                for idx, turn in zip(shares, turns, strict=True)
            ),
            y=tuple(y_M[idx] for idx in shares),
            num_outputs=10,
        )

    def quarter_turns(self, seed: int) -> Tensor:
        """Return how many times each client's images are turned by 90 degrees counter-clockwise, (C,): its group."""
        order_C = torch.randperm(self.num_clients, generator=generator(seed, "rotated MNIST groups"))
        return order_C.argsort() % 4


class HeterogeneousCIFAR10(ExampleSource):
    """CIFAR-10 where each client has a few random classes, and a random number of examples of each.

    x (3, 32, 32) in [0, 1]. Training and test images are pooled. Each class is shared out over the clients that drew
    it, in proportion to weights drawn uniformly from [0.5, 1.5]; a class that nobody drew is left out.

    Files: the standard ``cifar-10-batches-py/`` (in the root or its ``CIFAR10/``), else ``CIFAR10/cifar10_subset.npz``
    with ``x_train`` (M, 3, 32, 32), ``y_train`` (M,), ``x_test``, ``y_test``: a balanced part, here of 12,500 images.
    By default clients have about 1,400 to 2,700 of all 60,000 images, and 300 to 570 of the part.

    Args:
        num_clients: Clients.
        classes_per_client: Classes each of them draws, 1 to 10.
        examples_per_client: Keep at most this many of a client's images, chosen at random; None for all.

    Source: Sheaf-FMTL, appendix F, after T Dinh et al., NeurIPS 2020. How it draws the numbers is not printed; its
    clients have 1,515 to 1,839 training images, a narrower range than ours.
    """

    class_names = CIFAR10_CLASSES

    def __init__(
        self, num_clients: int = 30, classes_per_client: int = 5, examples_per_client: int | None = None
    ) -> None:
        _check_sizes(num_clients, examples_per_client)
        check_count("classes_per_client", classes_per_client)
        if classes_per_client > 10:
            raise ValueError(f"classes_per_client={classes_per_client} is not from 1 to 10.")
        self.num_clients = num_clients
        self.classes_per_client = classes_per_client
        self.examples_per_client = examples_per_client

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        image_M, y_M = _cifar10(root)
        shares = self._share_out(y_M, seed)
        return Examples(
            names=client_names("client", self.num_clients),
            x=tuple(_scaled(image_M[idx]) for idx in shares),
            y=tuple(y_M[idx] for idx in shares),
            num_outputs=10,
        )

    def _share_out(self, y_M: Tensor, seed: int) -> list[Tensor]:
        """Draw each client's classes and its share of each; return the indices of its images in random order."""
        draw = generator(seed, "heterogeneous CIFAR-10")
        ticket_CK = torch.rand(self.num_clients, 10, generator=draw)
        chosen_CK = ticket_CK.argsort(dim=1).argsort(dim=1) < self.classes_per_client
        weight_CK = (0.5 + torch.rand(self.num_clients, 10, generator=draw, dtype=torch.float64)) * chosen_CK
        parts: list[list[Tensor]] = [[] for _ in range(self.num_clients)]
        for label, weight_C in enumerate(weight_CK.T):
            idx = (y_M == label).nonzero().squeeze(1)
            idx = idx[torch.randperm(len(idx), generator=draw)]
            if weight_C.any():
                ends = (weight_C.cumsum(0) / weight_C.sum() * len(idx)).round().long()
                for part, piece in zip(parts, idx.tensor_split(ends[:-1]), strict=True):
                    part.append(piece)
        shares = [torch.cat(part) for part in parts]
        shares = [idx[torch.randperm(len(idx), generator=draw)][: self.examples_per_client] for idx in shares]
        _check_shares(shares, None)
        return shares


class CompCars(ExampleSource):
    """Four types of cars in 30 clients, one for each of five viewpoints and six years of manufacture.

    Clients are related if their viewpoints are the same or next to each other on the way around the car (front,
    front-side, side, rear-side, rear), or if their years are the same or successive: the paper's "either".

    File: ``compcars/compcars.npz`` with ``image`` (M, 3, H, W) uint8, ``type`` (M,) 0 to 3 (MPV, SUV, sedan,
    hatchback), ``viewpoint`` (M,) 1 to 5 (front, rear, side, front-side, rear-side, as CompCars numbers them) and
    ``year`` (M,) 2009 to 2014; images of other years or viewpoints are left out. Make it from the images of the data
    set, which its authors give out on request, cut to their bounding boxes and scaled to one size.

    Source: Yang et al., "A Large-Scale Car Dataset for Fine-Grained Categorization and Verification", CVPR 2015;
    Panacea, section IV, with 24,151 images.
    """

    #: CompCars' numbers in the order around the car.
    viewpoints: ClassVar[dict[int, str]] = {1: "front", 4: "front-side", 3: "side", 5: "rear-side", 2: "rear"}
    years = tuple(range(2009, 2015))

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        layout = {
            "image": "(M, 3, H, W) uint8",
            "type": "(M,) car types 0 to 3",
            "viewpoint": "(M,) 1 to 5",
            "year": "(M,) 2009 to 2014",
        }
        arrays = read_arrays(root, ["compcars/compcars.npz"], layout, whole=("type", "viewpoint", "year"))
        _check_bytes(root / "compcars/compcars.npz", arrays, "image")
        image_M, y_M = torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["type"])
        views = [(viewpoint, year) for viewpoint in self.viewpoints for year in self.years]
        shares = [
            torch.from_numpy(((arrays["viewpoint"] == viewpoint) & (arrays["year"] == year)).nonzero()[0])
            for viewpoint, year in views
        ]
        _check_shares(shares, None)
        return Examples(
            names=tuple(f"{self.viewpoints[viewpoint]}-{year}" for viewpoint, year in views),
            x=tuple(_scaled(image_M[idx]) for idx in shares),
            y=tuple(y_M[idx] for idx in shares),
            num_outputs=4,
            relation_CC=self._relation(),
        )

    def _relation(self) -> Tensor:
        num_years = len(self.years)
        client_C = torch.arange(len(self.viewpoints) * num_years)
        near_CC = [
            (coordinate[:, None] - coordinate).abs() <= 1
            for coordinate in (client_C // num_years, client_C % num_years)
        ]
        return (near_CC[0] | near_CC[1]).float().fill_diagonal_(0)


def _pooled(root: Path, path: str, shape: str, alternative: str = "") -> tuple[Tensor, Tensor]:
    """Read training and test images together, and their classes."""
    layout = {
        "x_train": f"(M, {shape}) images, uint8",
        "y_train": "(M,) classes",
        "x_test": f"(N, {shape}) images, uint8",
        "y_test": "(N,) classes",
    }
    arrays = read_arrays(root, [path], layout, whole=("y_train", "y_test"), alternative=alternative)
    _check_bytes(root / path, arrays, "x_train", "x_test")
    image_M = np.concatenate([arrays["x_train"], arrays["x_test"]])
    y_M = np.concatenate([arrays["y_train"], arrays["y_test"]])
    return torch.from_numpy(image_M), torch.from_numpy(y_M)


def _mnist(root: Path) -> tuple[Tensor, Tensor]:
    """All images of MNIST, with their one channel."""
    image_M, y_M = _pooled(root, "MNIST/mnist.npz", "28, 28")
    return image_M[:, None], y_M


def _cifar10(root: Path) -> tuple[Tensor, Tensor]:
    """All images of CIFAR-10, or of the part."""
    if has_cifar10_batches(root):
        return read_cifar10_batches(root)
    standard = "; or the standard folder cifar-10-batches-py of CIFAR-10's Python version"
    return _pooled(root, "CIFAR10/cifar10_subset.npz", "3, 32, 32", standard)


def _check_bytes(path: Path, arrays: dict[str, npt.NDArray[Any]], *names: str) -> None:
    for name in names:
        if arrays[name].dtype != np.uint8:
            raise ValueError(f"{path}: `{name}` is {arrays[name].dtype}; give images as uint8, 0 to 255.")


def _scaled(image_N: Tensor) -> Tensor:
    """Bytes to numbers in [0, 1]."""
    return image_N.float() / 255


def _check_sizes(num_clients: int, examples_per_client: int | None) -> None:
    check_count("num_clients", num_clients)
    if num_clients > 60_000:
        raise ValueError(f"num_clients={num_clients} exceeds the images that there are; use fewer clients.")
    if examples_per_client is not None:
        check_count("examples_per_client", examples_per_client)


def _check_shares(shares: list[Tensor], wanted: int | None) -> None:
    smallest = min(map(len, shares))
    if smallest < (wanted or 1):
        raise ValueError(
            f"{len(shares)} clients: the smallest would have {smallest} images, {wanted or 1} are needed. Use fewer "
            "clients or fewer examples of each."
        )
