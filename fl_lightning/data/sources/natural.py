"""Data sets of several graphs that are a client each, as they were collected."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from fl_lightning.data.settings import check_text
from fl_lightning.data.sources.array_file import read_arrays, reading
from fl_lightning.data.sources.base import GraphSource
from fl_lightning.data.sources.own import ManyGraphs
from fl_lightning.data.sources.pyg import PyGSource


class PyGGraphs(ManyGraphs):
    """Graphs of one PyTorch Geometric class that differ by ``name``, each a client.

    Args:
        dataset: Import path of the class, e.g. ``torch_geometric.datasets.Twitch``.
        names: Of the graphs, and of the clients, e.g. ``[DE, EN, ES]``; all need the same features.
        arguments: Its arguments besides ``root`` and ``name``.
        normalize_features: Row-normalize the features, which must not be negative.
        largest_component: Keep the largest connected component of each graph only.
        undirected: Add missing reverse edges.
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.
    """

    def __init__(
        self,
        dataset: str,
        names: list[str],
        arguments: dict[str, str | int | float | bool] | None = None,
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
        ignore_label: int | None = None,
    ) -> None:
        _check_names("names", names, "DE")
        settings = (normalize_features, largest_component, undirected, ignore_label)
        super().__init__(
            [PyGSource(dataset, _with_name(arguments, name), *settings) for name in names], names=list(names)
        )
        self.dataset, self.arguments = dataset, arguments

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {**super().given(), **dataclasses.asdict(self.sources[0].preparation)}


class TwitchSource(ManyGraphs):
    """Streamers of seven countries who follow each other; whether they use explicit language is to be predicted.

    The 3,170 features are games that are played and liked, place and habits. File of each country:
    ``twitch/<country>.npz`` with the edges ``edges`` (2, E), the labels ``y`` (N,), and which features streamer n has:
    ``feat_indices`` from ``feat_indptr[n]`` to ``feat_indptr[n + 1]``. (PyG's ``Twitch`` has 128 other features, an
    embedding, for six of the countries: read it by ``PyGGraphs``.)

    Args:
        countries: Which of DE, EN, ES, FR, PT, RU, TW are clients.
        normalize_features: Row-normalize the features.
        largest_component: Keep the largest connected component of each country only; all are connected.
        undirected: Add missing reverse edges.

    Source: Rozemberczki, Allen, Sarkar, "Multi-Scale Attributed Node Embedding", Journal of Complex Networks, 2021.
    """

    names = ("DE", "EN", "ES", "FR", "PT", "RU", "TW")
    class_names = ("not explicit", "explicit")

    def __init__(
        self,
        countries: list[str] | None = None,
        normalize_features: bool = False,
        largest_component: bool = False,
        undirected: bool = True,
    ) -> None:
        chosen = list(self.names) if countries is None else countries
        _check_names("countries", chosen, "DE")
        if unknown := sorted(set(chosen) - set(self.names)):
            raise ValueError(f"countries has {unknown[0]!r}, which is not one of {', '.join(self.names)}.")
        settings = (normalize_features, largest_component, undirected)
        super().__init__([_Country(name, *settings) for name in chosen], names=list(chosen))

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"countries": self.client_names, **dataclasses.asdict(self.sources[0].preparation)}

    def __str__(self) -> str:
        """The data set's name."""
        return "Twitch"


class _Country(GraphSource):
    """One of Twitch's, whose edges, each of them once, are mutual."""

    benchmark = True
    num_features = 3170

    def __init__(
        self, name: str, normalize_features: bool = False, largest_component: bool = False, undirected: bool = True
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected)
        self.name = name

    def __str__(self) -> str:
        """With the country."""
        return f"Twitch {self.name}"

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:
        from scipy.sparse import csr_matrix

        path = f"twitch/{self.name}.npz"
        layout = {
            "edges": "(2, E) nodes of each edge",
            "y": "(N,) labels",
            "feat_indices": "(M,) numbers of features, node after node",
            "feat_indptr": "(P,) where each node's begin, and where the last one's end",
        }
        arrays = read_arrays(root, (path,), layout, whole=tuple(layout))
        shape, indices = (len(arrays["y"]), self.num_features), arrays["feat_indices"]
        with reading(root / path, f"features below {self.num_features} of each node"):
            x_NF = csr_matrix((np.ones(len(indices), np.float32), indices, arrays["feat_indptr"]), shape=shape)
            x_NF.check_format(full_check=True)
        edge_index, y = (torch.from_numpy(arrays[name]) for name in ("edges", "y"))
        return Data(x=torch.from_numpy(x_NF.toarray()), edge_index=edge_index, y=y)

    def identity(self) -> dict[str, Any]:
        return {"source": "TwitchSource", "name": self.name}


def _check_names(setting: str, names: Any, example: str) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ValueError(f"{setting} is {names!r}: give a list of names such as {example!r}, one for each client.")
    for name in names:
        check_text(setting, name, example)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{setting} has {twice[0]!r} more than once: each is one client.")


def _with_name(arguments: Any, name: str) -> Any:
    """The arguments of one of the graphs; anything but a dictionary is refused by the source."""
    if not isinstance(arguments, dict | None):
        return arguments
    if arguments and "name" in arguments:
        raise ValueError(f"arguments: 'name' is {arguments['name']!r}; give the graphs' names by `names`.")
    return {**(arguments or {}), "name": name}
