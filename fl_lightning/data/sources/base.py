"""Where a global graph comes from: the contract, and a graph of your own in a file."""

import contextlib
import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from fl_lightning.counts import Counted
from fl_lightning.data.edge_data import same_edge_data
from fl_lightning.data.preparation import Preparation, names_of_classes, names_of_nodes, prepare_graph
from fl_lightning.data.settings import is_file, user_path
from fl_lightning.data.sources.array_file import reading

#: The node attribute that says which of several graphs a node is of.
GRAPH = "graph"
#: What is done to graphs that were prepared before they were joined.
NOTHING_MORE = Preparation(normalize_features=False, largest_component=False, undirected=False)


class Source(Counted, ABC):
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
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.
    """

    #: Whether the papers take the largest component of this data set: what it leaves out is then no surprise.
    benchmark: ClassVar[bool] = False
    #: The node attribute that says whose each node is, where the source's graphs are clients by themselves.
    clients_by: str | None = None
    #: What such clients are called; None for their numbers.
    client_names: tuple[str, ...] | None = None

    def __init__(
        self,
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
        ignore_label: int | None = None,
    ) -> None:
        self.preparation = Preparation(
            normalize_features=normalize_features,
            largest_component=largest_component,
            undirected=undirected,
            ignore_label=ignore_label,
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
        raw = self.load(root, cache_dir)
        return raw, prepare_graph(raw, self.what_is_left, str(self), warns=not self.benchmark)

    @property
    def what_is_left(self) -> Preparation:
        """What is still done to a loaded graph: nothing where it was joined of prepared ones."""
        return NOTHING_MORE if self.clients_by == GRAPH else self.preparation


@contextlib.contextmanager
def allow_pickled_graphs() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` accept what a pickled ``Data`` is made of, for the length of the context.

    Classes that are allowed already are left out: ``safe_globals`` would forbid them on leaving.
    """
    classes = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    with torch.serialization.safe_globals([*classes.difference(torch.serialization.get_safe_globals())]):
        yield


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of many graphs.

    Attributes:
        graph: As it was read.
        preparation: What is done to it.
        name: What messages call it.
        class_names: What its classes are called if it does not say so itself; None where that is not known.
        warns: Warn where its preparation adds edges.
    """

    graph: Data
    preparation: Preparation
    name: str
    class_names: tuple[str, ...] | None = None
    warns: bool = True


def joined(parts: Iterable[Part]) -> Data:
    """Prepare many graphs, and make them one without edges between them.

    Classes that have names are told by these: those of the first graph keep their numbers, new ones are appended.

    Args:
        parts: With the same features; what not all of them have is left out, and what differs in shape with a warning.

    Returns:
        The graph; :data:`GRAPH` is the number of the one that each node was of, ``own_idx`` its number there.
        ``class_names`` and ``node_names`` are of all, where the graphs have them.

    Raises:
        ValueError: One is not sound, they have different features, only some name their classes, or the edges of some
            carry what those of others do not.
    """
    prepared: list[Data] = []
    named: list[tuple[str, ...] | None] = []
    texts: list[tuple[str, ...] | None] = []
    titles: list[str] = []
    for part in parts:
        graph = prepare_graph(part.graph, part.preparation, part.name, warns=part.warns, may_lack_edges=True)
        named.append(names_of_classes(part.graph, int(graph.y.max()) + 1, part.name) or part.class_names)
        own = names_of_nodes(part.graph, part.name)
        texts.append(None if own is None else tuple(own[node] for node in graph.source_idx.tolist()))
        prepared.append(graph)
        titles.append(part.name)
        if graph.x.shape[1] != prepared[0].x.shape[1]:
            raise ValueError(
                f"{part.name} has {graph.x.shape[1]} features of each node, the first {prepared[0].x.shape[1]}: all "
                "clients need the same features"
            )
    class_names = _by_name(prepared, named, titles)
    sizes = torch.tensor([graph.num_nodes for graph in prepared])
    first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    attributes = {name: torch.cat([graph[name] for graph in prepared]) for name in _shared(prepared, titles)}
    attributes |= {name: torch.cat([graph[name] for graph in prepared]) for name in same_edge_data(prepared)}
    whole = Data(
        **attributes,
        edge_index=torch.cat([graph.edge_index + start for graph, start in zip(prepared, first, strict=True)], dim=1),
        own_idx=torch.cat([graph.source_idx for graph in prepared]),
        **{GRAPH: torch.repeat_interleave(torch.arange(len(prepared)), sizes)},
    )
    whole.class_names = class_names
    if any(texts):
        empty = [("",) * graph.num_nodes for graph in prepared]
        whole.node_names = [text for own, none in zip(texts, empty, strict=True) for text in own or none]
    return whole


def _by_name(
    graphs: Sequence[Data], named: Sequence[tuple[str, ...] | None], titles: Sequence[str]
) -> tuple[str, ...] | None:
    """Number the classes of all graphs alike, by their names, and return these."""
    silent = [title for title, names in zip(titles, named, strict=True) if names is None]
    if len(silent) == len(named):
        return None
    if silent:
        raise ValueError(
            f"{silent[0]} has no class_names, but others of the graphs have: nothing tells whether its classes are in "
            "their order. Give each graph a list class_names, or none of them."
        )
    numbers: dict[str, int] = {}
    for graph, names in zip(graphs, named, strict=True):
        place_K = torch.tensor([numbers.setdefault(text, len(numbers)) for text in names or ()])
        graph.y = torch.where(graph.y >= 0, place_K[graph.y.clamp(min=0)], graph.y)
    return tuple(numbers)


def _shared(graphs: Sequence[Data], titles: Sequence[str]) -> list[str]:
    """The attributes of nodes that all graphs have, in shapes that go together."""
    shared = set.intersection(*(set(graph.node_attrs()) for graph in graphs)) - {"source_idx", "own_idx", GRAPH}
    for name in sorted(shared):
        kinds = [(graph[name].shape[1:], graph[name].dtype) for graph in graphs]
        if (other := next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
            warnings.warn(
                f"{titles[other]}: {name} is {kinds[other][1]} of shape {tuple(graphs[other][name].shape)}, that of "
                f"{titles[0]} {kinds[0][1]} of shape {tuple(graphs[0][name].shape)}. It is left out of all graphs; "
                "give it the same shape and type in each to use it.",
                stacklevel=2,
            )
            shared.remove(name)
    return sorted(shared)


class FileSource(GraphSource):
    """A graph of your own: a ``torch_geometric.data.Data``, or its ``to_dict()``, written by ``torch.save``.

    Weights ``edge_weight`` and attributes ``edge_attr`` of its edges are carried along.

    A list of graphs in the file is a client each, and needs no partitioner; so is each of several files, which is then
    called as its file. A list of texts ``node_names``, one for each node, goes into the file of predictions; a list
    ``class_names``, one for each class, there and into the picture of the labels. Classes of several graphs that have
    names are told by these.

    Args:
        path: The file, or a list of files; a relative path starts at the working directory.
        normalize_features: Row-normalise the features, which must not be negative.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.
    """

    def __init__(
        self,
        path: str | list[str],
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
        ignore_label: int | None = None,
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected, ignore_label)
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
        titles = [f"FileSource({str(path)!r})" for path in self.paths] if self.is_list else [str(self)] * len(saved)
        return joined(
            Part(graph=graph, preparation=self.preparation, name=f"{title}, graph {idx}")
            for idx, (graph, title) in enumerate(zip(saved, titles, strict=True))
        )

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
            saved = torch.load(path, map_location="cpu", weights_only=True)
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
