"""Random draws of clients: with equal chances, or with chances in proportion to weights.

Shape legend: N clients, K of them that are drawn.
"""

from functools import cached_property

import torch
from torch import Tensor

#: From so many clients on, those of a round are drawn without a permutation of all.
MANY_CLIENTS = 100_000
#: How often a draw without a permutation is repeated until all drawn clients are different.
MOST_TRIES = 100


def some_of(number: int, wanted: int, rng: torch.Generator) -> list[int]:
    """Different indices below a number, drawn uniformly; of very many, without going through all of them.

    Args:
        number: How many there are.
        wanted: How many are drawn.
        rng: Of the draw.
    """
    if number < MANY_CLIENTS or 10 * wanted > number:
        order: list[int] = torch.randperm(number, generator=rng)[:wanted].tolist()
        return order
    chosen: dict[int, None] = {}
    while len(chosen) < wanted:
        chosen |= dict.fromkeys(torch.randint(number, (wanted,), generator=rng).tolist())
    return list(chosen)[:wanted]


def chances(weight_N: Tensor, wanted: int) -> Tensor:
    """The probability that each client is drawn, (N,): in proportion to its weight, at most 1; the sum is ``wanted``.

    A client whose proportion would be above 1 is certain, and the others share the rest. Clients of weight 0 are never
    drawn; if no more than ``wanted`` have another, all of these are certain.

    Args:
        weight_N: Weights, float64, not negative.
        wanted: K.

    Example:
        >>> chances(torch.tensor([1.0, 1.0, 2.0, 0.0]), 1)
        tensor([0.2500, 0.2500, 0.5000, 0.0000])
        >>> chances(torch.tensor([1.0, 1.0, 4.0, 0.0]), 2)
        tensor([0.5000, 0.5000, 1.0000, 0.0000])
    """
    certain_N = torch.zeros_like(weight_N, dtype=torch.bool)
    if int((weight_N > 0).sum()) <= wanted:
        return (weight_N > 0).to(weight_N)
    while True:
        rest_N = weight_N.masked_fill(certain_N, 0.0)
        chance_N = torch.where(certain_N, 1.0, (wanted - int(certain_N.sum())) * rest_N / rest_N.sum())
        above_N = (chance_N >= 1) & ~certain_N
        if not bool(above_N.any()):
            return chance_N
        certain_N |= above_N


class WeightedDraw:
    """Draws different indices, each with the probability that :func:`chances` says, exactly.

    Of few clients by systematic sampling in random order (Hartley, Rao: "Sampling with unequal probabilities and
    without replacement", Annals of Mathematical Statistics, 1962), of very many without a permutation of all by
    rejection (Sampford: "On sampling without replacement with unequal probabilities of selection", Biometrika, 1967).

    Args:
        weight_N: Weights, float64, not negative.
        wanted: K.
    """

    def __init__(self, weight_N: Tensor, wanted: int) -> None:
        chance_N = chances(weight_N, wanted)
        self.certain: list[int] = (chance_N >= 1).nonzero().flatten().tolist()
        self.chance_N = chance_N.masked_fill(chance_N >= 1, 0.0)
        self.wanted = round(float(self.chance_N.sum()))

    def __call__(self, rng: torch.Generator) -> list[int]:
        """The indices; fewer than K if there are not as many of positive weight."""
        if not self.wanted:
            return self.certain
        number = len(self.chance_N)
        if number >= MANY_CLIENTS and 10 * self.wanted <= number and (drawn := self._rejected(rng)):
            return self.certain + drawn
        order_N = torch.randperm(number, generator=rng)
        point_K = torch.rand((), dtype=torch.float64, generator=rng) + torch.arange(self.wanted)
        return self.certain + order_N[_at(self.chance_N[order_N].cumsum(0), point_K)].tolist()

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Sums of p and of p / (1 - K p) up to each client, for Sampford's draw."""
        return self.chance_N.cumsum(0), (self.chance_N / (1 - self.chance_N)).cumsum(0)

    def _rejected(self, rng: torch.Generator) -> list[int]:
        """One drawn by p, the others by p / (1 - K p), repeated until all differ; empty after too many tries."""
        first_N, other_N = self._ends
        for _ in range(MOST_TRIES):
            draw_K = torch.rand(self.wanted, dtype=torch.float64, generator=rng)
            parts = [_at(first_N, draw_K[:1] * first_N[-1]), _at(other_N, draw_K[1:] * other_N[-1])]
            drawn: list[int] = torch.cat(parts).tolist()
            if len(set(drawn)) == self.wanted:
                return drawn
        return []


def _at(end_N: Tensor, point_K: Tensor) -> Tensor:
    """In which of consecutive intervals, given by their ends, points lie."""
    last = torch.searchsorted(end_N, end_N[-1])  # not behind it, where intervals are empty
    return torch.searchsorted(end_N, point_K, right=True).clamp(max=last)
