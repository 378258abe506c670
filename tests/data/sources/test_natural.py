"""Data sets of several graphs that are a client each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.data import ClientSplit, FederatedDataModule, PyGGraphs, RandomPartitioner, TwitchSource

SIZES = {"DE": 30, "EN": 20, "ES": 25, "FR": 12, "PT": 10, "RU": 14, "TW": 16}


def ring(size: int) -> np.ndarray[Any, Any]:
    """Each edge in both directions, with a node that follows itself."""
    nodes = np.arange(size)
    pairs = np.stack([nodes, (nodes + 1) % size])
    return np.concatenate([pairs, pairs[::-1], [[0], [0]]], axis=1)


def write_country(root: Path, name: str, **changes: Any) -> None:
    """The game of node n has number n, and every other node has also the last feature."""
    size = SIZES[name]
    counts = 1 + np.arange(size) % 2
    indices = np.concatenate([[node, 3169][: counts[node]] for node in range(size)])
    arrays = {
        "edges": ring(size).astype(np.int32),
        "y": (np.arange(size) % 3 == 0).astype(np.int8),
        "feat_indices": indices.astype(np.int16),
        "feat_indptr": np.concatenate([[0], counts.cumsum()]).astype(np.int32),
    }
    (root / "twitch").mkdir(exist_ok=True)
    np.savez(root / "twitch" / f"{name}.npz", **arrays | changes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in SIZES:
        write_country(tmp_path, name)
    return tmp_path


def module(source: Any, root: Path, *parts: Any) -> FederatedDataModule:
    data = FederatedDataModule(source, *parts, splitter=ClientSplit(), root=str(root), cache_dir=str(root / "cache"))
    data.setup()
    return data


def test_each_country_is_a_client(root: Path) -> None:
    data = module(TwitchSource(), root)
    assert [client.name for client in data.clients] == list(SIZES)
    assert [client.num_nodes for client in data.clients] == list(SIZES.values())
    assert [row.edges_lost for row in data.statistics().rows] == [0] * 7
    assert (data.num_features, data.num_outputs, data.class_names) == (3170, 2, ("not explicit", "explicit"))
    for client in data.clients:
        assert client.num_edges == 2 * client.num_nodes
        assert torch.equal(client.x_NF[:, :3169].argmax(dim=1), torch.arange(client.num_nodes))
        assert client.x_NF[:, 3169].tolist() == [node % 2 for node in range(client.num_nodes)]
        assert client.y_N.tolist() == [int(node % 3 == 0) for node in range(client.num_nodes)]


def test_countries_are_chosen_and_prepared(root: Path) -> None:
    data = module(TwitchSource(["PT", "DE"], normalize_features=True), root)
    assert [client.name for client in data.clients] == ["PT", "DE"]
    assert torch.allclose(data.clients[0].x_NF.sum(dim=1), torch.ones(10))
    assert data.partition_hash != module(TwitchSource(["PT", "EN"]), root).partition_hash
    edges = np.delete(ring(10), [0, 10, 4, 14], axis=1)  # two pieces, of 4 and of 6 nodes
    write_country(root, "PT", edges=edges)
    assert module(TwitchSource(["PT", "DE"]), root).clients[0].num_nodes == 10
    assert module(TwitchSource(["PT", "DE"], largest_component=True), root).clients[0].num_nodes == 6


def test_countries_can_be_cut_anew(root: Path) -> None:
    data = module(TwitchSource(), root, RandomPartitioner(3))
    assert [client.name for client in data.clients] == ["client-00", "client-01", "client-02"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feat_indices": np.full(15, 3170)}, r"PT.npz cannot be read .*features below 3170"),
        ({"feat_indptr": np.arange(5)}, r"PT.npz cannot be read .*features below 3170"),
        ({"edges": ring(10).T}, r"PT.npz: the arrays are .*`edges` \(2, E\)"),
        ({"edges": ring(11)}, r"graph 4 \(Twitch PT\): edge 9 joins nodes \[9, 10\], but the nodes are 0 to 9"),
    ],
)
def test_damaged_files(root: Path, changes: dict[str, Any], message: str) -> None:
    write_country(root, "PT", **changes)
    with pytest.raises(ValueError, match=message):
        module(TwitchSource(), root)


def test_missing_file(root: Path) -> None:
    (root / "twitch" / "TW.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no .*TW.npz; expected .*FL_DATA_ROOT"):
        module(TwitchSource(), root)


def test_graphs_of_one_class_of_pyg(tmp_path: Path) -> None:
    for name in ("DE", "PT"):
        size = SIZES[name]
        raw = tmp_path / name / "raw"
        raw.mkdir(parents=True)
        features = np.random.default_rng(size).standard_normal((size, 128))
        np.savez(raw / f"{name}.npz", features=features, target=np.arange(size) % 2, edges=ring(size).T)
    source = PyGGraphs("torch_geometric.datasets.Twitch", ["PT", "DE"])
    data = module(source, tmp_path)
    assert [(client.name, client.num_nodes) for client in data.clients] == [("PT", 10), ("DE", 30)]
    assert data.num_features == 128
    assert data.clients[1].y_N.tolist() == [node % 2 for node in range(30)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TwitchSource(["DE", "UK"]), "countries has 'UK', which is not one of DE, EN, ES, FR, PT, RU, TW"),
        (lambda: TwitchSource(["DE", "DE"]), "countries has 'DE' more than once"),
        (lambda: TwitchSource([]), "countries is .*give a list of names such as 'DE', one for each client"),
        (lambda: PyGGraphs("torch_geometric.datasets.Twitch", "DE"), "names is 'DE': give a list"),  # type: ignore[arg-type]
        (lambda: PyGGraphs("torch_geometric.datasets.Twitch", ["DE"], {"name": "PT"}), "give the graphs' names by"),
    ],
)
def test_senseless_settings(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("country", "nodes", "edges"), [("DE", 9_498, 306_276), ("PT", 1_912, 62_598), ("TW", 2_772, 126_924)]
)
def test_real_sizes(
    country: str, nodes: int, edges: int, tmp_path: Path, require_dataset: Callable[[str], Path]
) -> None:
    data = FederatedDataModule(
        TwitchSource([country]), root=str(require_dataset(f"twitch/{country}.npz")), cache_dir=str(tmp_path)
    )
    data.setup()
    assert (data.clients[0].num_nodes, data.clients[0].num_edges) == (nodes, edges)
