"""Ranges of a grid, such as ``0.001..0.1``, from which Optuna draws the settings that a method tries.

The draws are Sobol's sequence, which covers a range evenly with few points, and the same for every method (Akiba et
al., "Optuna: A Next-generation Hyperparameter Optimization Framework", KDD 2019).
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fl_lightning.extras import require
from fl_lightning.study.edge import Point, label_of, points_of
from fl_lightning.study.schema import Axis, Settings

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}")
#: From this ratio of its ends on a range of positive numbers is drawn from in logarithms.
_WIDE = 10.0


@dataclass(frozen=True)
class Range:
    """The numbers from one to another, both included.

    Attributes:
        low: The lowest.
        high: The highest; if both are whole numbers, only whole numbers are drawn.
    """

    low: float
    high: float

    @classmethod
    def of(cls, setting: str, values: Sequence[Any]) -> "Range | None":
        """The range that is the only value of a setting; None if there are other values.

        Raises:
            ValueError: There is a range beside other values, or one that ends where it begins.

        Example:
            >>> Range.of("model.optimizer.lr", ["0.001..0.1"])
            Range(low=0.001, high=0.1)
        """
        matches = [_RANGE.fullmatch(each) for each in values if isinstance(each, str)]
        found = [match for match in matches if match is not None]
        if not found:
            return None
        if len(values) > 1:
            raise ValueError(f"--grid {setting}: the range {found[0][0]} stands alone, without other values")
        low, high = (float(text) if set(text) & set(".eE") else int(text) for text in found[0].groups())
        if not low < high:
            raise ValueError(f"--grid {setting}={found[0][0]}: give the lower end first")
        return cls(low, high)

    def distribution(self) -> Any:
        """As Optuna has it."""
        from optuna.distributions import FloatDistribution, IntDistribution

        log = self.low > 0 and self.high >= _WIDE * self.low
        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=log)
        return FloatDistribution(self.low, self.high, log=log)


def drawn(axes: Mapping[str, Axis | Range], count: int, seed: int) -> list[Point]:
    """Different points of some axes, of which at least one is a range; numbers are rounded to three digits.

    Args:
        axes: By name.
        count: So many are drawn.
        seed: Of the draws.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    require("choose", "a range in --grid")
    import optuna

    lists = {name: list(points_of(name, axis)) for name, axis in axes.items() if not isinstance(axis, Range)}
    distributions = {
        name: axis.distribution()
        if isinstance(axis, Range)
        else optuna.distributions.CategoricalDistribution(range(len(lists[name])))
        for name, axis in axes.items()
    }
    result: dict[str, Settings] = {}
    with _quiet():
        sampler = optuna.samplers.QMCSampler(
            seed=seed, warn_asynchronous_seeding=False, warn_independent_sampling=False
        )
        study = optuna.create_study(sampler=sampler)
        for _ in range(count):
            trial = study.ask(distributions)
            study.tell(trial, 0.0)  # the sequence goes on, whatever a trial has come to
            points = [
                lists[name][value] if name in lists else _point(name, value) for name, value in trial.params.items()
            ]
            label = ", ".join(each for each, _ in points)
            result.setdefault(label, {name: value for _, settings in points for name, value in settings.items()})
    return list(result.items())


def _point(name: str, value: float) -> Point:
    rounded = value if isinstance(value, int) else float(f"{value:.3g}")
    return label_of(name, rounded), {name: rounded}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's messages on its studies, and the warning that a sampler may change."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
