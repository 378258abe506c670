"""Your own graphs: one in memory, or many, each a client; and what the data module takes in place of a source."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData

from fl_lightning.data.partition.record import hash_features
from fl_lightning.data.preparation import Preparation
from fl_lightning.data.settings import user_path
from fl_lightning.data.sources.base import FileSource, GraphSource, Source
from fl_lightning.data.sources.example_sets import InMemoryExampleSet
from fl_lightning.data.sources.graph_sets import GraphSetSource, InMemoryGraphSet
from fl_lightning.data.sources.joined import GRAPH, Part, joined
from fl_lightning.data.sources.many_graph_sets import GraphSets, ManyGraphSets
from fl_lightning.data.sources.own_examples import InMemoryExamples, are_examples
from fl_lightning.data.sources.parts import has_parts

#: What the data module takes in place of a source.
_TAKEN = (
    "give a source, a graph (torch_geometric.data.Data) or its file, or a pair of inputs and targets (tensors, "
    "arrays); or, in a list or dictionary with a value for each client, graphs, lists of graphs, or such pairs, each "
    "perhaps as {'train': ..., 'val': ..., 'test': ...}"
)


class InMemorySource(GraphSource):
    """A graph in memory.

    Args:
        data: With ``x``, ``edge_index`` and ``y``, and perhaps ``edge_weight`` and ``edge_attr``.
        normalize_features: Row-normalize the features, which must not be negative.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.
    """

    def __init__(
        self,
        data: Data,
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
        ignore_label: int | None = None,
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected, ignore_label)
        if not isinstance(data, Data):
            raise ValueError(f"the graph is a {type(data).__name__}: give a torch_geometric.data.Data")
        self.graph = data

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        return self.graph

    def identity(self) -> dict[str, Any]:
        """The features; everything else on the graph is part of a partition's hash anyway."""
        x_NF = self.graph.get("x")
        features = hash_features(x_NF.to_dense().float().cpu()) if isinstance(x_NF, Tensor) else None
        return {"source": type(self).__name__, "features": features}


class ManyGraphs(GraphSource):
    """Graphs that are a client each: needs no partitioner.

    Features mean the same in all graphs, and so do the numbers of classes, unless all graphs have ``class_names``:
    classes are then matched by name.

    Args:
        sources: Where each client's graph comes from; each is prepared as it says itself.
        names: Of the clients; None for their numbers.

    Raises:
        ValueError: There are no graphs, or not a name for each.
    """

    clients_by = GRAPH

    def __init__(self, sources: list[GraphSource], names: list[str] | None = None) -> None:
        super().__init__()
        if not isinstance(sources, Sequence) or not sources:
            raise ValueError(f"ManyGraphs.sources is {sources!r}: give a source for each client")
        strangers = [each for each in sources if not isinstance(each, GraphSource)]
        if strangers:
            kind = type(strangers[0]).__name__
            raise ValueError(f"ManyGraphs.sources holds a {kind}, which is not a source of a graph: {_TAKEN}")
        if names is not None and (len(names) != len(sources) or len(set(names)) < len(names)):
            raise ValueError(f"ManyGraphs.names is {names}: give each of the {len(sources)} graphs its own")
        self.sources = sources
        self.client_names = None if names is None else tuple(names)

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        return joined(
            Part(
                graph=source.load(root, cache_dir),
                preparation=source.what_is_left,
                name=self._title(idx),
                class_names=source.class_names,
                warns=not source.benchmark,
            )
            for idx, source in enumerate(self.sources)
        )

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"names": self.client_names}

    def preparation_of(self, client: int) -> Preparation:
        """That of the client's own source."""
        return self.sources[client].preparation

    def _title(self, idx: int) -> str:
        """What messages call one of the graphs."""
        source = self.sources[idx]
        names = None if self.client_names is None else self.client_names[idx]
        name = names if isinstance(source, InMemorySource) else str(source)
        return f"graph {idx}" if name is None else f"graph {idx} ({name})"

    def identity(self) -> dict[str, Any]:
        """What each of the graphs depends on."""
        return {"source": type(self).__name__, "sources": [source.identity() for source in self.sources]}


def as_source(source: Any) -> Source:
    """Convert to a source.

    A graph in memory or a file is one graph, as is a data set of PyG that has one; a list or a dictionary of graphs,
    files or sources has a client for each; a list of lists of graphs, or of sets of graphs, has clients whose graphs
    have labels; a list or a dictionary of pairs of tensors, or of data sets of PyTorch, has clients with examples, and
    one such pair or data set has examples for a partitioner.

    Raises:
        ValueError: It is none of these.
    """
    result = _converted(source)
    if isinstance(result, HeteroData):
        raise ValueError("data.source has several types of nodes or edges: give data.to_homogeneous(), a Data")
    if isinstance(result, Dataset):
        raise ValueError(
            f"data.source is a {type(result).__name__} of {len(result)} graphs: give list(dataset) if each graph is a "
            "client, or fl_lightning.data.InMemoryGraphSet(list(dataset)), if each has a target and clients share them"
        )
    if not isinstance(result, Source):
        raise ValueError(f"data.source is a {type(result).__name__}, which is not a source: {_TAKEN}")
    return result


def _converted(source: Any) -> Any:
    if isinstance(source, Data):
        return InMemorySource(source)
    if isinstance(source, str | Path):
        if not user_path("data.source", source).is_file():
            raise ValueError(
                f"data.source is {str(source)!r}, which is not a file: give a source, a graph, or a saved graph"
            )
        return FileSource(str(source))
    if isinstance(source, Dataset) and len(source) == 1:
        return InMemorySource(source[0])
    if are_examples(source):
        return InMemoryExampleSet(source)
    if has_parts(source):
        return InMemoryGraphSet(source)
    if isinstance(source, Mapping | list | tuple):
        given, names = (source.values(), [*map(str, source)]) if isinstance(source, Mapping) else (source, None)
        return _of_clients(list(given), names)
    return source


def _of_clients(given: list[Any], names: list[str] | None) -> Source:
    """A source of what each client has."""
    if given and all(map(are_examples, given)):
        return InMemoryExamples(given, names)
    if given and all(isinstance(each, list | tuple) or has_parts(each) for each in given):
        return GraphSets(given, names)
    if given and all(isinstance(each, GraphSetSource) for each in given):
        return ManyGraphSets(given, names)
    return ManyGraphs([_converted(each) for each in given], names)
