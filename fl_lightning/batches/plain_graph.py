"""One client's graph in the form of PyG layers.

Shape legend: N nodes, E edges, F features, K attributes of an edge.
"""

import copy
from functools import cached_property

import torch
from torch import Tensor

from fl_lightning.batches.client_graph import ClientGraph


class PlainGraph:
    """One client's graph in the form of PyG layers, on the device.

    Attributes:
        x: Features (N, F).
        edge_index: Edges (2, E), source and target, without self loops; both directions unless the graph is directed.
        edge_weight: Weight of each edge (E,), or None.
        edge_attr: Attributes of each edge (E, K), or None.
    """

    def __init__(self, graph: ClientGraph, *, device: torch.device, dtype: torch.dtype) -> None:
        self._graph, self._device, self._dtype = graph, device, dtype

    def view(self, x: Tensor, kept_E: Tensor | None = None) -> "PlainGraph":
        """The graph with other features (N, F), and with some of its edges, boolean (E,); None for all edges."""
        other = copy.copy(self)
        other.x = x
        for name in () if kept_E is None else ("edge_index", "edge_weight", "edge_attr"):
            if (value := getattr(self, name, None)) is not None:
                setattr(other, name, value[:, kept_E] if name == "edge_index" else value[kept_E])
        return other

    @cached_property
    def x(self) -> Tensor:
        """Features (N, F)."""
        return self._graph.x_NF.to(self._device, self._dtype)

    @cached_property
    def edge_index(self) -> Tensor:
        """Edges (2, E)."""
        return self._graph.edge_index_2E.to(self._device)

    @cached_property
    def edge_weight(self) -> Tensor | None:
        """Weights of the edges (E,); None if they have none."""
        weight_E = self._graph.edge_weight_E
        return None if weight_E is None else weight_E.to(self._device, self._dtype)

    @cached_property
    def edge_attr(self) -> Tensor | None:
        """Attributes of the edges (E, K); None if they have none."""
        attr_EK = self._graph.edge_attr_EK
        return None if attr_EK is None else attr_EK.to(self._device, self._dtype)
