"""What a site tells of its client: its part of a stage and its scores, as the site's policy lets them out."""

import torch
from torch import Tensor

from fl_lightning.executors.private import rate_of
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.remote.filters import CannotFilter
from fl_lightning.remote.membership import Membership
from fl_lightning.remote.metrics import summands
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.secure import MASKED, summand
from fl_lightning.remote.sum_member import SumMember
from fl_lightning.round.payload import Payload, to_wire
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.round.stage import Stage
from fl_lightning.tasks import Drawing


def check_hidden(stage: Stage, drawing: Drawing, policy: SitePolicy) -> None:
    """Refuse a stage of which the site's filters cannot hide what they are to hide.

    Raises:
        Refused: Its number of steps would tell that of the examples.
    """
    steps_tell = stage.num_steps is None and drawing.batch_size is not None and drawing.steps_per_epoch is None
    if steps_tell and any(each.hides_counts for each in policy.filters):
        raise Refused("the number of steps would tell that of examples, which is hidden: set data.steps_per_epoch")


def pay_for(
    stage: Stage,
    work_fraction: float,
    member: Membership,
    privacy: RecordPrivacy | None,
    accountant: PrivacyAccountant,
    policy: SitePolicy,
) -> None:
    """Have the site's account count what private training is about to take, whatever comes of it.

    Raises:
        Refused: The policy allows no more.
    """
    if privacy is None or not (steps := member.executor.private_steps(stage, member.index, work_fraction)):
        return
    rate = rate_of(member.collator, member.index)
    try:
        accountant.spend_steps(rate, privacy.noise_multiplier, steps, policy.max_record_epsilon)
    except BudgetSpent as error:
        raise Refused(str(error)) from error


def answer_told(
    upload: Payload,
    stage: Stage,
    received: Payload | None,
    member: Membership,
    policy: SitePolicy,
    sums: SumMember,
    summed_with: int,
) -> Payload:
    """The stage's payload, filtered, and hidden in a sum where the server learns sums alone.

    Args:
        upload: The client's.
        stage: What it is of.
        received: What the server had sent.
        member: The client in its federation.
        policy: The site's.
        sums: Its part in secure sums.
        summed_with: How many clients are summed at the least.

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


def scores_told(
    result: dict[str, Tensor], num_models: int, member: Membership, policy: SitePolicy, sums: SumMember
) -> dict[str, Tensor]:
    """What the policy tells of metrics, (1, 2) by the place of their model and their name; or all, hidden in a sum.

    Raises:
        Refused: The policy's noise cannot be added to them.
    """
    try:
        result = policy.tell(result, summed=member.secure)
    except CannotFilter as error:
        raise Refused(str(error)) from error
    if not member.secure:
        return result
    keys = [f"{index}/{name}" for index in range(num_models) for name in member.metric_names]
    hidden = sums.hide(summands({key: torch.zeros(1, 2) for key in keys} | result), 1.0)
    return {f"s/{MASKED}": hidden[None]}
