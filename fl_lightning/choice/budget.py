"""What a search may take: time of the clock, or work, counted in whole runs, which is the same on every machine."""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from fl_lightning.choice.candidates import WrongChoice
from fl_lightning.choice.halving import FILLED, Cost
from fl_lightning.study.runner import duration

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: What may be needed past the time, as a multiple of it: runs that would take longer are not begun, or stopped.
_OVER = 1.05


class Meter(Protocol):
    """Measures what a search has taken of its budget, in a unit of its own.

    Attributes:
        limit: The budget.
        filled: Share of what is left that a plan may fill.
        over: What may be taken before training is stopped, as a multiple of the budget.
        known: What a run of any method takes, if that is known before one was trained.
    """

    limit: float
    known: Cost | None
    filled: float
    over: float

    @property
    def taken(self) -> float:
        """So far."""
        ...

    @property
    def seconds_left(self) -> float:
        """Of the clock, until runs are stopped."""
        ...

    def begin(self, key: str, expected: float) -> None:
        """A run is begun, which is expected to take so much; those that differ in their length have the same key."""
        ...

    def end(self, key: str, record: Mapping[str, Any]) -> Cost | None:
        """A run has ended, now or in an earlier search; what one of its kind takes, if that is known."""
        ...

    def shared_by(self, processes: int) -> int:
        """By how many processes the budget is used at the same time."""
        ...

    def text(self, amount: float) -> str:
        """An amount in words."""
        ...


class Clock:
    """Time of the clock, in seconds.

    Args:
        limit: The budget.
        before: What earlier starts of the same search took.
        clock: The time in seconds.
    """

    filled, over = FILLED, _OVER
    known: Cost | None = None

    def __init__(self, limit: float, before: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.before, self.clock = limit, before, clock
        self._start = clock()

    @property
    def taken(self) -> float:
        """Since the first start, without the time in between."""
        return self.before + self.clock() - self._start

    @property
    def seconds_left(self) -> float:
        """Until runs are stopped."""
        return self.over * self.limit - self.taken

    def begin(self, key: str, expected: float) -> None:
        """The clock goes on by itself."""

    def end(self, key: str, record: Mapping[str, Any]) -> Cost | None:
        """Seconds before and after the rounds, and of each round."""
        if not (spent := record.get("spent")):
            return None
        rounds = max(1, spent["num_rounds"])
        each = spent["training_seconds"] / rounds
        return Cost(start=max(record["seconds"] - each * (rounds - record.get("resumed", 0)), 0.0), each=each)

    def shared_by(self, processes: int) -> int:
        """All of them."""
        return processes

    def text(self, amount: float) -> str:
        """A time."""
        return duration(max(amount, 0.0))


class Work:
    """Rounds that are trained, of whichever method; those of runs that were there before count, too.

    What a setting has been trained for counts once, even if its state was lost and it was trained again.

    Args:
        runs: The budget in runs of the configuration.
        num_rounds: Of such a run.
    """

    filled, over, seconds_left = 1.0, 1.0, math.inf
    known: Cost | None = Cost(start=0.0, each=1.0)

    def __init__(self, runs: float, num_rounds: int) -> None:
        self.limit, self.num_rounds = runs * num_rounds, num_rounds
        self._rounds: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    @property
    def taken(self) -> float:
        """Rounds that were trained, and those that are being trained."""
        return sum(self._rounds.values()) + sum(self._begun.values())

    def begin(self, key: str, expected: float) -> None:
        """Count the rounds beforehand, so that other processes leave them alone."""
        self._begun[key] = expected

    def end(self, key: str, record: Mapping[str, Any]) -> Cost | None:
        """Count the rounds; every method's cost the same."""
        self._begun.pop(key, None)
        if not (spent := record.get("spent")):
            return None
        self._rounds[key] = max(self._rounds.get(key, 0.0), spent["num_rounds"])
        return self.known

    def shared_by(self, processes: int) -> int:
        """As if by one: rounds at the same time are no fewer."""
        return 1

    def text(self, amount: float) -> str:
        """A number of runs."""
        runs = f"{max(amount, 0.0) / self.num_rounds:.1f}".removesuffix(".0")
        return f"{runs} run{'' if runs == '1' else 's'}"


def amount_of(budget: str | float) -> tuple[float, bool]:
    """A budget such as ``30m`` in seconds, or one such as ``20runs`` in runs, and whether it is in runs.

    Raises:
        WrongChoice: It is none.

    Example:
        >>> amount_of("30m"), amount_of("1.5h"), amount_of(20), amount_of("20runs")
        ((1800.0, False), (5400.0, False), (20.0, False), (20.0, True))
    """
    in_runs, amount = False, 0.0
    if isinstance(budget, int | float):
        amount = float(budget)
    elif found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|runs?)", str(budget).strip()):
        in_runs = found[2].startswith("run")
        amount = float(found[1]) * (1.0 if in_runs else _UNITS[found[2]])
    if not 0 < amount < 1e8:
        raise WrongChoice(
            f"--budget is {budget!r}: give a time with its unit, such as 90s, 30m or 2h, or work, such as 20runs"
        )
    return amount, in_runs


def earlier(records: Iterable[Mapping[str, Any]], asked: str) -> float:
    """Seconds that earlier starts of a search took."""
    return max((each.get("elapsed", 0.0) for each in records if each.get("asked") == asked), default=0.0)
