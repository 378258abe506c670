"""Graphs of the Open Graph Benchmark.

Source: Hu et al., "Open Graph Benchmark: Datasets for Machine Learning on Graphs", NeurIPS 2020.

The reader of ``ogb`` 1.3.6 looks for a newer version of itself on import, asks questions on standard input, and loads
its converted file in a way that torch >= 2.6 refuses. Here none of that happens: with the files in place nothing goes
over the network, and standard input is never read.
"""

import contextlib
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, download_url, extract_zip

from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import GraphSource, allow_pickled_graphs
from fl_lightning.data.sources.converted import open_dataset
from fl_lightning.data.sources.downloads import move_into

#: The parts of OGB's splits, in their order.
PARTS = ("train", "valid", "test")


class OgbSource(GraphSource):
    """A node-classification graph of OGB, with its official split as masks.

    Args:
        name: For example ``ogbn-arxiv`` or ``ogbn-products``.
        normalize_features: Row-normalize the features; OGB's are left as they are.
        largest_component: Keep the largest connected component only.
        undirected: Add missing reverse edges.
    """

    benchmark = True

    def __init__(
        self,
        name: str = "ogbn-arxiv",
        normalize_features: bool = False,
        largest_component: bool = True,
        undirected: bool = True,
    ) -> None:
        super().__init__(normalize_features, largest_component, undirected)
        if not isinstance(name, str) or not re.fullmatch(r"ogbn-[A-Za-z0-9]+", name):
            raise ValueError(f"name={name!r} is not a node-classification graph of OGB; give one such as 'ogbn-arxiv'.")
        self.name = name

    def __str__(self) -> str:
        """The name of the data set."""
        return self.name

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        released_folder(root, self.name)
        dataset_class = _import_dataset_class()
        arguments = {"name": self.name, "root": str(root)}
        with tamed_reader():
            dataset = open_dataset(dataset_class, arguments, root, cache_dir, download, check_raw=_check_node_labels)
            data = dataset[0]
            part_N = official_split(dataset, data.num_nodes)
        for number, mask in enumerate(("train_mask", "val_mask", "test_mask")):
            data[mask] = part_N == number
        return data

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {"source": "OgbSource", "name": self.name}


def released_folder(root: Path, name: str) -> Path:
    """The folder of a data set, whether it exists or not.

    Raises:
        FileNotFoundError: It exists, but OGB would ask on standard input whether to fetch it again.
    """
    folder = root / name.replace("-", "_")
    folder = folder.with_name(f"{folder.name}_pyg") if folder.with_name(f"{folder.name}_pyg").exists() else folder
    if folder.exists() and not any(folder.glob("RELEASE_v*.txt")):
        raise FileNotFoundError(
            f"{name}: {folder} has no RELEASE_v1.txt, so the files are incomplete or of another release. Set "
            "FL_DATA_ROOT or data.root to the folder that holds the unpacked archive, move this folder away to "
            "download it again, or create an empty RELEASE_v1.txt if you know the files to be the current ones."
        )
    return folder


def official_split(dataset: Any, count: int) -> Tensor:
    """OGB's split of a data set.

    Args:
        dataset: A data set of OGB's for nodes or graphs.
        count: N, how many of them it has.

    Returns:
        The part of each by its place in :data:`PARTS`, int64 (N,); -1 for none.

    Raises:
        ValueError: A file is damaged, or an index in it is not whole, out of range or there twice; names the file.
    """
    folder = Path(dataset.root, "split", dataset.meta_info["split"])
    saved = folder / "split_dict.pt"
    given: Any = {}
    if saved.is_file():
        with reading(saved, "OGB's split of the data set"):
            given = dataset.get_idx_split()
    part_N = torch.full((count,), -1)
    for number, part in enumerate(PARTS):
        path = saved if saved.is_file() else folder / f"{part}.csv.gz"
        with reading(path, "OGB's split of the data set"):
            index = np.asarray(given[part] if given else table(path)[:, 0], dtype=np.float64)
            wrong = ~((index >= 0) & (index < count) & (index == np.floor(index)))
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(f"{part} has {index[row]:.10g} in row {row}, no whole number from 0 to {count - 1}")
            index_M = torch.from_numpy(index.astype(np.int64))
            if bool((again_M := part_N[index_M] >= 0).any()):
                first = int(index_M[again_M][0])
                raise ValueError(f"{part} has {first}, which is in {PARTS[int(part_N[first])]} as well")
            part_N[index_M] = number
            if int((part_N == number).sum()) < len(index_M):
                raise ValueError(f"{part} has {int(torch.bincount(index_M).argmax())} twice")
    return part_N


def check_classes(path: Path, label: Any) -> None:
    """Refuse labels with fractions, which OGB's reader would cut off.

    Args:
        path: Their file, for the message.
        label: As :func:`table` reads them.

    Raises:
        ValueError: A label is neither whole nor missing.
    """
    if (wrong := ~(np.isnan(label) | (label == np.floor(label)))).any():
        raise ValueError(f"{path.name} has {label[wrong][0]} in row {int(wrong.any(axis=1).argmax())}, no class")


def table(path: Path) -> Any:
    """A file of numbers, float64 (rows, columns); nan where it has gaps."""
    import pandas as pd

    return pd.read_csv(path, compression="gzip", header=None).to_numpy(dtype=np.float64)


def _check_node_labels(path: Path) -> None:
    if path.name == "edge.csv.gz":  # the list of what is checked lacks the labels
        labels = path.with_name("node-label.csv.gz")
        check_classes(labels, table(labels))


def _import_dataset_class() -> Any:
    with no_version_check():
        from ogb.nodeproppred import PygNodePropPredDataset
    return PygNodePropPredDataset


@contextlib.contextmanager
def no_version_check() -> Iterator[None]:
    """Import modules of OGB in it without the version check that their import would start in a thread."""
    absent = object()
    checker = sys.modules.get("outdated", absent)
    sys.modules["outdated"] = None  # type: ignore[assignment]  # importing it raises ImportError, which ogb accepts
    try:
        yield
    finally:
        del sys.modules["outdated"]
        if checker is not absent:
            sys.modules["outdated"] = checker  # type: ignore[assignment]


@contextlib.contextmanager
def tamed_reader() -> Iterator[None]:
    """Allow the classes in OGB's converted file, and keep its messages off standard output."""
    with (
        allow_pickled_graphs(),
        contextlib.redirect_stdout(sys.stderr),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        yield


def download(dataset: Any) -> None:
    """Fetch and unpack a data set's archive as OGB does, without asking."""
    with tempfile.TemporaryDirectory(dir=dataset.original_root) as scratch:
        extract_zip(download_url(dataset.meta_info["url"], scratch), scratch)
        unpacked = Path(scratch, dataset.download_name)
        move_into(Path(dataset.root), unpacked, last=[path.name for path in unpacked.glob("RELEASE_v*.txt")])
