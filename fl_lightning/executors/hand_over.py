"""Which clients the stacked executor hands over to the sequential one, with a warning that says why."""

import warnings
from collections.abc import Callable

from lightning.fabric import Fabric

from fl_lightning.batches.base import Batch
from fl_lightning.executors.hooks import SEQUENTIAL, overridden
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.executors.time_limit import check_time_limit
from fl_lightning.executors.trial import own_code, why_not_stacked
from fl_lightning.models.batch_norm import has_torch_norms
from fl_lightning.models.plain import plain_alone
from fl_lightning.round.client import ClientModule


def handed_over(client: ClientModule) -> SequentialExecutor | None:
    """The sequential executor for a client that does not fit on a stack."""
    why = why_one_by_one(client)
    return _one_by_one(why) if why else None


def why_one_by_one(client: ClientModule) -> str:
    """Why a client does not fit on a stack, by its own hooks and nets; empty if nothing is known against it."""
    if any(map(has_torch_norms, client.nets)):
        return (
            "model.net has torch.nn's BatchNorm or InstanceNorm, which would count the padding of a stack "
            "(fl_lightning.models.BatchNorm leaves padding out)"
        )
    if hooks := overridden(client, SEQUENTIAL):
        return f"{type(client).__name__} overrides {', '.join(hooks)}, which the stacked executor does not call"
    if alone := [part for net in client.nets for part in plain_alone(net)]:
        return f"model.net {alone[0].plain_name}: {alone[0].why_alone}"
    return ""


def handed_over_after_trial(
    client: ClientModule, first: Callable[[], Batch], fabric: Fabric, time_limit: float | None
) -> SequentialExecutor | None:
    """The sequential executor for a client with code of its own that ``torch.vmap`` does not support."""
    if time_limit is not None:
        check_time_limit()
    code = own_code(client)
    if not code or not (why := why_not_stacked(client, first(), fabric, time_limit)):
        return None
    return _one_by_one(f"{type(client).__name__}'s own code ({', '.join(code)}) does not run on a stack ({why})")


def _one_by_one(why: str) -> SequentialExecutor:
    warnings.warn(f"{why}: clients are run one after another (trainer.executor: SequentialExecutor)", stacklevel=5)
    return SequentialExecutor()
