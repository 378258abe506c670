"""Where a global graph comes from: the contract, and a graph of your own in a file."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from fl_lightning.counts import Counted
from fl_lightning.data.allocation import Allocation, Asked
from fl_lightning.data.partition.cut import CutGraph, partition_of
from fl_lightning.data.partition.partitioners import GivenPartitioner, Partitioner
from fl_lightning.data.partition.subgraphs import client_graphs
from fl_lightning.data.partition.table import PartitionTable
from fl_lightning.data.preparation import (
    Preparation,
    check_num_classes,
    dropped,
    names_of_classes,
    names_of_nodes,
    prepare_graph,
)
from fl_lightning.data.settings import check_is_file, digest_of_file, user_path
from fl_lightning.data.sketch import sketch
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.joined import GRAPH, Part, joined
from fl_lightning.data.split import MASKS, ClientSplit, GlobalSplit, Splitter
from fl_lightning.saved_tensors import load_data
from fl_lightning.tasks import NodeClassification, NodeRegression
from fl_lightning.tasks.base import kind_of_target

#: What is done to graphs that were prepared before they were joined.
NOTHING_MORE = Preparation(normalize_features=False, largest_component=False, undirected=False)


class Source(Counted, ABC):
    """Where a federation's data come from: a :class:`GraphSource`, an ``ExampleSource``, or another that allocates."""

    #: Whether clients' training examples can be drawn in mini-batches.
    takes_batches: ClassVar[bool] = True
    #: Whether the edges between clients can be kept where it is cut (``data.cross_edges``).
    keeps_cross_edges: ClassVar[bool] = False
    #: What the classes are called, in their order; None where that is not known. A graph's own ``class_names`` win.
    class_names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """What messages call the data set."""
        return type(self).__name__

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return everything the data depend on (besides seeds that are passed on), as JSON-ready values."""

    def partitioner_for(self, given: Partitioner | None) -> Partitioner | None:
        """The partitioner to use, for the one that was given; None if the source has its own clients.

        Raises:
            ValueError: One is missing, or too many.
        """
        if given is not None:
            raise ValueError(
                f"data.partitioner is {type(given).__name__}, but {type(self).__name__} has its own clients: drop it"
            )
        return None

    @property
    def default_splitter(self) -> Splitter:
        """The splitter where none is given."""
        return ClientSplit(train=0.6, val=0.2) if self.takes_batches else GlobalSplit()

    def prepare(self, asked: Asked) -> Any:
        """What one process of a machine makes and caches before the others read; None for nothing."""
        return None

    def is_cut_by(self, partitioner: Partitioner | None) -> bool:
        """Whether the clients are parts of one graph, which a partitioner cuts."""
        return False

    @abstractmethod
    def allocate(self, asked: Asked, prepared: Any) -> Allocation:
        """What each client holds.

        Args:
            asked: The settings of the data module.
            prepared: What :meth:`prepare` has made.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: The data are not sound.
        """

    def describe(self, allocation: Allocation, *, seed: int, non_iidness: bool) -> PartitionTable:
        """The table of the clients.

        Args:
            allocation: As allocated.
            seed: Of what is sampled.
            non_iidness: Whether to measure that too, where it can be.
        """
        names = allocation.class_names
        return PartitionTable.from_examples(allocation.clients, num_classes=allocation.num_outputs, class_names=names)

    def preparation_of(self, client: int) -> Preparation:
        """How the graphs of a client are prepared, for new graphs of the same kind; without graphs not at all."""
        return NOTHING_MORE

    def of_client(self, client: int) -> "Source":
        """Where a client's data come from: this source, unless it has one for each."""
        return self

    def whole_graph(self, asked: Asked) -> Data:
        """The prepared global graph that clients have parts of.

        Raises:
            ValueError: There is none.
        """
        raise ValueError(f"{type(self).__name__} is not one graph that is cut into clients")


class GraphSource(Source):
    """A global graph whose nodes are the examples: with classes, labels or numbers, as its ``y`` is.

    Whole numbers are classes; a matrix of zeros and ones (nan where unknown) is of labels; other numbers (nan where
    missing) are to be predicted. A graph may say it itself by an attribute ``task``: ``classes``, ``labels``,
    ``numbers``.

    Args:
        normalize_features: Row-normalize the features, which must not be negative.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.
    """

    takes_batches = False
    keeps_cross_edges = True
    #: Whether the papers take the largest component of this data set: what it leaves out is then no surprise.
    benchmark: ClassVar[bool] = False
    #: The split that its links come with (``data/sources/links.py``); None for none.
    splitter_of_links: ClassVar[Splitter | None] = None
    #: The node attribute with each node's client, if the source's graphs are clients themselves.
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

    def preparation_of(self, client: int) -> Preparation:
        """The settings."""
        return self.preparation

    @property
    def what_is_left(self) -> Preparation:
        """What is still done to a loaded graph: nothing where it was joined of prepared ones."""
        return NOTHING_MORE if self.clients_by == GRAPH else self.preparation

    def partitioner_for(self, given: Partitioner | None) -> Partitioner:
        """The given one; where graphs are clients by themselves, none is needed."""
        if given is None and self.clients_by is not None:
            return GivenPartitioner(self.clients_by)
        if given is None:
            raise ValueError(
                f"data.partitioner is missing: {type(self).__name__} is one graph, which has to be cut into clients"
            )
        return given

    def is_cut_by(self, partitioner: Partitioner | None) -> bool:
        """Unless its graphs are clients themselves."""
        by = getattr(partitioner, "attribute", None)
        return by is None or by != self.clients_by

    def all_identity(self, asked: Asked) -> dict[str, Any]:
        """Everything that graph, partition and split depend on besides the graph's content, as JSON-ready values."""
        assert asked.partitioner is not None
        more = {"preparation": self.preparation.identity(), "partitioner": asked.partitioner.identity()}
        return asked.identity(self.identity(), **more)

    def whole_graph(self, asked: Asked) -> Data:  # noqa: D102
        return self.prepared(asked.root, asked.cache_dir)[1]

    def prepare(self, asked: Asked) -> CutGraph:
        """The graph, and its partition and split as they are cached."""
        raw, data = self.prepared(asked.root, asked.cache_dir)
        title = str(self)
        kind = kind_of_target(data.y, given=data.get("task"))
        task = NodeRegression() if kind == "numbers" else NodeClassification(multi_label=kind == "labels")
        class_names = None
        if not task.target.is_numeric:
            class_names = names_of_classes(raw, task.target.num_outputs([data.y]), title) or self.class_names
        if task.target.has_classes:
            check_num_classes(data.y, class_names, title)
        left_out = dropped(raw, data, self.preparation)
        if not (asked.splitter_is_given or self.benchmark) and all(raw.get(name) is not None for name in MASKS):
            warnings.warn(
                f"{self}: the graph's {', '.join(MASKS)} are not used, the split is {type(asked.splitter).__name__}'s; "
                "set data.splitter to GivenSplit to use them.",
                stacklevel=2,
            )
        node_names = names_of_nodes(raw, title)
        del raw  # a large graph is not held twice while it is cut
        return CutGraph(
            data=data,
            task=task,
            record=partition_of(data, task, asked, self.all_identity(asked)),
            class_names=class_names,
            node_names=node_names,
            dropped=left_out,
        )

    def allocate(self, asked: Asked, prepared: CutGraph) -> Allocation:
        """The subgraph of each client."""
        data, record = prepared.data, prepared.record
        user_names = getattr(asked.partitioner, "attribute", None) == self.clients_by
        clients, edges_lost = client_graphs(data, record, self.client_names if user_names else None)
        named_nodes = None
        if (names := prepared.node_names) is not None:
            loaded = [data.source_idx[node_idx_N].tolist() for node_idx_N in record.node_idx]
            named_nodes = tuple(tuple(names[node] for node in nodes) for nodes in loaded)
        return Allocation(
            task=prepared.task,
            clients=clients,
            num_outputs=prepared.task.target.num_outputs([data.y], len(prepared.class_names or ())),
            source_idx=tuple(data.get("own_idx", data.source_idx)[node_idx_N] for node_idx_N in record.node_idx),
            partition_hash=record.content_hash(self.all_identity(asked)),
            features=sketch(data.x),
            groups=record.groups(),
            class_names=prepared.class_names,
            node_names=prepared.node_names,
            named_nodes=named_nodes,
            edges_lost=edges_lost,
            dropped=prepared.dropped,
        )

    def describe(self, allocation: Allocation, *, seed: int, non_iidness: bool) -> PartitionTable:
        """Of graphs also lost edges and clustering, and how unlike they are."""
        return PartitionTable.from_graphs(
            allocation.clients,
            edges_lost=allocation.edges_lost,
            num_classes=allocation.num_outputs,
            seed=seed,
            dropped=allocation.dropped,
            non_iidness=non_iidness,
            class_names=allocation.class_names,
        )


@contextlib.contextmanager
def allow_pickled_graphs() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` accept the parts of a pickled ``Data``, within the context.

    Classes that are allowed already are left out: ``safe_globals`` would forbid them on leaving.
    """
    classes = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    with torch.serialization.safe_globals([*classes.difference(torch.serialization.get_safe_globals())]):
        yield


class FileSource(GraphSource):
    """A graph of your own: a ``torch_geometric.data.Data``, or its ``to_dict()``, written by ``torch.save``.

    Weights ``edge_weight`` and attributes ``edge_attr`` of its edges are carried along.

    A list of graphs in the file is a client each, and needs no partitioner; so is each of several files, which is then
    called as its file. A list of texts ``node_names``, one for each node, goes into the file of predictions; a list
    ``class_names``, one for each class, there and into the picture of the labels. Classes of several graphs that have
    names are matched by them.

    Args:
        path: The file, or a list of files; a relative path starts at the working directory.
        normalize_features: Row-normalize the features, which must not be negative.
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
        self.path = path
        self.is_list = not isinstance(path, str | Path)
        self.paths = [user_path("path", each) for each in ([path] if isinstance(path, str | Path) else path)]
        if not self.paths:
            raise ValueError("FileSource.path is an empty list: give at least one file")
        stems = tuple(each.stem for each in self.paths)
        self.client_names = stems if self.is_list and len(set(stems)) == len(stems) else None
        self._saved: Data | list[Data] | None = None  # from when the file is first looked at until it is loaded
        self._digests: list[str] | None = None  # of what was read last

    def __str__(self) -> str:
        """With the file."""
        names = [str(each) for each in self.paths]
        return f"FileSource({names if self.is_list else names[0]!r})"

    def partitioner_for(self, given: Partitioner | None) -> Partitioner:
        """As for any graph; for a new data module the file is read anew."""
        self._saved = self._digests = None
        return super().partitioner_for(given)

    @property
    def clients_by(self) -> str | None:  # type: ignore[override]
        """Set where there are several files, or the file holds a list."""
        if self._digests is None:
            self._read()
        return GRAPH if self._holds_list else None

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        if self._saved is None:
            self._read()
        saved, self._saved = self._saved, None
        assert saved is not None
        if not isinstance(saved, list):
            return saved
        titles = [f"FileSource({str(path)!r})" for path in self.paths] if self.is_list else [str(self)] * len(saved)
        return joined(
            Part(graph=graph, preparation=self.preparation, name=f"{title}, graph {idx}")
            for idx, (graph, title) in enumerate(zip(saved, titles, strict=True))
        )

    def _read(self) -> None:
        """Keep what is in the file or files until it is loaded, and which contents that were."""
        self._digests = self._digests_now()
        result = [_graphs_in(path) for path in self.paths]
        if self.is_list:
            for path, graphs in zip(self.paths, result, strict=True):
                if isinstance(graphs, list):
                    raise ValueError(f"path={str(path)!r} holds a list, but it is one of several files: give it alone")
        self._saved = result if self.is_list else result[0]
        self._holds_list = isinstance(self._saved, list)

    def _digests_now(self) -> list[str]:
        for path in self.paths:
            check_is_file(path, "data")
        return [digest_of_file(path) for path in self.paths]

    def identity(self) -> dict[str, Any]:
        """Depends on the contents of the file when it was read, not on its place."""
        hashes = self._digests or self._digests_now()
        return {"source": type(self).__name__, "sha256": hashes if self.is_list else hashes[0]}


def _graphs_in(path: Path) -> Data | list[Data]:
    """The graph in a file, or the graphs."""
    check_is_file(path, "data")
    expected = (
        "a torch_geometric Data (or a list of them, a client each) that loads with weights_only=True. Save it as "
        "`torch.save(Data(x=..., edge_index=..., y=...), path)` with only tensors, numbers and texts in it"
    )
    with reading(path, expected):
        with allow_pickled_graphs():
            saved = load_data(path)
        graphs = saved if isinstance(saved, list) else [saved]
        graphs = [Data.from_dict(each) if isinstance(each, dict) else each for each in graphs]
        strangers = [type(each).__name__ for each in graphs if not isinstance(each, Data)]
        if strangers or not graphs:
            raise ValueError(f"it holds a {strangers[0] if strangers else 'list of nothing'}")
    return graphs if isinstance(saved, list) else graphs[0]
