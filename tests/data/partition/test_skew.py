"""Clients by draws from a Dirichlet distribution, and by communities that are alike."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import (
    DirichletPartitioner,
    LouvainPartitioner,
    LouvainPlusPartitioner,
    MetisPartitioner,
    MetisPlusPartitioner,
    Partitioner,
    PlantedCommunities,
    RandomPartitioner,
    prepare_graph,
)
from fl_lightning.data.partition.communities import label_shares, louvain_communities, metis_parts
from fl_lightning.data.partition.heterogeneity import label_heterogeneity

ALL = [
    DirichletPartitioner(4),
    DirichletPartitioner(4, alpha=0.1),
    LouvainPlusPartitioner(4, resolution=2.0),
    MetisPlusPartitioner(4, num_parts=40),
    LouvainPartitioner(4, max_share=0.25),
]


@pytest.fixture(scope="module")
def graph() -> Data:
    """A prepared graph of 600 nodes in 12 communities of three classes, of which 20 have no label."""
    source = PlantedCommunities(num_nodes=600, num_communities=12, num_classes=3, num_features=8)
    data = prepare_graph(source.load(Path()), source.preparation)
    data.y[::30] = -1
    return data


def client_of(parts: list[torch.Tensor]) -> torch.Tensor:
    client_N = torch.empty(sum(map(len, parts)), dtype=torch.long)
    for client, nodes in enumerate(parts):
        client_N[nodes] = client
    return client_N


def num_cut(data: Data, parts: list[torch.Tensor]) -> int:
    client_N = client_of(parts)
    return int((client_N[data.edge_index[0]] != client_N[data.edge_index[1]]).sum())


def skew(data: Data, parts: list[torch.Tensor]) -> float:
    y_N = data.y.numpy()
    return label_heterogeneity(np.stack([np.bincount(y_N[nodes][y_N[nodes] >= 0], minlength=3) for nodes in parts]))


def describe(partitioner: Partitioner) -> str:
    return f"{type(partitioner).__name__}-{getattr(partitioner, 'alpha', '')}"


@pytest.mark.parametrize("partitioner", ALL, ids=describe)
def test_each_node_is_of_one_client_decided_by_the_seed(partitioner: Partitioner, graph: Data) -> None:
    parts = partitioner(graph, seed=3)
    assert len(parts) == 4
    assert torch.cat(parts).sort().values.tolist() == list(range(600))
    assert all(map(torch.equal, parts, partitioner(graph, seed=3)))
    others = [partitioner(graph, seed=seed) for seed in (4, 5)]
    assert any(not torch.equal(client_of(parts), client_of(other)) for other in others)


@pytest.mark.parametrize("seed", range(3))
def test_the_lower_alpha_the_more_the_labels_differ(graph: Data, seed: int) -> None:
    low, middle, high = (skew(graph, DirichletPartitioner(4, alpha=alpha)(graph, seed)) for alpha in (0.1, 2.0, 1000.0))
    assert low > 1.3 * middle > 1.3 * high
    assert high < skew(graph, RandomPartitioner(4)(graph, seed)) + 0.02


def test_dirichlet_draws_until_each_client_has_enough(graph: Data) -> None:
    few = DirichletPartitioner(4, alpha=0.1, min_nodes=1)(graph, seed=1)
    many = DirichletPartitioner(4, alpha=0.1, min_nodes=100)(graph, seed=1)
    assert min(map(len, few)) < 100 <= min(map(len, many))


def test_dirichlet_with_a_great_alpha_gives_equal_shares_of_each_class(graph: Data) -> None:
    for nodes in DirichletPartitioner(4, alpha=1e6)(graph):
        for label in (-1, 0, 1, 2):
            share = int((graph.y[nodes] == label).sum()) / int((graph.y == label).sum())
            assert share == pytest.approx(0.25, abs=0.06)


def test_a_client_with_its_share_of_nodes_gets_no_further_class(graph: Data) -> None:
    """It has at most one class beyond what it had when it was not full."""
    largest_class = int(graph.y[graph.y >= 0].bincount().max())
    for seed in range(5):
        assert max(map(len, DirichletPartitioner(4, alpha=0.05, min_nodes=1)(graph, seed))) < 150 + largest_class


def test_louvain_cuts_fewer_edges_than_a_random_partition(graph: Data) -> None:
    random = num_cut(graph, RandomPartitioner(4)(graph))
    for partitioner in (LouvainPartitioner(4), LouvainPlusPartitioner(4), LouvainPartitioner(4, max_share=0.25)):
        assert num_cut(graph, partitioner(graph)) < 0.5 * random
    assert num_cut(graph, MetisPlusPartitioner(4, num_parts=40)(graph)) < 0.6 * random


def test_the_plus_variants_have_more_label_skew_than_the_plain_ones(graph: Data) -> None:
    for seed in range(3):
        plain = skew(graph, LouvainPartitioner(4)(graph, seed))
        assert skew(graph, LouvainPlusPartitioner(4)(graph, seed)) > 1.2 * plain
        plain = skew(graph, MetisPartitioner(4)(graph, seed))
        assert skew(graph, MetisPlusPartitioner(4, num_parts=40)(graph, seed)) > 1.2 * plain


def test_the_plus_variants_keep_communities_whole(graph: Data) -> None:
    client_N = client_of(LouvainPlusPartitioner(4, resolution=2.0)(graph, seed=1))
    community_N = louvain_communities(graph, 2.0, seed=1)
    assert len({(int(a), int(b)) for a, b in zip(community_N, client_N, strict=True)}) == community_N.max() + 1
    client_N = client_of(MetisPlusPartitioner(4, num_parts=40)(graph, seed=1))
    part_N = metis_parts(graph, 40, seed=1)
    assert len({(int(a), int(b)) for a, b in zip(part_N, client_N, strict=True)}) == len(np.unique(part_N))


def test_shares_of_labels() -> None:
    data = Data(y=torch.tensor([0, 0, 1, -1, 1, -1, -1]))
    shares = label_shares(data, np.array([0, 0, 0, 0, 1, 2, 2]))
    assert shares.tolist() == [[2 / 3, 1 / 3], [0, 1], [0.5, 0.5]]


@pytest.mark.parametrize("max_share", [0.25, 0.5, 1.0])
def test_louvain_in_pieces_is_balanced(graph: Data, max_share: float) -> None:
    sizes = [len(nodes) for nodes in LouvainPartitioner(7, max_share=max_share)(graph)]
    assert max(sizes) - min(sizes) <= 1.1 * max_share * 600 / 7
    whole = [len(nodes) for nodes in LouvainPartitioner(7)(graph)]
    assert max(sizes) - min(sizes) < max(whole) - min(whole) or max_share == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DirichletPartitioner(3, alpha=0), r"alpha must be a number in \(0, 1e\+09\], got 0"),
        (lambda: MetisPlusPartitioner(8, num_parts=7), "num_parts=7 is less than num_clients=8.*raise num_parts"),
        (lambda: LouvainPartitioner(3, max_share=1.5), r"max_share must be a number in \(0, 1\], got 1.5"),
    ],
)
def test_senseless_settings(build: Callable[[], Partitioner], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (DirichletPartitioner(3), "min_nodes=5 for each of 3 clients exceeds the 6 nodes of the graph; lower it"),
        (
            DirichletPartitioner(3, alpha=1e-6, min_nodes=2, max_draws=4),
            "alpha=1e-06: in none of max_draws=4 draws has each of 3 clients min_nodes=2 nodes.*raise alpha",
        ),
        (LouvainPlusPartitioner(5), r"num_clients=5 exceeds the \d communities with different.*raise `resolution`"),
        (MetisPlusPartitioner(2), "num_parts=100 exceeds the 6 nodes of the graph; use fewer parts"),
        (MetisPlusPartitioner(5, num_parts=5), r"num_clients=5 exceeds the \d communities.*raise `num_parts`"),
    ],
)
def test_impossible_partitions(partitioner: Partitioner, message: str, path_graph: Data) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        partitioner(path_graph)
    assert "\n" not in str(refusal.value)
