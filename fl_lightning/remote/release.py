"""What a site releases about its client: its part of a stage and its scores, as the site's policy allows.

A server may send models with which training fails exactly if the data have some property. So at a site that adds noise
nothing that leaves depends on whether a stage or an evaluation failed: it is paid for before the data are touched, and
one that failed counts as a change of zero, or as scores of 0, to which the same noise is added.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.executors import StageResult
from fl_lightning.executors.private import rate_of
from fl_lightning.remote import masking
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.remote.filters import CannotFilter, GaussianNoise
from fl_lightning.remote.guard import Guard
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.membership import Membership
from fl_lightning.remote.metrics import summands
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.secure import MASKED, summand
from fl_lightning.remote.sum_member import SumMember
from fl_lightning.round.payload import Payload
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Drawing

_log = logging.getLogger(__name__)


def failed(kind: str) -> str:
    """What leaves of a failure that came after the data were touched, by the kind of the server's message."""
    what = {"run": "stage", "evaluate": "evaluation"}.get(kind, "request")
    return f"the {what} failed: see the site's log"


def told_of(member: Membership, policy: SitePolicy) -> dict[str, Any]:
    """What a site says of its metrics when a federation starts, without any value."""
    secure, scored = member.secure, member.metric_names
    if isinstance(scored, str) and policy.is_quiet(summed=secure):
        scored = failed("evaluate")
    tells = policy.releases_metrics(summed=secure)
    return {"metrics": tells, "scored": scored, **({"noisy": True} if tells and policy.metric_noise else {})}


def check_hidden(stage: Stage, drawing: Drawing, policy: SitePolicy) -> None:
    """Refuse a stage that would reveal what the site's filters must hide.

    Raises:
        Refused: Its number of steps would reveal the number of examples.
    """
    steps_reveal = stage.num_steps is None and drawing.batch_size is not None and drawing.steps_per_epoch is None
    if steps_reveal and policy.adds_noise:
        raise Refused("the number of steps would reveal that of examples, which is hidden: set data.steps_per_epoch")


def pay_for(
    stage: Stage,
    work_fraction: float,
    member: Membership,
    privacy: RecordPrivacy | None,
    accountant: PrivacyAccountant,
    policy: SitePolicy,
) -> None:
    """Count the steps that private training is about to take in the site's account, whatever their outcome.

    Raises:
        Refused: The policy allows no more steps.
    """
    if privacy is None or not (steps := member.executor.private_steps(stage, member.index, work_fraction)):
        return
    rate = rate_of(member.collator, member.index)
    try:
        accountant.spend_steps(rate, privacy.noise_multiplier, steps, policy.max_record_epsilon)
    except BudgetSpent as error:
        raise Refused(str(error)) from error


def open_accounts(policy: SitePolicy, folder: Path) -> PrivacyAccountant:
    """Open the site's account, and those of what adds noise, which keep to the bound on ε of an example, too."""
    for each in (*policy.filters, policy.metric_noise):
        if each is None:
            continue
        each.open(folder)
        account = getattr(each, "accountant", None)
        if isinstance(account, PrivacyAccountant) and policy.max_record_epsilon is not None:
            account.record_bound = policy.max_record_epsilon, policy.record_delta
    return PrivacyAccountant(folder, delta=policy.record_delta)


def check_plan(
    job: Job | None,
    strategy: Strategy,
    member: Membership,
    privacy: RecordPrivacy | None,
    accountant: PrivacyAccountant,
    policy: SitePolicy,
) -> None:
    """Refuse a search for whose rounds the site's account cannot pay, before the first of them.

    Each round is taken for one like the first, with one noisy response for each of its stages and one for its
    evaluations.

    Raises:
        Refused: The account would exceed a bound of the policy.
    """
    if job is None or (num_rounds := job.planned_rounds) is None:
        return
    stages = strategy.stages(0)
    noisy = [
        (each.accountant, each.noise_multiplier, num_rounds * len(stages), each.max_epsilon)
        for each in policy.filters
        if isinstance(each, GaussianNoise)
    ]
    if (metrics := policy.metric_noise) is not None:
        noisy.append((metrics.accountant, metrics.noise_multiplier, num_rounds, metrics.max_epsilon))
    steps = sum(member.executor.private_steps(stage, member.index, 1.0) for stage in stages)
    try:
        for account, multiplier, number, bound in noisy:
            assert account is not None, "filters are opened with the site"
            account.check(multiplier, number, {}, max_epsilon=bound)
        planned = {}
        if privacy is not None and steps:
            planned = {(rate_of(member.collator, member.index), privacy.noise_multiplier): num_rounds * steps}
        precision = sum(number * multiplier**-2 for _, multiplier, number, _ in noisy)
        together = precision**-0.5 if precision else None  # one response that reveals as much as all of them
        accountant.check(together, 1, planned, max_record_epsilon=policy.max_record_epsilon)
    except BudgetSpent as error:
        raise Refused(f"the privacy budget does not pay for the {num_rounds} rounds of this search: {error}") from error


def blank_response(
    stage: Stage, work_fraction: float, received: Payload | None, member: Membership, guard: Guard, summed_with: int
) -> Payload | None:
    """Pay for the noise on a response, before the data are touched.

    Returns:
        What leaves, with that noise, if the stage fails; None at a site that adds no noise.

    Raises:
        Refused: A filter cannot work on such responses, the server sent numbers that are not finite, or the budget is
            spent. The reason depends on neither the model nor the data.
    """
    policy = guard.policy
    if not policy.adds_noise:
        return None
    if received is not None and not all(tensor.isfinite().all() for tensor in received.named().values()):
        raise Refused("the server sends numbers that are not finite")
    if stage.per_example:
        raise Refused(
            f"this site hides how many examples there are, but {', '.join(stage.per_example)} have a row for each"
        )
    blank = guard.leaving(member.blank(stage, work_fraction, received), stage)
    try:
        for each in policy.filters:
            each.check(blank)
        for each in policy.filters if blank.tensors() else ():
            each.pay(summed_with)
    except CannotFilter as error:
        raise Refused(str(error)) from error
    return blank


def released_update(
    result: StageResult,
    stage: Stage,
    received: Payload | None,
    blank: Payload | None,
    member: Membership,
    guard: Guard,
    sums: SumMember,
    summed_with: int,
) -> Payload:
    """The stage's payload after the filters, and masked if the server learns only sums.

    Args:
        result: What the client computed, or why it failed.
        stage: The stage that it belongs to.
        received: What the server had sent.
        blank: What leaves if it failed; None for a refusal.
        member: The client in its federation.
        guard: Enforces the site's policy.
        sums: The site's part in secure sums.
        summed_with: The minimum number of clients in the sum.

    Raises:
        Refused: It failed, a part of it may not leave, or a filter cannot do its work on it.
    """
    policy, why = guard.policy, result.failures.get(member.index)
    if why is None:
        upload = guard.leaving(result.upload, stage)
        if blank is not None and not _is_like(upload, blank):
            why = "its response is not finite, or has other names, shapes or types than with the initial model"
    if why is not None:
        _log.warning("stage %s failed: %s", stage.name, why)
        if blank is None:
            raise Refused(failed("run") if policy.is_quiet(summed=member.secure) else why.partition(":")[0])
        _log.warning("a response without a change, with the usual noise, leaves in its place")
        upload = blank
    known = {} if stage.as_update else member.known_to_server(stage, received)
    try:
        for each in policy.filters:
            upload = each(upload, known, summed_with=summed_with)
    except CannotFilter as error:
        raise Refused(str(error)) from error
    if not member.weighting:
        return upload
    hidden = _hidden(*summand(upload, member.weighting), sums, "run", clamp=blank is not None)
    return Payload(clients=upload.clients, extras={MASKED: hidden[None]})


def _is_like(upload: Payload, blank: Payload) -> bool:
    """Whether a response has the names, shapes and types of a blank one, and only finite numbers."""
    kinds = [{n: (t.shape, t.dtype) for n, t in each.tensors().items()} for each in (upload, blank)]
    return kinds[0] == kinds[1] and all(bool(tensor.isfinite().all()) for tensor in upload.tensors().values())


def _hidden(numbers_D: Tensor, weight: float, sums: SumMember, kind: str, *, clamp: bool) -> Tensor:
    """Numbers under the masks of a sum; those that are too large for it are clamped if they have noise.

    Raises:
        Refused: They are too large.
    """
    count = len(sums.state["members"])
    if clamp:  # a refusal would tell something of numbers that have only their share of the sum's noise
        most = masking.largest(weight, count)
        numbers_D = numbers_D.nan_to_num(0.0).clamp(-most, most)
    try:
        total_D = masking.to_whole(numbers_D, weight, count)
    except ValueError as error:
        _log.warning("%s", error)
        raise Refused(failed(kind)) from error
    return sums.hide(total_D)


def released_scores(
    evaluations: Sequence[tuple[str, Evaluation]],
    round_idx: int,
    member: Membership,
    policy: SitePolicy,
    sums: SumMember,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Evaluate models, as far as the policy releases something about them; masked in a sum.

    Returns:
        The metrics, (1, 2) by the index of their model and their name, zeros for what is not released; and why models
        could not be evaluated, which noise hides.

    Raises:
        Refused: The budget of the policy's noise is spent; or it fails, in a sum.
    """
    names = member.metric_names if isinstance(member.metric_names, list) else []
    result = {f"{index}/{name}": torch.zeros(1, 2) for index in range(len(evaluations)) for name in names}
    failures: dict[str, str] = {}
    noise = policy.metric_noise
    if policy.releases_metrics(summed=member.secure):
        if noise is not None:
            _pay_for_scores(member, policy)
        scores, failures = member.scores(evaluations, round_idx, policy.min_examples)
        if noise is not None:
            result, failures = noise(_as_counted(result, scores, member.counted)), {}
        else:
            result = result | scores if member.secure else scores
        if failures and policy.is_quiet(summed=member.secure):
            failures = dict.fromkeys(failures, failed("evaluate"))
    if not member.secure:
        return result, failures
    if not names:
        raise Refused(failed("evaluate"))
    return {f"s/{MASKED}": _hidden(summands(result), 1.0, sums, "evaluate", clamp=noise is not None)[None]}, failures


def _pay_for_scores(member: Membership, policy: SitePolicy) -> None:
    noise = policy.metric_noise
    if noise is None or not any(noise.releases(name) for name in member.counted):
        return
    try:
        noise.pay()
    except CannotFilter as error:
        raise Refused(str(error)) from error


def _as_counted(
    blank: Mapping[str, Tensor], scores: Mapping[str, Tensor], counted: frozenset[str]
) -> dict[str, Tensor]:
    """Scores of the metrics that had a value when the run started: 0 of one example for those that have none now."""
    result = dict(blank)
    for name in blank:
        if name.partition("/")[2] in counted:
            pair_12 = scores.get(name, blank[name])
            result[name] = pair_12 if pair_12[0, 1] > 0 else torch.tensor([[0.0, 1.0]])
    return result
