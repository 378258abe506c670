"""Filters of what leaves a site: they act on parameters and client outputs alike, as changes of what the server knows.

A change is a parameter less the value that the server sent (or, where it sent none, less the common initial value), an
update or a client output as it is. Filters work on all numbers of a response together.
"""

import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.counts import Counted
from fl_lightning.extras import require
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.round.payload import Payload

#: The least length, noise multiplier and ε of settings: the account would overflow far below it.
LEAST = 1e-9
#: Changes are clipped at this before their norm is computed, in which the squares of larger ones would overflow.
_LARGEST = 1e150


class CannotFilter(ValueError):
    """A response is of a kind that a filter cannot work on."""


class SiteFilter(Counted, ABC):
    """Changes a response before it leaves its site."""

    #: Whether the number of training examples is hidden too; every client then counts as one.
    hides_counts = False

    def open(self, folder: Path) -> None:
        """Called with the folder of the site's account, one for all runs, before the first response."""

    def pay(self, summed_with: int) -> None:
        """Called before a stage touches the data: what the next response costs is counted, whatever comes of the stage.

        Raises:
            CannotFilter: The response could not leave.
        """

    @abstractmethod
    def change(self, numbers_D: Tensor, summed_with: int) -> Tensor:
        """What becomes of all changes of a response, one vector (D,) in float64.

        Args:
            numbers_D: The changes.
            summed_with: Clients over which a response is summed at the least before anybody sees it; 1 without
                secure aggregation.
        """

    def __call__(self, response: Payload, known: Mapping[str, Tensor], *, summed_with: int = 1) -> Payload:
        """Filter one client's response.

        Args:
            response: As the stage asks for it.
            known: What the server knows of the parameters that are communicated as they are, (1, *shape).
            summed_with: Clients over which it is summed at the least before anybody sees it.

        Raises:
            CannotFilter: Some of it has no place on a line of numbers.
        """
        self.check(response)
        tensors = response.tensors()
        if not tensors:
            return self._counted(response)
        start = {name: known[name].double() if name in known else 0.0 for name in tensors}
        moves = {name: tensor.double() - start[name] for name, tensor in tensors.items()}
        changed = self.change(torch.cat([move.flatten() for move in moves.values()]), summed_with)
        parts = torch.split(changed, [move.numel() for move in moves.values()])
        new = {
            name: (part.view_as(moves[name]) + start[name]).to(tensors[name])
            for (name, part) in zip(moves, parts, strict=True)
        }
        return self._counted(
            dataclasses.replace(
                response,
                parameters={name: new[name] for name in response.parameters},
                extras={name: new[name] for name in response.extras},
            )
        )

    def check(self, response: Payload) -> None:
        """Refuse a response that the filter cannot work on, by its names, types and lengths.

        Raises:
            CannotFilter: Some of it has no place on a line of numbers, or a row for each example that is to be hidden.
        """
        tensors = response.tensors()
        if whole := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
            raise CannotFilter(f"{type(self).__name__} is for real numbers, but {', '.join(whole)} are whole")
        if self.hides_counts and response.lengths:
            raise CannotFilter(
                f"{type(self).__name__} hides how many examples there are, but "
                f"{', '.join(response.lengths)} have a row "
                "for each"
            )

    def _counted(self, response: Payload) -> Payload:
        if not self.hides_counts or response.num_examples is None:
            return response
        return dataclasses.replace(response, num_examples=torch.ones_like(response.num_examples))


class GaussianNoise(SiteFilter):
    """Differential privacy of a client's round: the change is shortened to ``clip_norm``, and normal noise is added.

    Two responses of a client, whatever it holds, are at most 2 S apart after clipping to S, so noise with standard
    deviation z 2 S in every coordinate makes each response (ε, δ)-private at noise multiplier z, and
    ``privacy.json`` in the folder of the site's account has the ε of all responses so far, over all runs. The noise is
    drawn from the system's entropy, not from the run's seed, which the server knows.

    Under secure aggregation the noise may be ``distributed``: each of the at least t clients whose responses are summed
    adds a normal number of variance (z 2 S)^2 / t, so that every sum that can be read has the noise of multiplier z
    (Dwork, Kenthapadi, McSherry, Mironov, Naor, EUROCRYPT 2006). ε then holds against the server, and against k clients
    that conspire with it at multiplier z ((t - k) / t)^1/2. Rounding to 2^-24 afterward is small beside the noise.

    A stage that fails is responded to as if nothing had changed, with the same noise, and counted like any other.

    What ε does not speak of: metrics of evaluations, which such a site keeps to itself unless its policy says otherwise
    (``metrics``, ``metric_noise``), and the low bits of floating-point noise (Mironov,
    CCS 2012).

    Args:
        clip_norm: S, the largest Euclidean norm of a response, positive.
        noise_multiplier: z, positive.
        delta: δ, in (0, 1).
        max_epsilon: The ε that the site's account must not exceed; None for no bound.
        distributed: Share the noise with the others of a secure sum; a response that is in none is refused.

    Raises:
        ValueError: A value is out of its range.
    """

    hides_counts = True

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        distributed: bool = False,
    ) -> None:
        bounds = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier, "max_epsilon": max_epsilon}
        for name, value in bounds.items():
            if value is not None and not LEAST <= value < math.inf:
                raise ValueError(f"GaussianNoise.{name} must be a finite number of at least {LEAST:g}, got {value}")
        if not 0 < delta < 1:
            raise ValueError(f"GaussianNoise.delta must be in (0, 1), got {delta}")
        require("privacy", "GaussianNoise")
        self.clip_norm = clip_norm
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.max_epsilon = max_epsilon
        self.distributed = distributed
        self.accountant: PrivacyAccountant | None = None
        self._is_paid = False

    def open(self, folder: Path) -> None:
        """Open the account in the site's folder."""
        self.accountant = PrivacyAccountant(folder, delta=self.delta)

    def pay(self, summed_with: int) -> None:
        """Count the next response in the account.

        Raises:
            CannotFilter: The budget is spent, or distributed noise has no other site to be shared with.
        """
        assert self.accountant is not None, "a filter is opened before it is used"
        if self.distributed and summed_with < 2:
            raise CannotFilter("GaussianNoise.distributed is for secure aggregation, but this response is in no sum")
        try:
            self.accountant.spend(self.noise_multiplier, self.max_epsilon)
        except BudgetSpent as error:
            raise CannotFilter(str(error)) from error
        self._is_paid = True

    def change(self, numbers_D: Tensor, summed_with: int) -> Tensor:
        """Clip the response and add noise; if it was not paid for, count it in the account first.

        A change that is not a number counts as 0: the server sends parameters of its own choice, from which a change
        may overflow, and a result that is not finite would say so without noise.

        Raises:
            CannotFilter: As in :meth:`pay`.
        """
        if not self._is_paid:
            self.pay(summed_with)
        self._is_paid = False
        finite_D = numbers_D.double().nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)
        clipped_D = finite_D * (self.clip_norm / finite_D.norm().clamp(min=1e-300)).clamp(max=1.0)
        deviation = self.noise_multiplier * 2 * self.clip_norm
        if self.distributed:
            deviation /= math.sqrt(summed_with)
        noisy_D: Tensor = clipped_D + deviation * normal_numbers(len(numbers_D))
        return noisy_D


def normal_numbers(count: int) -> Tensor:
    """Standard normal numbers from the system's entropy, float64 (count,)."""
    drawn = np.random.default_rng(int.from_bytes(os.urandom(32), "little")).standard_normal(count)
    return torch.from_numpy(drawn)


class TopK(SiteFilter):
    """Only the largest changes leave; all others are zero. Less is revealed, but without a privacy guarantee.

    Args:
        fraction: Share of the numbers that leave, in (0, 1]; at least one.

    Raises:
        ValueError: It is out of its range.
    """

    def __init__(self, *, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"TopK.fraction must be in (0, 1], got {fraction}")
        self.fraction = fraction

    def change(self, numbers_D: Tensor, summed_with: int) -> Tensor:
        """Keep the largest by absolute value."""
        count = max(1, round(self.fraction * len(numbers_D)))
        indices = numbers_D.abs().topk(count).indices
        kept_D = torch.zeros_like(numbers_D)
        kept_D[indices] = numbers_D[indices]
        return kept_D


class Percentile(SiteFilter):
    """Changes below a percentile become zero, and the others are clipped at a limit.

    Shokri, Shmatikov: "Privacy-Preserving Deep Learning", CCS 2015. Less is revealed, but without a privacy guarantee.

    Args:
        percentile: Of the absolute changes, in [0, 100).
        limit: Largest absolute change; None for no limit.

    Raises:
        ValueError: A value is out of its range.
    """

    def __init__(self, *, percentile: float = 10.0, limit: float | None = 0.01) -> None:
        if not 0 <= percentile < 100:
            raise ValueError(f"Percentile.percentile must be in [0, 100), got {percentile}")
        if limit is not None and not limit > 0:
            raise ValueError(f"Percentile.limit must be positive, or null for none, got {limit}")
        self.percentile = percentile
        self.limit = limit

    def change(self, numbers_D: Tensor, summed_with: int) -> Tensor:
        """Set small changes to zero and clip large ones."""
        size_D = numbers_D.abs()
        rank = max(1, round(self.percentile / 100 * len(size_D)))  # torch.quantile takes 2**24 numbers at most
        least = size_D.kthvalue(rank).values if self.percentile else size_D.new_zeros(())
        kept_D = torch.where(size_D >= least, numbers_D, 0.0)
        return kept_D if self.limit is None else kept_D.clamp(-self.limit, self.limit)
