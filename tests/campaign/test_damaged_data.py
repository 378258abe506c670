"""Cut and flipped bytes in every kind of file of the data layer: valid data, or one line that names the file."""

import gzip
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from campaign.damage import NUM_PLACES, damaged
from campaign.record import SEED, Record
from example_files import write_example_files
from scipy import sparse
from torch_geometric.data import Data, InMemoryDataset

from fl_lightning.data import (
    HAR,
    METRLA,
    TPT48,
    AmazonSource,
    CitationFullSource,
    CoauthorSource,
    CompCars,
    ExampleSource,
    FederatedDataModule,
    FileSource,
    GivenPartitioner,
    GRDAToy,
    HeterogeneousCIFAR10,
    HeterophilousSource,
    OgbSource,
    PlanetoidSource,
    PlantedCommunities,
    PyGSource,
    RandomPartitioner,
    RotatedMNIST,
    School,
    TwitchSource,
    Vehicle,
    prepare_graph,
)


def check(path: Path, load: Callable[[], object], named: str = "", *, sealed: bool = False) -> None:
    """Load each damaged version: it succeeds (never one that is sealed), or raises one line that names the file."""
    whole = path.read_bytes()
    load()
    refused, lost = 0, []
    for version in damaged(whole, seed=SEED + len(whole)):
        path.write_bytes(version)
        survived = not sealed
        try:
            load()
        except (ValueError, FileNotFoundError) as error:
            survived = "\n" not in str(error) and (named or path.name) in str(error)
            refused += 1
            said = str(error)
        except Exception as error:  # which is what the campaign looks for
            survived, said = False, repr(error)
        else:
            said = "it was loaded"
        Record().count("damaged data files", survived=survived)
        lost += [] if survived else [said]
    path.write_bytes(whole)
    assert not lost, "\n".join(lost)
    assert refused > NUM_PLACES // 2


def small_graph(num_nodes: int = 30) -> Data:
    source = PlantedCommunities(num_nodes=num_nodes, num_communities=3, num_classes=3, num_features=4)
    return source.load(Path())


def assert_sound(data: Data) -> None:
    prepared = prepare_graph(data, FileSource("x").preparation, "graph.pt (TextGraphs/processed, ogbn_arxiv, cora)")
    assert bool(prepared.x.isfinite().all())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("school/school.npz", School()),
        ("vehicle_sensor/vehicle_ditto_train.npz", Vehicle()),
        ("har/har_raw.npz", HAR()),
        ("tpt48/tpt48.npz", TPT48(2000, 2004)),
        ("traffic/traffic_graphs.npz", METRLA(history=3, horizon=2)),
        ("grda_toy/DG-15.npz", GRDAToy("DG-15")),
        ("compcars/compcars.npz", CompCars()),
        ("MNIST/mnist.npz", RotatedMNIST(num_clients=8)),
        ("CIFAR10/cifar10_subset.npz", HeterogeneousCIFAR10(num_clients=4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ExampleSource) else None,
)
def test_arrays(tmp_path: Path, path: str, source: ExampleSource):
    write_example_files(tmp_path)
    check(tmp_path / path, lambda: source.load(tmp_path, 0))


def test_batches_of_cifar(tmp_path: Path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {b"data": np.zeros((20, 3072), dtype=np.uint8), b"labels": [label % 10 for label in range(20)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    source = HeterogeneousCIFAR10(num_clients=2)
    check(folder / "data_batch_3", lambda: source.load(tmp_path, 0))


@pytest.mark.parametrize("as_dict", [True, False])
def test_saved_graph(tmp_path: Path, as_dict: bool):
    path = tmp_path / "graph.pt"
    torch.save(small_graph().to_dict() if as_dict else small_graph(), path)
    check(path, lambda: assert_sound(FileSource(str(path)).load(tmp_path)))


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_given_clients(tmp_path: Path, suffix: str):
    path = tmp_path / f"clients{suffix}"
    client_N = np.arange(30) % 3
    np.save(path, client_N) if suffix == ".npy" else torch.save(torch.from_numpy(client_N), path)
    data = prepare_graph(small_graph(), PlantedCommunities().preparation)
    check(path, lambda: GivenPartitioner(str(path))(data))


class TextGraphs(InMemoryDataset):
    """Converts a raw file as the data sets of PyG do."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.load(self.processed_paths[0])

    raw_file_names = "graph.pt"
    processed_file_names = "data.pt"

    def download(self) -> None:
        raise OSError("no network")

    def process(self) -> None:
        self.save([Data.from_dict(torch.load(self.raw_paths[0], weights_only=True))], self.processed_paths[0])


def test_raw_and_converted_files_of_pyg(tmp_path: Path):
    raw = tmp_path / "TextGraphs" / "raw" / "graph.pt"
    raw.parent.mkdir(parents=True)
    torch.save(small_graph().to_dict(), raw)
    source = PyGSource(f"{__name__}.TextGraphs")

    def converted() -> None:
        assert_sound(source.load(tmp_path, tmp_path / "cache"))

    def anew() -> None:
        shutil.rmtree(tmp_path / "TextGraphs" / "processed", ignore_errors=True)
        converted()

    converted()
    (path,) = (tmp_path / "TextGraphs" / "processed").glob("*/data.pt")
    check(path, converted, named="TextGraphs/processed", sealed=True)
    check(raw, anew)


def write_planetoid(raw: Path) -> None:
    """A graph of 540 nodes as Cora's files hold it: 20 to train on, 500 to validate and 20 to test."""
    data = small_graph(540)
    x, y = sparse.csr_matrix(data.x.numpy()), np.eye(3, dtype=np.int32)[data.y.numpy()]
    neighbors: dict[int, list[int]] = {node: [] for node in range(540)}
    for source, target in data.edge_index.T.tolist():
        neighbors[source].append(target)
    raw.mkdir(parents=True)
    pickled = {
        "x": x[:20],
        "tx": x[520:],
        "allx": x[:520],
        "y": y[:20],
        "ty": y[520:],
        "ally": y[:520],
        "graph": neighbors,
    }
    for name, value in pickled.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value, protocol=2))
    (raw / "ind.cora.test.index").write_text("".join(f"{node}\n" for node in range(520, 540)))


@pytest.mark.parametrize("name", ["x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"])
def test_raw_files_of_planetoid(tmp_path: Path, name: str):
    write_planetoid(tmp_path / "Cora" / "raw")

    def load() -> None:
        shutil.rmtree(tmp_path / "Cora" / "processed", ignore_errors=True)
        assert_sound(PlanetoidSource("Cora").load(tmp_path, tmp_path / "cache"))

    check(tmp_path / "Cora" / "raw" / f"ind.cora.{name}", load, named="cora")


@pytest.mark.parametrize(
    ("source", "folder", "file"),
    [
        (AmazonSource("Photo"), "Photo", "amazon_electronics_photo.npz"),
        (CoauthorSource("CS"), "CS", "ms_academic_cs.npz"),
        (CitationFullSource("DBLP"), "dblp", "dblp.npz"),
    ],
    ids=["Amazon", "Coauthor", "CitationFull"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves what is damaged open
def test_raw_and_converted_files_of_npz(tmp_path: Path, source: PyGSource, folder: str, file: str):
    data, raw = small_graph(), tmp_path / folder / "raw" / file
    row, column = data.edge_index.numpy()
    adjacency = sparse.csr_matrix((np.ones(len(row), dtype=np.float32), (row, column)), shape=(30, 30))
    arrays = {
        f"{kind}_{part}": getattr(matrix, part)
        for kind, matrix in (("adj", adjacency), ("attr", sparse.csr_matrix(data.x.numpy())))
        for part in ("data", "indices", "indptr", "shape")
    }
    raw.parent.mkdir(parents=True)
    np.savez_compressed(raw, labels=data.y.numpy(), **arrays)

    def converted() -> None:
        assert_sound(source.load(tmp_path, tmp_path / "cache"))

    def anew() -> None:
        shutil.rmtree(tmp_path / folder / "processed", ignore_errors=True)
        converted()

    check(raw, anew)
    anew()
    (path,) = (tmp_path / folder / "processed").glob("data*.pt")
    check(path, converted, named="processed", sealed=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy leaves what is damaged open
def test_raw_and_converted_files_of_heterophilous_graphs(tmp_path: Path):
    data, raw = small_graph(), tmp_path / "heterophilous_npz" / "chameleon.npz"
    role = np.arange(30) % 3 + np.zeros((10, 1))
    masks = {f"{name}_masks": role == number for number, name in enumerate(("train", "val", "test"))}
    raw.parent.mkdir()
    np.savez_compressed(
        raw, node_features=data.x.numpy(), node_labels=data.y.numpy(), edges=data.edge_index.T.numpy(), **masks
    )

    def converted() -> None:
        assert_sound(HeterophilousSource("chameleon").load(tmp_path, tmp_path / "cache"))

    def anew() -> None:
        shutil.rmtree(tmp_path / "heterophilous_npz" / "processed", ignore_errors=True)
        converted()

    check(raw, anew)
    anew()
    check(tmp_path / "heterophilous_npz/processed/chameleon/data.pt", converted, named="processed", sealed=True)


def test_files_of_twitch(tmp_path: Path):
    data, path = small_graph(), tmp_path / "twitch" / "PT.npz"
    path.parent.mkdir()
    indices = np.arange(31, dtype=np.int32)
    np.savez_compressed(
        path, edges=data.edge_index.numpy(), y=data.y.numpy(), feat_indices=indices[:30], feat_indptr=indices
    )
    check(path, lambda: TwitchSource(["PT"]).load(tmp_path), named="PT")


@pytest.mark.parametrize("file", ["raw/edge", "raw/node-feat", "raw/node-label", "split/time/train"])
def test_files_of_ogb(tmp_path: Path, file: str):
    files = {
        "raw/edge": "".join(f"{node},{node + 1}\n" for node in range(19)),
        "raw/node-feat": "".join(f"{node},0.5\n" for node in range(20)),
        "raw/node-label": "".join(f"{node % 3}\n" for node in range(20)),
        "raw/node_year": "2015\n" * 20,
        "raw/num-node-list": "20\n",
        "raw/num-edge-list": "19\n",
        "split/time/train": "0\n1\n2\n",
        "split/time/valid": "3\n",
        "split/time/test": "4\n5\n",
    }
    folder = tmp_path / "ogbn_arxiv"
    for name, text in files.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    (folder / "RELEASE_v1.txt").touch()

    def load() -> None:
        shutil.rmtree(folder / "processed", ignore_errors=True)
        assert_sound(OgbSource().load(tmp_path, tmp_path / "cache"))

    check(folder / f"{file}.csv.gz", load, named="ogbn_arxiv")


def test_partition_cache(tmp_path: Path):
    def load() -> str:
        source = PlantedCommunities(num_nodes=60, num_communities=3, num_classes=3, num_features=4)
        data = FederatedDataModule(source, RandomPartitioner(3), cache_dir=str(tmp_path))
        data.setup()
        return data.partition_hash

    expected = load()
    (path,) = (tmp_path / "partitions").iterdir()
    whole = path.read_bytes()
    num_regenerated = 0
    for version in damaged(whole, seed=0):
        path.write_bytes(version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            survived = load() == expected  # of the archive's padding, not every byte matters
        Record().count("damaged partition caches", survived=survived)
        assert survived
        num_regenerated += any(f"{path} is damaged and is regenerated" in str(warning.message) for warning in caught)
    assert num_regenerated > NUM_PLACES
