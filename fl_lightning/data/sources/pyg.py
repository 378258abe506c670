"""Graphs of PyTorch Geometric: read from a local root, downloaded only where files are missing.

PyG writes ``processed/`` beside ``raw/``. Where the root is read-only the converted files go to the cache folder.

Many classes of PyG keep their files right in the root, or in a folder that does not depend on all their arguments: two
data sets would then read each other's. So a class without a folder of its own gets one, ``root/<class>``, and what
:class:`PyGSource` converts lies in a folder for each class and arguments. The named sources keep PyG's layout, in which
each name has a folder already.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch_geometric.data import Data, Dataset

from fl_lightning.data.settings import check_text
from fl_lightning.data.sources.array_file import one_line
from fl_lightning.data.sources.base import GraphSource
from fl_lightning.data.sources.converted import open_dataset
from fl_lightning.data.sources.pickled_arrays import check_planetoid_file


class PyGSource(GraphSource):
    """Any node-classification data set of PyTorch Geometric that is a single graph.

    Args:
        dataset: Import path of the class, e.g. ``torch_geometric.datasets.WikipediaNetwork``.
        arguments: Its arguments besides ``root``, e.g. ``{"name": "chameleon"}``.
        normalize_features: Row-normalize the features, which must not be negative.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.
    """

    def __init__(
        self,
        dataset: str,
        arguments: dict[str, str | int | float | bool] | None = None,
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
        ignore_label: int | None = None,
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected, ignore_label)
        self.dataset, self.arguments = dataset, checked_arguments(dataset, arguments)

    def __str__(self) -> str:
        """With the class and its arguments."""
        return title_of(self.dataset, self.arguments)

    @property
    def converted_folder(self) -> str:
        """The folder in PyG's ``processed/`` with the converted files; empty if nobody else uses it."""
        return folder_of(self.dataset, self.arguments)

    def check_raw(self, path: Path) -> None:
        """Raise a ValueError if a raw file cannot be given to PyG's reader."""
        return

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        folder = self.converted_folder
        dataset = open_by_path(self.dataset, self.arguments, root, cache_dir, folder, check_raw=self.check_raw)
        if len(dataset) != 1:
            raise ValueError(
                f"dataset={self.dataset!r} with {self.arguments} holds {len(dataset)} graphs; one graph is needed. "
                "Choose one by `arguments`; or use PyGGraphSet if each graph has a target of its own; or save a list "
                "of them to a file, a client each, and use FileSource."
            )
        return dataset[0]

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {"source": "PyGSource", "dataset": self.dataset, "arguments": self.arguments}


def checked_arguments(dataset: Any, arguments: Any) -> dict[str, str | int | float | bool]:
    """The arguments of a class of PyG's, checked.

    Raises:
        ValueError: The path of the class is no text, or the arguments are not what a configuration can hold.
    """
    check_text("dataset", dataset, "torch_geometric.datasets.Planetoid")
    if not isinstance(arguments, dict | None):
        raise ValueError(f"arguments={arguments!r}: give the settings of {dataset} by their names.")
    for name, value in (arguments or {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool) or name == "root":
            remedy = "set data.root in its place" if name == "root" else "give a text, a number, true or false"
            raise ValueError(f"arguments: {name!r} is {value!r}; {remedy}.")
    return dict(arguments or {})


def title_of(dataset: str, arguments: Mapping[str, Any]) -> str:
    """What messages call a data set of PyG's."""
    return ", ".join([dataset.rpartition(".")[2], *(f"{key}={value}" for key, value in arguments.items())])


def folder_of(dataset: str, arguments: Mapping[str, Any]) -> str:
    """A folder in PyG's ``processed/`` that depends on the class and all its arguments."""
    setting = json.dumps([dataset, arguments], sort_keys=True)
    return f"{dataset.rpartition('.')[2]}-{hashlib.sha256(setting.encode()).hexdigest()[:12]}"


def open_by_path(
    dataset: str,
    arguments: Mapping[str, Any],
    root: Path,
    cache_dir: Path | None,
    converted_folder: str,
    *,
    check_raw: Callable[[Path], None] | None = None,
) -> Any:
    """Construct a data set of a class of PyG's; see :func:`~fl_lightning.data.sources.converted.open_dataset`.

    Raises:
        FileNotFoundError: Files are missing and cannot be downloaded.
        ValueError: The class cannot be imported, is no data set, or its files are damaged.
    """
    module, _, name = dataset.rpartition(".")
    try:
        dataset_class = getattr(importlib.import_module(module), name)
        if not issubclass(dataset_class, Dataset):
            raise TypeError("it is not a data set")
    except Exception as error:  # importing runs the module
        raise ValueError(
            f"dataset={dataset!r} is not an importable class of data sets ({one_line(error)}); give a path such as "
            "'torch_geometric.datasets.Planetoid'."
        ) from error
    given = {"root": str(root), **arguments}
    return open_dataset(dataset_class, given, root, cache_dir, converted_folder=converted_folder, check_raw=check_raw)


class _NamedPyGSource(PyGSource):
    """A family of PyTorch Geometric data sets that differ by name."""

    benchmark = True
    dataset_path: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    #: What the classes are called, by the data set's name in lower case.
    known_classes: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(
        self,
        name: str,
        normalize_features: bool = True,
        largest_component: bool = True,
        undirected: bool = True,
    ) -> None:
        spelling = {known.lower(): known for known in self.names}
        check_text("name", name, self.names[0])
        if name.lower() not in spelling:
            raise ValueError(f"name={name!r} is not a data set of {type(self).__name__}; use one of {self.names}.")
        super().__init__(
            self.dataset_path, {"name": spelling[name.lower()]}, normalize_features, largest_component, undirected
        )
        self.class_names = self.known_classes.get(name.lower())

    @property
    def converted_folder(self) -> str:
        """None: each name has a folder of PyG's."""
        return ""


class PlanetoidSource(_NamedPyGSource):
    """Citation graphs with their public split (Yang et al., "Revisiting Semi-Supervised Learning", ICML 2016).

    Args:
        name: Cora, CiteSeer or PubMed.
        normalize_features: Row-normalize the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.Planetoid"
    names = ("Cora", "CiteSeer", "PubMed")
    #: The order of the files, found by the classes' sizes in Sen et al., "Collective Classification in Network Data".
    known_classes: ClassVar[dict[str, tuple[str, ...]]] = {
        "cora": (
            "theory",
            "reinforcement learning",
            "genetic algorithms",
            "neural networks",
            "probabilistic methods",
            "case-based",
            "rule learning",
        ),
        "citeseer": ("AI", "ML", "IR", "DB", "agents", "HCI"),
    }

    def check_raw(self, path: Path) -> None:  # noqa: D102
        check_planetoid_file(path)


class AmazonSource(_NamedPyGSource):
    """Co-purchase graphs (Shchur et al., "Pitfalls of Graph Neural Network Evaluation", 2018).

    Args:
        name: Computers or Photo.
        normalize_features: Row-normalize the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.Amazon"
    names = ("Computers", "Photo")


class CoauthorSource(_NamedPyGSource):
    """Co-authorship graphs (Shchur et al., "Pitfalls of Graph Neural Network Evaluation", 2018).

    Args:
        name: CS or Physics.
        normalize_features: Row-normalize the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.Coauthor"
    names = ("CS", "Physics")


class CitationFullSource(_NamedPyGSource):
    """Full citation graphs (Bojchevski and Günnemann, "Deep Gaussian Embedding of Graphs", ICLR 2018).

    Args:
        name: Cora, Cora_ML, CiteSeer, DBLP or PubMed.
        normalize_features: Row-normalize the features.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "torch_geometric.datasets.CitationFull"
    names = ("Cora", "Cora_ML", "CiteSeer", "DBLP", "PubMed")


class HeterophilousSource(_NamedPyGSource):
    """Graphs whose edges mostly join dissimilar nodes (Platonov et al., ICLR 2023), with ten public splits.

    The files are called as the graphs, in lower case and with ``_`` in place of ``-``: those of chameleon and squirrel
    are ``heterophilous_npz/<name>.npz``, the others, where PyG has them, ``<name>/raw/<name>.npz``. What is missing is
    downloaded. Of Minesweeper, Tolokers and Questions, which have two unequal classes, papers report the area under the
    ROC curve; here accuracy is.

    Args:
        name: Roman-empire, Amazon-ratings, Minesweeper, Tolokers, Questions, chameleon, squirrel, or one of the latter
            without pages that occur twice: chameleon-filtered, squirrel-filtered.
        normalize_features: Row-normalize the features, where these are not negative: those of Roman-empire,
            Amazon-ratings and Questions are embeddings of words.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    dataset_path = "fl_lightning.data.sources.heterophilous.HeterophilousGraphs"
    names = (
        "Roman-empire",
        "Amazon-ratings",
        "Minesweeper",
        "Tolokers",
        "Questions",
        "chameleon",
        "chameleon-filtered",
        "squirrel",
        "squirrel-filtered",
    )

    def __init__(
        self,
        name: str,
        normalize_features: bool = False,
        largest_component: bool = True,
        undirected: bool = True,
    ) -> None:
        super().__init__(name, normalize_features, largest_component, undirected)
