"""Graphs of the Open Graph Benchmark.

Source: Hu et al., "Open Graph Benchmark: Datasets for Machine Learning on Graphs", NeurIPS 2020.

The reader of ``ogb`` 1.3.6 looks for a newer version of itself on import, asks questions on standard input, and loads
its converted file in a way that torch >= 2.6 refuses. Here none of that happens: with the files in place nothing goes
over the network, and standard input is never read.
"""

import contextlib
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, download_url, extract_zip

from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import GraphSource, allow_pickled_graphs
from fl_lightning.data.sources.converted import open_dataset


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
        folder = released_folder(root, self.name)
        dataset_class = _import_dataset_class()
        with tamed_reader():
            dataset = open_dataset(dataset_class, {"name": self.name, "root": str(root)}, root, cache_dir, download)
            with reading(folder / "split", "OGB's split of the data set"):
                data, split = dataset[0], dataset.get_idx_split()
        for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
            data[mask] = torch.zeros(data.num_nodes, dtype=torch.bool)
            data[mask][split[part]] = True
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
        shutil.copytree(Path(scratch, dataset.download_name), dataset.root, dirs_exist_ok=True)
