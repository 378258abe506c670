"""The request of a stage to an executor, and its result."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.round.payload import Payload, concatenate
from fl_lightning.round.stage import Stage, StageAddress


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """A stage as requested in a round.

    Attributes:
        stage: The stage.
        address: Its address; its round is part of the random keys.
        work_fraction: Share of the stage's steps that each participating client does (1, or less for a straggler).
        payload: What the server sends to (at least) these clients.
        until_failure: Whether a failing client ends the stage, so that the others do not work in vain.
    """

    stage: Stage
    address: StageAddress
    work_fraction: Mapping[int, float]
    payload: Payload | None = None
    until_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of a stage: the upload of the clients that succeeded, and why the others failed.

    In an evaluation, the upload's extras are each metric's numerator and denominator, (C, 2). If clients reveal only
    sums, ``sums`` has for each metric, (4,): the sum of the clients' values, the number of clients that have one, and
    the sums of numerators and of denominators; the upload is then empty.
    """

    upload: Payload
    failures: Mapping[int, str] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)


def part_of(result: StageResult, clients: Collection[int]) -> StageResult:
    """The part of an evaluation that belongs to some of its clients."""
    upload = result.upload.rows([client for client in result.upload.clients if client in clients])
    failures = {client: why for client, why in result.failures.items() if client in clients}
    return StageResult(upload=upload, failures=failures)


def join(results: Sequence[StageResult]) -> StageResult:
    """Join the results of disjoint clients."""
    if len(results) == 1:
        return results[0]
    failures = {client: why for result in results for client, why in result.failures.items()}
    return StageResult(upload=concatenate(result.upload for result in results), failures=failures)


def misfits(uploads: Mapping[int, Payload], per_example: Sequence[str]) -> dict[int, str]:
    """Clients whose tensors differ in name, shape or type from most others'; the number of examples may differ."""
    kinds = {
        client: frozenset(
            (name, tuple(tensor.shape[2 if name in per_example else 1 :]), tensor.dtype)
            for name, tensor in upload.tensors().items()
        )
        for client, upload in uploads.items()
    }
    usual = Counter(kinds.values()).most_common(1)
    return {
        client: f"it sent {_summary(kind - usual[0][0])}, most others sent {_summary(usual[0][0] - kind)}"
        for client, kind in kinds.items()
        if kind != usual[0][0]
    }


def _summary(kinds: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    return {name: f"{shape} {str(dtype).removeprefix('torch.')}" for name, shape, dtype in sorted(kinds, key=str)}
