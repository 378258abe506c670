"""Weights and attributes of edges, and checks that refuse invalid ones.

Shape legend: E edges, K attributes of an edge.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, to_undirected

from fl_lightning.kernels.edge_codes import distinct_codes, edges_of, with_reverses

#: What a graph's edges may carry.
EDGE_DATA = ("edge_weight", "edge_attr")


def merged_edges(
    edge_index_2E: Tensor, values: Mapping[str, Tensor | None], num_nodes: int, *, undirected: bool = False
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Edges without self-loops, each once, in the order of their nodes, with what they carry.

    Of repeated edges the weights are added and the attributes averaged; where a direction is added, both are averaged.

    Args:
        edge_index_2E: int64 edges, on the CPU.
        values: What they carry by name, of :data:`EDGE_DATA`; None for nothing.
        num_nodes: Nodes.
        undirected: Add the missing direction of every edge.

    Returns:
        The edges, which are the given tensor if nothing had to be done; what they carry; how many directions were
        added.
    """
    code_E = distinct_codes(edge_index_2E, num_nodes)
    num_before = len(code_E)
    if undirected:
        code_E = with_reverses(code_E, num_nodes)
    carried = {}
    for key, value in values.items():
        if value is not None:
            kept_E = edge_index_2E[0] != edge_index_2E[1]
            reduce = "sum" if key == "edge_weight" else "mean"
            edges_2E, value = coalesce(edge_index_2E[:, kept_E], value[kept_E], num_nodes=num_nodes, reduce=reduce)
            if undirected:
                _, value = to_undirected(edges_2E, value, num_nodes=num_nodes, reduce="mean")
            carried[key] = value
    return edges_of(code_E, num_nodes, edge_index_2E), carried, len(code_E) - num_before


def checked_weights(data: Data, name: str) -> Tensor | None:
    """Return a graph's ``edge_weight`` as float32 (E,); None if it has none.

    Raises:
        ValueError: There is not a finite, non-negative number for each edge.
    """
    weight = _numbers(data, "edge_weight", "a number for each edge, shape (num_edges,)", name)
    if weight is None:
        return None
    if weight.numel() != len(weight):
        raise ValueError(
            f"{name}: edge_weight has shape {tuple(weight.shape)}; give a number for each edge, shape (num_edges,), "
            "and several as `data.edge_attr`."
        )
    weight_E = weight.flatten()
    if bool((weight_E < 0).any()):
        edge = int((weight_E < 0).nonzero()[0])
        raise ValueError(
            f"{name}: edge_weight of edge {edge} is {float(weight_E[edge]):g}; weights are not negative, as no "
            "normalization D^(-1/2) A D^(-1/2) could have them. Give signed numbers as `data.edge_attr`."
        )
    return weight_E


def checked_attributes(data: Data, name: str) -> Tensor | None:
    """Return a graph's ``edge_attr`` as float32 (E, K); None if it has none.

    Raises:
        ValueError: There is not a row of finite numbers for each edge.
    """
    attr = _numbers(data, "edge_attr", "a row of numbers for each edge, shape (num_edges, num_attributes)", name)
    if attr is None:
        return None
    attr_EK = attr[:, None] if attr.dim() == 1 else attr
    if attr_EK.dim() != 2 or attr_EK.shape[1] == 0:
        raise ValueError(
            f"{name}: edge_attr has shape {tuple(attr.shape)}; give a row of numbers for each edge, shape (num_edges, "
            "num_attributes)."
        )
    return attr_EK


def same_edge_data(parts: list[Data]) -> tuple[str, ...]:
    """What the edges of all of several graphs carry.

    Raises:
        ValueError: Some graphs carry it and some do not, or they have different numbers of attributes.
    """
    carried = []
    for key in EDGE_DATA:
        have = [idx for idx, part in enumerate(parts) if part.get(key) is not None]
        if have and len(have) < len(parts):
            missing = next(idx for idx in range(len(parts)) if idx not in have)
            raise ValueError(
                f"graph {missing} has no {key}, but graph {have[0]} has: give all graphs {key}, or none of them"
            )
        if have:
            carried.append(key)
            for idx, part in enumerate(parts):
                if part[key].shape[1:] != parts[0][key].shape[1:]:
                    raise ValueError(
                        f"graph {idx} has {part[key].shape[1]} attributes of each edge, the first "
                        f"{parts[0][key].shape[1]}: all clients need the same"
                    )
    return tuple(carried)


def _numbers(data: Data, key: str, wanted: str, name: str) -> Tensor | None:
    """An attribute of the edges as float32, if there is one."""
    value = data.get(key)
    if value is None:
        return None
    num_edges = data.edge_index.shape[1]
    if not isinstance(value, Tensor) or value.is_complex() or value.dim() == 0 or len(value) != num_edges:
        given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: {key} is {given} for {num_edges} edges; give {wanted}, or leave it out.")
    numbers = (value.to_dense() if value.layout != torch.strided else value).detach().float()
    if not bool(numbers.isfinite().all()):
        edge = int((~numbers.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"{name}: {key} of edge {edge} is {value[edge].tolist()}, which is not finite in float32; replace what is "
            f"not finite, e.g. by `data.{key}.nan_to_num_()`."
        )
    return numbers
