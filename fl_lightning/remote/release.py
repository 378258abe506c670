"""What a site releases about its client: its part of a stage and its scores, as the site's policy allows."""

from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.executors.private import rate_of
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.remote.filters import CannotFilter, GaussianNoise
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.membership import Membership
from fl_lightning.remote.metrics import summands
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.secure import MASKED, summand
from fl_lightning.remote.sum_member import SumMember
from fl_lightning.round.payload import Payload, to_wire
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.round.stage import Stage
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Drawing


def check_hidden(stage: Stage, drawing: Drawing, policy: SitePolicy) -> None:
    """Refuse a stage that would reveal what the site's filters must hide.

    Raises:
        Refused: Its number of steps would reveal the number of examples.
    """
    steps_reveal = stage.num_steps is None and drawing.batch_size is not None and drawing.steps_per_epoch is None
    if steps_reveal and any(each.hides_counts for each in policy.filters):
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


def released_update(
    upload: Payload,
    stage: Stage,
    received: Payload | None,
    member: Membership,
    policy: SitePolicy,
    sums: SumMember,
    summed_with: int,
) -> Payload:
    """The stage's payload after the filters, and masked if the server learns only sums.

    Args:
        upload: The client's payload.
        stage: The stage that it belongs to.
        received: What the server had sent.
        member: The client in its federation.
        policy: The site's policy.
        sums: The site's part in secure sums.
        summed_with: The minimum number of clients in the sum.

    Raises:
        Refused: A filter cannot do its work on it.
    """
    known: dict[str, Tensor] = {}
    if not stage.as_update:
        initial = {name: tensor[None] for name, tensor in member.known.items()}
        known = to_wire(initial, member.num_flat) if stage.flat else initial
        known |= {} if received is None else received.parameters
    try:
        for each in policy.filters:
            upload = each(upload, known, summed_with=summed_with)
    except CannotFilter as error:
        raise Refused(str(error)) from error
    if not member.weighting:
        return upload
    hidden = sums.hide(*summand(upload, member.weighting))
    return Payload(clients=upload.clients, extras={MASKED: hidden[None]})


def released_scores(
    result: dict[str, Tensor], num_models: int, member: Membership, policy: SitePolicy, sums: SumMember
) -> dict[str, Tensor]:
    """What the policy releases of metrics, (1, 2) by the index of their model and their name; or all, masked in a sum.

    Raises:
        Refused: The policy's noise cannot be added to them.
    """
    try:
        result = policy.release_metrics(result, summed=member.secure)
    except CannotFilter as error:
        raise Refused(str(error)) from error
    if not member.secure:
        return result
    keys = [f"{index}/{name}" for index in range(num_models) for name in member.metric_names]
    hidden = sums.hide(summands({key: torch.zeros(1, 2) for key in keys} | result), 1.0)
    return {f"s/{MASKED}": hidden[None]}
