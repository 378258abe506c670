"""Graphs and their partition into clients, clients with examples, and the data module that puts them together."""

from fl_lightning.data.activity_source import HAR
from fl_lightning.data.client_examples import ClientExamples
from fl_lightning.data.client_graph import ClientGraph
from fl_lightning.data.example_source import Examples, ExampleSource
from fl_lightning.data.generated import PlantedCommunities, SuperClusterSBM
from fl_lightning.data.image_sources import CompCars, HeterogeneousCIFAR10, RotatedMNIST
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
from fl_lightning.data.series_sources import METRLA, PEMSBAY, TPT48
from fl_lightning.data.source import FileSource, GraphSource, Source
from fl_lightning.data.split import (
    ChronologicalSplit,
    ClientSplit,
    GivenSplit,
    GlobalSplit,
    Role,
    ScarceSplit,
    Splitter,
)
from fl_lightning.data.synthetic_sources import FL60, GRDAToy
from fl_lightning.data.task_sources import GLEAM, Landmine, School, Vehicle

__all__ = [
    "FL60",
    "GLEAM",
    "HAR",
    "METRLA",
    "PEMSBAY",
    "TPT48",
    "AmazonSource",
    "ChronologicalSplit",
    "CitationFullSource",
    "ClientExamples",
    "ClientGraph",
    "ClientSplit",
    "ClientStatistics",
    "CoauthorSource",
    "CompCars",
    "ExampleSource",
    "Examples",
    "FederatedDataModule",
    "FileSource",
    "GRDAToy",
    "GivenPartitioner",
    "GivenSplit",
    "GlobalSplit",
    "GraphSource",
    "HeterogeneousCIFAR10",
    "Landmine",
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
    "RotatedMNIST",
    "ScarceSplit",
    "School",
    "Source",
    "Splitter",
    "SuperClusterSBM",
    "Vehicle",
    "prepare_graph",
]
