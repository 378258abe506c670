"""What clients know of their nodes beyond their own graphs, as fields of a batch.

Shape legend: C clients, N nodes (padded), S structure features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.base import pad
from fl_lightning.batches.client_graph import ClientGraph


def known_fields(graphs: Sequence[ClientGraph], *, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The ids that all clients share (C, N), and the structure features (C, N, S), by name; None for none.

    A client without structure features among some that have them has zeros.
    """
    fields: dict[str, Tensor | None] = {"node_id": None, "structure": None}
    if all(graph.cross_edge_2X is not None for graph in graphs):
        fields["node_id"] = pad([graph.node_idx_N + 1 for graph in graphs], device)
    known = [graph.structure_NS for graph in graphs if graph.structure_NS is not None]
    if known:
        zero_S = torch.zeros_like(known[0][0])
        rows = [g.structure_NS if g.structure_NS is not None else zero_S.expand(g.num_nodes, -1) for g in graphs]
        fields["structure"] = pad(rows, device).to(dtype)
    return fields
