"""Client data, and the batches on which models compute: a graph, many graphs, or mini-batches of examples."""

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.examples import ExampleBatch, ExampleCollator
from fl_lightning.batches.graph_sets import ClientGraphs, GraphSetBatch, GraphSetCollator
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.batches.pairs import ClientPairs, PairBatch, PairCollator
from fl_lightning.batches.sampled_graphs import SampledGraphBatch, SampledGraphCollator
from fl_lightning.batches.samplers import ClusterSampler, GraphSampler, NeighborSampler

__all__ = [
    "Batch",
    "ClientData",
    "ClientExamples",
    "ClientGraph",
    "ClientGraphs",
    "ClientPairs",
    "ClusterSampler",
    "Collator",
    "ExampleBatch",
    "ExampleCollator",
    "GraphBatch",
    "GraphCollator",
    "GraphSampler",
    "GraphSetBatch",
    "GraphSetCollator",
    "NeighborSampler",
    "PairBatch",
    "PairCollator",
    "SampledGraphBatch",
    "SampledGraphCollator",
]
