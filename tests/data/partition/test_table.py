import csv
import itertools
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from statistics import fmean

import networkx as nx
import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.spatial.distance import jensenshannon
from task_data import node_data
from torch_geometric.data import Data

from fl_lightning.data import (
    AmazonSource,
    ClientGraph,
    ClientSplit,
    FederatedDataModule,
    GivenPartitioner,
    InMemorySource,
    MetisPartitioner,
    OverlappingMetisPartitioner,
    Partitioner,
    PartitionTable,
    PlanetoidSource,
    PlantedCommunities,
    RandomPartitioner,
    SuperClusterSBM,
)
from fl_lightning.data.adjacency import adjacency_matrix, clustering_coefficient
from fl_lightning.data.partition.heterogeneity import (
    _neighborhood_means,
    label_divergence,
    label_heterogeneity,
    label_histograms,
    neighborhood_discrepancy,
)


def client_graph(x: list[list[float]], y: list[int], edges: list[tuple[int, int]]) -> ClientGraph:
    mask_N = torch.ones(len(y), dtype=torch.bool)
    both_ways = sorted([*edges, *((b, a) for a, b in edges)])
    return ClientGraph(
        name="client-00",
        x_NF=torch.tensor(x),
        edge_index_2E=torch.tensor(both_ways, dtype=torch.int64).view(-1, 2).T,
        y_N=torch.tensor(y),
        train_mask_N=mask_N,
        val_mask_N=~mask_N,
        test_mask_N=~mask_N,
        node_idx_N=torch.arange(len(y)),
    )


@pytest.fixture
def table(tmp_path: Path) -> PartitionTable:
    source = PlantedCommunities(num_nodes=300, num_communities=6, num_classes=3, num_features=8)
    data = FederatedDataModule(source, GivenPartitioner(), cache_dir=str(tmp_path))
    data.setup()
    return data.statistics()


def test_label_heterogeneity_is_the_median_over_pairs():
    histogram = np.array([[5, 1, 0], [2, 2, 2], [0, 0, 9], [1, 8, 1]])
    pairs = [jensenshannon(a, b) for a, b in itertools.combinations(histogram, 2)]
    assert label_heterogeneity(histogram) == pytest.approx(np.median(pairs))
    assert label_heterogeneity(histogram[:1]) == 0.0


def test_label_divergence_by_hand():
    divergence = 0.5 * (np.log(4 / 3) + (0.5 * np.log(2 / 3) + 0.5 * np.log(2)))
    assert label_divergence(np.array([[4, 0], [0, 4]])) == pytest.approx(divergence)
    assert label_divergence(np.array([[4, 2], [2, 1]])) == pytest.approx(0.0, abs=1e-12)


def test_discrepancy_by_hand():
    """Neighborhood means 0 and 1 (a pair of nodes: 0.5 each) against 3; the median of the distances is 2.5."""
    near = client_graph([[0.0], [1.0]], [0, 0], [(0, 1)])
    far = client_graph([[3.0]], [0], [])
    cross = np.exp(-0.5 * (2.5 / 2.5) ** 2)
    assert neighborhood_discrepancy((near, far)) == pytest.approx(2 - 2 * cross)
    assert neighborhood_discrepancy((near, near)) == pytest.approx(0.0, abs=1e-6)
    assert neighborhood_discrepancy((near,)) == 0.0


def test_discrepancy_of_a_subsample_is_close(tmp_path: Path):
    data = FederatedDataModule(SuperClusterSBM(), GivenPartitioner(), cache_dir=str(tmp_path))
    data.setup()
    exact = neighborhood_discrepancy(data.clients)
    sampled = neighborhood_discrepancy(data.clients, max_nodes=1000)
    assert sampled == pytest.approx(exact, rel=0.15)
    assert sampled == neighborhood_discrepancy(data.clients, max_nodes=1000)


def test_planted_communities_are_more_heterogeneous_than_random_parts(tmp_path: Path):
    tables = []
    for partitioner in (GivenPartitioner(), RandomPartitioner(10)):
        data = FederatedDataModule(PlantedCommunities(), partitioner, cache_dir=str(tmp_path))
        data.setup()
        tables.append(data.statistics())
    natural, random = tables
    assert natural.heterogeneity > 3 * random.heterogeneity
    assert natural.non_iidness > 3 * random.non_iidness


def test_rows_and_means(table: PartitionTable):
    assert [row.client for row in table.rows] == [f"client-{idx:02d}" for idx in range(6)]
    assert table.means["num_nodes"] == 50
    assert table.means["edges_lost"] == fmean(row.edges_lost for row in table.rows)
    assert all(row.num_train + row.num_val + row.num_test == row.num_nodes for row in table.rows)
    assert [sum(counts) for counts in table.label_counts] == [50] * 6


def test_csv(table: PartitionTable, tmp_path: Path):
    table.to_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == [*(row.client for row in table.rows), "mean"]
    assert int(rows[0]["num_edges"]) == table.rows[0].num_edges
    assert float(rows[-1]["heterogeneity"]) == table.heterogeneity
    assert float(rows[-1]["clustering"]) == table.means["clustering"]


def test_table_fits_a_terminal(table: PartitionTable):
    console = Console(file=StringIO(), width=80)
    console.print(table.rich_table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for expected in ("client-05", "clustering", f"heterogeneity {table.heterogeneity:.3f}"):
        assert expected in text


@pytest.mark.parametrize("num_classes", [3, 15, 45, 70])
def test_picture(tmp_path: Path, num_classes: int):
    clients = tuple(client_graph([[0.0]] * num_classes, list(range(num_classes)), []) for _ in range(2))
    table = PartitionTable.from_graphs(clients, edges_lost=[0, 0], num_classes=num_classes)
    table.plot_labels(tmp_path / "labels.png")
    named = PartitionTable.from_graphs(
        clients, edges_lost=[0, 0], num_classes=num_classes, class_names=["a class"] * num_classes
    )
    named.plot_labels(tmp_path / "named.svg")
    assert (tmp_path / "named.svg").read_text().count("<!-- a class -->") == num_classes
    assert (tmp_path / "labels.png").read_bytes().startswith(b"\x89PNG")


def measure(root: Path, name: str, partitioner: Partitioner, num_seeds: int = 1) -> list[float]:
    """Return the means over clients and seeds of nodes, edges, clustering coefficient and label heterogeneity."""
    source = (AmazonSource if name in AmazonSource.names else PlanetoidSource)(name)
    measured = []
    for seed in range(num_seeds):
        data = FederatedDataModule(source, partitioner, root=str(root), seed=seed)
        data.setup()
        matrices = [adjacency_matrix(client.edge_index_2E, client.num_nodes) for client in data.clients]
        measured.append(
            [
                fmean(client.num_nodes for client in data.clients),
                fmean(client.num_edges for client in data.clients),
                fmean(map(clustering_coefficient, matrices)),
                label_heterogeneity(label_histograms(data.clients, data.num_outputs)),
            ]
        )
    return [fmean(column) for column in zip(*measured, strict=True)]


def assert_close(measured: list[float], published: tuple[float, ...], tolerances: tuple[float, ...]) -> None:
    for value, expected, tolerance in zip(measured, published, tolerances, strict=True):
        assert value == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "num_clients", "expected"),
    [
        ("Cora", 10, (249, 891, 0.259, 0.606)),
        ("Cora", 20, (124, 422, 0.263, 0.665)),
        ("CiteSeer", 10, (212, 675, 0.178, 0.541)),
        ("CiteSeer", 20, (106, 326, 0.180, 0.568)),
        ("PubMed", 10, (1972, 7671, 0.066, 0.392)),
        ("PubMed", 20, (986, 3607, 0.067, 0.424)),
        ("Computers", 10, (1338, 36136, 0.398, 0.612)),
        ("Photo", 10, (749, 19322, 0.457, 0.681)),
    ],
)
def test_published_disjoint_partitions(
    name: str, num_clients: int, expected: tuple[float, ...], require_dataset: Callable[[str], Path]
):
    measured = measure(require_dataset(name), name, MetisPartitioner(num_clients))
    assert_close(measured, expected, tolerances=(0.01, 0.05, 0.05, 0.10))


@pytest.mark.parametrize(
    ("name", "num_clients", "expected"),
    [
        ("Cora", 30, (207, 379, 0.129, 0.567)),
        ("Cora", 50, (124, 215, 0.125, 0.613)),
        ("CiteSeer", 30, (177, 293, 0.087, 0.494)),
        ("CiteSeer", 50, (106, 170, 0.096, 0.547)),
    ],
)
def test_published_overlapping_partitions(
    name: str, num_clients: int, expected: tuple[float, ...], require_dataset: Callable[[str], Path]
):
    """Published from a single draw; clustering has a standard deviation of 4 % over draws, hence 10 % for it."""
    measured = measure(require_dataset(name), name, OverlappingMetisPartitioner(num_clients), num_seeds=4)
    assert_close(measured, expected, tolerances=(0.01, 0.05, 0.10, 0.10))


def test_edges_lost_are_the_cut(require_dataset: Callable[[str], Path]):
    data = FederatedDataModule(PlanetoidSource("Cora"), MetisPartitioner(10), root=str(require_dataset("Cora")))
    data.setup()
    table = data.statistics()
    assert sum(row.edges_lost for row in table.rows) + sum(row.num_edges for row in table.rows) == 10_138
    assert table.means["edges_lost"] * 10 / 2 == pytest.approx(615, rel=0.02)


def directed_client(
    edges: list[tuple[int, int]], num_nodes: int = 3, x: list[list[float]] | None = None
) -> ClientGraph:
    mask_N = torch.ones(num_nodes, dtype=torch.bool)
    return ClientGraph(
        name="client-00",
        x_NF=torch.eye(num_nodes) if x is None else torch.tensor(x),
        edge_index_2E=torch.tensor(sorted(edges)).T,
        y_N=torch.zeros(num_nodes, dtype=torch.int64),
        train_mask_N=mask_N,
        val_mask_N=~mask_N,
        test_mask_N=~mask_N,
        node_idx_N=torch.arange(num_nodes),
    )


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([(0, 1), (1, 2), (2, 0)], 1 / 2),  # one of the two triangles that each node's edges allow
        ([(0, 1), (1, 2), (0, 2)], 1 / 2),
        ([(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)], 1.0),
        ([(0, 1), (1, 2)], 0.0),
    ],
    ids=["circle", "order", "both ways", "path"],
)
def test_clustering_of_directed_triangles(edges, expected):
    [row] = PartitionTable.from_graphs([directed_client(edges)], edges_lost=[0], num_classes=1).rows
    assert row.clustering == pytest.approx(expected)
    assert row.clustering == pytest.approx(nx.average_clustering(nx.DiGraph(edges)))


def test_clustering_of_a_random_directed_graph_is_that_of_networkx():
    graph = nx.gnp_random_graph(60, 0.12, seed=3, directed=True)
    matrix = adjacency_matrix(torch.tensor(sorted(graph.edges)).T, 60)
    assert clustering_coefficient(matrix, directed=True) == pytest.approx(nx.average_clustering(graph))
    both_ways = graph.to_undirected()
    matrix = adjacency_matrix(torch.tensor(sorted(both_ways.to_directed().edges)).T, 60)
    expected = pytest.approx(nx.average_clustering(both_ways))
    assert clustering_coefficient(matrix) == expected
    assert clustering_coefficient(matrix, directed=True) == expected


def test_edges_lost_are_the_messages_that_a_client_misses(tmp_path: Path):
    """Two directed triangles; from the first three edges lead into the second, and one back."""
    edges = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 3), (2, 5), (4, 1)]
    raw = Data(
        x=torch.eye(6),
        y=torch.tensor([0, 1] * 3),
        edge_index=torch.tensor(edges).T,
        membership=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    source, folder = InMemorySource(raw, undirected=False), str(tmp_path)
    data = FederatedDataModule(source, GivenPartitioner(), ClientSplit(0.4, 0.3), cache_dir=folder, root=folder)
    data.setup()
    table = data.statistics()
    assert [row.edges_lost for row in table.rows] == [1, 3]
    assert [row.num_edges for row in table.rows] == [3, 3]
    assert [row.clustering for row in table.rows] == [0.5, 0.5]


def test_neighborhoods_are_those_that_send_messages():
    """Turned round, the edges of one client make other neighborhoods."""
    from_hub, to_hub = [(0, 1), (0, 2), (0, 3)], [(1, 0), (2, 0), (3, 0)]
    x = [[3.0], [0.0], [0.0], [0.0]]

    def client(edges: list[tuple[int, int]]) -> ClientGraph:
        return directed_client(edges, 4, x)

    assert _neighborhood_means(client(from_hub), 4, 0, 0).flatten().tolist() == [3, 1.5, 1.5, 1.5]
    assert _neighborhood_means(client(to_hub), 4, 0, 0).flatten().tolist() == [0.75, 0, 0, 0]


def test_targets_that_are_no_classes_are_spread(tmp_path: Path):
    numbers, labels = node_data("numbers", tmp_path), node_data("labels", tmp_path)
    known = [client.y_N[~client.y_N.isnan()] for client in numbers.clients]
    middle = [float(values.double().quantile(0.5)) for values in known]
    table = numbers.statistics()
    assert [median for _, _, median, _, _ in table.spreads["target of each node"]] == pytest.approx(middle)
    most = [float((client.y_N == 1).sum(dim=1).max()) for client in labels.clients]
    assert [greatest for *_, greatest in labels.statistics().spreads["labels of each node"]] == most
    table.plot_labels(tmp_path / "numbers.svg")
    assert "target of each node" in (tmp_path / "numbers.svg").read_text()
