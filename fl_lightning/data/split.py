"""Splits nodes or examples into training, validation and test.

A splitter gives each node or example one role, so that the three sets cannot overlap. Those without a label (negative)
stay ``Role.UNUSED``.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.counts import Counted
from fl_lightning.data.settings import check_count, check_number, check_shares
from fl_lightning.kernels.randomness import generator


class Role(IntEnum):
    """What a node or example is used for."""

    UNUSED = 0
    TRAIN = 1
    VAL = 2
    TEST = 3


#: What graphs call their public split.
MASKS = ("train_mask", "val_mask", "test_mask")


class Splitter(Counted, ABC):
    """Gives roles to the nodes or examples of every client."""

    def __call__(self, data: Data, clients: list[Tensor], seed: int = 0) -> list[Tensor]:
        """Split a partitioned graph, or the examples of all clients.

        Args:
            data: The prepared graph with labels ``y``, or all clients' labels (of regressions zeros) one after another.
            clients: For each client the indices of its nodes or examples; of examples ascending, in their order.
            seed: Of the draw.

        Returns:
            For each client an int8 tensor with the :class:`Role` of each of its nodes or examples.

        Raises:
            ValueError: If a client has nothing to train on.
        """
        roles = self.assign(data, clients, seed)
        lacking = [client for client, role_N in enumerate(roles) if not bool((role_N == Role.TRAIN).any())]
        if lacking:
            smallest = min(clients[client].numel() for client in lacking)
            unlabeled = [client for client in lacking if not bool((data.y[clients[client]] >= 0).any())]
            raise ValueError(
                f"{type(self).__name__} leaves clients {lacking} without a training example (the smallest "
                f"has {smallest} in all{f'; {unlabeled} have no label' if unlabeled else ''}). "
                f"{self.remedy_for_untrained_clients}."
            )
        self.say_what_is_lacking(roles)
        return roles

    def say_what_is_lacking(self, roles: Sequence[Tensor]) -> None:
        """Warn of clients with nothing to validate or to test on; of roles from the cache, too."""
        for role in (Role.VAL, Role.TEST):
            if lacking := [client for client, role_N in enumerate(roles) if not bool((role_N == role).any())]:
                warnings.warn(
                    f"{type(self).__name__} leaves clients {lacking} without a {role.name.lower()} example; they do "
                    f"not count in the {role.name.lower()} metrics.",
                    stacklevel=3,
                )

    @property
    def remedy_for_untrained_clients(self) -> str:
        """How to give every client something to train on."""
        return "Raise `train`, or use fewer and larger clients"

    @property
    def is_inductive(self) -> bool:
        """Whether validation and test nodes and their edges are hidden from training."""
        return False

    @property
    def link_attributes(self) -> tuple[str, ...]:
        """Attributes of a graph, one of which it goes by where links are split."""
        return ()

    @abstractmethod
    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:
        """Return the roles of each client's nodes or examples."""

    def identity(self) -> dict[str, Any]:
        """Return everything the split depends on besides graph, partition and seed, as JSON-ready values."""
        return {"splitter": type(self).__name__, **vars(self)}


class GlobalSplit(Splitter):
    """One draw over the nodes of the whole graph: a node that several clients hold has the same role in each.

    Args:
        train: Share of the labeled nodes that train, in (0, 1].
        val: Share that validates, in [0, 1]; the rest tests.

    Source: 40/30/30 is the protocol of FedSheafHN.
    """

    def __init__(self, train: float = 0.4, val: float = 0.3) -> None:
        check_shares(train, val)
        self.train = train
        self.val = val

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        role_N = draw_roles(data.y, self.train, self.val, generator(seed, "global split"))
        return [role_N[nodes] for nodes in clients]


class ClientSplit(Splitter):
    """One draw inside each client, which all get the same shares. For disjoint clients.

    Args:
        train: Share of a client's labeled nodes or examples that train, in (0, 1].
        val: Share that validates, in [0, 1]; the rest tests.

    Source: 20/40/40 is the protocol of FedAux (ogbn-arxiv: 5 % train, the rest halved).
    """

    def __init__(self, train: float = 0.2, val: float = 0.4) -> None:
        check_shares(train, val)
        self.train = train
        self.val = val

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        _check_disjoint(self, clients)
        return [
            draw_roles(data.y[nodes], self.train, self.val, generator(seed, "client split", client))
            for client, nodes in enumerate(clients)
        ]


class StratifiedSplit(Splitter):
    """One draw inside each client and each of its classes, so that the three sets have the same shares of classes.

    Counts are rounded to the nearest in each class. Where examples have labels or numbers, it is :class:`ClientSplit`.
    For disjoint clients.

    Args:
        train: Share of a client's labeled examples that train, in (0, 1].
        val: Share that validates, in [0, 1]; the rest tests.

    Source: 80/10/10, stratified, is the protocol of Xie et al., "Federated Graph Classification over Non-IID Graphs"
    (GCFL), NeurIPS 2021, and of FedStar.
    """

    def __init__(self, train: float = 0.8, val: float = 0.1) -> None:
        check_shares(train, val)
        self.train = train
        self.val = val

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        _check_disjoint(self, clients)
        roles = []
        for client, nodes in enumerate(clients):
            y_N = data.y[nodes]
            role_N = torch.zeros(len(nodes), dtype=torch.int8)
            for label in y_N[y_N >= 0].unique().tolist():
                draw = generator(seed, "stratified split", client, label)
                role_N += draw_roles(torch.where(y_N == label, label, -1), self.train, self.val, draw)
            roles.append(role_N)
        return roles


class ChronologicalSplit(Splitter):
    """In each client the first examples train, those after them validate, the last ones test. For disjoint clients.

    The shares are of what is left without the gaps, and go by place: an example without a label takes its place, but
    stays unused.

    Args:
        train: Share that trains, in (0, 1].
        val: Share that validates, in [0, 1]; the rest tests.
        gap: Examples between two roles that stay unused, so that windows which overlap do not leak. Windows of L
            readings that start every s readings need (L - 1) / s, rounded down.

    Source: 70/10/20 is the protocol of Li et al., "Diffusion Convolutional Recurrent Neural Network", ICLR 2018.
    """

    def __init__(self, train: float = 0.7, val: float = 0.1, gap: int = 0) -> None:
        check_shares(train, val)
        check_count("gap", gap, least=0)
        self.train = train
        self.val = val
        self.gap = gap

    @property
    def link_attributes(self) -> tuple[str, ...]:
        """Their times."""
        return ("edge_time",)

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        _check_disjoint(self, clients)
        return [self._roles(data.y[idx_N], client) for client, idx_N in enumerate(clients)]

    def _roles(self, y_N: Tensor, client: int) -> Tensor:
        shares = {Role.TRAIN: self.train, Role.VAL: self.val, Role.TEST: 1 - self.train - self.val}
        present = [role for role, share in shares.items() if share > 1e-9]
        num_used = y_N.numel() - self.gap * (len(present) - 1)
        if num_used <= 0:
            raise ValueError(
                f"gap={self.gap} is too large: client {client} has {y_N.numel()} examples, too few for "
                f"{len(present) - 1} gaps."
            )
        role_N = torch.full(y_N.shape, Role.UNUSED, dtype=torch.int8)
        taken, share = 0, 0.0
        for number, role in enumerate(present):
            share += shares[role]
            end = round(num_used * share)
            role_N[taken + number * self.gap : end + number * self.gap] = role
            taken = end
        role_N[y_N < 0] = Role.UNUSED
        return role_N


class DerivedSplit(Splitter):
    """Another split that is changed.

    Args:
        splitter: The other one.
    """

    def __init__(self, splitter: Splitter) -> None:
        if not isinstance(splitter, Splitter):
            raise ValueError(f"splitter={splitter!r} is not a splitter: give one such as ClientSplit().")
        self.splitter = splitter

    def identity(self) -> dict[str, Any]:
        """Includes the other split's identity."""
        return {**super().identity(), "splitter": type(self).__name__, "of": self.splitter.identity()}

    @property
    def is_inductive(self) -> bool:
        """As the other split is."""
        return self.splitter.is_inductive

    @property
    def link_attributes(self) -> tuple[str, ...]:
        """Those of the other split."""
        return self.splitter.link_attributes

    @property
    def remedy_for_untrained_clients(self) -> str:
        """The other split's remedy."""
        return self.splitter.remedy_for_untrained_clients


class ScarceSplit(DerivedSplit):
    """Another split, after which a random part of the clients keep only few of their nodes or examples.

    Of each role of such a client a random share stays, at least one example; the others become unused.

    Args:
        splitter: Gives the roles.
        clients: Share of the clients, rounded to the nearest number, whose data are reduced, in [0, 1].
        keep: Share of their examples that they keep, in (0, 1].

    Source: half of the clients without 80 % of their data is the protocol of Dinh et al., "A New Look and Convergence
    Rate of Federated Multi-Task Learning with Laplacian Regularization" (dFedU), 2022, and of Sheaf-FMTL, section 4.
    """

    def __init__(self, splitter: Splitter, clients: float = 0.5, keep: float = 0.2) -> None:
        super().__init__(splitter)
        check_number("clients", clients, most=1)
        check_number("keep", keep, most=1, above_0=True)
        self.clients = clients
        self.keep = keep

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        roles = self.splitter.assign(data, clients, seed)
        order = torch.randperm(len(clients), generator=generator(seed, "scarce clients")).tolist()
        for client in order[: round(len(clients) * self.clients)]:
            roles[client] = self._reduced(roles[client], generator(seed, "scarce split", client))
        return roles

    def _reduced(self, role_N: Tensor, draw: torch.Generator) -> Tensor:
        kept_N = torch.full_like(role_N, Role.UNUSED)
        for role in (Role.TRAIN, Role.VAL, Role.TEST):
            idx = (role_N == role).nonzero().squeeze(1)
            order = torch.randperm(idx.numel(), generator=draw)
            kept_N[idx[order[: max(1, round(idx.numel() * self.keep))]]] = role
        return kept_N


class GivenSplit(Splitter):
    """The split that comes with the data.

    It is the ``train_mask``, ``val_mask`` and ``test_mask`` of a graph, e.g. ogbn-arxiv's split by year, or what comes
    with sets of graphs and with rows of tables (``{"train": ..., "test": ...}``).

    Args:
        column: Which split to use where a data set has several (masks of shape (num_nodes, splits)).
        val: Share of a client's training examples that validates instead, drawn with the seed, if it has nothing to
            validate on; at most 0.9.
    """

    def __init__(self, column: int = 0, val: float = 0.0) -> None:
        check_count("column", column, least=0)
        check_number("val", val, most=0.9)
        self.column = column
        self.val = val

    @property
    def link_attributes(self) -> tuple[str, ...]:
        """The links themselves."""
        return ("val_edge_index", "test_edge_index")

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        role_N = torch.zeros(data.num_nodes, dtype=torch.int8)
        for role, name in zip((Role.TRAIN, Role.VAL, Role.TEST), MASKS, strict=True):
            mask_N = data.get(name)
            may_lack = self.val or (data.get("examples") and data.get(MASKS[0]) is not None)
            if mask_N is None and role is Role.VAL and may_lack:
                continue
            if mask_N is None:
                raise ValueError(self._lacking(data, name))
            if mask_N.dim() == 2:
                if not 0 <= self.column < mask_N.shape[1]:
                    raise ValueError(
                        f"column={self.column}: the graph has splits 0 to {mask_N.shape[1] - 1} only; use one of these."
                    )
                mask_N = mask_N[:, self.column]
            chosen_N = mask_N.bool() & (data.y >= 0)
            if bool((role_N[chosen_N] != Role.UNUSED).any()):
                raise ValueError(f"GivenSplit: the graph's {name} overlaps another mask; every node may have one role.")
            role_N[chosen_N] = role
        if self.val:
            self._draw_validation(role_N, clients, seed)
        return [role_N[nodes] for nodes in clients]

    def _lacking(self, data: Data, name: str) -> str:
        """What to do where no split is given."""
        if (examples := data.get("examples")) is None:
            hint = ", or GivenSplit's val to draw it from what trains" if name == MASKS[1] else ""
            return (
                f"GivenSplit needs the graph's {name}, which it lacks (a value for each node); use GlobalSplit or "
                f"ClientSplit{hint}."
            )
        return (
            f"GivenSplit needs {examples} that come with a split at all clients, as {{'train': ..., 'val': ..., "
            f"'test': ...}}, or as columns {', '.join(MASKS)} of a file; use ClientSplit to draw one."
        )

    def _draw_validation(self, role_N: Tensor, clients: list[Tensor], seed: int) -> None:
        """Let some of what trains validate at clients without that; a node of several clients has one role."""
        had_N = role_N == Role.VAL
        draw = generator(seed, "given split")
        drawn_N = torch.zeros_like(role_N, dtype=torch.bool)
        for nodes in clients:
            if bool(had_N[nodes].any()):
                continue
            idx = nodes[(role_N[nodes] == Role.TRAIN) & ~drawn_N[nodes]]
            drawn_N[idx] = True
            role_N[idx[torch.randperm(len(idx), generator=draw)[: round(self.val * len(idx))]]] = Role.VAL

    def identity(self) -> dict[str, Any]:
        """As of other splits; what was not drawn is as it was before something could be."""
        result = super().identity()
        return result if self.val else {name: value for name, value in result.items() if name != "val"}

    @property
    def remedy_for_untrained_clients(self) -> str:
        """The remedy for given masks."""
        return (
            "Let some of what they have train (train_mask, 'train'), use fewer and larger clients, or draw the split "
            "by GlobalSplit or ClientSplit"
        )


def _check_disjoint(splitter: Splitter, clients: list[Tensor]) -> None:
    if int(torch.bincount(torch.cat(clients)).max()) > 1:
        raise ValueError(
            f"{type(splitter).__name__} splits inside each client, and these clients overlap: a node would train in "
            "one and test in another. Use GlobalSplit."
        )


def draw_roles(y_N: Tensor, train: float, val: float, draw: torch.Generator) -> Tensor:
    """Give roles to a random permutation of the labeled nodes, counts rounded to the nearest."""
    labeled = (y_N >= 0).nonzero().squeeze(1)
    order = labeled[torch.randperm(labeled.numel(), generator=draw)]
    num_train = round(labeled.numel() * train)
    num_val = round(labeled.numel() * (train + val)) - num_train
    role_N = torch.full(y_N.shape, Role.UNUSED, dtype=torch.int8)
    role_N[order] = Role.TEST
    role_N[order[:num_train]] = Role.TRAIN
    role_N[order[num_train : num_train + num_val]] = Role.VAL
    return role_N
