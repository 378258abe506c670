"""The parts of a report's record, computed from a run.

Shape legend: C clients, P sampled points.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.report.record import (
    BestRound,
    Partition,
    Points,
    RunRecord,
    Timing,
)
from fl_lightning.run.callback import Trainer


def data_of(trainer: Trainer) -> Sequence[Any] | None:
    """The clients' data; None if they are elsewhere."""
    clients: Sequence[Any] | None = getattr(trainer.run.datamodule, "clients", None)
    return None if clients is None or any(client is None for client in clients) else clients


def describe(trainer: Trainer) -> RunRecord:
    """What is known about a run before its first round."""
    run, clients = trainer.run, data_of(trainer)
    partition = None
    if clients is not None and hasattr(run.datamodule, "statistics"):
        table = run.datamodule.statistics(non_iidness=False)
        partition = Partition(
            columns=list(table.columns),
            rows=table.cells,
            labels=[list(row) for row in table.label_counts],
            heterogeneity=table.heterogeneity,
            simulated=[(kind, list(names)) for kind, names in table.simulated],
        )
    return RunRecord(
        strategy=type(run.strategy).__name__,
        task=run.registry.task.plain,
        examples=run.registry.task.examples,
        monitor=run.selection.monitor,
        mode="max" if run.selection.sign > 0 else "min",
        planned_rounds=trainer.num_rounds,
        names=list(run.registry.names),
        sizes=list(run.registry.sizes),
        training=list(run.training_clients),
        regression=not run.registry.task.target.has_classes,
        class_names=list(getattr(run.datamodule, "class_names", None) or ()),
        own_outputs=list(run.registry.own_outputs),
        seed=run.seed,
        partition_hash=run.registry.partition_hash,
        settings={} if run.config else dict(run.settings),
        machine={
            "device": str(trainer.fabric.device),
            "precision": str(trainer.dtype).removeprefix("torch."),
            "processes": str(trainer.fabric.world_size),
            "threads": str(torch.get_num_threads()),
        },
        partition=partition,
    )


def best_round(trainer: Trainer, tallies: Mapping[int, NDArray[Any]]) -> BestRound:
    """The scores of the current round, and the tallies of its predictions by client."""
    run = trainer.run
    scores: dict[str, dict[str, list[float | None]]] = {}
    examples: dict[str, dict[str, list[int]]] = {}
    clients = run.scores[""].clients
    for kind, payload in run.scores.items():
        if payload.clients == clients:
            named = {n: pair for n, pair in payload.extras.items() if n.startswith(("val/", "test/"))}
            scores[kind] = {name: _values(pair) for name, pair in named.items()}
            examples[kind] = {name: pair[:, 1].int().tolist() for name, pair in named.items()}
    chosen = BestRound(round=run.round_idx, clients=list(clients), scores=scores, examples=examples)
    target = run.registry.task.target
    if run.registry.own_outputs and not target.tally_is_of_examples:
        chosen.own = {run.registry.names[client]: tallies[client].tolist() for client in sorted(tallies)}
    elif tallies:
        parts = list(tallies.values())
        whole = np.concatenate(parts) if target.tally_is_of_examples else np.sum(parts, axis=0)
        setattr(chosen, target.tallied_as, whole.tolist())
    return chosen


def _values(totals_C2: Tensor) -> list[float | None]:
    """Each client's mean; None for one without examples."""
    return [total / count if count else None for total, count in totals_C2.double().cpu().tolist()]


def scores_of_unseen(trainer: Trainer) -> dict[str, dict[str, float | None]]:
    """The scores of the clients that were onboarded at the end, by metric and name."""
    scores = trainer.run.scores.get("unseen/")
    if scores is None:
        return {}
    names = [trainer.run.registry.names[client] for client in scores.clients]
    return {metric: dict(zip(names, _values(pair), strict=True)) for metric, pair in scores.extras.items()}


def timing(trainer: Trainer, first_round: int) -> Timing | None:
    """Where the time of the rounds went; None before the first has ended."""
    clock = trainer.run.clock
    if not clock.num_rounds:
        return None
    seconds = {name: share * clock.total for name, _, share in clock.rows()}
    return Timing(first_round=first_round, num_rounds=clock.num_rounds, seconds=seconds)


def project(trainer: Trainer, parts: Sequence[tuple[list[int], NDArray[np.float32], list[float | None]]]) -> Points:
    """The first two principal components of the sample."""
    rows = np.concatenate([part[1] for part in parts if len(part[1])]).astype(np.float64)
    centered_PD = rows - rows.mean(axis=0)
    _, variance, axes = np.linalg.svd(centered_PD, full_matrices=False)
    axes *= np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]  # otherwise the sign is arbitrary
    place_P2 = centered_PD @ axes[:2].T
    if place_P2.shape[1] < 2:
        place_P2 = np.pad(place_P2, ((0, 0), (0, 1)))
    total = max(float((variance**2).sum()), 1e-30)
    return Points(
        round=trainer.run.round_idx - 1,
        x=place_P2[:, 0].tolist(),
        y=place_P2[:, 1].tolist(),
        client=[client for part in parts for client in part[0]],
        label=[label for part in parts for label in part[2]],
        explained=(variance[:2] ** 2 / total).tolist(),
        total=sum(trainer.run.registry.sizes[client] for client in trainer.run.training_clients),
    )
