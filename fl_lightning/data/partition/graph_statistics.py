"""Statistics of clients that hold many graphs: a row for each client, and how its graphs are spread.

Shape legend: G graphs of a client.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.data.partition.spreads import Spreads, known, spreads


@dataclass(frozen=True, kw_only=True)
class GraphSetStatistics:
    """One client and its graphs.

    Attributes:
        client: Its name.
        num_graphs: Graphs.
        mean_nodes: Mean number of nodes of a graph.
        mean_degree: Mean over the graphs of their mean (in-)degrees.
        num_train: Training graphs.
        num_val: Validation graphs.
        num_test: Test graphs.
    """

    client: str
    num_graphs: int
    mean_nodes: float
    mean_degree: float
    num_train: int
    num_val: int
    num_test: int


@dataclass(frozen=True, kw_only=True)
class GraphClassStatistics(GraphSetStatistics):
    """One client and its graphs, which have classes.

    Attributes:
        num_classes: Classes that occur in it.
    """

    num_classes: int


@dataclass(frozen=True, kw_only=True)
class GraphNumberStatistics(GraphSetStatistics):
    """One client and its graphs, which have numbers.

    Attributes:
        mean_target: Mean of the known numbers; nan if there are none.
        std_target: Their standard deviation.
    """

    mean_target: float
    std_target: float


def rows_of(
    clients: Sequence[ClientGraphs], num_classes: Sequence[int], *, numbers: bool
) -> tuple[GraphSetStatistics, ...]:
    """A row for each client.

    Args:
        clients: The clients.
        num_classes: Classes that occur in each; 0 for labels and numbers.
        numbers: Whether targets are numbers.
    """
    rows: list[GraphSetStatistics] = []
    for client, count in zip(clients, num_classes, strict=True):
        values: dict[str, Any] = dict(
            client=client.name,
            num_graphs=client.size,
            mean_nodes=float(client.num_nodes_G.double().mean()),
            mean_degree=float(_degrees(client).mean()),
            num_train=client.num_examples,
            num_val=int(client.val_mask_N.sum()),
            num_test=int(client.test_mask_N.sum()),
        )
        if not numbers:
            rows.append(GraphClassStatistics(num_classes=count, **values) if count else GraphSetStatistics(**values))
            continue
        known_y = known(client.y_N).double()
        targets: dict[str, Any] = {"mean_target": float(known_y.mean()), "std_target": float(known_y.std(correction=0))}
        rows.append(GraphNumberStatistics(**values, **targets))
    return tuple(rows)


def graph_spreads(clients: Sequence[ClientGraphs], *, numbers: bool) -> Spreads:
    """How nodes, degrees and targets that are numbers are spread over each client's graphs."""
    values = {
        "nodes of a graph": [client.num_nodes_G for client in clients],
        "mean degree of a graph": [_degrees(client) for client in clients],
    }
    if numbers:
        values["target of a graph"] = [known(client.y_N) for client in clients]
    return spreads(values)


def _degrees(client: ClientGraphs) -> Tensor:
    """The mean degree of each graph, (G,)."""
    graph_N = torch.arange(client.size).repeat_interleave(client.num_nodes_G)
    count_G = torch.bincount(graph_N[client.union.edge_index_2E[1]], minlength=client.size)
    return count_G / client.num_nodes_G.double()
