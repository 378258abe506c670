"""Sets of graphs of PyTorch Geometric: the TU collection, and any class by its path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.graph_sets import LoadedGraphs
from fl_lightning.data.settings import check_flag, check_text
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.graph_sets import GraphSetSource
from fl_lightning.data.sources.pyg import checked_arguments, folder_of, open_by_path, title_of


class TUSource(GraphSetSource):
    """A set of graphs of the TU collection (Morris et al., "TUDataset", 2020), read from its text files.

    Looked for in ``<root>/TU/<name>/raw``, else ``<root>/<name>/raw``, where PyG has it. Features of a node are its
    attributes, if wanted, and its label, one-hot; where a set has neither, its degree, one-hot.

    Args:
        name: For example MUTAG, PROTEINS or IMDB-BINARY.
        use_node_attr: Whether the attributes of nodes are features, before their labels. (PyG's default is false; the
            protocol of GCFL and FedStar has them only for sets without labels, such as Letter-low.)
        use_edge_attr: Whether edges have their attributes and labels, one-hot, as ``edge_attr``, for nets that read
            them.
        cleaned: Read the set without graphs that are the same as another (Ivanov et al., "Understanding Isomorphism
            Bias in Graph Data Sets", 2019).
        max_degree: Where the degree is the feature, higher ones count as this; None for the highest that occurs.
        undirected: Add missing reverse edges.
    """

    def __init__(
        self,
        name: str,
        use_node_attr: bool = True,
        use_edge_attr: bool = False,
        cleaned: bool = False,
        max_degree: int | None = None,
        undirected: bool = True,
    ) -> None:
        super().__init__(undirected, max_degree)
        check_text("name", name, "MUTAG")
        for flag, value in {"use_node_attr": use_node_attr, "use_edge_attr": use_edge_attr, "cleaned": cleaned}.items():
            check_flag(flag, value)
        self.name = name
        self.use_node_attr = use_node_attr
        self.use_edge_attr = use_edge_attr
        self.cleaned = cleaned

    def __str__(self) -> str:
        """The name of the set."""
        return self.name

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:  # noqa: D102
        beside = (root / self.name).exists() and not (root / "TU" / self.name).exists()
        arguments: dict[str, Any] = {"name": self.name, "use_node_attr": self.use_node_attr, "cleaned": self.cleaned}
        dataset = open_by_path(
            "torch_geometric.datasets.TUDataset",
            {**arguments, "use_edge_attr": self.use_edge_attr},
            root if beside else root / "TU",
            cache_dir,
            converted_folder="",
        )
        with reading(Path(dataset.raw_dir), "a set of the TU collection, with a target for each graph"):
            _complete(dataset)
            return LoadedGraphs(graphs=graphs_of(dataset, edge_attr=self.use_edge_attr))

    def identity(self) -> dict[str, Any]:  # noqa: D102
        names = ("name", "use_node_attr", "use_edge_attr", "cleaned")
        return {**super().identity(), **{name: getattr(self, name) for name in names}}


class PyGGraphSet(GraphSetSource):
    """Any data set of PyTorch Geometric whose graphs have a target each.

    Args:
        dataset: Import path of the class, e.g. ``torch_geometric.datasets.GNNBenchmarkDataset``.
        arguments: Its arguments besides ``root``, e.g. ``{"name": "CSL"}``.
        max_degree: Where the degree is the feature, higher ones count as this; None for the highest that occurs.
        undirected: Add missing reverse edges.
    """

    def __init__(
        self,
        dataset: str,
        arguments: dict[str, str | int | float | bool] | None = None,
        max_degree: int | None = None,
        undirected: bool = True,
    ) -> None:
        super().__init__(undirected, max_degree)
        self.dataset, self.arguments = dataset, checked_arguments(dataset, arguments)

    def __str__(self) -> str:
        """With the class and its arguments."""
        return title_of(self.dataset, self.arguments)

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:  # noqa: D102
        folder = folder_of(self.dataset, self.arguments)
        dataset = open_by_path(self.dataset, self.arguments, root, cache_dir, folder)
        with reading(Path(dataset.raw_dir), "graphs"):
            return LoadedGraphs(graphs=graphs_of(dataset))

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {**super().identity(), "dataset": self.dataset, "arguments": self.arguments}


def _complete(dataset: Any) -> None:
    """Count the last graphs that have no edges, too, which PyG's reader of the TU collection overlooks.

    Raises:
        ValueError: There is not a target for each graph.
    """
    slices: dict[str, Tensor] = dataset.slices
    if "y" not in slices:
        raise ValueError(f"there is no {dataset.name}_graph_labels.txt")
    if len(y := dataset._data.y) != int(slices["y"][-1]):
        raise ValueError(f"there are {len(y)} targets for {int(slices['y'][-1])} graphs")
    for key in {"edge_index", "edge_attr"} & slices.keys():
        ends, missing = slices[key], len(slices["y"]) - len(slices[key])
        slices[key] = torch.cat([ends, ends[-1:].expand(missing)])


def graphs_of(dataset: Sequence[Data], *, edge_attr: bool = True) -> list[Data]:
    """The graphs of a data set of PyG's, with or without attributes of edges; without features that are none."""
    keys = ("x", "edge_index", "edge_weight", *(["edge_attr"] if edge_attr else []), "y")
    result = []
    for graph in dataset:
        given = {key: graph[key] for key in keys if graph.get(key) is not None}
        for key in ("x", "edge_attr"):
            if key in given and given[key].shape[1:] == (0,):
                del given[key]
        result.append(Data(**given, num_nodes=graph.num_nodes))
    return result
