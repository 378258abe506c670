"""What the owner of a machine refuses, whatever a job or a server asks."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.remote.filters import SiteFilter
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.metrics import NoisyMetrics
from fl_lightning.remote.schema import MOST_OUTPUTS
from fl_lightning.remote.secure import FEWEST_CLIENTS
from fl_lightning.round.privacy import RecordPrivacy

#: What a client output tells of: the client as a whole, each class, or each example.
Kind = Literal["client", "class", "example"]
#: Which model is scored: the client's own, one that the server sends, or one that is trained for it first.
Scored = Literal["own", "received", "tuned"]
#: What evaluations tell.
Told = Literal["plain", "sums", "off"]


class Refused(ValueError):
    """A site will not do what it is asked; the message holds nothing of its data and goes back to the server."""


@dataclass(frozen=True, kw_only=True)
class JobPolicy:
    """The rules of a machine that builds what a job names: the server's, and part of a site's.

    Args:
        classes: Classes of the owner's own that jobs may name, ``module.Class``. They must be installed here.
        strategies: Class names of the strategies that may be run here; None for any.
        max_outputs: Most classes, or targets, of a federation, at most 100,000.
        max_memory_gib: Memory of a job's process, in GiB, beside what it needs to start (Linux); None for what is free
            as it starts.

    Raises:
        ValueError: A value is out of its range.
    """

    classes: Sequence[str] = ()
    strategies: Sequence[str] | None = None
    max_outputs: int = MOST_OUTPUTS
    max_memory_gib: float | None = None

    def __post_init__(self) -> None:
        _check_least(max_outputs=self.max_outputs)
        if self.max_outputs > MOST_OUTPUTS:
            raise ValueError(
                f"policy.max_outputs must be at most {MOST_OUTPUTS}, which is as many as a message may ask for, got "
                f"{self.max_outputs}"
            )
        if self.max_memory_gib is not None and not self.max_memory_gib > 0:
            raise ValueError(f"policy.max_memory_gib must be positive, or null, got {self.max_memory_gib}")

    def check_strategy(self, name: str) -> None:
        """Refuse a strategy that is not on the list."""
        if self.strategies is not None and name not in self.strategies:
            raise Refused(f"this site runs {', '.join(self.strategies) or 'no strategy'} alone, not {name}")

    def check_outputs(self, num_outputs: int) -> None:
        """Refuse more outputs than the bound."""
        if num_outputs > self.max_outputs:
            raise Refused(f"{num_outputs} outputs are asked for, policy.max_outputs is {self.max_outputs} here")

    def check_job(self, job: Job) -> None:
        """Refuse a job by what it says, before anything is built."""
        self.check_strategy(job.strategy["class"])
        self.check_outputs(job.num_outputs or 0)


@dataclass(frozen=True, kw_only=True)
class SitePolicy(JobPolicy):
    """A site's own rules.

    Args:
        classes: As of :class:`JobPolicy`.
        strategies: The same.
        max_outputs: The same.
        max_memory_gib: The same.
        min_examples: Fewest examples that any number may tell of: with fewer labeled training examples the site trains
            for nobody, of a split with fewer its metrics say nothing, a statistic of a class with fewer is withheld,
            and what has a row for each example is refused if this is above 1. At least 1.
        parameters: Patterns of the parameters that may leave; None for all that the strategy sends.
        local: Patterns of the parameters that never leave, whatever a job calls personal.
        outputs: Patterns of the client outputs that may leave; None for all.
        kinds: What client outputs may tell of.
        evaluations: Which models are scored.
        max_evaluations_per_round: Most models that are scored in a round, trials of a strategy's settings among them.
        metrics: What evaluations tell: ``plain`` numerators and denominators (under secure aggregation only their
            sums over clients), ``sums`` alone, or nothing (``off``). None: ``plain``, but ``off`` where a filter adds
            noise or a job trains with ``model.privacy``, and ``metric_noise`` is not set.
        metric_noise: Noise on the metrics, which the site's account counts.
        filters: What every response passes before it leaves, in this order.
        max_record_epsilon: The ε of each training example that the site's account of private training must not exceed,
            over all jobs; the site then trains for none without ``model.privacy``. None for no bound.
        record_delta: δ of that, in (0, 1).
        secure_only: Response only under secure aggregation.
        min_sum_clients: Fewest clients that the site is summed with under secure aggregation, at least 3.
        peers: Names of the sites that it may be summed with, by their certificates; None for any of the federation.
        max_parameters: Most parameters of a client's nets, counted before they are allocated.
        max_steps_per_round: Most local steps in a round, those before an evaluation among them.
        max_seconds: Longest time for one stage or evaluation; None for no bound.
        max_messages: Most messages of a job.
        max_message_mib: Largest message, in MiB.

    Raises:
        ValueError: A value is out of its range.
    """

    min_examples: int = 5
    parameters: Sequence[str] | None = None
    local: Sequence[str] = ()
    outputs: Sequence[str] | None = None
    kinds: Sequence[Kind] = ("client", "class", "example")
    evaluations: Sequence[Scored] = ("own", "received", "tuned")
    max_evaluations_per_round: int = 64
    metrics: Told | None = None
    metric_noise: NoisyMetrics | None = None
    filters: Sequence[SiteFilter] = ()
    max_record_epsilon: float | None = None
    record_delta: float = 1e-5
    secure_only: bool = False
    min_sum_clients: int = 3
    peers: Sequence[str] | None = None
    max_parameters: int = 50_000_000
    max_steps_per_round: int = 100_000
    max_seconds: float | None = None
    max_messages: int = 100_000
    max_message_mib: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_examples < 1:
            raise ValueError(f"site.min_examples must be at least 1, got {self.min_examples}")
        if self.max_evaluations_per_round < 0:
            raise ValueError(
                f"policy.max_evaluations_per_round must be at least 0, got {self.max_evaluations_per_round}"
            )
        _check_least(
            max_parameters=self.max_parameters,
            max_steps_per_round=self.max_steps_per_round,
            max_messages=self.max_messages,
            max_message_mib=self.max_message_mib,
        )
        if self.min_sum_clients < FEWEST_CLIENTS:
            raise ValueError(f"policy.min_sum_clients must be at least {FEWEST_CLIENTS}, got {self.min_sum_clients}")
        if self.metrics not in (None, "plain", "sums", "off"):
            raise ValueError(f"policy.metrics must be plain, sums or off, got {self.metrics!r}")
        if self.max_record_epsilon is not None and not self.max_record_epsilon > 0:
            raise ValueError(
                f"policy.max_record_epsilon must be positive, or null for no bound, got {self.max_record_epsilon}"
            )
        if not 0 < self.record_delta < 1:
            raise ValueError(f"policy.record_delta must be in (0, 1), got {self.record_delta}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"policy.max_seconds must be positive, or null for no bound, got {self.max_seconds}")

    def check_job(self, job: Job) -> None:
        """Refuse a job by what it says, before anything is built."""
        super().check_job(job)
        if self.secure_only and not job.secure:
            raise Refused("this site responds under secure aggregation alone")

    def for_training(self, privacy: RecordPrivacy | None) -> "SitePolicy":
        """The rules for a job that trains with the given privacy: its metrics, which that does not cover, stay here.

        Raises:
            Refused: The site trains with privacy alone, and the job has none.
        """
        if privacy is None:
            if self.max_record_epsilon is not None:
                raise Refused("this site trains with model.privacy alone (policy.max_record_epsilon)")
            return self
        silent = self.metrics is None and self.metric_noise is None
        return dataclasses.replace(self, metrics="off") if silent else self

    @property
    def disclosed_metrics(self) -> Told:
        """What evaluations tell."""
        if self.metrics is not None:
            return self.metrics
        adds_noise = any(each.hides_counts for each in self.filters)
        return "off" if adds_noise and self.metric_noise is None else "plain"

    def tells_metrics(self, *, summed: bool) -> bool:
        """Whether evaluations tell anything; ``summed`` under secure aggregation."""
        return self.disclosed_metrics == "plain" or (self.disclosed_metrics == "sums" and summed)

    def tell(self, result: dict[str, Tensor], *, summed: bool) -> dict[str, Tensor]:
        """What leaves of metrics, (1, 2) by name.

        Raises:
            CannotFilter: The budget of their noise is spent.
        """
        if not self.tells_metrics(summed=summed):
            return {name: torch.zeros_like(pair_12) for name, pair_12 in result.items()}
        return result if self.metric_noise is None else self.metric_noise(result)

    def check_parameters(self, names: Sequence[str]) -> None:
        """Refuse parameters that may not leave."""
        if selected := [name for name in names if matches(name, self.local)]:
            raise Refused(f"{_listed(selected)} would leave, which policy.local keeps here")
        if self.parameters is not None and (other := [name for name in names if not matches(name, self.parameters)]):
            raise Refused(f"{_listed(other)} would leave, which policy.parameters does not let out")

    def check_output(self, name: str, kind: Kind) -> None:
        """Refuse a client output that may not leave; ``name`` may be the first part of one.

        What is named after a parameter that stays here stays here too.
        """
        base, _, rest = name.partition("/")
        if matches(name, self.local) or (rest and matches(rest, self.local)):
            raise Refused(f"{name} would leave, which policy.local keeps here")
        if self.outputs is not None and not (
            matches(name, self.outputs)
            or matches(base, self.outputs)
            or (not rest and any(pattern.startswith(f"{base}/") for pattern in self.outputs))
        ):
            raise Refused(f"{name} would leave, which policy.outputs does not let out")
        if kind not in self.kinds:
            raise Refused(f"{name} tells of each {kind}, policy.kinds lets {', '.join(self.kinds) or 'nothing'} out")
        if kind == "example" and self.min_examples > 1:
            raise Refused(
                f"{name} has numbers of one example each, policy.min_examples asks for {self.min_examples}: "
                "a strategy that sends such runs where it is 1"
            )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is of one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_least(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"policy.{name} must be at least 1, got {value}")
