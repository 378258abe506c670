"""Splits for what training has not seen: nodes that are not in its graph, and classes that a client has no label of.

Clients that training has not seen are those of ``trainer.participation.held_out_fraction``.
"""

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.settings import check_count, check_number
from fl_lightning.data.split import DerivedSplit, Role, Splitter
from fl_lightning.kernels.randomness import generator


class InductiveSplit(DerivedSplit):
    """Another split, whose validation and test nodes are unseen: training has neither them nor their edges.

    Models are scored on the whole graphs of the clients. For nodes; other examples are unseen in training anyway.

    Args:
        splitter: Gives the roles.

    Source: the inductive setting of Hamilton et al., "Inductive Representation Learning on Large Graphs", NeurIPS 2017.
    """

    def __init__(self, splitter: Splitter) -> None:
        super().__init__(splitter)

    @property
    def is_inductive(self) -> bool:
        """Yes."""
        return True

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:
        """The roles of the other split."""
        return self.splitter.assign(data, clients, seed)


class MissingClasses(DerivedSplit):
    """Another split, after which some clients have no training example of some classes, but are tested on all.

    The training examples of these classes become unused. At least one class of a client is left.

    Args:
        splitter: Gives the roles.
        num_classes: Classes that a client misses, drawn among those that it has training examples of.
        clients: Share of the clients, rounded to the nearest number, that miss classes, in [0, 1].
    """

    def __init__(self, splitter: Splitter, num_classes: int = 1, clients: float = 1.0) -> None:
        super().__init__(splitter)
        check_count("num_classes", num_classes)
        check_number("clients", clients, most=1)
        self.num_classes = num_classes
        self.clients = clients

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:
        """The roles of the other split, but for training examples of missing classes.

        Raises:
            ValueError: There are no two classes.
        """
        if len(data.y[data.y >= 0].unique()) < 2:
            raise ValueError(
                f"{type(self).__name__} is for examples of two classes or more, which these are not: leave it out"
            )
        roles = self.splitter.assign(data, clients, seed)
        order = torch.randperm(len(clients), generator=generator(seed, "clients that miss classes")).tolist()
        for client in order[: round(len(clients) * self.clients)]:
            y_N, role_N = data.y[clients[client]], roles[client].clone()
            known = y_N[role_N == Role.TRAIN].unique()
            drawn = known[torch.randperm(len(known), generator=generator(seed, "missing classes", client))]
            missing = drawn[: min(self.num_classes, len(known) - 1)]
            role_N[torch.isin(y_N, missing) & (role_N == Role.TRAIN)] = Role.UNUSED
            roles[client] = role_N
        return roles
