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
from fl_lightning.remote.job_schema import Job, NotAJob
from fl_lightning.remote.message import Message
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.release import check_hidden
from fl_lightning.remote.site import Site
from fl_lightning.round.disclosure import COUNTS, what_leaves
from fl_lightning.round.privacy import RecordPrivacy, epsilon_of
from fl_lightning.round.stage import Stage
from fl_lightning.trainer import FederatedTrainer


def explain(job: Job, site_file: Path) -> tuple[list[str], list[str]]:
    """What would leave, and what is refused and why, one line each.

    Args:
        job: As it would be sent.
        site_file: The site's own file.

    Raises:
        ValueError: The site's file cannot be read, or its data cannot be opened.
    """
    with TemporaryDirectory() as folder:
        try:
            site = open_site(job, site_file, Path(folder) / "site")
        except (Refused, NotAJob) as error:
            return [], [str(error)]
        try:
            site._set_up(_start(job, site))
        except ValueError as error:
            return _leaving(job, site) if hasattr(site, "member") else [], [str(error)]
        return _leaving(job, site), list(dict.fromkeys(_refusals(job, site)))


def _rounds(job: Job) -> tuple[int, int]:
    """The number of rounds of the job, and how many of them end with evaluations."""
    trainer = FederatedTrainer(logger=False)
    num_rounds = job.trainer.get("num_rounds", trainer.num_rounds)
    every = job.trainer.get("evaluate_every", trainer.evaluate_every)
    return num_rounds, math.ceil(num_rounds / every)


def _start(job: Job, site: Site) -> Message:
    """The server's first message for a federation of clients like this one."""
    card = Message.read(
        site.respond(Message(kind="enroll", about={"strategy": type(site.strategy).__name__}).wire)
    ).about
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
        "precision": job.trainer.get("precision", "32-true"),
        "dtype": "float32",
        "secure": job.secure,
        "secure_share": job.secure_share,
        "federation": "explained",
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
        summary = f"a sum and a count of each metric and split with at least {policy.min_examples} examples"
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


def _refusals(job: Job, site: Site) -> Iterator[str]:
    """What the site would refuse while the job runs."""
    if site.client_data.num_examples < site.policy.min_examples:
        yield "this site has too few training examples to respond"
    steps_per_epoch = site.member.collator.steps_per_epoch(0)
    rounds: list[tuple[int, Sequence[Stage]]] = [(0, site.strategy.initial_stages())]
    rounds += [(round_idx, site.strategy.stages(round_idx)) for round_idx in range(_rounds(job)[0])]
    for round_idx, stages in rounds:
        for stage in stages:
            try:
                check_hidden(stage, site.drawing, site.policy)
                site.guard.admit_stage(
                    stage, list(site.member.known), round_idx, 1.0, steps_per_epoch, asked=f"{round_idx}/{stage.name}"
                )
            except Refused as error:
                yield f"stage {stage.name} from round {round_idx} on: {error}"
    try:
        scored = list(site.strategy.evaluations([0]).values())
        site.guard.admit_evaluations(scored, _rounds(job)[0], steps_per_epoch, asked="evaluations")
    except Refused as error:
        yield f"evaluations: {error}"
