"""Sources of very many clients, whose examples are made or read when they are needed.

Shape legend: C clients, N examples of one client, X the shape of one example.
"""

import hashlib
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.lazy_clients import LazyClients, NumberedNames
from fl_lightning.data.allocation import Allocation, Asked, masks_of
from fl_lightning.data.partition.record import canonical_json
from fl_lightning.data.settings import check_count, check_number, check_seed, user_path
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import Source
from fl_lightning.data.split import ClientSplit, Role, draw_roles
from fl_lightning.kernels.randomness import generator
from fl_lightning.tasks import ExampleClassification


class LazySource(Source):
    """Clients whose labeled examples are made when they are asked for, and not kept. All settings are attributes.

    A subclass says how many clients there are, with how many examples each, and makes those of one client. Every
    example has a class, so that the number of training examples is known beforehand; roles are drawn by a
    ``ClientSplit``.
    """

    #: What a client is called, before its number.
    kind = "client"
    #: Classes.
    num_classes: int

    @abstractmethod
    def sizes(self, root: Path) -> Sequence[int]:
        """Number of examples of each client, at least 1.

        Args:
            root: Folder of the data sets.
        """

    @abstractmethod
    def examples_of(self, client: int, root: Path, seed: int) -> tuple[Tensor, Tensor]:
        """A client's examples, always the same: inputs, float32 (N, *X), and classes, int64 (N,).

        Args:
            client: Its index.
            root: Folder of the data sets.
            seed: Of the draws that belong to the data.
        """

    def identity(self) -> dict[str, Any]:
        """Return everything the examples depend on besides the files and the seed, as JSON-ready values."""
        return {"source": type(self).__name__, **vars(self)}

    def content(self, root: Path) -> str:
        """A digest of the files that the examples come from; empty if they come from none."""
        return ""

    def allocate(self, asked: Asked, prepared: Any) -> Allocation:
        """The clients, of which none is made yet."""
        splitter, sizes = asked.splitter, array("q", self.sizes(asked.root))
        if not isinstance(splitter, ClientSplit):
            raise ValueError(
                f"data.splitter is {type(splitter).__name__}, but {type(self).__name__} makes one client at a time: "
                "leave it out, or set ClientSplit"
            )
        trained = {size: round(size * splitter.train) for size in set(sizes)}
        if too_small := [size for size, count in trained.items() if not count]:
            raise ValueError(
                f"{type(self).__name__}: data.splitter.train {splitter.train} leaves clients of {min(too_small)} "
                "examples without one to train on: raise it"
            )
        names = NumberedNames(self.kind, len(sizes))

        def make(client: int) -> ClientExamples:
            x_NX, y_N = self.examples_of(client, asked.root, asked.seed)
            self._check(names[client], x_NX, y_N, sizes[client])
            draw = generator(asked.seed, "client split", client)
            role_N = draw_roles(y_N, splitter.train, splitter.val, draw)
            assert Role.UNUSED not in role_N
            return ClientExamples(name=names[client], x_NX=x_NX, y_N=y_N, **masks_of(role_N))

        num_examples = array("q", (trained[size] for size in sizes))
        identity = canonical_json(asked.identity(self.identity(), content=self.content(asked.root)))
        return Allocation(
            task=ExampleClassification(),
            clients=LazyClients(make, names=names, sizes=sizes, num_examples=num_examples),
            num_outputs=self.num_classes,
            source_idx=_Numbers(sizes),
            partition_hash=hashlib.sha256(identity.encode()).hexdigest(),
            class_names=self.class_names,
        )

    def _check(self, name: str, x_NX: Tensor, y_N: Tensor, size: int) -> None:
        fits = x_NX.dtype == torch.float32 and x_NX.dim() > 1 and len(x_NX) == size and y_N.shape == (size,)
        if not fits or y_N.dtype != torch.int64 or not bool(((y_N >= 0) & (y_N < self.num_classes)).all()):
            raise ValueError(
                f"{name}: {type(self).__name__} gives x {x_NX.dtype} {tuple(x_NX.shape)} and y {y_N.dtype} "
                f"{tuple(y_N.shape)}; give float32 ({size}, *X), and int64 ({size},) classes below {self.num_classes}"
            )
        if not bool(x_NX.isfinite().all()):
            raise ValueError(f"{name}: x is not finite: correct what {type(self).__name__} gives")


class _Numbers(Sequence[Tensor]):
    """The number of each example in the source, for each client: that within the client."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.arange(size) for size in self.sizes)

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(client, slice):
            return [torch.arange(size) for size in self.sizes[client]]
        return torch.arange(self.sizes[client])


class GeneratedClients(LazySource):
    """Any number of clients that see the same classes in a different light, each generated when it is needed.

    All share the class centroids, so collaboration helps; each shifts all features by its own vector, so
    personalization helps as well.

    Args:
        num_clients: Clients.
        num_examples: Examples of a client.
        num_classes: Classes.
        num_features: Features.
        shift: Length of a client's shift; a class centroid has length 1.
        noise: Standard deviation of the noise on every feature.
    """

    def __init__(
        self,
        num_clients: int = 1000,
        num_examples: int = 20,
        num_classes: int = 2,
        num_features: int = 20,
        shift: float = 0.5,
        noise: float = 0.3,
    ) -> None:
        counts = {
            "num_clients": num_clients,
            "num_examples": num_examples,
            "num_classes": num_classes,
            "num_features": num_features,
        }
        for name, count in counts.items():
            check_count(name, count)
        for name, length in (("shift", shift), ("noise", noise)):
            check_number(name, length)
        self.num_clients = num_clients
        self.num_examples = num_examples
        self.num_classes = num_classes
        self.num_features = num_features
        self.shift = shift
        self.noise = noise

    def sizes(self, root: Path) -> Sequence[int]:  # noqa: D102
        return array("q", [self.num_examples]) * self.num_clients

    def examples_of(self, client: int, root: Path, seed: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        check_seed("data.seed", seed)
        shared, own = generator(seed, "centroids"), generator(seed, "examples", client)
        centroid_KF = torch.nn.functional.normalize(torch.randn(self.num_classes, self.num_features, generator=shared))
        y_N = torch.randint(self.num_classes, (self.num_examples,), generator=own)
        shift_1F = torch.nn.functional.normalize(torch.randn(1, self.num_features, generator=own))
        noise_NF = torch.randn(self.num_examples, self.num_features, generator=own)
        return centroid_KF[y_N] + self.shift * shift_1F + self.noise * noise_NF, y_N


class ShardSource(LazySource):
    """Clients in a folder of arrays that are mapped into memory: only what a round needs is read.

    The folder has ``x.npy``, numbers (examples, *X), the clients' one after another; ``y.npy``, their classes, whole
    numbers (examples,); and ``offsets.npy``, whole numbers (clients + 1,): client c has rows offsets[c] to
    offsets[c + 1].

    Args:
        folder: The folder, absolute or in the folder of the data sets.
        num_classes: Classes.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The arrays do not fit together.
    """

    def __init__(self, folder: str, num_classes: int) -> None:
        check_count("num_classes", num_classes)
        self.folder = folder
        self.num_classes = num_classes

    def sizes(self, root: Path) -> Sequence[int]:  # noqa: D102
        x, y, offsets = self._arrays(root)
        ends = offsets.astype(np.int64) if offsets.ndim == 1 else np.empty(0, np.int64)
        sizes = np.diff(ends)
        if len(sizes) < 1 or ends[0] != 0 or sizes.min() < 1 or ends[-1] != len(x):
            raise ValueError(
                f"{self.folder}/offsets.npy must ascend from 0 to the {len(x)} examples of x.npy, with an example or "
                "more for each client"
            )
        if len(y) != len(x):
            raise ValueError(f"{self.folder}: y.npy has {len(y)} rows for {len(x)} of x.npy: give one for each example")
        return array("q", sizes.tolist())

    def examples_of(self, client: int, root: Path, seed: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        x, y, offsets = self._arrays(root)
        rows = slice(int(offsets[client]), int(offsets[client + 1]))
        return torch.from_numpy(np.array(x[rows], np.float32)), torch.from_numpy(np.array(y[rows], np.int64))

    def content(self, root: Path) -> str:  # noqa: D102
        digest = hashlib.sha256()
        for name in ("x", "y", "offsets"):
            with (self._place(root) / f"{name}.npy").open("rb") as file:
                while part := file.read(1 << 24):
                    digest.update(part)
        return digest.hexdigest()

    def _place(self, root: Path) -> Path:
        return root / user_path("folder", self.folder)

    def _arrays(self, root: Path) -> tuple[Any, Any, Any]:
        folder = self._place(root)
        x = _mapped(folder / "x.npy", "biuf", "numbers (examples, *X)")
        y = _mapped(folder / "y.npy", "biu", "classes, whole numbers of int64 (examples,)")
        return x, y, _mapped(folder / "offsets.npy", "iu", "whole numbers of int64 (clients + 1,)")


def _mapped(path: Path, kinds: str, expected: str) -> Any:
    """An array in a file, which is mapped into memory."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; expected {expected}, written by numpy.save")
    with reading(path, f"{expected}, written by numpy.save"):
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(mapped, np.ndarray) or mapped.ndim < 1 or mapped.dtype.kind not in kinds:
            what = f"{mapped.dtype} of shape {mapped.shape}" if isinstance(mapped, np.ndarray) else "several arrays"
            raise ValueError(f"it holds {what}")
        return mapped
