"""No link that is validated or tested on is seen in training: by source, partitioner, executor and at sites."""

import functools
import os
from pathlib import Path

import pytest
import torch
from link_leaks import SpyNet, check_no_leak, check_what_nets_saw
from sites import make_sites
from task_data import link_data, link_graph
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor, data
from fl_lightning.data import (
    DirichletPartitioner,
    FileSource,
    GivenPartitioner,
    InMemorySource,
    Links,
    LouvainPartitioner,
    LouvainPlusPartitioner,
    ManyGraphs,
    MetisPartitioner,
    MetisPlusPartitioner,
    OverlappingMetisPartitioner,
    Partitioner,
    PlanetoidSource,
    PlantedCommunities,
    RandomPartitioner,
    SEALSource,
    SortedPartitioner,
    SuperClusterSBM,
)
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.strategies import FedAvg
from fl_lightning.tasks import LinkPrediction

COMMUNITIES = PlantedCommunities(num_nodes=120, num_communities=3, num_features=4, intra_degree=8.0)
PARTITIONERS = [
    MetisPartitioner(3),
    LouvainPartitioner(3),
    RandomPartitioner(3),
    GivenPartitioner(),
    OverlappingMetisPartitioner(4, draws_per_part=2, node_fraction=0.7),
    DirichletPartitioner(3, alpha=5.0),
    MetisPlusPartitioner(3, num_parts=9),
    LouvainPlusPartitioner(3, resolution=3.0),
    SortedPartitioner(3, by="membership"),
]
ROOT = Path(os.environ.get("FL_DATA_ROOT", "data"))


def name_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("negatives", ["uniform", "degree", "hard"])
@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=name_of)
def test_partitioners(partitioner, negatives, fraction, tmp_path) -> None:
    made = link_data(tmp_path, partitioner, source=COMMUNITIES, negatives=negatives, message_fraction=fraction)
    check_no_leak(made)
    assert made.task == LinkPrediction()
    assert made.num_outputs == 1


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("partitioner", [p for p in PARTITIONERS if "Overlap" not in name_of(p)], ids=name_of)
def test_links_between_clients(partitioner, fraction, tmp_path) -> None:
    settings = {"candidates": "across", "features": "structure", "message_fraction": fraction}
    made = link_data(tmp_path, partitioner, source=COMMUNITIES, **settings)
    check_no_leak(made)
    assert made.task == LinkPrediction(across_clients=True)
    assert [row.edges_lost for row in made.statistics().rows] == [0] * len(made.clients)
    alone = link_data(tmp_path, partitioner, source=COMMUNITIES, **{**settings, "candidates": "own"})
    assert made.partition_hash != alone.partition_hash
    assert sum(each.size for each in made.clients) > sum(each.size for each in alone.clients)


def test_all_partitioners_are_tested() -> None:
    known = {n for n in data.__all__ if n.endswith("Partitioner") and getattr(data, n) is not Partitioner}
    assert known == set(map(name_of, PARTITIONERS))


def saved(graph, folder):
    torch.save(graph, folder / "graph.pt")
    return str(folder / "graph.pt")


def labeled(graph):
    return graph.update({"y": torch.zeros(len(graph.x))})


#: A source of each kind, and how its graph is cut.
SOURCES = {
    "InMemorySource": (lambda _: InMemorySource(link_graph()), GivenPartitioner()),
    "InMemorySource of a component": (lambda _: InMemorySource(link_graph(), largest_component=True), None),
    "FileSource": (lambda folder: FileSource(saved(link_graph(), folder)), None),
    "SuperClusterSBM": (
        lambda _: SuperClusterSBM(num_nodes=240, num_blocks=4, intra_edge_probability=(0.2, 0.3)),
        GivenPartitioner(),
    ),
    "PlantedCommunities": (lambda _: COMMUNITIES, OverlappingMetisPartitioner(4, 2, 0.7)),
    "ManyGraphs": (lambda _: ManyGraphs([InMemorySource(labeled(link_graph(size))) for size in (60, 90)]), "own"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name, tmp_path) -> None:
    make, partitioner = SOURCES[name]
    partitioner = None if partitioner == "own" else partitioner or MetisPartitioner(3)
    made = FederatedDataModule(Links(make(tmp_path), pool_size=50), partitioner, cache_dir=str(tmp_path))
    made.setup()
    check_no_leak(made)


@pytest.fixture
def spy() -> type[SpyNet]:
    SpyNet.seen.clear()
    return SpyNet


def client(net, task=None) -> ClientModule:
    made = ClientModule(functools.partial(net, hidden_channels=8), functools.partial(SGD, lr=0.05))
    if task is not None:
        made.take_task(task)
    return made


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("clients", ["disjoint", "overlapping", "linked"])
@pytest.mark.parametrize("kind", ["sequential", "stacked", "sites"])
def test_executors_and_sites(kind, clients, fraction, spy, make_trainer, tmp_path) -> None:
    partitioner = OverlappingMetisPartitioner(4, 2, 0.7) if clients == "overlapping" else MetisPartitioner(3)
    settings = {"message_fraction": fraction, "candidates": "across" if clients == "linked" else "own"}
    made = link_data(tmp_path, partitioner, source=COMMUNITIES, features="identity", **settings)
    strategy = FedAvg(num_epochs=1)
    if kind == "sites":
        sites = make_sites(made.clients, tmp_path / "sites", lambda: (client(spy, made.task), FedAvg(num_epochs=1)))
        trainer = make_trainer(num_rounds=1)
        trainer.fit(client(spy), federate(trainer, LoopbackChannel(sites), strategy), strategy)
    else:
        executor = StackedExecutor(max_padding=0.9) if kind == "stacked" else SequentialExecutor()
        make_trainer(num_rounds=1, executor=executor).fit(client(spy), made, strategy)
    check_what_nets_saw(made.clients, made)


@pytest.mark.full
@pytest.mark.parametrize("partitioner", [MetisPartitioner(6), LouvainPartitioner(6)], ids=name_of)
@pytest.mark.parametrize("name", ["Cora", "Celegans"])
def test_real_graphs(name, partitioner, spy, make_trainer, tmp_path) -> None:
    if not (ROOT / (name if name == "Cora" else f"links/{name}.mat")).exists():
        pytest.skip(f"{name} is not in FL_DATA_ROOT")
    source = PlanetoidSource(name) if name == "Cora" else SEALSource(name)
    made = FederatedDataModule(Links(source, features="identity"), partitioner, root=str(ROOT), cache_dir=str(tmp_path))
    made.setup()
    check_no_leak(made)
    make_trainer(num_rounds=1).fit(client(spy), made, FedAvg(num_epochs=1))
    check_what_nets_saw(made.clients, made)


@pytest.mark.full
def test_overlapping_clients_of_a_real_graph(tmp_path) -> None:
    if not (ROOT / "Cora").exists():
        pytest.skip("Cora is not in FL_DATA_ROOT")
    partitioner = OverlappingMetisPartitioner(30)
    made = FederatedDataModule(Links(PlanetoidSource("Cora")), partitioner, root=str(ROOT), cache_dir=str(tmp_path))
    made.setup()
    check_no_leak(made)
