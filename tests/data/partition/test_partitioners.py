from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import (
    GivenPartitioner,
    LouvainPartitioner,
    MetisPartitioner,
    OverlappingMetisPartitioner,
    Partitioner,
    PlantedCommunities,
    RandomPartitioner,
)
from fl_lightning.data.partition.record import PartitionRecord

DISJOINT = [MetisPartitioner(6), LouvainPartitioner(4), RandomPartitioner(7), GivenPartitioner()]
ALL = [*DISJOINT, OverlappingMetisPartitioner(10)]


def name_of(partitioner: Partitioner) -> str:
    return type(partitioner).__name__


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("partitioner", ALL, ids=name_of)
def test_ascending_indices_decided_by_the_seed(partitioner: Partitioner, planted: Data):
    parts = partitioner(planted, seed=3)
    assert same(parts, partitioner(planted, seed=3))
    for nodes in parts:
        assert nodes.dtype == torch.int64
        assert bool((nodes.diff() > 0).all())


@pytest.mark.parametrize("partitioner", DISJOINT, ids=name_of)
def test_disjoint_partitions_cover_the_graph(partitioner: Partitioner, planted: Data):
    assert torch.cat(partitioner(planted)).sort().values.tolist() == list(range(300))


@pytest.mark.parametrize("build", [MetisPartitioner, RandomPartitioner, OverlappingMetisPartitioner])
def test_own_seed_overrides_that_of_the_module(build: Callable[..., Partitioner]):
    planted = PlantedCommunities().load(Path())
    assert not same(build(10)(planted, 0), build(10)(planted, 1))
    assert same(build(10, seed=1)(planted, 0), build(10)(planted, 1))
    assert build(10, seed=1).identity() != build(10).identity()


def test_metis_is_balanced_and_finds_communities(planted: Data):
    def num_cut(parts: list[torch.Tensor]) -> int:
        client_N = torch.empty(300, dtype=torch.long)
        for client, nodes in enumerate(parts):
            client_N[nodes] = client
        return int((client_N[planted.edge_index[0]] != client_N[planted.edge_index[1]]).sum())

    parts = MetisPartitioner(6)(planted)
    assert max(map(len, parts)) < 1.1 * min(map(len, parts))
    assert num_cut(parts) < 0.4 * num_cut(RandomPartitioner(6)(planted))


def test_metis_takes_any_seed(planted: Data):
    for seed in (0, 2**31, 2**62):
        assert len(MetisPartitioner(3)(planted, seed)) == 3


def test_metis_takes_directed_edges(path_graph: Data):
    directed = path_graph.clone()
    directed.edge_index = path_graph.edge_index[:, :5]
    assert same(MetisPartitioner(2)(directed), MetisPartitioner(2)(path_graph))


def test_one_client_holds_everything(planted: Data):
    for partitioner in (MetisPartitioner(1), RandomPartitioner(1), LouvainPartitioner(1)):
        assert [len(nodes) for nodes in partitioner(planted)] == [300]


def test_overlapping_clients_draw_half_of_their_part(planted: Data):
    parts = MetisPartitioner(2)(planted)
    clients = OverlappingMetisPartitioner(10)(planted)
    for client, nodes in enumerate(clients):
        part = parts[client // 5]
        assert len(nodes) == len(part) // 2
        assert bool(torch.isin(nodes, part).all())
    assert not torch.equal(clients[0], clients[1])


def test_louvain_balances_whole_communities(planted: Data):
    parts = LouvainPartitioner(3, resolution=1.0)(planted)
    assert max(map(len, parts)) - min(map(len, parts)) <= 60


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_given_by_file(tmp_path: Path, path_graph: Data, suffix: str):
    path = tmp_path / f"clients{suffix}"
    client_N = np.array([7, 2, 2, 7, 9, 2])
    np.save(path, client_N) if suffix == ".npy" else torch.save(torch.from_numpy(client_N), path)
    partitioner = GivenPartitioner(str(path))
    assert [nodes.tolist() for nodes in partitioner(path_graph)] == [[1, 2, 5], [0, 3], [4]]
    before = partitioner.identity()
    np.save(path, client_N + 1) if suffix == ".npy" else torch.save(torch.zeros(6).long(), path)
    assert partitioner.identity() != before


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MetisPartitioner(0), "num_clients must be at least 1, got 0"),
        (
            lambda: OverlappingMetisPartitioner(12),
            "num_clients=12 is not a multiple of draws_per_part=5.*num_clients=30",
        ),
        (
            lambda: OverlappingMetisPartitioner(10, node_fraction=0.0),
            r"node_fraction must be a number in \(0, 1\], got 0.0",
        ),
        (lambda: LouvainPartitioner(3, resolution=0), r"resolution must be a number in \(0, 1e\+09\], got 0"),
    ],
)
def test_senseless_settings(build: Callable[[], Partitioner], message: str):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (RandomPartitioner(7), "num_clients=7 exceeds the 6 nodes of the graph; use fewer clients"),
        (
            LouvainPartitioner(6),
            r"num_clients=6: LouvainPartitioner left \d clients without a node; raise `resolution`",
        ),
        (OverlappingMetisPartitioner(5, node_fraction=0.1), "left 5 clients without a node; use fewer clients"),
        (GivenPartitioner("block"), r"attribute='block' is not on the graph, which has \['edge_index'"),
        (GivenPartitioner("x"), "attribute='x' holds torch.float32 of shape .*largest_component to false"),
    ],
)
def test_impossible_partitions(partitioner: Partitioner, message: str, path_graph: Data):
    with pytest.raises(ValueError, match=message):
        partitioner(path_graph)


def test_given_file_must_exist(path_graph: Data):
    for call in (GivenPartitioner("nowhere.npy").identity, lambda: GivenPartitioner("nowhere.npy")(path_graph)):
        with pytest.raises(FileNotFoundError, match=r"attribute='nowhere.npy': .* is not a file"):
            call()


def test_clients_drawn_from_one_part_are_a_group(planted: Data):
    def groups(partitioner: Partitioner) -> tuple[int, ...]:
        parts = tuple(partitioner(planted))
        return PartitionRecord(node_idx=parts, roles=parts, graph_hash="").groups()

    assert groups(OverlappingMetisPartitioner(10)) == (0,) * 5 + (1,) * 5
    assert groups(OverlappingMetisPartitioner(9, draws_per_part=3)) == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert groups(MetisPartitioner(6)) == ()
