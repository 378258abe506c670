"""Link-prediction graphs of the Open Graph Benchmark.

Source: Hu et al., "Open Graph Benchmark: Datasets for Machine Learning on Graphs", NeurIPS 2020.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import GraphSource
from fl_lightning.data.sources.converted import open_dataset
from fl_lightning.data.sources.ogb import download, no_version_check, released_folder, tamed_reader
from fl_lightning.data.split import GivenSplit

#: Data sets of triples, whose pairs of entities have several relations and no direction that could be left out.
OF_TRIPLES = ("ogbl-wikikg2", "ogbl-biokg")


class OgbLinkSource(GraphSource):
    """A link-prediction graph of OGB with its official split of the edges, for :class:`~fl_lightning.data.Links`.

    Validation and test links are those of OGB; a pair that is also among its training edges, as in ``ogbl-collab``, is
    no training link. The pairs without a link that OGB compares them with are not read, since few of them have both
    nodes at one client: each client has pools of its own, so metrics are not those of OGB's leaderboards. Weights and
    years of edges are not read either. Nodes of a graph without features (``ogbl-ddi``) have the feature 1: give
    ``Links`` the features ``structure`` or ``identity``.

    Args:
        name: ``ogbl-collab``, ``ogbl-ddi``, ``ogbl-ppa``, ``ogbl-citation2`` or ``ogbl-vessel``.
        normalize_features: Row-normalize the features; OGB's are left as they are.
        largest_component: Keep the largest connected component only.

    Raises:
        ValueError: It is no such graph.
    """

    benchmark = True
    splitter_of_links = GivenSplit()
    names = ("ogbl-collab", "ogbl-ddi", "ogbl-ppa", "ogbl-citation2", "ogbl-vessel")

    def __init__(
        self, name: str = "ogbl-collab", normalize_features: bool = False, largest_component: bool = False
    ) -> None:
        super().__init__(normalize_features, largest_component)
        if name in OF_TRIPLES:
            raise ValueError(
                f"OgbLinkSource.name is {name!r}, a knowledge graph, in which two nodes may have several relations of "
                f"either direction: give one of {', '.join(self.names)}, or a graph of yours with an edge_type"
            )
        if name not in self.names:
            raise ValueError(f"OgbLinkSource.name is {name!r}: give one of {', '.join(self.names)}")
        self.name = name

    def __str__(self) -> str:
        """The name of the data set."""
        return self.name

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        folder = released_folder(root, self.name)
        with no_version_check():
            from ogb.linkproppred import PygLinkPropPredDataset
        with tamed_reader():
            dataset = open_dataset(
                PygLinkPropPredDataset, {"name": self.name, "root": str(root)}, root, cache_dir, download
            )
            with reading(folder / "split", "OGB's split of the edges"), allow_pickled_arrays():
                graph, split = dataset[0], dataset.get_edge_split()
                held_out = {part: pairs_of(split[part]) for part in ("valid", "test")}
        x_NF = graph.get("x")
        return Data(
            x=torch.ones(graph.num_nodes, 1) if x_NF is None else x_NF,
            edge_index=graph.edge_index,
            val_edge_index=held_out["valid"],
            test_edge_index=held_out["test"],
        )

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {"source": type(self).__name__, "name": self.name}


def pairs_of(part: Mapping[str, Any]) -> Tensor:
    """The links of a part of OGB's split, int64 (2, E): its edges, or papers with those that they cite."""
    if "edge" in part:
        return torch.as_tensor(part["edge"]).t().long()
    return torch.stack([torch.as_tensor(part[name]) for name in ("source_node", "target_node")]).long()


@contextlib.contextmanager
def allow_pickled_arrays() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` accept numpy arrays of numbers, within the context."""
    rebuild = np.array(0).__reduce__()[0]
    types = [type(np.dtype(name)) for name in ("int64", "int32", "float32", "float64", "bool")]
    classes: list[Any] = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    with torch.serialization.safe_globals([*classes, np.ndarray, np.dtype, *types]):
        yield
