"""Graphs of PyTorch Geometric: read from a local root, downloaded only where files are missing.

PyG writes ``processed/`` beside ``raw/``. Where the root is read-only the converted files go to the cache folder.
"""

import contextlib
import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from filelock import FileLock
from torch_geometric.data import Data

from fl_lightning.data.sources.base import GraphSource
from fl_lightning.data.sources.folders import cache_folder, is_writable

_log = logging.getLogger(__name__)


class PyGSource(GraphSource):
    """Any node-classification data set of PyTorch Geometric that is a single graph.

    Args:
        dataset: Import path of the class, e.g. ``torch_geometric.datasets.WikipediaNetwork``.
        arguments: Its arguments beside ``root``, e.g. ``{"name": "chameleon"}``.
        normalize_features: Row-normalise the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    def __init__(
        self,
        dataset: str,
        arguments: dict[str, str | int | float | bool] | None = None,
        normalize_features: bool = True,
        largest_component: bool = True,
        undirected: bool = True,
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected)
        self.dataset = dataset
        self.arguments = dict(arguments or {})

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        module, _, name = self.dataset.rpartition(".")
        try:
            dataset_class = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"dataset={self.dataset!r} is not an importable class; give a path such as "
                "'torch_geometric.datasets.Planetoid'."
            ) from error
        dataset = open_dataset(dataset_class, {"root": str(root), **self.arguments}, root, cache_dir)
        if len(dataset) != 1:
            raise ValueError(
                f"dataset={self.dataset!r} with {self.arguments} holds {len(dataset)} graphs; one graph is needed. "
                "Choose one by `arguments`, or save it to a file and use FileSource."
            )
        return dataset[0]

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {"source": "PyGSource", "dataset": self.dataset, "arguments": self.arguments}


class _NamedPyGSource(PyGSource):
    """A family of PyTorch Geometric data sets told apart by their name."""

    dataset_path: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        name: str,
        normalize_features: bool = True,
        largest_component: bool = True,
        undirected: bool = True,
    ) -> None:
        spelling = {known.lower(): known for known in self.names}
        if name.lower() not in spelling:
            raise ValueError(f"name={name!r} is not a data set of {type(self).__name__}; use one of {self.names}.")
        super().__init__(
            self.dataset_path, {"name": spelling[name.lower()]}, normalize_features, largest_component, undirected
        )


class PlanetoidSource(_NamedPyGSource):
    """Citation graphs with their public split (Yang et al., "Revisiting Semi-Supervised Learning", ICML 2016).

    Args:
        name: Cora, CiteSeer or PubMed.
        normalize_features: Row-normalise the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.Planetoid"
    names = ("Cora", "CiteSeer", "PubMed")


class AmazonSource(_NamedPyGSource):
    """Co-purchase graphs (Shchur et al., "Pitfalls of Graph Neural Network Evaluation", 2018).

    Args:
        name: Computers or Photo.
        normalize_features: Row-normalise the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.Amazon"
    names = ("Computers", "Photo")


class CoauthorSource(_NamedPyGSource):
    """Co-authorship graphs (Shchur et al., "Pitfalls of Graph Neural Network Evaluation", 2018).

    Args:
        name: CS or Physics.
        normalize_features: Row-normalise the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.Coauthor"
    names = ("CS", "Physics")


class CitationFullSource(_NamedPyGSource):
    """Full citation graphs (Bojchevski and Günnemann, "Deep Gaussian Embedding of Graphs", ICLR 2018).

    Args:
        name: Cora, Cora_ML, CiteSeer, DBLP or PubMed.
        normalize_features: Row-normalise the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.CitationFull"
    names = ("Cora", "Cora_ML", "CiteSeer", "DBLP", "PubMed")


def open_dataset(
    dataset_class: Any,
    arguments: dict[str, Any],
    root: Path,
    cache_dir: Path | None,
    download: Callable[[Any], None] | None = None,
) -> Any:
    """Construct a PyG data set without ever writing into a read-only root.

    Args:
        dataset_class: A ``torch_geometric.data.InMemoryDataset`` class.
        arguments: What it is constructed with, its root included.
        root: Folder of the data sets.
        cache_dir: Where converted files go if ``root`` is read-only; None for the default cache folder.
        download: Fetches the raw files in place of the class's own ``download``.

    Returns:
        The data set.

    Raises:
        FileNotFoundError: If files are missing and cannot be downloaded; names the data set, the folder and the remedy.
    """
    name = str(arguments.get("name", dataset_class.__name__))
    derived = _derive(dataset_class, root, cache_folder(cache_dir), download or dataset_class.download)
    try:
        with _one_process_at_a_time(f"{dataset_class.__name__} {arguments}", cache_folder(cache_dir)):
            return derived(**arguments)
    except (OSError, aiohttp.ClientError) as error:
        raise FileNotFoundError(
            f"{name} cannot be read from {root}, nor downloaded ({type(error).__name__}: {error}). Set "
            "FL_DATA_ROOT or data.root to the folder that holds the data set, or place its raw files there."
        ) from error


def _derive(dataset_class: Any, root: Path, cache: Path, download: Callable[[Any], None]) -> Any:
    """Subclass a data set so that conversion and download respect a read-only root."""
    mirror = cache / "converted" / hashlib.sha256(str(root).encode()).hexdigest()[:16]

    def processed_dir(self: Any) -> str:
        beside_raw = dataset_class.processed_dir.fget(self)
        names = self.processed_file_names
        paths = [Path(beside_raw, name) for name in ([names] if isinstance(names, str) else names)]
        if all(path.exists() for path in paths) or is_writable(Path(beside_raw)):
            return str(beside_raw)
        return str(mirror / os.path.relpath(beside_raw, root))

    def checked_download(self: Any) -> None:
        missing = [path for path in map(Path, self.raw_paths) if not path.exists()]
        if not missing:
            return
        raw_dir = Path(self.raw_dir)
        if not is_writable(raw_dir):
            raise PermissionError(f"{missing[0]} is missing, and the folder is read-only")
        _log.info("Downloading %s to %s", dataset_class.__name__, raw_dir)
        raw_dir.mkdir(parents=True, exist_ok=True)
        try:
            download(self)
        finally:
            with contextlib.suppress(OSError):  # only folders that the failed download left empty
                raw_dir.rmdir()
                raw_dir.parent.rmdir()

    members = {"processed_dir": property(processed_dir), "_download": checked_download}
    return type(dataset_class.__name__, (dataset_class,), members)


@contextlib.contextmanager
def _one_process_at_a_time(task: str, cache: Path) -> Iterator[None]:
    """Keep two processes from converting one data set at once: PyG does not write atomically."""
    locks = cache / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.lock"):
        yield
