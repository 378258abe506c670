"""Federations of known data sets in one line: ``fl.datasets.cora(clients=10)``.

Each is a source of :mod:`fl_lightning.data`, cut by a partitioner if it has no clients of its own. Further settings are
those of :class:`~fl_lightning.data.FederatedDataModule`, such as ``splitter``, ``partitioner``, ``seed`` and ``root``.

Example:
    >>> data = planted(clients=4, seed=1)
    >>> data.setup()
    >>> data.num_clients
    4
"""

from typing import Any

from fl_lightning.data import (
    HAR,
    AmazonSource,
    AqSolDB,
    CoauthorSource,
    FederatedDataModule,
    GivenPartitioner,
    HeterogeneousCIFAR10,
    MetisPartitioner,
    OgbSource,
    Partitioner,
    PlanetoidSource,
    PlantedCommunities,
    RandomPartitioner,
    RotatedMNIST,
    School,
    Source,
    Tox21,
    TUSource,
    TwitchSource,
    Vehicle,
)


def _cut(source: Source, partitioner: Partitioner, settings: dict[str, Any]) -> FederatedDataModule:
    return FederatedDataModule(source, **{"partitioner": partitioner, **settings})


def cora(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """Cora: 2,708 papers that cite each other, 7 fields; clients by METIS."""
    return _cut(PlanetoidSource("Cora"), MetisPartitioner(clients), settings)


def citeseer(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """CiteSeer: 3,327 papers that cite each other, 6 fields; clients by METIS."""
    return _cut(PlanetoidSource("CiteSeer"), MetisPartitioner(clients), settings)


def pubmed(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """PubMed: 19,717 papers that cite each other, 3 diseases; clients by METIS."""
    return _cut(PlanetoidSource("PubMed"), MetisPartitioner(clients), settings)


def computers(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """Amazon Computers: 13,752 products that are bought together, 10 categories; clients by METIS."""
    return _cut(AmazonSource("Computers"), MetisPartitioner(clients), settings)


def photo(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """Amazon Photo: 7,650 products that are bought together, 8 categories; clients by METIS."""
    return _cut(AmazonSource("Photo"), MetisPartitioner(clients), settings)


def cs(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """Coauthor CS: 18,333 authors who write together, 15 fields; clients by METIS."""
    return _cut(CoauthorSource("CS"), MetisPartitioner(clients), settings)


def physics(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """Coauthor Physics: 34,493 authors who write together, 5 fields; clients by METIS."""
    return _cut(CoauthorSource("Physics"), MetisPartitioner(clients), settings)


def arxiv(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """ogbn-arxiv: 169,343 papers that cite each other, 40 fields; clients by METIS."""
    return _cut(OgbSource("ogbn-arxiv"), MetisPartitioner(clients), settings)


def mutag(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """MUTAG: 188 molecules, 2 classes; shared out at random."""
    return _cut(TUSource("MUTAG"), RandomPartitioner(clients), settings)


def proteins(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """PROTEINS: 1,113 proteins, 2 classes; shared out at random."""
    return _cut(TUSource("PROTEINS"), RandomPartitioner(clients), settings)


def nci1(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """NCI1: 4,110 molecules, 2 classes; shared out at random."""
    return _cut(TUSource("NCI1"), RandomPartitioner(clients), settings)


def planted(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """A generated graph of 200 nodes a client, whose communities are the clients; nothing is downloaded."""
    return _cut(PlantedCommunities(num_nodes=200 * clients, num_communities=clients), GivenPartitioner(), settings)


def twitch(**settings: Any) -> FederatedDataModule:
    """Twitch: the streamers of seven countries, each a client, 2 classes."""
    return FederatedDataModule(TwitchSource(), **settings)


def aqsoldb(**settings: Any) -> FederatedDataModule:
    """AqSolDB: the solubility in water of molecules from nine laboratories, each a client."""
    return FederatedDataModule(AqSolDB(), **settings)


def tox21(clients: int = 10, **settings: Any) -> FederatedDataModule:
    """Tox21: whether 7,831 molecules are toxic in each of twelve assays; shared out at random."""
    return _cut(Tox21(), RandomPartitioner(clients), settings)


def rotated_mnist(clients: int = 40, **settings: Any) -> FederatedDataModule:
    """Rotated MNIST: digits in four rotations, 10 classes."""
    return FederatedDataModule(RotatedMNIST(clients), **settings)


def cifar10(clients: int = 30, **settings: Any) -> FederatedDataModule:
    """CIFAR-10: photographs, of five of the 10 classes for each client."""
    return FederatedDataModule(HeterogeneousCIFAR10(clients), **settings)


def har(**settings: Any) -> FederatedDataModule:
    """HAR: movements of 30 people, each a client, 6 activities."""
    return FederatedDataModule(HAR(), **settings)


def vehicle(**settings: Any) -> FederatedDataModule:
    """Vehicle: 23 sensors, each a client, 2 classes."""
    return FederatedDataModule(Vehicle(), **settings)


def school(**settings: Any) -> FederatedDataModule:
    """School: exam scores of 139 schools, each a client."""
    return FederatedDataModule(School(), **settings)
