"""Wrong, few and no labels. Only training labels change: validation and test stay as they are.

Source: Han et al., "Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy Labels", NeurIPS 2018,
for the two kinds of label noise.
"""

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from fl_lightning.data.heterogeneity.base import AnyClient, Graded, Heterogeneity
from fl_lightning.tasks import Task

#: Which class a wrong label has.
Noise = Literal["uniform", "pair"]


class LabelNoise(Graded):
    """Wrong classes of training examples.

    Args:
        strength: Share of a client's training labels that are wrong, rounded to the nearest number, in [0, 1].
        clients: Share of the clients that have wrong labels, rounded to the nearest number, in [0, 1].
        kind: ``uniform``, any other class, drawn uniformly; or ``pair``, the next class (of the last one the first).
    """

    def __init__(self, strength: float, clients: float = 1.0, kind: Noise = "uniform") -> None:
        super().__init__(strength, clients)
        if kind not in get_args(Noise):
            raise ValueError(f"LabelNoise.kind must be {' or '.join(get_args(Noise))}, got {kind!r}")
        self.kind = kind

    def why_not(self, task: Task) -> str:
        """It needs classes."""
        if task.target.has_classes:
            return ""
        return f"is for examples of one class each, but {task.examples} here have {task.target.name}: leave it out"

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Replace classes."""
        num_classes = client.num_outputs or num_outputs
        if num_classes < 2:
            raise ValueError("there is one class, and no other that a wrong label could have")
        train_T = client.train_mask_N.nonzero().squeeze(1)
        order_T = train_T[torch.randperm(len(train_T), generator=draw)]
        step_T = torch.randint(1, num_classes, order_T.shape, generator=draw)
        if self.kind == "pair":
            step_T = torch.ones_like(step_T)
        number = round(len(order_T) * self.strength)
        wrong_W, y_N = order_T[:number], client.y_N.clone()
        y_N[wrong_W] = (y_N[wrong_W] + step_T[:number]) % num_classes
        return dataclasses.replace(client, y_N=y_N)


class LabelScarcity(Graded):
    """Training examples whose labels are lost. Nodes stay in the graph; at least one label of a client is left.

    Args:
        strength: Share of a client's training labels that are lost, rounded to the nearest number, in [0, 1].
        clients: Share of the clients that lose labels, rounded to the nearest number, in [0, 1].
    """

    def why_not(self, task: Task) -> str:
        """It needs labels that are no links."""
        return _not_of_links(task)

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Forget labels."""
        train_T = client.train_mask_N.nonzero().squeeze(1)
        order_T = train_T[torch.randperm(len(train_T), generator=draw)]
        number = min(round(len(order_T) * self.strength), len(order_T) - 1)
        return _without_labels(client, order_T[: max(number, 0)])


class UnlabeledClients(Heterogeneity):
    """Clients that have no training label at all, and take part and are evaluated as the others.

    Their loss is zero, so they send what they have received, with the weight of no example.

    Args:
        clients: Share of the clients, rounded to the nearest number, in [0, 1]; some must be left.
    """

    def __init__(self, clients: float) -> None:
        super().__init__(clients)

    def why_not(self, task: Task) -> str:
        """It needs labels that are no links."""
        return _not_of_links(task)

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Forget all training labels."""
        return _without_labels(client, client.train_mask_N.nonzero().squeeze(1))


def _not_of_links(task: Task) -> str:
    return "is for labels, which links do not have: lower data.splitter.train instead" if task.shares_nodes else ""


def _without_labels(client: AnyClient, idx_M: Tensor) -> AnyClient:
    """The data with some training examples that have no role and no label."""
    y_N, train_mask_N = client.y_N.clone(), client.train_mask_N.clone()
    y_N[idx_M] = torch.nan if y_N.is_floating_point() else -1
    train_mask_N[idx_M] = False
    return dataclasses.replace(client, y_N=y_N, train_mask_N=train_mask_N)
