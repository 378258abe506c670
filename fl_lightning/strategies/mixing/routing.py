"""What clients compute whose nets have a shared and a local copy of each layer (``models/routed.py``)."""

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.models.output import NetOutput
from fl_lightning.models.routed import policy_shares, run_route, training_mean
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.program import Change


def half(batch: Batch, context: Context, part: int) -> Batch:
    """The batch with one half of its training examples, the same in every step for a batch of all."""
    mask = batch.replace({"key": context.received["half"]}).split(2)[part].train_mask
    return batch.replace({"train_mask": mask})


def copy_once(parameters: Parameters, context: Context) -> Change:
    """Local <- global before the first step."""
    if context.step:
        return Change()
    local = (name for name in parameters if ".local." in name)
    return Change(parameters={name: parameters[name.replace(".local.", ".shared.")] for name in local})


def local_loss(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The local copy's f on the first half."""
    first = half(batch, context, 0)
    return client.loss(run_route(client.net, parameters, first, "local"), first)


def shared_output(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """What the global model predicts."""
    return run_route(client.net, parameters, batch, "shared")


copy_once.takes_stacks = local_loss.takes_stacks = shared_output.takes_stacks = True  # type: ignore[attr-defined]


def shared_routes(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The share of training examples and layers that takes the global model."""
    shares = policy_shares(client.net, parameters, batch)
    return training_mean((shares >= 0.5).to(shares.dtype).mean(dim=-1), batch)
