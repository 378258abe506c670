"""Where a global graph comes from: the contract, and a graph of your own in a file."""

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from fl_lightning.data.edge_data import same_edge_data
from fl_lightning.data.preparation import Preparation, prepare_graph
from fl_lightning.data.settings import is_file, user_path
from fl_lightning.data.sources.array_file import reading

#: The node attribute that says which of several graphs a node is of.
GRAPH = "graph"
#: What is done to graphs that were prepared before they were joined.
NOTHING_MORE = Preparation(normalize_features=False, largest_component=False, undirected=False)


class Source(ABC):
    """Where a federation's data come from: a :class:`GraphSource`, or an ``ExampleSource``."""

    #: What the classes are called, in their order; None where that is not known. A graph's own ``class_names`` win.
    class_names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """What messages call the data set."""
        return type(self).__name__

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return everything the data depend on (beside seeds that are passed on), as JSON-ready values."""


class GraphSource(Source):
    """A global node-classification graph.

    Args:
        normalize_features: Row-normalise the features, which must not be negative.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    #: Whether the papers take the largest component of this data set: what it leaves out is then no surprise.
    benchmark: ClassVar[bool] = False
    #: The node attribute that says whose each node is, where the source's graphs are clients by themselves.
    clients_by: str | None = None
    #: What such clients are called; None for their numbers.
    client_names: tuple[str, ...] | None = None

    def __init__(
        self, normalize_features: bool = False, largest_component: bool = False, undirected: bool = True
    ) -> None:
        self.preparation = Preparation(
            normalize_features=normalize_features, largest_component=largest_component, undirected=undirected
        )

    @abstractmethod
    def load(self, root: Path, cache_dir: Path | None = None) -> Data:
        """Read or generate the raw graph, before preparation.

        Args:
            root: Folder of the data sets (see :func:`fl_lightning.data.sources.folders.data_root`).
            cache_dir: Where converted files go if ``root`` is read-only; None for the default cache folder.

        Returns:
            A graph with ``x``, ``edge_index``, ``y`` and perhaps public masks, ``edge_weight`` and ``edge_attr``.

        Raises:
            FileNotFoundError: If files are missing and cannot be downloaded.
        """

    def prepared(self, root: Path, cache_dir: Path | None = None) -> tuple[Data, Data]:
        """The raw graph and the prepared one; graphs that are a client each were prepared one by one, as they say."""
        preparation = NOTHING_MORE if self.clients_by == GRAPH else self.preparation
        raw = self.load(root, cache_dir)
        return raw, prepare_graph(raw, preparation, str(self), warns=not self.benchmark)


@contextlib.contextmanager
def allow_pickled_graphs() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` accept what a pickled ``Data`` is made of, for the length of the context.

    Classes that are allowed already are left out: ``safe_globals`` would forbid them on leaving.
    """
    classes = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    with torch.serialization.safe_globals([*classes.difference(torch.serialization.get_safe_globals())]):
        yield


def joined(graphs: Iterable[Data]) -> Data:
    """Many prepared graphs as one without edges between them.

    Args:
        graphs: With the same features; what not all of them have is left out.

    Returns:
        The graph; :data:`GRAPH` is the number of the one that each node was of, ``own_idx`` its number there.

    Raises:
        ValueError: They have different features, or the edges of some carry what those of others do not.
    """
    parts = list(graphs)
    for idx, part in enumerate(parts):
        if part.x.shape[1] != parts[0].x.shape[1]:
            raise ValueError(
                f"graph {idx} has {part.x.shape[1]} features of each node, the first {parts[0].x.shape[1]}: all "
                "clients need the same features"
            )
    sizes = torch.tensor([part.num_nodes for part in parts])
    first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    shared = set.intersection(*(set(part.node_attrs()) for part in parts)) - {"source_idx", "own_idx", GRAPH}
    attributes = {name: torch.cat([part[name] for part in parts]) for name in sorted(shared)}
    attributes |= {name: torch.cat([part[name] for part in parts]) for name in same_edge_data(parts)}
    return Data(
        **attributes,
        edge_index=torch.cat([part.edge_index + start for part, start in zip(parts, first, strict=True)], dim=1),
        own_idx=torch.cat([part.source_idx for part in parts]),
        **{GRAPH: torch.repeat_interleave(torch.arange(len(parts)), sizes)},
    )


class FileSource(GraphSource):
    """A graph of your own: a ``torch_geometric.data.Data``, or its ``to_dict()``, written by ``torch.save``.

    Weights ``edge_weight`` and attributes ``edge_attr`` of its edges are carried along.

    A list of graphs in the file is a client each, and needs no partitioner; so is each of several files, which is then
    called as its file. A list of texts ``node_names``, one for each node, goes into the file of predictions; a list
    ``class_names``, one for each class, into the picture of the labels.

    Args:
        path: The file, or a list of files; a relative path starts at the working directory.
        normalize_features: Row-normalise the features, which must not be negative.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    def __init__(
        self,
        path: str | list[str],
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected)
        if not isinstance(path, str | Path | list | tuple):
            raise ValueError(f"path is {path!r}: give a file, or a list of files")
        self.is_list = not isinstance(path, str | Path)
        self.paths = [user_path("path", each) for each in ([path] if isinstance(path, str | Path) else path)]
        if not self.paths:
            raise ValueError("FileSource.path is an empty list: give at least one file")
        stems = tuple(each.stem for each in self.paths)
        self.client_names = stems if self.is_list and len(set(stems)) == len(stems) else None

    def __str__(self) -> str:
        """With the file."""
        names = [str(each) for each in self.paths]
        return f"FileSource({names if self.is_list else names[0]!r})"

    @property
    def clients_by(self) -> str | None:  # type: ignore[override]
        """Set where there are several files, or the file holds a list."""
        return GRAPH if isinstance(self._saved, list) else None

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        saved = self._saved
        del self._saved
        if not isinstance(saved, list):
            return saved
        names = (f"{self}, graph {idx}" for idx in range(len(saved)))
        whole = joined(
            prepare_graph(graph, self.preparation, name, warns=True) for graph, name in zip(saved, names, strict=True)
        )
        whole.class_names = saved[0].get("class_names")
        return whole

    @cached_property
    def _saved(self) -> Data | list[Data]:
        """What is in the file or files, from when it is first looked at until it is loaded."""
        found = [_graphs_in(path) for path in self.paths]
        if self.is_list:
            for path, graphs in zip(self.paths, found, strict=True):
                if isinstance(graphs, list):
                    raise ValueError(f"path={str(path)!r} holds a list, but it is one of several files: give it alone")
        return found if self.is_list else found[0]

    def identity(self) -> dict[str, Any]:
        """Depends on the file's contents, not on its place."""
        hashes = []
        for path in self.paths:
            _check_exists(path)
            with path.open("rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
        return {"source": type(self).__name__, "sha256": hashes if self.is_list else hashes[0]}


def _graphs_in(path: Path) -> Data | list[Data]:
    """The graph in a file, or the graphs."""
    _check_exists(path)
    expected = (
        "a torch_geometric Data (or a list of them, a client each) that loads with weights_only=True. Save it as "
        "`torch.save(Data(x=..., edge_index=..., y=...), path)` with only tensors, numbers and texts in it"
    )
    with reading(path, expected):
        with allow_pickled_graphs():
            saved = torch.load(path, weights_only=True)
        graphs = [Data.from_dict(each) if isinstance(each, dict) else each for each in _listed(saved)]
        strangers = [type(each).__name__ for each in graphs if not isinstance(each, Data)]
        if strangers or not graphs:
            raise ValueError(f"it holds a {strangers[0] if strangers else 'list of nothing'}")
    return graphs if isinstance(saved, list) else graphs[0]


def _check_exists(path: Path) -> None:
    if not is_file(path):
        raise FileNotFoundError(
            f"path={str(path)!r}: {path.absolute()} is not a file. Write one with `torch.save(data, path)` or correct "
            "the source's path."
        )


def _listed(saved: Any) -> list[Any]:
    return saved if isinstance(saved, list) else [saved]
