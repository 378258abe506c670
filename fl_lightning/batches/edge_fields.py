"""The fields of a batch of graphs whose edges have attributes.

Shape legend: C clients, N nodes and E edges of a client (padded), K attributes of an edge.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.base import pad
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.kernels.block_sparse import BlockSparse

#: Metadata of fields of edges, and of operators from edges to nodes.
EDGES, ENDS = {"axes": ("edges",)}, {"axes": ("nodes", "edges")}


def edge_fields(
    graphs: Sequence[ClientGraph],
    num_nodes: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    operator_dtype: torch.dtype,
) -> dict[str, Any]:
    """The attributes of the clients' edges, and where these are; nothing if they have none.

    Args:
        graphs: Of the clients.
        num_nodes: N.
        device: Of the fields.
        dtype: Of the attributes.
        operator_dtype: Of the operators.
    """
    attrs = [graph.edge_attr_EK for graph in graphs if graph.edge_attr_EK is not None]
    if len(attrs) < len(graphs):
        return {}
    ends = pad([graph.edge_index_2E.t() for graph in graphs], device)
    mask = pad([torch.ones(len(attr_EK), dtype=torch.bool) for attr_EK in attrs], device)
    attr = pad([attr_EK.to(dtype) for attr_EK in attrs], device)
    return {"edge_attr": attr, **incidence_fields(ends, mask, num_nodes, operator_dtype)}


def incidence_fields(ends: Tensor, mask: Tensor, num_nodes: int, dtype: torch.dtype) -> dict[str, Any]:
    """Where edges are, as tensors and as operators.

    Args:
        ends: Source and target of each edge, (C, E, 2), or (E, 2) of one client; any for padding.
        mask: Which edges are no padding, (C, E).
        num_nodes: N.
        dtype: Of the operators.
    """
    sources, targets = (BlockSparse.incidence(end, mask, num_nodes, dtype) for end in ends.unbind(dim=-1))
    return {"edge_mask": mask, "edge_ends": ends, "edge_sources": sources, "edge_targets": targets}
