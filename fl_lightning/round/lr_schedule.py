"""Learning rates that change from round to round, by a scheduler of PyTorch.

A scheduler counts steps, but clients take part in different rounds and take different numbers of steps. So the
settings of a client's optimizer are a function of the round alone: what the scheduler has made of them after one step
a round. An absent client misses nothing, and a resumed run needs no state. Outside the rounds, where clients join later
or copies are tuned for an evaluation, the optimizer has the settings that it was given.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

LRSchedulerFactory = Callable[[Optimizer], LRScheduler]
#: What is set in each group of an optimizer's parameters, by name.
GroupSettings = Sequence[Mapping[str, Any]]

#: What schedulers change: some cycle the momentum, too.
_SCHEDULED = ("lr", "momentum", "betas")


class LRSchedule:
    """What is set in a client's optimizer in every round.

    Args:
        factory: Builds the scheduler from an optimizer; None if all rounds are alike.
        build_optimizer: Builds an optimizer with the groups of a client's.

    Raises:
        ValueError: The scheduler cannot be built, or its rates depend on a metric.

    Example:
        >>> import functools
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> schedule = LRSchedule(functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), lambda: sgd)
        >>> [schedule.at(round_idx)[0]["lr"] for round_idx in (0, 2, 1, None)]
        [0.5, 0.125, 0.25, 0.5]
    """

    def __init__(self, factory: LRSchedulerFactory | None, build_optimizer: Callable[[], Optimizer]) -> None:
        self._rounds: list[GroupSettings] = []
        self._unscheduled: GroupSettings = []
        if factory is None:
            return
        self._optimizer = _Groups(build_optimizer())
        self._unscheduled = self._settings()
        try:
            self._scheduler = factory(self._optimizer)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"model.lr_scheduler: {_why(error)}") from error
        if isinstance(self._scheduler, ReduceLROnPlateau) or not isinstance(self._scheduler, LRScheduler):
            raise ValueError(
                f"model.lr_scheduler is a {type(self._scheduler).__name__}, but a client's learning rate must follow "
                "from the round: give a scheduler of torch.optim.lr_scheduler other than ReduceLROnPlateau"
            )
        self._rounds.append(self._settings())

    def at(self, round_idx: int | None) -> GroupSettings:
        """The settings in a round, or without schedule outside the rounds; empty if they are always the same.

        Raises:
            ValueError: The scheduler ends before that round, or fails.
        """
        if round_idx is None or not self._rounds:
            return self._unscheduled
        while len(self._rounds) <= round_idx:
            self._optimizer.step()
            try:
                self._scheduler.step()
            except TypeError as error:
                raise ValueError(f"model.lr_scheduler, in round {len(self._rounds)}: {_why(error)}") from error
            except ValueError as error:
                length = len(self._rounds)
                raise ValueError(
                    f"model.lr_scheduler ends after {length} rounds, and trainer.num_rounds is {round_idx + 1} "
                    f"({error}): have it last longer, or set trainer.num_rounds to {length}"
                ) from error
            self._rounds.append(self._settings())
        return self._rounds[round_idx]

    def _settings(self) -> GroupSettings:
        groups = self._optimizer.param_groups
        return [{name: _own(group[name]) for name in _SCHEDULED if name in group} for group in groups]


def set_groups(optimizer: Optimizer, settings: GroupSettings) -> None:
    """Give each group of an optimizer its settings, if there are any."""
    if settings:
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)


def _why(error: Exception) -> str:
    """What a scheduler says, and where its arithmetic fails, what is likely."""
    return f"{error} (a function must return a number)" if "operand" in str(error) else str(error)


def _own(value: Any) -> Any:
    """A setting; a copy of a tensor, which a scheduler changes in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Groups(Optimizer):
    """The groups of an optimizer, each with one number as its parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = [{name: _own(value) for name, value in group.items()} for group in optimizer.param_groups]
        groups = [{**group, "params": [torch.zeros(1)]} for group in own]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> Any:
        """Do nothing; a scheduler expects it before its own step."""
