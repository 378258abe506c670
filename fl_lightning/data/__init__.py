"""Graphs and their partition into clients, clients with examples, and the data module that puts them together."""

from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.samplers import ClusterSampler, GraphSampler, NeighborSampler
from fl_lightning.data.graph_sets import LoadedGraphs
from fl_lightning.data.group_split import GroupSplit
from fl_lightning.data.heterogeneity import (
    EdgeInsertion,
    EdgeRemoval,
    FeatureNoise,
    Heterogeneity,
    LabelNoise,
    LabelScarcity,
    MissingFeatures,
    UnlabeledClients,
)
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition.partitioners import (
    GivenPartitioner,
    LouvainPartitioner,
    MetisPartitioner,
    OverlappingMetisPartitioner,
    Partitioner,
    RandomPartitioner,
)
from fl_lightning.data.partition.skew import DirichletPartitioner, LouvainPlusPartitioner, MetisPlusPartitioner
from fl_lightning.data.partition.sorted import SortedPartitioner
from fl_lightning.data.partition.table import ClientStatistics, PartitionTable
from fl_lightning.data.preparation import Preparation, prepare_graph
from fl_lightning.data.sources.activity import HAR
from fl_lightning.data.sources.base import FileSource, GraphSource, Source
from fl_lightning.data.sources.example_sets import ExampleSetFile, ExampleSetSource, InMemoryExampleSet
from fl_lightning.data.sources.examples import Examples, ExampleSource
from fl_lightning.data.sources.generated import PlantedCommunities, SuperClusterSBM
from fl_lightning.data.sources.graph_sets import GraphSetFile, GraphSetSource, InMemoryGraphSet
from fl_lightning.data.sources.images import CompCars, HeterogeneousCIFAR10, ImageSet, RotatedMNIST
from fl_lightning.data.sources.lazy import GeneratedClients, LazySource, ShardSource
from fl_lightning.data.sources.links import Links, SEALSource
from fl_lightning.data.sources.many_graph_sets import GraphSets, ManyGraphSets
from fl_lightning.data.sources.molecules import AqSolDB, MoleculeSource, Tox21
from fl_lightning.data.sources.natural import PyGGraphs, TwitchSource
from fl_lightning.data.sources.ogb import OgbSource
from fl_lightning.data.sources.ogb_graphs import OgbGraphSource
from fl_lightning.data.sources.ogb_links import OgbLinkSource
from fl_lightning.data.sources.own import InMemorySource, ManyGraphs
from fl_lightning.data.sources.own_examples import ExampleFile, InMemoryExamples
from fl_lightning.data.sources.pyg import (
    AmazonSource,
    CitationFullSource,
    CoauthorSource,
    HeterophilousSource,
    PlanetoidSource,
    PyGSource,
)
from fl_lightning.data.sources.pyg_graph_sets import PyGGraphSet, TUSource
from fl_lightning.data.sources.series import METRLA, PEMSBAY, TPT48
from fl_lightning.data.sources.synthetic import FL60, GRDAToy, PlantedRelations
from fl_lightning.data.sources.tasks import GLEAM, Landmine, School, Vehicle
from fl_lightning.data.split import (
    ChronologicalSplit,
    ClientSplit,
    GivenSplit,
    GlobalSplit,
    Role,
    ScarceSplit,
    Splitter,
    StratifiedSplit,
)
from fl_lightning.data.unseen import InductiveSplit, MissingClasses

__all__ = [
    "FL60",
    "GLEAM",
    "HAR",
    "METRLA",
    "PEMSBAY",
    "TPT48",
    "AmazonSource",
    "AqSolDB",
    "ChronologicalSplit",
    "CitationFullSource",
    "ClientExamples",
    "ClientGraph",
    "ClientSplit",
    "ClientStatistics",
    "ClusterSampler",
    "CoauthorSource",
    "CompCars",
    "DirichletPartitioner",
    "EdgeInsertion",
    "EdgeRemoval",
    "ExampleFile",
    "ExampleSetFile",
    "ExampleSetSource",
    "ExampleSource",
    "Examples",
    "FeatureNoise",
    "FederatedDataModule",
    "FileSource",
    "GRDAToy",
    "GeneratedClients",
    "GivenPartitioner",
    "GivenSplit",
    "GlobalSplit",
    "GraphSampler",
    "GraphSetFile",
    "GraphSetSource",
    "GraphSets",
    "GraphSource",
    "GroupSplit",
    "Heterogeneity",
    "HeterogeneousCIFAR10",
    "HeterophilousSource",
    "ImageSet",
    "InMemoryExampleSet",
    "InMemoryExamples",
    "InMemoryGraphSet",
    "InMemorySource",
    "InductiveSplit",
    "LabelNoise",
    "LabelScarcity",
    "Landmine",
    "LazySource",
    "Links",
    "LoadedGraphs",
    "LouvainPartitioner",
    "LouvainPlusPartitioner",
    "ManyGraphSets",
    "ManyGraphs",
    "MetisPartitioner",
    "MetisPlusPartitioner",
    "MissingClasses",
    "MissingFeatures",
    "MoleculeSource",
    "NeighborSampler",
    "OgbGraphSource",
    "OgbLinkSource",
    "OgbSource",
    "OverlappingMetisPartitioner",
    "PartitionTable",
    "Partitioner",
    "PlanetoidSource",
    "PlantedCommunities",
    "PlantedRelations",
    "Preparation",
    "PyGGraphSet",
    "PyGGraphs",
    "PyGSource",
    "RandomPartitioner",
    "Role",
    "RotatedMNIST",
    "SEALSource",
    "ScarceSplit",
    "School",
    "ShardSource",
    "SortedPartitioner",
    "Source",
    "Splitter",
    "StratifiedSplit",
    "SuperClusterSBM",
    "TUSource",
    "Tox21",
    "TwitchSource",
    "UnlabeledClients",
    "Vehicle",
    "prepare_graph",
]
