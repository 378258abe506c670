"""What a client holds, and what its model computes on: a graph, or mini-batches of examples."""

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.examples import ExampleBatch, ExampleCollator
from fl_lightning.batches.graphs import GraphBatch, GraphCollator

__all__ = [
    "Batch",
    "ClientExamples",
    "ClientGraph",
    "Collator",
    "ExampleBatch",
    "ExampleCollator",
    "GraphBatch",
    "GraphCollator",
]
