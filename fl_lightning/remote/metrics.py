"""What evaluations reveal about a site: nothing, metrics of enough examples, noisy values, or sums over clients.

Shape legend: K metrics, of all models of an evaluation and all splits.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.direction import group_of
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.remote.filters import LEAST, CannotFilter, normal_numbers
from fl_lightning.remote.schema import MOST
from fl_lightning.tasks.class_metrics import CLASS_METRICS

#: Summands of each metric under secure aggregation: value, whether there is one, numerator, denominator.
NUM_SUMMED = 4
#: Metrics that are shares of examples.
_SHARES = frozenset({"acc", "recall", *CLASS_METRICS})
#: By which factor a share may exceed 1: sums of float16 and bfloat16 are rounded.
ROUNDING = 1.02


class NoisyMetrics:
    """Differential privacy of a client's metrics: their values are clipped at a bound, and normal noise is added.

    The K values that one evaluation releases are each in [0, b], so those of two clients are at most b K^1/2 apart, and
    noise of standard deviation z b K^1/2 makes them together one Gaussian mechanism with multiplier z, which the site's
    account counts. The number of examples is not revealed: every client counts as one.

    Args:
        noise_multiplier: z, positive.
        names: Shell-style patterns of the metrics that are released, without the model's prefix; fewer need less noise.
        bound: b, the largest value of a metric, positive; 1 for shares.
        delta: δ, in (0, 1).
        max_epsilon: The ε that the site's account must not exceed; None for no bound.

    Raises:
        ValueError: A value is out of its range.
    """

    def __init__(
        self,
        *,
        noise_multiplier: float,
        names: Sequence[str] = ("val/acc", "test/acc"),
        bound: float = 1.0,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
    ) -> None:
        for name, value in {"noise_multiplier": noise_multiplier, "bound": bound, "max_epsilon": max_epsilon}.items():
            if value is not None and not LEAST <= value < math.inf:
                raise ValueError(f"NoisyMetrics.{name} must be a finite number of at least {LEAST:g}, got {value}")
        if not 0 < delta < 1:
            raise ValueError(f"NoisyMetrics.delta must be in (0, 1), got {delta}")
        self.noise_multiplier = noise_multiplier
        self.names = tuple(names)
        self.bound = bound
        self.delta = delta
        self.max_epsilon = max_epsilon
        self.accountant: PrivacyAccountant | None = None
        self._is_paid = False

    def open(self, folder: Path) -> None:
        """Open the account in the site's folder; called before the first evaluation."""
        self.accountant = PrivacyAccountant(folder, delta=self.delta)

    def releases(self, name: str) -> bool:
        """Whether a metric, by its name without the model's prefix, is released."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.names)

    def pay(self) -> None:
        """Count the next evaluation in the account, before the data are touched.

        Raises:
            CannotFilter: The budget is spent.
        """
        assert self.accountant is not None, "it is opened before it is used"
        try:
            self.accountant.spend(self.noise_multiplier, self.max_epsilon)
        except BudgetSpent as error:
            raise CannotFilter(str(error)) from error
        self._is_paid = True

    def __call__(self, result: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Noisy values over a denominator of 1, (1, 2); zeros for what is not released.

        A value that is not finite counts as 0. An evaluation that was not paid for is counted first.

        Args:
            result: Numerator and denominator of each metric, (1, 2), by the index of its model and its name.

        Raises:
            CannotFilter: The budget is spent.
        """
        names = [name for name in result if self.releases(name.partition("/")[2]) and result[name][0, 1] > 0]
        hidden = {name: torch.zeros_like(pair_12) for name, pair_12 in result.items()}
        if not names:
            return hidden
        if not self._is_paid:
            self.pay()
        self._is_paid = False
        value_K = torch.stack([result[name][0, 0].double() / result[name][0, 1].double() for name in names])
        noise_K = self.noise_multiplier * self.bound * math.sqrt(len(names)) * normal_numbers(len(names))
        noisy_K = value_K.nan_to_num(0.0, 0.0, 0.0).clamp(0, self.bound) + noise_K
        return hidden | {
            name: torch.tensor([[value, 1.0]], dtype=torch.float32)
            for name, value in zip(names, noisy_K.tolist(), strict=True)
        }


def summands(result: Mapping[str, Tensor]) -> Tensor:
    """A client's metrics as summands, float64 (4 K,): value, 1, numerator, denominator; 0 without examples."""
    rows = []
    for name in sorted(result):
        total, count = result[name][0].double().tolist()
        rows.append([total / count, 1.0, total, count] if count > 0 else [0.0] * NUM_SUMMED)
    return torch.tensor(rows, dtype=torch.float64).flatten()


def from_summands(total_D: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Undo :func:`summands` for a sum: (4,) for each metric, by its name.

    Raises:
        ValueError: The number of summands does not fit the metrics.
    """
    if total_D.numel() != NUM_SUMMED * len(names):
        raise ValueError(f"{total_D.numel()} numbers arrived for {len(names)} metrics")
    return dict(zip(sorted(names), total_D.view(-1, NUM_SUMMED), strict=True))


def wrong_summands(total_D: Tensor, names: Sequence[str], num_clients: int, *, noisy: bool = False) -> str:
    """What is wrong with a sum of :func:`summands`, in words; empty for nothing.

    Args:
        total_D: The sum, float64 (4 K,).
        names: Names of the metrics.
        num_clients: How many clients' metrics were summed.
        noisy: Whether some client's have noise, which takes shares out of [0, 1].
    """
    for name, (value, count, total, weight) in from_summands(total_D, names).items():
        metric = name.rpartition("/")[2]
        fits = float(count) == round(float(count)) and 0 <= count <= num_clients and 0 <= weight <= num_clients * MOST
        if fits and is_share(metric) and not noisy:
            fits = bool(0 <= value <= ROUNDING * count and 0 <= total <= ROUNDING * weight)
        if not fits:
            return f"{name} is {value:g} of {count:g} clients and {total:g} of {weight:g} examples, which is impossible"
    return ""


def is_share(metric: str) -> bool:
    """Whether a metric is a share of examples, of all or of a class or a range of degrees."""
    group = group_of(metric)
    return (metric if group is None else group[0]) in _SHARES


def of_model(sums: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The sums of one of several models, whose metrics are named ``index/name``."""
    prefix = f"{index}/"
    return {name.removeprefix(prefix): total for name, total in sums.items() if name.startswith(prefix)}


def unknown_sums(names: Sequence[str]) -> dict[str, Tensor]:
    """The sums of an evaluation to which nobody has responded: nan."""
    return {name: torch.full((NUM_SUMMED,), torch.nan, dtype=torch.float64) for name in names}
