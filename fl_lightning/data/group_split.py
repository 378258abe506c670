"""A split that keeps groups of examples together: what is alike does not train and test."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.columns import number_of_each
from fl_lightning.data.settings import check_flag, check_shares, check_text
from fl_lightning.data.split import Role, Splitter
from fl_lightning.kernels.randomness import generator


class GroupSplit(Splitter):
    """All examples of a group get one role, at all clients: those of a patient, of a sensor, or of a scaffold.

    Whole groups train until ``train`` is reached, then validate, then test; each role gets one at least, if there are
    as many groups as roles. They come in random order, those that are more than half of what validates or of what tests
    before the others.

    Args:
        by: A column of the source's table, such as the ``scaffold`` of molecules, or an attribute of a graph's nodes.
        train: Share of the labeled examples that train, in (0, 1].
        val: Share that validates, in [0, 1]; the rest tests.
        largest_first: Let groups come by their size instead, so that the most unusual ones test, by the rule of
            MoleculeNet; the seed then decides nothing.

    Source: splits by scaffold, 80/10/10, largest first, are the protocol of Wu et al., "MoleculeNet: a benchmark for
    molecular machine learning", Chemical Science, 2018, and of the Open Graph Benchmark; the random order is that of
    Yang et al., "Analyzing Learned Molecular Representations for Property Prediction", J. Chem. Inf. Model., 2019.
    """

    def __init__(self, by: str, train: float = 0.8, val: float = 0.1, largest_first: bool = False) -> None:
        check_text("by", by, "scaffold")
        check_shares(train, val)
        check_flag("largest_first", largest_first)
        self.by = by
        self.train = train
        self.val = val
        self.largest_first = largest_first

    @property
    def remedy_for_untrained_clients(self) -> str:
        """How to give every client something to train on."""
        return f"Raise `train`, use fewer and larger clients, or split by smaller groups than those of {self.by!r}"

    def assign(self, data: Data, clients: list[Tensor], seed: int) -> list[Tensor]:  # noqa: D102
        value_N = number_of_each(data, self.by, "split by")
        held_M = torch.unique(torch.cat(clients))
        held_M = held_M[data.y[held_M] >= 0]
        group_M, size_G = torch.unique(value_N[held_M], return_inverse=True, return_counts=True)[1:]
        shares = {Role.TRAIN: self.train, Role.VAL: self.val, Role.TEST: 1 - self.train - self.val}
        wanted = [role for role, share in shares.items() if share > 1e-9]
        role_G = self._by_size(group_M, size_G, wanted) if self.largest_first else self._drawn(size_G, wanted, seed)
        self._fill_empty(role_G, size_G, wanted)
        role_N = torch.full(value_N.shape, Role.UNUSED, dtype=torch.int8)
        role_N[held_M] = role_G[group_M]
        return [role_N[nodes] for nodes in clients]

    def identity(self) -> dict[str, Any]:
        """As of other splits; what is cached of the largest first was made by another rule before."""
        return {**super().identity(), **({"rule": "MoleculeNet"} if self.largest_first else {})}

    def _by_size(self, group_M: Tensor, size_G: Tensor, wanted: list[Role]) -> Tensor:
        """The role of each group, int8, by the rule of MoleculeNet: of groups of one size the last to begin is first.

        A group validates if it and all that trains and validates so far are at most what is to train and validate.
        """
        total = len(group_M)
        most = {Role.TRAIN: self.train * total, Role.VAL: (self.train + self.val) * total}
        taken = dict.fromkeys(wanted, 0)
        first_G = torch.full_like(size_G, total).scatter_reduce(0, group_M, torch.arange(total), "amin")
        role_G = torch.full(size_G.shape, wanted[-1], dtype=torch.int8)
        for size, _, group in sorted(zip(size_G.tolist(), first_G.tolist(), range(len(size_G)), strict=True))[::-1]:
            used = dict(zip(wanted, accumulate(taken.values()), strict=True))
            role = next((role for role in wanted[:-1] if used[role] + size <= most[role]), wanted[-1])
            role_G[group] = role
            taken[role] += size
        return role_G

    def _drawn(self, size_G: Tensor, wanted: list[Role], seed: int) -> Tensor:
        """The role of each group, int8, in random order."""
        total = int(size_G.sum())
        room = {Role.TRAIN: round(total * self.train), Role.VAL: round(total * (self.train + self.val))}
        room[Role.VAL] -= room[Role.TRAIN]
        room[Role.TEST] = total - sum(room.values())
        role_G = torch.full(size_G.shape, wanted[-1], dtype=torch.int8)
        shuffled = torch.randperm(len(size_G), generator=generator(seed, "group split"))
        is_small = size_G[shuffled] <= min(room[role] for role in wanted) / 2
        for group in torch.cat([shuffled[~is_small], shuffled[is_small]]).tolist():
            size = int(size_G[group])
            role = next((role for role in wanted if size <= room[role]), wanted[-1])
            role_G[group] = role
            room[role] -= size
        return role_G

    def _fill_empty(self, role_G: Tensor, size_G: Tensor, wanted: list[Role]) -> None:
        """Give a role without a group the smallest one of the role that has most groups."""
        if len(role_G) < len(wanted):
            raise ValueError(
                f"by={self.by!r} has {len(role_G)} groups for {len(wanted)} roles, one for each is needed: split by "
                "another, or set train and val so that fewer roles are left"
            )
        for role in wanted:
            if bool((role_G == role).any()):
                continue
            giver = max(wanted, key=lambda each: int((role_G == each).sum()))
            own = (role_G == giver).nonzero().flatten()
            role_G[own[size_G[own].argmin()]] = role
