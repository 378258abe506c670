"""What an executor is asked to do, and what came of it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.round.payload import Payload, concatenate
from fl_lightning.round.stage import Stage, StageAddress


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """A stage as one round asks for it.

    Attributes:
        stage: What to do.
        address: Where it is found; its round is part of the random keys.
        work_fraction: Share of the stage's steps that each participating client manages (1, or less for a straggler).
        payload: What the server sends to (at least) these clients.
        until_failure: Whether a client that fails ends the stage, so that the others need not work for nothing.
    """

    stage: Stage
    address: StageAddress
    work_fraction: Mapping[int, float]
    payload: Payload | None = None
    until_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What came of it: the upload of the clients that succeeded and why the others did not.

    Of an evaluation the upload's client outputs are each metric's numerator and denominator, (C, 2). Where clients tell
    only sums, ``sums`` has them by the metric's name, (4,): of the clients' values, how many clients have one, of the
    numerators, of the denominators; the upload is then empty.
    """

    upload: Payload
    failures: Mapping[int, str] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)


def join(results: Sequence[StageResult]) -> StageResult:
    """What came of disjoint clients' work."""
    if len(results) == 1:
        return results[0]
    failures = {client: why for result in results for client, why in result.failures.items()}
    return StageResult(upload=concatenate(result.upload for result in results), failures=failures)


def misfits(uploads: Mapping[int, Payload], per_example: Sequence[str]) -> dict[int, str]:
    """Clients whose tensors are not named, shaped and typed as those of most; rows of examples may be any number."""
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
