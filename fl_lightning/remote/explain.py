"""Explains what would leave a site in a job, before it runs: from the stages, the policy and the site's data."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fl_lightning.executors.private import rate_of
from fl_lightning.remote.digests import settings_of
from fl_lightning.remote.guard import kind_of, scored_of
from fl_lightning.remote.job import open_site
from fl_lightning.remote.job_schema import PRECISIONS, Job, NotAJob
from fl_lightning.remote.message import Message
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.questions import rounds_of
from fl_lightning.remote.release import check_hidden, pay_for
from fl_lightning.remote.sealed import copy_account
from fl_lightning.remote.secure import check_stage, threshold_of
from fl_lightning.remote.site import Site
from fl_lightning.round.disclosure import COUNTS, what_leaves
from fl_lightning.round.payload import FLAT, Payload
from fl_lightning.round.privacy import RecordPrivacy, epsilon_of
from fl_lightning.round.stage import Stage

#: The folder of the account in a site's kit.
_ACCOUNTS = ("account", "_account")
#: Messages by which a site takes part in a secure sum: keys, shares, the work, confirmation, opening.
_MESSAGES_OF_A_SUM = 5


def explain(job: Job, site_file: Path) -> tuple[list[str], list[str]]:
    """What would leave, and what is refused and why, one line each.

    Args:
        job: As it would be sent.
        site_file: The site's own file.

    Raises:
        ValueError: The site's file cannot be read, or its data cannot be opened.
    """
    kit = site_file.absolute().parent.parent
    with TemporaryDirectory() as folder:
        account = Path(folder) / "account"
        try:
            for name in _ACCOUNTS:
                copy_account(kit / name, account)
            site = open_site(job, site_file, Path(folder) / "site", account=account)
        except (Refused, NotAJob) as error:
            return [], [str(error)]
        try:
            site._start(_start(job, site))
        except ValueError as error:
            return _leaving(job, site) if hasattr(site, "member") else [], [str(error)]
        leaving = _leaving(job, site)  # before the trial of its rounds, which the copy of the account counts
        return leaving, [*_refused_sums(job, site, kit.name), *_refusals(job, site)]


def _rounds(job: Job) -> tuple[int, int]:
    """The number of rounds of the job, and how many of them end with evaluations."""
    num_rounds, every = rounds_of(job)
    return num_rounds, math.ceil(num_rounds / every)


def _start(job: Job, site: Site) -> Message:
    """The server's first message for a federation of clients like this one."""
    card = Message.read(
        site.respond(Message(kind="enroll", about={"strategy": type(site.strategy).__name__}).wire)
    ).about
    precision = job.trainer.get("precision", PRECISIONS[0])
    about = {
        "strategy": type(site.strategy).__name__,
        "settings": settings_of(site.strategy, site.model),
        "names": [f"client-{index}" for index in range(len(job.sites))],
        "task": card["task"],
        "num_features": card["num_features"],
        "num_outputs": job.num_outputs or card["num_outputs"],
        "own": card["own"],
        "layout": site.model.task.layout_for(card["density"]),
        "training_clients": list(range(len(job.sites))),
        "seed": job.seed,
        "precision": precision,
        "dtype": {"64-true": "float64", "bf16-true": "bfloat16"}.get(precision, "float32"),
        "secure": job.secure,
        "secure_share": job.secure_share,
        "federation": "0" * 64,
        "index": 0,
    }
    relation = {} if job.relation_graph is None else {"relation": 1 - torch.eye(len(job.sites))}
    return Message(kind="start", about=about, tensors=relation)


def _stages(job: Job, site: Site) -> Iterator[tuple[str, int, Stage]]:
    """Each stage of the job, with when and how often it runs."""
    strategy, (num_rounds, _) = site.strategy, _rounds(job)
    for stage in strategy.initial_stages():
        yield "once", 1, stage
    result: dict[str, tuple[int, Stage]] = {}
    for round_idx in range(num_rounds):
        for stage in strategy.stages(round_idx):
            result[stage.name] = (result[stage.name][0] + 1 if stage.name in result else 1, stage)
    for count, stage in result.values():
        yield ("each round" if count == num_rounds else f"{count} of {num_rounds} rounds"), count, stage


def _leaving(job: Job, site: Site) -> list[str]:
    """What would leave, for each stage and in total."""
    num_rounds, num_scored = _rounds(job)
    net = site.member.known
    lines = [
        f"the job {job.name}: {type(site.strategy).__name__}, {num_rounds} rounds, {len(job.sites)} sites, "
        f"{'the server learns only sums' if job.secure else 'the server learns each response'}",
        "when it joins: its name, its task, widths, share of nonzero features, a digest of its data",
    ]
    total = 0
    for when, times, stage in _stages(job, site):
        names = list(net) if stage.flat else list(stage.upload)
        numbers = site.member.num_flat if stage.flat else sum(net[name].numel() for name in names)
        total += times * numbers
        described = "; ".join(what_leaves(stage, list(net))) or "nothing"
        lines.append(f"{when}, stage {stage.name}: {described}; and the {COUNTS}")
        sizes = [f"{name} {'x'.join(map(str, net[name].shape)) or '1'}" for name in names]
        if sizes:
            lines.append(f"  parameters: {numbers} numbers per round, {times * numbers} in total ({', '.join(sizes)})")
        lines += [f"  output {name}: {_support(site, stage, name)}" for name in stage.client_outputs]
    evaluations = site.strategy.evaluations([0])
    models = ", ".join(f"{name.rstrip('/') or 'the result'} ({scored_of(each)})" for name, each in evaluations.items())
    lines.append(
        f"evaluations: {len(evaluations)} models per round, {num_scored * len(evaluations)} in total: {models}; "
        f"{_metrics(job, site)}"
    )
    if (privacy := site.model.privacy) is not None:
        lines.append(_record_privacy(job, site, privacy))
    filters = ", ".join(type(each).__name__ for each in site.policy.filters)
    lines.append(f"{total} parameter values in total; every response passes {filters or 'no filter'} before it leaves")
    return lines


def _record_privacy(job: Job, site: Site, privacy: RecordPrivacy) -> str:
    """What private training reveals about each example."""
    steps = sum(
        times * site.member.executor.private_steps(stage, site.member.index, 1.0)
        for _, times, stage in _stages(job, site)
    )
    rate, delta = rate_of(site.member.collator, site.member.index), site.policy.record_delta
    record_epsilon = epsilon_of({(rate, privacy.noise_multiplier): steps}, delta)
    return (
        f"private training: {steps} steps in total, each example in a step with probability {rate:.3g}, noise "
        f"multiplier "
        f"{privacy.noise_multiplier:g}: ε {record_epsilon:.3g} of each training example at δ {delta:g}, "
        f"in addition to what this site's "
        "account has counted before"
    )


def _metrics(job: Job, site: Site) -> str:
    """What evaluations release."""
    policy = site.policy
    if not policy.releases_metrics(summed=job.secure):
        return "their metrics stay here"
    if policy.metric_noise is not None:
        summary = f"noisy values of {', '.join(policy.metric_noise.names)}"
    else:
        summary = (
            f"a sum and a count of each metric and split with at least {policy.min_examples} examples, in each class "
            "if it is a mean over classes"
        )
    return (
        f"{summary}, of which the server learns the sum over at least {policy.min_sum_clients}"
        if job.secure
        else summary
    )


def _support(site: Site, stage: Stage, name: str) -> str:
    """From how many examples a number in a client output is computed."""
    kind = kind_of(stage, name)
    if kind == "example":
        return "numbers that describe one example each"
    least = max(site.policy.min_examples, 1)
    if kind == "class":
        return f"numbers of each class, 0 for a class with fewer than {least} examples"
    if name in stage.scores:
        return f"a score of a model, 0 with fewer than {least} examples; counted as an evaluation"
    return f"numbers of the client as a whole, which trains on {site.client_data.num_examples} examples"


def _refused_sums(job: Job, site: Site, name: str) -> Iterator[str]:
    """What the site would refuse of the job's secure sums, if it has any, and of the number of its messages."""
    policy, count = site.policy, len(job.sites)
    others = [each for each in job.sites if policy.peers is not None and each not in (*policy.peers, name)]
    if job.secure and count < site.sum.fewest:
        yield f"this site needs at least {site.sum.fewest} clients in a sum, this job has {count} sites"
    if job.secure and others:
        yield f"secure sums: not in policy.peers: {', '.join(others)}"
    stages = sum(times for _, times, _ in _stages(job, site))
    evaluations = _rounds(job)[1] if site.strategy.evaluations([0]) else 0
    messages = 2 + (stages + evaluations) * (_MESSAGES_OF_A_SUM if job.secure else 1)  # enroll, start
    if messages > policy.max_messages:
        yield f"policy.max_messages is {policy.max_messages}, this job has at least {messages} if it asks in each round"


def _refusals(job: Job, site: Site) -> Iterator[str]:
    """What the site would refuse while the job runs, which is asked in each round; it is counted as the site counts."""
    if site.client_data.num_examples < site.policy.min_examples:
        yield "this site has too few training examples to respond"
    num_rounds, every = rounds_of(job)
    refused: set[str | None] = set()  # None for metrics
    tried: set[str] = set()
    rounds: list[tuple[int, Sequence[Stage]]] = [(0, site.strategy.initial_stages())]
    rounds += [(round_idx, site.strategy.stages(round_idx)) for round_idx in range(num_rounds)]
    for position, (round_idx, stages) in enumerate(rounds):
        for stage in stages:
            counts = stage.name not in tried or _has_budget(site)  # else filters do the same in each round
            tried.add(stage.name)
            if stage.name not in refused and (why := _refused_stage(job, site, stage, round_idx, filtered=counts)):
                refused.add(stage.name)
                yield f"stage {stage.name} from round {round_idx} on: {why}"
        is_scored = position > 0 and ((round_idx + 1) % every == 0 or round_idx + 1 == num_rounds)
        counts = is_scored and _has_budget(site) and None not in refused
        if counts and (why := _refused_metrics(job, site)):
            refused.add(None)
            yield f"metrics from round {round_idx} on: {why}"
    try:
        scored = list(site.strategy.evaluations([0]).values())
        site.guard.admit_evaluations(scored, num_rounds, site.member.steps_per_epoch, asked="evaluations")
    except Refused as error:
        yield f"evaluations: {error}"


def _has_budget(site: Site) -> bool:
    """Whether the account may end what the site releases."""
    noise = [getattr(each, "max_epsilon", None) for each in (*site.policy.filters, site.policy.metric_noise)]
    return any(bound is not None for bound in (*noise, site.policy.max_record_epsilon))


def _refused_stage(job: Job, site: Site, stage: Stage, round_idx: int, *, filtered: bool) -> str:
    """Why the site refuses a stage; empty if it does not. Zeros pass its filters, which count them."""
    member, policy, asked = site.member, site.policy, f"{round_idx}/{stage.name}"
    try:
        check_hidden(stage, site.drawing, policy)
        site.guard.admit_stage(stage, list(member.known), round_idx, 1.0, member.steps_per_epoch, asked=asked)
        if job.secure:
            check_stage(stage)
        if policy.max_record_epsilon is not None:
            pay_for(stage, 1.0, member, site.model.privacy, site.accountant, policy)
        summed_with = max(threshold_of(len(job.sites), job.secure_share), site.sum.fewest) if job.secure else 1
        upload = _zeros(site, stage)
        for each in policy.filters if filtered else ():
            upload = each(upload, {}, summed_with=summed_with)
    except ValueError as error:
        return str(error)
    return ""


def _zeros(site: Site, stage: Stage) -> Payload:
    """A response to a stage in which everything is 0; a client output, whose shape is not known yet, is one number."""
    net, one = site.member.known, torch.zeros(1, 1)
    parameters = {FLAT: torch.zeros(1, site.member.num_flat)} if stage.flat else {}
    parameters |= {} if stage.flat else {name: torch.zeros(1, *net[name].shape) for name in stage.upload}
    return Payload(
        clients=(site.member.index,),
        parameters=parameters,
        extras=dict.fromkeys(stage.client_outputs, one),
        lengths=dict.fromkeys(stage.per_example, torch.ones(1, dtype=torch.int64)),
        num_examples=torch.ones(1, dtype=torch.int64),
    )


def _refused_metrics(job: Job, site: Site) -> str:
    """Why the site cannot release metrics; empty if it can."""
    names = site.member.metric_names
    result = {f"0/{name}": torch.ones(1, 2) for name in (names if isinstance(names, list) else ())}
    try:
        site.policy.release_metrics(result, summed=job.secure)
    except ValueError as error:
        return str(error)
    return ""
