"""Graphs, their partition into clients, and the data module that puts them together."""

from fl_lightning.data.client_examples import ClientExamples
from fl_lightning.data.client_graph import ClientGraph
from fl_lightning.data.example_source import Examples, ExampleSource
from fl_lightning.data.generated import PlantedCommunities, SuperClusterSBM
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.ogb_source import OgbSource
from fl_lightning.data.partition import (
    GivenPartitioner,
    LouvainPartitioner,
    MetisPartitioner,
    OverlappingMetisPartitioner,
    Partitioner,
    RandomPartitioner,
)
from fl_lightning.data.partition_table import ClientStatistics, PartitionTable
from fl_lightning.data.preparation import Preparation, prepare_graph
from fl_lightning.data.pyg_source import AmazonSource, CitationFullSource, CoauthorSource, PlanetoidSource, PyGSource
from fl_lightning.data.source import FileSource, GraphSource, Source
from fl_lightning.data.split import ClientSplit, GivenSplit, GlobalSplit, Role, Splitter

__all__ = [
    "AmazonSource",
    "CitationFullSource",
    "ClientExamples",
    "ClientGraph",
    "ClientSplit",
    "ClientStatistics",
    "CoauthorSource",
    "ExampleSource",
    "Examples",
    "FederatedDataModule",
    "FileSource",
    "GivenPartitioner",
    "GivenSplit",
    "GlobalSplit",
    "GraphSource",
    "LouvainPartitioner",
    "MetisPartitioner",
    "OgbSource",
    "OverlappingMetisPartitioner",
    "PartitionTable",
    "Partitioner",
    "PlanetoidSource",
    "PlantedCommunities",
    "Preparation",
    "PyGSource",
    "RandomPartitioner",
    "Role",
    "Source",
    "Splitter",
    "SuperClusterSBM",
    "prepare_graph",
]
