"""Successive halving: how many settings a budget is enough for, which of them go on, and what is said of the others.

All settings are trained for a ninth of the rounds, the better ones for a third, and the best of these to the end
(Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016, with a
third in place of a half where time is short). After the first rung every method keeps at least its best setting, since
methods differ in how soon they are good more than settings of one method do.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

#: Rounds of a rung beside those of the one before.
_STEP = 3
#: Fewer seeds have no interval that says anything; more are not needed.
FEWEST_SEEDS, MOST_SEEDS = 3, 10
#: Settings that a method tries at most, and methods that are trained with new seeds beside those that always are.
MOST_POINTS, MOST_FINALISTS = 6, 3
#: Share of the time left that a plan may fill: what it does not know of takes the rest.
FILLED = 0.9
#: What sums of numbers of rounds may be off by.
_ROUNDING = 1e-6
#: Settings of a method, one of how many goes on, and methods beside those that always do, of the smallest plan.
_SMALLEST = (1, 9, 1)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A setting of a method.

    Attributes:
        method: Name of the method.
        label: Of the setting; empty if there is nothing to set.
    """

    method: str
    label: str

    def __str__(self) -> str:
        return f"{self.method} ({self.label})" if self.label else self.method


@dataclass(kw_only=True)
class Cost:
    """What a method has been seen to take, in seconds of one process.

    Attributes:
        start: Before and after the rounds: data, nets, tests.
        each: A round.
    """

    start: float
    each: float

    def of(self, num_rounds: int) -> float:
        """Of so many rounds in one go."""
        return self.start + self.each * num_rounds


def lengths(num_rounds: int, evaluate_every: int) -> list[int]:
    """After how many rounds settings are compared: two (of each method's first one, to see the cost), a ninth, ..."""
    planned = [2 * evaluate_every, num_rounds / _STEP**2, num_rounds / _STEP, num_rounds]
    whole = [min(num_rounds, evaluate_every * math.ceil(each / evaluate_every)) for each in planned]
    result = list(dict.fromkeys(whole[1:]))
    return [min(whole[0], result[0]), *result]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done within a budget.

    Attributes:
        points: Settings that each method tries at most.
        share: One of so many settings goes on.
        finalists: Methods that are trained with new seeds beside those that always are.
        seconds: Expected time of the search and of the fewest seeds, of all processes together (rounds, if the budget
            is in runs).
    """

    points: int
    share: int
    finalists: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans a search.

    Attributes:
        costs: Of each method.
        sizes: How many settings each has.
        rungs: After how many rounds settings are compared, the first of them being that of the costs.
        processes: Worker processes.
        beside: Methods that go on to the end whatever comes.
        references: Methods of which the best setting goes on, and no other; they do not count.
        seeds: Of the finalists, at least.
        filled: Share of the budget that a plan may fill.
    """

    costs: Mapping[str, Cost]
    sizes: Mapping[str, int]
    rungs: Sequence[int]
    processes: int
    beside: Collection[str] = field(default=())
    references: Collection[str] = field(default=())
    seeds: int = FEWEST_SEEDS
    filled: float = FILLED

    def plan(self, seconds: float) -> Plan | None:
        """The largest plan that fits into so many seconds of the clock (or rounds); None if none does."""
        most = min(MOST_POINTS, max(self.sizes.values()))
        smaller = [(points, 3, 2) for points in range(most, 0, -1)]
        for points, share, finalists in [(most, 2, MOST_FINALISTS), *smaller, (1, 3, 1), _SMALLEST]:
            needed = self.needed(points, share, finalists)
            if needed <= self.filled * seconds + _ROUNDING:
                return Plan(points=points, share=share, finalists=finalists, seconds=needed)
        return None

    def needed(
        self,
        points: int = _SMALLEST[0],
        share: int = _SMALLEST[1],
        finalists: int = _SMALLEST[2],
        num_rounds: int | None = None,
    ) -> float:
        """Seconds of the clock for a search and the fewest seeds, with another number of rounds if one is given."""
        rungs = list(self.rungs)
        if num_rounds is not None:
            rungs = [rungs[0], *lengths(num_rounds, 1)[1:]]
        total, longest = 0.0, []
        numbers: dict[str, float] = {name: min(points, size) for name, size in self.sizes.items()}
        before = 0
        for index, length in enumerate(rungs[1:]):
            at = {name: cost.start + cost.each * (length - before) for name, cost in self.costs.items()}
            total += sum(numbers[name] * at[name] for name in numbers)
            longest.append(max(at.values()))
            numbers = self._left(numbers, share, finalists, is_first=index == 0)
            before = length
        total += self.seeds * self.seed(finalists, rungs[-1])
        longest.append(max(cost.of(rungs[-1]) for cost in self.costs.values()))
        slack = sum(longest) * (self.processes - 1) / self.processes  # the others wait for the last one of each rung
        return total / self.processes + slack

    def _left(self, numbers: Mapping[str, float], share: int, finalists: int, *, is_first: bool) -> dict[str, float]:
        """How many settings of each method are expected to go on: which ones is not known, so of each its share."""
        rivals = [name for name in numbers if name not in self.references]
        goes_on = math.ceil(sum(numbers[name] for name in rivals) / share)
        result = {name: 1.0 for name in numbers if name in self.beside or name in self.references or is_first}
        others = [name for name in rivals if name not in self.beside]
        certain = len(rivals) - len(others)
        fewest = len(others) if is_first else min(finalists, len(others))
        return result | dict.fromkeys(others, max(goes_on - certain, fewest) / max(1, len(others)))

    def seed(self, finalists: int, num_rounds: int) -> float:
        """Seconds of one process for a seed of all finalists, of which it is not known yet which they are."""
        whole = {name: cost.of(num_rounds) for name, cost in self.costs.items()}
        others = [seconds for name, seconds in whole.items() if name not in self.beside]
        upper = 0.5 * (statistics.fmean(others) + max(others)) if others else 0.0
        return sum(whole[name] for name in self.beside if name in whole) + min(finalists, len(others)) * upper


def survivors(
    scores: Mapping[Arm, float],
    *,
    share: int,
    references: Collection[str],
    beside: Collection[str],
    keep_methods: bool,
    finalists: int,
) -> list[Arm]:
    """The settings that go on, the best first.

    Args:
        scores: Validation metric of each, more being better; not finite where it failed.
        share: One of so many goes on.
        references: Methods of which the best setting goes on, and no other; they do not count.
        beside: Methods of which the best setting goes on in any case.
        keep_methods: Whether that is so of every method.
        finalists: So many other methods go on at least.
    """
    ranked = sorted((arm for arm, score in scores.items() if math.isfinite(score)), key=lambda arm: -scores[arm])
    best: dict[str, Arm] = {}
    for arm in ranked:
        best.setdefault(arm.method, arm)
    others = [name for name in best if name not in beside][:finalists]
    chosen = {arm for name, arm in best.items() if keep_methods or name in beside or name in others}
    rivals = [arm for arm in ranked if arm.method not in references]
    number = math.ceil(sum(arm.method not in references for arm in scores) / share)
    for arm in rivals:
        if sum(each.method not in references for each in chosen) >= number:
            break
        chosen.add(arm)
    return [arm for arm in ranked if arm in chosen]
