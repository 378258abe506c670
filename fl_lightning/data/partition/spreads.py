"""How values are spread over a client: least, quartiles and greatest, by what they are of."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.tasks import Task

Spreads: TypeAlias = Mapping[str, tuple[tuple[float, ...], ...]]

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def spreads(values: Mapping[str, Sequence[Tensor]]) -> Spreads:
    """Five numbers of each client's values; nan if it has none.

    Args:
        values: For each client its values, by what they are of.
    """
    return {name: tuple(map(_five_numbers, each)) for name, each in values.items()}


def known(y: Tensor) -> Tensor:
    """The numbers that are not missing."""
    return y[~y.isnan()]


def target_spreads(clients: Sequence[ClientData], task: Task) -> Spreads:
    """How targets that are no classes are spread: numbers, or how many labels each example has."""
    if task.target.has_classes:
        return {}
    if task.target.is_numeric:
        return spreads({f"target of each {task.example}": [known(client.y_N) for client in clients]})
    return spreads({f"labels of each {task.example}": [(client.y_N == 1).sum(dim=1) for client in clients]})


def link_spreads(clients: Sequence[ClientPairs]) -> Spreads:
    """How the links of nodes are spread, whatever their roles."""
    return spreads({"links of each node": [_degree_N(client) for client in clients]})


def _degree_N(client: ClientPairs) -> Tensor:
    link_P2 = client.pair_P2[client.y_N[:, 0] > 0.5]
    return torch.bincount(link_P2.flatten(), minlength=client.graph.num_nodes)


def _five_numbers(values: Tensor) -> tuple[float, ...]:
    if not len(values):
        return (float("nan"),) * len(_QUANTILES)
    return tuple(np.quantile(values.double().numpy(), _QUANTILES).tolist())
