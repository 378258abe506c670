"""What clients know of their nodes beyond their own graphs, as fields of a batch.

Shape legend: C clients, N nodes (padded), M largest number of neighbor ids, S structure features, F features.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.base import pad
from fl_lightning.batches.client_graph import ClientGraph


def known_fields(
    graphs: Sequence[ClientGraph], num_nodes: int, *, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Ids of neighbors (C, N, M) and of nodes (C, N), structure features (C, N, S), by name; None for none.

    Nodes that were added have no neighbor ids. A client without structure features among some with them has zeros.

    Args:
        graphs: The clients' graphs.
        num_nodes: N.
        device: Of the batch.
        dtype: Of the features.
    """
    fields: dict[str, Tensor | None] = dict.fromkeys(("neighbor_ids", "node_id", "structure"))
    neighbors = [graph.neighbor_ids_NM for graph in graphs if graph.neighbor_ids_NM is not None]
    if len(neighbors) == len(graphs):
        ids_CNM = pad(neighbors, device)
        fields["neighbor_ids"] = F.pad(ids_CNM, (0, 0, 0, num_nodes - ids_CNM.shape[1]))
    if all(graph.cross_edge_2X is not None for graph in graphs):
        fields["node_id"] = pad([graph.node_idx_N + 1 for graph in graphs], device)
    structures = [graph.structure_NS for graph in graphs if graph.structure_NS is not None]
    if structures:
        zero_S = torch.zeros_like(structures[0][0])
        rows = [g.structure_NS if g.structure_NS is not None else zero_S.expand(g.num_nodes, -1) for g in graphs]
        fields["structure"] = pad(rows, device).to(dtype)
    return fields


def known_propagation(graphs: Sequence[ClientGraph], compute: Callable[[], Tensor], *, dtype: torch.dtype) -> Tensor:
    """Â X of the whole graph where clients know it, and of their own graphs where they do not, (C, N, F).

    Args:
        graphs: The clients' graphs, some of which have it.
        compute: Computes that of all clients' own graphs; called if some need it.
        dtype: Of the result.
    """
    known = [graph.propagated_NF for graph in graphs]
    rows = [graph.x_NF if each is None else each for graph, each in zip(graphs, known, strict=True)]
    known_CNF = pad([each.to(dtype) for each in rows], torch.device("cpu"))
    if all(each is not None for each in known):
        return known_CNF
    is_known_C = torch.tensor([each is not None for each in known])
    return torch.where(is_known_C[:, None, None], known_CNF, compute().cpu())
