"""What the owner of a machine refuses, whatever a job or a server asks."""

import dataclasses
import fnmatch
import glob
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
from fl_lightning.strategies.base import HEAD

#: What a client output describes: the client as a whole, each class, or each example.
Kind = Literal["client", "class", "example"]
#: Which model is evaluated: the client's own, one that the server sends, or one that is fine-tuned first.
Scored = Literal["own", "received", "tuned"]
#: What evaluations release.
MetricsRelease = Literal["plain", "sums", "off"]


class Refused(ValueError):
    """A site refuses what it is asked; the message contains nothing about its data and is sent to the server."""


@dataclass(frozen=True, kw_only=True)
class JobPolicy:
    """The rules of a machine that builds what a job names: the server's, and part of a site's.

    Args:
        classes: The owner's own classes that jobs may name, ``module.Class``. They must be installed here.
        strategies: Class names of the strategies that may run here; None for any.
        max_outputs: Maximum number of classes, targets or relations of links of a federation, at most 100,000.
        max_memory_gib: Memory that a job's process may use beyond what it needs to start, in GiB (Linux); None for what
            is free when it starts.

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
        if self.max_memory_gib is not None and not 0 < self.max_memory_gib < float("inf"):
            raise ValueError(f"policy.max_memory_gib must be positive, or null, got {self.max_memory_gib}")

    def check_strategy(self, name: str) -> None:
        """Refuse a strategy that is not in the list."""
        if self.strategies is not None and name not in self.strategies:
            raise Refused(f"this site runs only {', '.join(self.strategies) or 'no strategy'}, not {name}")

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
        classes: As in :class:`JobPolicy`.
        strategies: As in :class:`JobPolicy`.
        max_outputs: As in :class:`JobPolicy`.
        max_memory_gib: As in :class:`JobPolicy`.
        min_examples: Minimum number of examples behind any number in a response to a stage or an evaluation: with fewer
            labeled training examples the site does not train, metrics of a split with fewer (in any class, label or
            number, if they are a mean over these) and statistics of a class with fewer are withheld, and client
            outputs with a row for each example are refused if this is above 1. At least 1.
        parameters: Patterns of the parameters that may leave; None for all that the strategy sends.
        local: Patterns of the parameters that never leave, whatever a job declares personal; ``head.*`` is the last
            layer, whatever its name. A job whose nets have no parameter that a pattern matches is refused.
        outputs: Patterns of the client outputs that may leave; None for all.
        kinds: What client outputs may describe.
        evaluations: Which models may be evaluated. Strategies that choose settings by scores of their own need ``own``
            and ``received``, and ``metrics`` that leave without noise.
        max_evaluations_per_round: Maximum number of models that are evaluated in a round, including trials of a
            strategy's settings.
        metrics: What evaluations release: ``plain`` numerators and denominators (under secure aggregation only their
            sums over clients), only ``sums``, or nothing (``off``). None: ``plain``, but ``off`` if a filter adds noise
            or a job trains with ``model.privacy``, and ``metric_noise`` is not set.
        metric_noise: Noise on the metrics, which the site's account counts.
        filters: The filters that every response passes before it leaves, in this order.
        max_record_epsilon: Upper bound on the ε of each training example in the site's account of private training,
            over all jobs; if set, the site refuses jobs without ``model.privacy``. None for no bound.
        record_delta: The δ of that ε, in (0, 1).
        secure_only: Respond only under secure aggregation.
        min_sum_clients: Minimum number of clients in a secure sum that includes this site, at least 3.
        peers: Names, as in their certificates, of the sites with which it may be summed; None for all of the
            federation.
        max_parameters: Maximum number of parameters of a client's nets, checked before they are allocated.
        max_padding_mib: Maximum size, in MiB, of what is added to this site's data so that they are as wide as the
            widest site's, where features or outputs are each site's own; checked before it is allocated.
        max_steps_per_round: Maximum number of local steps in a round, including those before an evaluation.
        max_seconds: Maximum time for one stage or evaluation; None for no bound.
        max_messages: Maximum number of messages of a job.
        max_message_mib: Maximum size of a message, in MiB.

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
    metrics: MetricsRelease | None = None
    metric_noise: NoisyMetrics | None = None
    filters: Sequence[SiteFilter] = ()
    max_record_epsilon: float | None = None
    record_delta: float = 1e-5
    secure_only: bool = False
    min_sum_clients: int = 3
    peers: Sequence[str] | None = None
    max_parameters: int = 50_000_000
    max_padding_mib: int = 1024
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
            max_padding_mib=self.max_padding_mib,
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
            raise Refused("this site responds only under secure aggregation")

    def for_training(self, privacy: RecordPrivacy | None) -> "SitePolicy":
        """The rules for a job with the given privacy, which does not cover metrics: these are off unless they are set.

        Raises:
            Refused: The site trains only with privacy, and the job has none.
        """
        if privacy is None:
            if self.max_record_epsilon is not None:
                raise Refused("this site trains only with model.privacy (policy.max_record_epsilon)")
            return self
        silent = self.metrics is None and self.metric_noise is None
        return dataclasses.replace(self, metrics="off") if silent else self

    def for_net(self, names: Sequence[str], head: Sequence[str]) -> "SitePolicy":
        """The rules for a net, of whose parameters each pattern in ``local`` keeps some here.

        Args:
            names: The names of all of its parameters.
            head: The names of those of its last layer, if it declares them, for which ``head.*`` stands too.

        Raises:
            Refused: A pattern matches no parameter, so that what the owner meant might leave under another name.
        """
        meant = {pattern: [pattern] for pattern in self.local}
        if HEAD in meant:
            meant[HEAD] += [glob.escape(name) for name in head]
        for pattern, patterns in meant.items():
            if not any(stays(name, patterns) for name in names):
                raise Refused(
                    f"policy.local has {pattern!r}, which matches none of the net's parameters: {', '.join(names)}"
                )
        return dataclasses.replace(self, local=[each for patterns in meant.values() for each in patterns])

    @property
    def adds_noise(self) -> bool:
        """Whether a filter adds noise to responses."""
        return any(each.hides_counts for each in self.filters)

    @property
    def hides_failures(self) -> bool:
        """Whether what leaves has noise, so that a failure would tell more than it."""
        return self.adds_noise or self.metric_noise is not None

    def is_quiet(self, *, summed: bool) -> bool:
        """Whether all failures are told in the same words; ``summed`` means under secure aggregation."""
        return summed or self.hides_failures

    @property
    def disclosed_metrics(self) -> MetricsRelease:
        """What evaluations release."""
        if self.metrics is not None:
            return self.metrics
        return "off" if self.adds_noise and self.metric_noise is None else "plain"

    def releases_metrics(self, *, summed: bool) -> bool:
        """Whether evaluations release anything; ``summed`` means under secure aggregation."""
        return self.disclosed_metrics == "plain" or (self.disclosed_metrics == "sums" and summed)

    def release_metrics(self, result: dict[str, Tensor], *, summed: bool) -> dict[str, Tensor]:
        """The metrics that leave, (1, 2) by name.

        Raises:
            CannotFilter: The budget of their noise is spent.
        """
        if not self.releases_metrics(summed=summed):
            return {name: torch.zeros_like(pair_12) for name, pair_12 in result.items()}
        return result if self.metric_noise is None else self.metric_noise(result)

    def check_scores(self, names: Sequence[str], *, summed: bool) -> None:
        """Refuse exact scores of models within a stage, if evaluations do not release such."""
        if not self.releases_metrics(summed=summed) or self.metric_noise is not None:
            why = "policy.metric_noise is for evaluations alone" if self.metric_noise else "policy.metrics forbids it"
            raise Refused(f"{_listed(names)} would leave, which scores models on this site's examples, but {why}")
        if missing := [kind for kind in ("own", "received") if kind not in self.evaluations]:
            raise Refused(
                f"{_listed(names)} would leave, which scores models, but policy.evaluations does not allow those that "
                f"are {' or '.join(missing)}"
            )

    def check_parameters(self, names: Sequence[str]) -> None:
        """Refuse parameters that may not leave."""
        if selected := [name for name in names if stays(name, self.local)]:
            raise Refused(f"{_listed(selected)} would leave, but policy.local keeps it here")
        if self.parameters is not None and (other := [name for name in names if not matches(name, self.parameters)]):
            raise Refused(f"{_listed(other)} would leave, but policy.parameters does not allow it")

    def check_output(self, name: str, kind: Kind) -> None:
        """Refuse a client output that may not leave; ``name`` may be the first part of one.

        An output that is named after a parameter that is kept local is kept local, too.
        """
        base, _, rest = name.partition("/")
        if stays(name, self.local):
            raise Refused(f"{name} would leave, but policy.local keeps it here")
        if self.outputs is not None and not (
            matches(name, self.outputs)
            or matches(base, self.outputs)
            or (not rest and any(pattern.startswith(f"{base}/") for pattern in self.outputs))
        ):
            raise Refused(f"{name} would leave, but policy.outputs does not allow it")
        if kind not in self.kinds:
            allowed = ", ".join(self.kinds) or "nothing"
            raise Refused(f"{name} describes each {kind}, but policy.kinds allows only {allowed}")
        if kind == "example" and self.min_examples > 1:
            raise Refused(
                f"{name} has numbers that describe one example each, but policy.min_examples is {self.min_examples}: "
                "a strategy that sends such outputs needs 1"
            )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def stays(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name, or what follows a dot or a slash in it, matches one of the patterns.

    Strategies that wrap a net put names of their own before a parameter's, and outputs that of what they are.

    Example:
        >>> stays("gradients/shared.head.bias", ["head.*"]), stays("head.bias", ["body.*"])
        (True, False)
    """
    starts = [0, *(index + 1 for index, character in enumerate(name) if character in "./")]
    return any(matches(name[start:], patterns) for start in starts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_least(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"policy.{name} must be at least 1, got {value}")
