import builtins
import gzip
import pickle
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch_geometric.datasets
from torch_geometric.data import Data, InMemoryDataset

from fl_lightning.data import (
    AmazonSource,
    CitationFullSource,
    CoauthorSource,
    FileSource,
    GivenSplit,
    GraphSource,
    HeterophilousSource,
    OgbSource,
    PlanetoidSource,
    PlantedCommunities,
    PyGSource,
    Role,
    SuperClusterSBM,
    prepare_graph,
)


def triangle() -> Data:
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return Data(x=torch.eye(3), edge_index=edge_index, y=torch.tensor([0, 1, 1]))


class TinyDataset(InMemoryDataset):
    """Has a raw file, as the data sets of PyG do."""

    def __init__(self, root: str, name: str = "tiny", num_graphs: int = 1) -> None:
        self.name, self.num_graphs = name, num_graphs
        super().__init__(root)
        self.load(self.processed_paths[0])

    @property
    def raw_dir(self) -> str:
        return f"{self.root}/{self.name}/raw"

    @property
    def processed_dir(self) -> str:
        return f"{self.root}/{self.name}/processed"

    raw_file_names = "graph.txt"
    processed_file_names = "data.pt"

    def download(self) -> None:
        raise URLError("no route to host")

    def process(self) -> None:
        self.save([triangle()] * self.num_graphs, self.processed_paths[0])


TINY = f"{__name__}.TinyDataset"


@pytest.fixture
def tiny_root(tmp_path: Path) -> Path:
    raw = tmp_path / "root" / "tiny" / "raw"
    raw.mkdir(parents=True)
    (raw / "graph.txt").touch()
    return tmp_path / "root"


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on any connection and on any question."""

    def refuse(*_: object) -> None:
        raise AssertionError("network or standard input was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(builtins, "input", refuse)


def test_pyg_converts_beside_the_raw_files(tiny_root: Path, tmp_path: Path):
    data = PyGSource(TINY).load(tiny_root, tmp_path / "cache")
    assert data.num_nodes == 3
    assert len(list((tiny_root / "tiny" / "processed").glob("TinyDataset-*/data.pt"))) == 1


def test_pyg_converts_to_the_cache_if_the_root_is_read_only(tiny_root: Path, tmp_path: Path):
    (tiny_root / "tiny").chmod(0o555)
    try:
        for _ in range(2):
            assert PyGSource(TINY).load(tiny_root, tmp_path / "cache").num_nodes == 3
    finally:
        (tiny_root / "tiny").chmod(0o755)
    assert not (tiny_root / "tiny" / "processed").exists()
    assert len(list((tmp_path / "cache" / "converted").glob("*/tiny/processed/*/data.pt"))) == 1


def test_pyg_converts_to_the_cache_if_writing_fails(tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(**_: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    PyGSource(TINY).load(tiny_root, tmp_path / "cache")
    assert not (tiny_root / "tiny" / "processed").exists()


class RootedDataset(InMemoryDataset):
    """Keeps its files right in the root, and converts by an argument that no path tells."""

    first_label = 0

    def __init__(self, root: str, num_nodes: int = 3) -> None:
        self.num_rooted = num_nodes
        super().__init__(root)
        self.load(self.processed_paths[0])

    raw_file_names = "labels.txt"
    processed_file_names = "data.pt"

    def download(self) -> None:
        Path(self.raw_paths[0]).write_text(str(self.first_label))

    def process(self) -> None:
        y = torch.full((self.num_rooted,), int(Path(self.raw_paths[0]).read_text()))
        edge_index = torch.tensor([[0, 1], [1, 0]])
        self.save([Data(x=torch.ones(self.num_rooted, 1), edge_index=edge_index, y=y)], self.processed_paths[0])


class OtherRootedDataset(RootedDataset):
    first_label = 7


def test_pyg_data_sets_do_not_read_each_others_files(tmp_path: Path):
    def load(name: str, **arguments: int) -> list[int]:
        labels: list[int] = PyGSource(f"{__name__}.{name}", arguments).load(tmp_path, tmp_path / "cache").y.tolist()
        return labels

    for _ in range(2):
        assert load("RootedDataset") == [0] * 3
        assert load("OtherRootedDataset") == [7] * 3
        assert load("RootedDataset", num_nodes=4) == [0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["OtherRootedDataset", "RootedDataset", "cache"]
    assert (tmp_path / "RootedDataset" / "raw" / "labels.txt").is_file()


def test_pyg_arguments_tell_conversions_apart(tiny_root: Path, tmp_path: Path):
    assert PyGSource(TINY).load(tiny_root, tmp_path / "cache").num_nodes == 3
    with pytest.raises(ValueError, match="holds 2 graphs; one graph is needed"):
        PyGSource(TINY, {"num_graphs": 2}).load(tiny_root, tmp_path / "cache")


def test_named_sources_find_what_pyg_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch_geometric.datasets.Planetoid.process", lambda _: pytest.fail("converted again"))
    raw, processed = (tmp_path / "Cora" / name for name in ("raw", "processed"))
    for folder in (raw, processed):
        folder.mkdir(parents=True)
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (raw / f"ind.cora.{name}").touch()
    InMemoryDataset.save([triangle()], processed / "data.pt")
    assert PlanetoidSource("Cora").load(tmp_path, tmp_path / "cache").num_nodes == 3


def test_benchmarks_are_prepared_as_in_the_papers_and_own_graphs_are_left_whole():
    own = (FileSource("graph.pt"), PyGSource(TINY))
    assert not any(source.preparation.largest_component or source.preparation.normalize_features for source in own)
    named = (PlanetoidSource("Cora"), AmazonSource("Photo"), CoauthorSource("CS"), CitationFullSource("DBLP"))
    assert all(source.preparation.largest_component and source.preparation.normalize_features for source in named)
    assert OgbSource().preparation.largest_component
    assert not OgbSource().preparation.normalize_features


def test_pyg_failed_download_names_data_set_folder_and_remedy(tmp_path: Path):
    (tmp_path / "root").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"tiny cannot be read from .*root.*no route.*FL_DATA_ROOT or data.root"
    ):
        PyGSource(TINY, {"name": "tiny"}).load(tmp_path / "root", tmp_path / "cache")
    assert list((tmp_path / "root").iterdir()) == []


def test_pyg_missing_files_in_a_read_only_root(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir(mode=0o555)
    with pytest.raises(FileNotFoundError, match=r"graph.txt is missing, and the folder is read-only"):
        PyGSource(TINY).load(root, tmp_path / "cache")


def test_pyg_class_path_must_exist(tmp_path: Path):
    for path in ("torch_geometric.datasets.Nowhere", "Planetoid", "no.such.module"):
        with pytest.raises(ValueError, match=f"dataset='{path}' is not an importable class"):
            PyGSource(path).load(tmp_path)


def test_pyg_needs_a_single_graph(tiny_root: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="holds 2 graphs; one graph is needed"):
        PyGSource(TINY, {"num_graphs": 2}).load(tiny_root, tmp_path / "cache")


@pytest.mark.parametrize(
    "source", [PlanetoidSource, AmazonSource, CoauthorSource, CitationFullSource, HeterophilousSource]
)
def test_named_sources(source: type[PlanetoidSource]):
    with pytest.raises(ValueError, match=f"name='Karate' is not a data set of {source.__name__}; use one of"):
        source("Karate")
    for name in source.names:
        assert source(name.lower()).identity() == source(name).identity()


@pytest.mark.parametrize(
    ("source", "nodes", "edges", "classes"),
    [
        (PlanetoidSource("Cora"), 2_485, 10_138, 7),
        (PlanetoidSource("CiteSeer"), 2_120, 7_358, 6),
        (PlanetoidSource("PubMed"), 19_717, 88_648, 3),
        (AmazonSource("Computers"), 13_381, 491_556, 10),
        (AmazonSource("Photo"), 7_487, 238_086, 8),
        (CoauthorSource("CS"), 18_333, 163_788, 15),
        (CoauthorSource("Physics"), 34_493, 495_924, 5),
        (HeterophilousSource("chameleon"), 2_277, 62_742, 5),
        (HeterophilousSource("squirrel"), 5_201, 396_706, 5),
        (HeterophilousSource("chameleon-filtered"), 890, 17_708, 5),
        (HeterophilousSource("squirrel-filtered"), 2_223, 93_996, 5),
    ],
    ids=lambda value: value.arguments["name"] if isinstance(value, PyGSource) else None,
)
def test_sizes_after_preparation(
    source: PyGSource, nodes: int, edges: int, classes: int, require_dataset: Callable[..., Path]
):
    name = str(source.arguments["name"])
    from_wikipedia = name.startswith(("chameleon", "squirrel"))
    root = require_dataset(f"heterophilous_npz/{name.replace('-', '_')}.npz" if from_wikipedia else f"{name}/raw")
    data = prepare_graph(source.load(root), source.preparation)
    assert (data.num_nodes, data.num_edges, int(data.y.max()) + 1) == (nodes, edges, classes)
    assert not data.has_self_loops()
    assert data.is_undirected()


def write_heterophilous(path: Path, num_nodes: int = 30, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A file of that layout: each edge once, ten splits."""
    draw = np.random.default_rng(seed)
    role = draw.integers(3, size=(10, num_nodes))
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "node_features": draw.standard_normal((num_nodes, 4)).astype(np.float32),
        "node_labels": np.arange(num_nodes) % 3,
        "edges": np.stack([np.arange(num_nodes - 1), np.arange(1, num_nodes)], axis=1),
        "train_masks": role == 0,
        "val_masks": role == 1,
        "test_masks": role == 2,
    }
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, **arrays)
    return arrays


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("name", HeterophilousSource.names)
def test_heterophilous_graphs(name: str, tmp_path: Path):
    stem, root = name.lower().replace("-", "_"), tmp_path / "root"
    from_wikipedia = stem.startswith(("chameleon", "squirrel"))
    arrays = write_heterophilous(
        root / (f"heterophilous_npz/{stem}.npz" if from_wikipedia else f"{stem}/raw/{stem}.npz")
    )
    source = HeterophilousSource(name)
    data = prepare_graph(source.load(root, tmp_path / "cache"), source.preparation)
    assert (data.num_nodes, data.num_edges) == (30, 58)
    assert torch.equal(data.x, torch.from_numpy(arrays["node_features"]))
    assert data.y.tolist() == arrays["node_labels"].tolist()
    roles = GivenSplit(column=3)(data, [torch.arange(30)])[0]
    assert torch.equal(roles == Role.TRAIN, torch.from_numpy(arrays["train_masks"][3]))
    if not from_wikipedia:  # where PyG's own class finds it
        own = torch_geometric.datasets.HeterophilousGraphDataset(str(root), name)[0]
        assert torch.equal(own.edge_index, source.load(root, tmp_path / "cache").edge_index)


def test_heterophilous_graphs_do_not_read_those_of_another_class(tmp_path: Path):
    """PyG's ``WikipediaNetwork`` has files ``chameleon/raw/chameleon.npz`` and ``chameleon/processed/data.pt``."""
    other = tmp_path / "root" / "chameleon"
    (other / "raw").mkdir(parents=True)
    (other / "raw" / "chameleon.npz").touch()
    (other / "processed").mkdir()
    InMemoryDataset.save([triangle()], other / "processed" / "data.pt")
    for name, num_nodes in (("chameleon", 20), ("chameleon-filtered", 25)):
        path = tmp_path / "root" / "heterophilous_npz" / f"{name.replace('-', '_')}.npz"
        write_heterophilous(tmp_path / name / "new.npz", num_nodes=num_nodes)
        path.parent.mkdir(exist_ok=True)
        (tmp_path / name / "new.npz").rename(path)
        assert HeterophilousSource(name).load(tmp_path / "root", tmp_path / "cache").num_nodes == num_nodes


def test_heterophilous_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def download(url: str, folder: str) -> None:
        assert url == "https://github.com/yandex-research/heterophilous-graphs/raw/main/data/squirrel_filtered.npz"
        write_heterophilous(tmp_path / "scratch" / "new.npz")
        (tmp_path / "scratch" / "new.npz").rename(Path(folder) / "squirrel_filtered.npz")

    monkeypatch.setattr("torch_geometric.datasets.heterophilous_graph_dataset.download_url", download)
    root = tmp_path / "root"
    root.mkdir()
    assert HeterophilousSource("squirrel-filtered").load(root, tmp_path / "cache").num_nodes == 30
    monkeypatch.setattr("torch_geometric.datasets.heterophilous_graph_dataset.download_url", _refuse)
    with pytest.raises(FileNotFoundError, match=r"chameleon cannot be read from .*no route.*FL_DATA_ROOT"):
        HeterophilousSource("chameleon").load(tmp_path / "other", tmp_path / "cache")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="no route"):
        HeterophilousSource("chameleon").load(empty, tmp_path / "cache")
    assert empty.is_dir()


def _refuse(*_: object) -> None:
    raise URLError("no route to host")


@pytest.fixture
def ogb_root(tmp_path: Path) -> Path:
    """Six papers in OGB's own layout."""
    files = {
        "raw/edge": "0,1\n1,2\n2,3\n3,4\n4,5\n",
        "raw/node-feat": "".join(f"{node},0.5\n" for node in range(6)),
        "raw/node-label": "0\n1\n0\n1\n2\n2\n",
        "raw/node_year": "2015\n" * 6,
        "raw/num-node-list": "6\n",
        "raw/num-edge-list": "5\n",
        "split/time/train": "0\n1\n2\n",
        "split/time/valid": "3\n",
        "split/time/test": "4\n5\n",
    }
    for name, text in files.items():
        path = tmp_path / "ogb" / "ogbn_arxiv" / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    (tmp_path / "ogb" / "ogbn_arxiv" / "RELEASE_v1.txt").touch()
    return tmp_path / "ogb"


@pytest.mark.usefixtures("_offline")
def test_ogb_reads_offline(ogb_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    allowed = set(torch.serialization.get_safe_globals())
    for _ in range(2):  # converts, then reads the converted file
        data = OgbSource("ogbn-arxiv").load(ogb_root, tmp_path / "cache")
        prepared = prepare_graph(data, OgbSource().preparation)
        assert (prepared.num_nodes, prepared.num_edges) == (6, 10)
        assert prepared.y.tolist() == [0, 1, 0, 1, 2, 2]
        assert prepared.test_mask.tolist() == [False] * 4 + [True] * 2
        torch.testing.assert_close(prepared.x[:, 0], torch.arange(6.0))
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert capsys.readouterr().out == ""
    version = sys.modules["ogb.version"]
    assert version.check_outdated is None, "the import of ogb looked for a newer version"
    assert "outdated" not in sys.modules or sys.modules["outdated"] is not None


@pytest.mark.usefixtures("_offline")
def test_ogb_of_unknown_release_asks_nothing(ogb_root: Path):
    (ogb_root / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ogbn-arxiv: .*ogbn_arxiv has no RELEASE_v1.txt.*FL_DATA_ROOT"):
        OgbSource().load(ogb_root)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("split/time/test", "4\n-1\n", "test.csv.gz .*test has -1 in row 1"),
        ("split/time/test", "4\n99\n", "test.csv.gz .*test has 99 in row 1, no whole number from 0 to 5"),
        ("split/time/test", "4\n3\n", "test.csv.gz .*test has 3, which is in valid as well"),
        ("raw/node-label", "0\n1\n0.5\n1\n2\n2\n", "node-label.csv.gz has 0.5 in row 2, no class"),
    ],
)
def test_ogb_refuses_damaged_files(ogb_root: Path, tmp_path: Path, file: str, text: str, message: str):
    (ogb_root / "ogbn_arxiv" / f"{file}.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ValueError, match=message):
        OgbSource().load(ogb_root, tmp_path / "cache")


def test_ogb_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("fl_lightning.data.sources.ogb.download_url", refuse)
    with pytest.raises(FileNotFoundError, match=r"ogbn-arxiv cannot be read from .*no route.*FL_DATA_ROOT"):
        OgbSource().load(tmp_path, tmp_path / "cache")


def test_ogb_downloads_without_asking(ogb_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fl_lightning.data.sources.ogb.download_url", lambda url, folder: folder)
    monkeypatch.setattr(
        "fl_lightning.data.sources.ogb.extract_zip",
        lambda _, folder: (ogb_root / "ogbn_arxiv").rename(Path(folder, "arxiv")),
    )
    (tmp_path / "new").mkdir()
    data = OgbSource().load(tmp_path / "new", tmp_path / "cache")
    assert data.num_nodes == 6
    assert (tmp_path / "new" / "ogbn_arxiv" / "RELEASE_v1.txt").exists()


@pytest.mark.parametrize("as_dict", [True, False])
def test_file_source(tmp_path: Path, as_dict: bool):
    path = tmp_path / "graph.pt"
    torch.save(triangle().to_dict() if as_dict else triangle(), path)
    source = FileSource(str(path))
    assert torch.equal(source.load(tmp_path).edge_index, triangle().edge_index)
    before = source.identity()
    changed = triangle()
    changed.y = torch.tensor([1, 1, 0])
    torch.save(changed, path)
    assert source.identity() == before  # of what was read
    assert FileSource(str(path)).identity() != before
    assert torch.equal(source.load(tmp_path).y, changed.y)
    assert source.identity() == FileSource(str(path)).identity()


@pytest.mark.parametrize("content", [b"no pickle", [1, 2], Path("runs code")])
def test_file_source_refuses_what_is_not_a_graph(tmp_path: Path, content: object):
    path = tmp_path / "graph.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"graph.pt cannot be read .*does not hold a torch_geometric Data.*torch.save"):
        FileSource(str(path)).load(tmp_path)


def test_file_source_without_a_file():
    for call in (FileSource("nowhere.pt").identity, lambda: FileSource("nowhere.pt").load(Path())):
        with pytest.raises(FileNotFoundError, match=r"path='nowhere.pt': .* is not a file"):
            call()


@pytest.mark.parametrize(
    "source",
    [PlantedCommunities(num_nodes=500), SuperClusterSBM(num_nodes=400)],
    ids=lambda source: type(source).__name__,
)
def test_generators_depend_on_their_seed_alone(source: GraphSource):
    first, again = source.load(Path()), source.load(Path())
    assert torch.equal(first.edge_index, again.edge_index)
    assert torch.equal(first.x, again.x)
    other = type(source)(num_nodes=first.num_nodes, seed=1)  # type: ignore[call-arg]
    assert not torch.equal(first.y, other.load(Path()).y)
    assert other.identity() != source.identity()


def test_planted_communities_have_what_was_asked_for():
    source = PlantedCommunities(num_nodes=20_000, homophily=0.7, intra_degree=5.0, inter_degree=0.5, label_skew=0.4)
    data = prepare_graph(source.load(Path()), source.preparation)
    start, end = data.edge_index
    within = data.membership[start] == data.membership[end]
    assert int(within.sum()) / data.num_nodes == pytest.approx(5.0, rel=0.03)
    assert int((~within).sum()) / data.num_nodes == pytest.approx(0.5, rel=0.15)
    assert data.membership.bincount().tolist() == [2_000] * 10
    preferred = (data.y == data.membership % 5).float().mean()
    assert float(preferred) == pytest.approx(0.4 + 0.6 / 5, abs=0.02)


def test_a_gcn_learns_planted_communities_well_but_not_perfectly():
    from torch_geometric.nn import GCNConv

    source = PlantedCommunities()
    data = prepare_graph(source.load(Path()), source.preparation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [GCNConv(32, 16), GCNConv(16, 5)]
        train_N = torch.rand(data.num_nodes) < 0.4
    adam = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=0.05, weight_decay=5e-4)
    for _ in range(30):
        logits_NK = layers[1](layers[0](data.x, data.edge_index).relu(), data.edge_index)
        loss = torch.nn.functional.cross_entropy(logits_NK[train_N], data.y[train_N])
        adam.zero_grad()
        loss.backward()
        adam.step()
    accuracy = float((logits_NK.argmax(dim=1) == data.y)[~train_N].float().mean())
    assert 0.80 < accuracy < 0.96


def test_super_clusters():
    data = SuperClusterSBM().load(Path())
    assert (data.num_nodes, data.x.shape[1]) == (3_000, 5)
    assert data.membership.bincount().tolist() == [150] * 20
    assert data.super_cluster.bincount().tolist() == [600] * 5
    assert torch.equal(data.x.argmax(dim=1), data.y)
    assert float((data.y == data.super_cluster).float().mean()) == pytest.approx(0.8, abs=0.03)
    start, end = data.edge_index
    within = data.membership[start] == data.membership[end]
    edges_per_block = data.membership[start[within]].bincount()
    expected = torch.tensor([0.06, 0.10, 0.14, 0.18, 0.22]).repeat_interleave(4) * 150 * 149
    torch.testing.assert_close(edges_per_block.float(), expected, rtol=0.15, atol=0)
    assert data.is_undirected()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PlantedCommunities(label_skew=1.5), "label_skew must be a number in .*, got 1.5"),
        (lambda: PlantedCommunities(homophily=-1), "homophily must be a number in .*, got -1"),
        (lambda: PlantedCommunities(num_nodes=5), "num_nodes=5 is too small for num_communities=10"),
        (lambda: SuperClusterSBM(num_nodes=3001), "num_nodes=3001 must be a multiple of num_blocks=20"),
        (lambda: SuperClusterSBM(intra_edge_probability=(0.1, 0.2, 0.3)), "number of super-clusters, 3"),
        (
            lambda: SuperClusterSBM(inter_edge_probability=2.0),
            r"inter_edge_probability must be a number in \[0, 1\], got 2.0",
        ),
    ],
)
def test_generators_refuse_senseless_settings(build: Callable[[], GraphSource], message: str):
    with pytest.raises(ValueError, match=message):
        build()


class Strikes:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pre_transform.pt", "pre_filter.pt", "data.pt"])
def test_nothing_in_a_data_folder_is_unpickled(tiny_root: Path, tmp_path: Path, name: str):
    PyGSource(TINY).load(tiny_root, tmp_path / "cache")
    (folder,) = (tiny_root / "tiny" / "processed").glob("TinyDataset-*")
    torch.save(Strikes(tmp_path / "struck"), folder / name)
    for seal in folder.glob("*seal*"):
        seal.unlink()
    with pytest.raises(ValueError, match="is damaged: delete the folder; it is rebuilt"):
        PyGSource(TINY).load(tiny_root, tmp_path / "cache")
    assert not (tmp_path / "struck").exists()


class PickledRaw(TinyDataset):
    """Reads a pickle, as several data sets of PyG do."""

    def process(self) -> None:
        with open(self.raw_paths[0], "rb") as file:
            pickle.load(file)
        super().process()


def test_raw_pickles_hold_arrays_alone(tiny_root: Path, tmp_path: Path):
    raw = tiny_root / "tiny" / "raw" / "graph.txt"
    raw.write_bytes(pickle.dumps({"x": np.arange(3)}))
    assert PyGSource(f"{__name__}.PickledRaw").load(tiny_root, tmp_path / "cache").num_nodes == 3
    shutil.rmtree(tiny_root / "tiny" / "processed")
    raw.write_bytes(pickle.dumps(Strikes(tmp_path / "struck")))
    with pytest.raises(ValueError, match="is damaged"):
        PyGSource(f"{__name__}.PickledRaw").load(tiny_root, tmp_path / "other_cache")
    assert not (tmp_path / "struck").exists()
