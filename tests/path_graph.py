"""The path 0-1-2-3 as one client's graph, on which methods are computed by hand."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches import ClientGraph, GraphBatch, GraphCollator


def path_graph(
    x_NF: Tensor | None = None, *, train: tuple[int, ...] = (0,), y: tuple[int, ...] = (0,) * 4
) -> ClientGraph:
    """The path; what is not trained on is validated on."""
    mask_N = torch.tensor([node in train for node in range(4)])
    return ClientGraph(
        name="client-0",
        x_NF=torch.eye(4) if x_NF is None else x_NF,
        edge_index_2E=torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]),
        y_N=torch.tensor(y),
        train_mask_N=mask_N,
        val_mask_N=~mask_N,
        test_mask_N=torch.zeros_like(mask_N),
        node_idx_N=torch.arange(4),
    )


def wider(graph: ClientGraph, count: int) -> ClientGraph:
    """The graph with more nodes, which nothing is known of and which nobody knows."""
    nobody = torch.zeros(count, dtype=torch.bool)
    masks = {name: torch.cat([value, nobody]) for name, value in vars(graph).items() if "mask" in name}
    x_NF = torch.cat([graph.x_NF, torch.ones(count, graph.num_features)])
    y_N = torch.cat([graph.y_N, torch.ones(count, dtype=torch.int64)])
    return dataclasses.replace(graph, x_NF=x_NF, y_N=y_N, node_idx_N=torch.arange(len(y_N)), **masks)


def computed(
    function: Callable[[GraphBatch], Mapping[str, Tensor]],
    graph: ClientGraph,
    *,
    padding: int = 0,
    sparse: bool = False,
) -> dict[str, Tensor]:
    """What a function makes of a graph's batch, in float64, beside a larger client under ``vmap`` if it is padded."""
    collator = GraphCollator(
        [graph, wider(graph, padding)],
        layout={"sparse_features": sparse},
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    batch = collator([0, 1])

    def one(tensors: Any) -> Mapping[str, Tensor]:
        return function(batch.replace(tensors))

    return {name: tensor[0] for name, tensor in torch.vmap(one)(batch.tensors()).items()}
