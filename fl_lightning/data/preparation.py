"""Bringing a raw graph into the form that all federated methods here share (undirected, connected, normalised)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.transforms import LargestConnectedComponents, NormalizeFeatures
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to a raw graph before it is partitioned.

    Attributes:
        normalize_features: Scale each node's features to sum 1 (``torch_geometric.transforms.NormalizeFeatures``).
        largest_component: Keep only the largest connected component.
        undirected: Add the missing direction of every edge.
    """

    normalize_features: bool = True
    largest_component: bool = True
    undirected: bool = True


def prepare_graph(data: Data, preparation: Preparation) -> Data:
    """Return a copy of ``data`` with clean edges, float32 features and int64 labels.

    Self-loops and duplicate edges always go: GNN layers add their own loops, and METIS allows neither.

    Args:
        data: Graph with ``x`` (num_nodes, num_features), ``edge_index`` and ``y`` (num_nodes) or (num_nodes, 1).
        preparation: The optional steps.

    Returns:
        A graph whose node attributes (masks, ``membership`` ...) follow the kept nodes. Edge attributes are dropped.

    Raises:
        ValueError: If features, edges or single-class labels are missing.
    """
    prepared = _checked_copy(data)
    edge_index_2E, _ = remove_self_loops(data.edge_index)
    if preparation.undirected:
        prepared.edge_index = to_undirected(edge_index_2E, num_nodes=data.num_nodes)
    else:
        prepared.edge_index = coalesce(edge_index_2E, num_nodes=data.num_nodes)
    if preparation.largest_component:
        prepared = LargestConnectedComponents()(prepared)
    if preparation.normalize_features:
        prepared = NormalizeFeatures()(prepared)
    return prepared


def _checked_copy(data: Data) -> Data:
    """Copy the node attributes, with features and labels in their final types."""
    if data.get("x") is None or data.get("edge_index") is None or data.get("y") is None:
        missing = [name for name in ("x", "edge_index", "y") if data.get(name) is None]
        raise ValueError(f"The graph has no {', '.join(missing)}; node features, edges and labels are all needed.")
    x_NF, y_N = data.x, data.y
    if y_N.dim() == 2 and y_N.shape[1] == 1:
        y_N = y_N.squeeze(1)
    if y_N.dim() != 1 or y_N.shape[0] != data.num_nodes:
        raise ValueError(
            f"The labels y have shape {tuple(data.y.shape)} for {data.num_nodes} nodes; one class per node is "
            "supported. Choose one task of a multi-label data set, e.g. `data.y = data.y[:, 0]`."
        )
    if y_N.is_floating_point():
        y_N = torch.where(y_N.isnan(), -1, y_N)
    if bool((y_N != y_N.long()).any()):
        raise ValueError("The labels y are not whole numbers; give int64 classes 0, 1, ... (negative: unlabelled).")
    attributes: dict[str, Any] = {key: data[key] for key in data.node_attrs() if key not in ("x", "y")}
    return Data(x=(x_NF.to_dense() if x_NF.layout != torch.strided else x_NF).float(), y=y_N.long(), **attributes)
