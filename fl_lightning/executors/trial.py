"""A trial on the first client's data before the first round: whether a client's own code runs on a stack.

A client may override ``loss``, ``objective``, ``scores`` and the like, and a net may be written outside this package.
``torch.vmap`` supports neither boolean masks as indices, ``logits[mask]``, nor ``.item()``, nor a Python branch on a
tensor, nor PyTorch's random numbers. What it supports may still count padding: ``output.logits.mean()`` does.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.executors.failure import check_count, check_loss, check_scores, check_tensors
from fl_lightning.executors.hooks import overridden
from fl_lightning.executors.own_draws import drawn_from
from fl_lightning.executors.time_limit import within
from fl_lightning.models.batch_norm import TOO_FEW, TORCH_NORMS, BatchNorm, refuse_one, statistics_of
from fl_lightning.models.plain import PlainNet
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters

#: How far the results of a trial may be apart, in the scale of the largest, by their type; and how many times as far
#: if few examples are normalized by their variance, which may be small.
TOLERANCES, OF_NORMS = {torch.float64: 1e-9, torch.float32: 2e-4}, 30
#: What to do where a method computes from a client's own parameters.
OF_GIVEN = "override objective(parameters, batch, context) to compute with parameters"
#: Methods of a client that the stacked executor calls for all clients at once, in place of its hooks of training.
CALLED = (
    *("objective", "output", "loss", "scores", "score_table", "predictions", "ruled_output", "example_count"),
    *("clip", "constrain"),
)


def own_code(client: ClientModule) -> list[str]:
    """The parts of a client's code that are the user's: overridden methods, and classes in its nets."""
    names = own_methods(client)
    parts = [part for net in client.nets for part in net.modules()]
    nets = {type(part.plain_module) if isinstance(part, PlainNet) else type(part) for part in parts}
    return [*names, *sorted(f"{kind.__name__}.forward" for kind in nets if not is_ours(kind))]


def own_methods(client: ClientModule) -> list[str]:
    """The methods that the stacked executor calls for all clients at once and that the user's class overrides."""
    return [name for name in overridden(client, CALLED) if not is_ours(_definer(client, name))]


def why_not_stacked(client: ClientModule, batch: Batch, fabric: Fabric, time_limit: float | None = None) -> str:
    """Why a client's own code cannot be mapped over clients; empty if it can, or fails for one client in the same way.

    It is mapped over a stack of one client with padding, and must compute what it computes on the client's own data,
    from the parameters that it is given: a stack's are not those of ``self.net``.

    Args:
        client: The built client; copies of it compute.
        batch: A batch of one client, with the client dimension.
        fabric: The Fabric, for its precision.
        time_limit: Seconds after which a trial counts as failed; None for no bound.
    """
    on_stack, alone = (copy.deepcopy(client).to(batch.key.device) for _ in range(2))  # each with its own state
    moved = with_other_parameters(alone)
    drawn, part = next(batch.draws(batch.key[None])), next(batch.parts())
    own_scores, methods = overridden(client, ("scores", "score_table")), own_methods(client)
    trials = [(_trained, drawn), (_table if own_scores else _outputs, part), (_predictions, part), (_count, batch)]
    trials += [(compute, batch) for name, compute in _OF_STEP.items() if name in methods]
    with fabric.autocast():
        is_mixed = torch.is_autocast_enabled(batch.key.device.type)
        for compute, whole in trials:
            for twin in (on_stack, alone, moved):
                twin.train(compute is _trained)
            run = functools.partial(_run, net=alone.net, compute=compute, time_limit=time_limit)
            if is_mixed and (failure := run(on_stack, batch=whole.padded(), mapped=True)[0]):
                return "" if run(alone, batch=whole, mapped=False)[0] == failure else failure
            with torch.autocast(batch.key.device.type, enabled=False):
                failure, stacked = run(on_stack, batch=whole.padded(), mapped=True)
                why, expected = run(alone, batch=whole, mapped=False)
                unlike = "" if failure or why else _unlike(expected, stacked)
                changes = bool(unlike) and bool(_unlike(expected, run(alone, batch=whole, mapped=False)[1]))
                is_mapped = bool(methods) and not (failure or why or unlike)
                reads = _unlike(expected, run(moved, batch=whole, mapped=False)[1]) if is_mapped else ""
            if failure:
                return "" if why == failure else failure  # if both fail, the error without vmap is the user's own
            if changes:
                return f"its {unlike} change from call to call"
            if unlike and compute is _clipped:
                return f"its {unlike} depend on those of other clients: gradients are (C, *shape), a row for each"
            if unlike:
                return f"padding changes its {unlike}: leave out what batch.example_mask says is padding"
            if reads:
                instead = "" if compute in _OF_STEP.values() else f": {OF_GIVEN}"
                return f"its {reads} are computed from self.net or self.parameters(), which are one client's{instead}"
    return ""


def with_other_parameters(client: ClientModule) -> ClientModule:
    """A copy of a client whose own parameters are others: what is computed from given ones alone stays the same."""
    moved = copy.deepcopy(client)
    with torch.no_grad():
        for parameter in moved.net.parameters():
            parameter.add_(1)
    return moved


def reads_own_parameters(
    client: ClientModule, compute: Callable[[ClientModule], Mapping[str, Tensor]], key: Tensor
) -> bool:
    """Whether what is computed with a client changes if its own parameters do, and what it is given does not.

    Args:
        client: The client; copies of it compute, as a user's code may change it.
        compute: What is computed, tensors by name.
        key: Of the random draws, the same for both.
    """
    results = []
    for twin in (copy.deepcopy(client), with_other_parameters(client)):
        with torch.no_grad(), drawn_from(key):
            results.append(compute(twin))
    one, other = results
    return one.keys() != other.keys() or not all(equal(value, other[name]) for name, value in one.items())


def check_buffers(client: ClientModule, collator: Collator, first: int, time_limit: float | None) -> None:
    """Refuse a net with buffers that training changes, or that changes its inputs; other buffers are constants.

    Running statistics of PyTorch's layers and the changing buffers of a plain PyG module are parameters by now, and
    plain modules that change their inputs get copies.

    Raises:
        ValueError: The net has one, or changes its inputs in place.
    """
    before = dict(client.net.named_buffers())
    if not before and not own_code(client):
        return
    copied = copy.deepcopy(client).to(collator.device).train()
    batch = single(collator([first]))
    versions = {name: tensor._version for name, tensor in batch.tensors().items()}
    # an error here occurs once more later, and is reported then
    with torch.no_grad(), torch.random.fork_rng(), contextlib.suppress(Exception), within(time_limit):
        copied.output(copied.parameter_dict(), batch)
    if written := [name for name, tensor in batch.tensors().items() if tensor._version != versions[name]]:
        raise ValueError(
            f"model.net changes batch.{written[0]} in place, which is the client's data: compute a new tensor instead "
            "(x = x - 1 rather than x -= 1, no inplace=True on inputs)"
        )
    now = dict(copied.net.named_buffers())
    changed = [name for name, value in before.items() if name not in now or not equal(value, now[name])]
    if changed:
        raise ValueError(
            f"model.net changes {', '.join(sorted(changed))} while it trains, outside its parameters, which is in "
            "neither checkpoints nor payloads: make it a parameter with requires_grad=False named running_mean or "
            "running_var, or use fl_lightning.models.BatchNorm"
        )


def check_returns(client: ClientModule, collator: Collator, first: int, time_limit: float | None) -> None:
    """Refuse a client whose own ``loss``, ``objective``, ``scores``, ... returns something of another kind.

    Raises:
        WrongReturn: One of them does.
    """
    unused = ("loss", "objective") if overridden(client, ("training_step",)) else ()
    own = overridden(client, tuple(name for name in _RETURNS if name not in unused))
    if not (own := [name for name in own if not is_ours(_definer(client, name))]):
        return
    batch = single(collator([first]))
    twin = copy.deepcopy(client).to(collator.device)
    parameters = twin.parameter_dict()
    twin.context = Context(anchor=parameters)
    for name in own:
        twin.train(name != "scores")
        method, (check, arguments) = getattr(twin, name), _RETURNS[name]
        try:
            with torch.random.fork_rng(), within(time_limit):
                data = next(batch.parts() if name == "scores" else batch.draws(batch.key[None]))
                returned = method(*arguments(twin, parameters, batch if name == "example_count" else data))
        except Exception:  # it occurs once more, and is reported then
            continue
        check(method, returned)


def check_batches_of_one(client: ClientModule, collator: Collator, clients: Sequence[int]) -> None:
    """Refuse clients whose training would give a BatchNorm one example, which has no variance.

    Raises:
        ValueError: A client has, or may draw, such a step.
    """
    norms = [layer for layer in client.net.modules() if isinstance(layer, (BatchNorm, *TORCH_NORMS))]
    alone = [member for member in clients if norms and collator.least_examples(member) == 1]
    if not alone:
        return
    first = alone[0]
    copied = copy.deepcopy(client).to(collator.device).train()
    for layer in copied.net.modules():
        if isinstance(layer, BatchNorm):
            layer.register_forward_pre_hook(lambda _, inputs: refuse_one(inputs[1]))
    keys = torch.arange(collator.steps_per_epoch(first))
    *_, batch = single(collator([first])).draws(keys)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            copied.output(copied.parameter_dict(), batch)
    except Exception as error:
        if TOO_FEW not in str(error):
            return  # it occurs once more, and is reported then
        client_data = collator.client_data(first)
        more = f"; so do {len(alone) - 1} more" if len(alone) > 1 else ""
        if client_data.num_examples == 1:
            remedy = "give it more training examples (data.splitter, data.partitioner), or take a net without BatchNorm"
        else:
            remedy = "set data.drop_last to true, or a larger data.batch_size"
        raise ValueError(
            f"client {client_data.name!r} has a training step with one example, for which BatchNorm in model.net has "
            f"no variance ({TOO_FEW}){more}: {remedy}"
        ) from None
    # each BatchNorm counts the nodes of that graph
    if small := [member for member in alone if collator.may_draw_one_node(member)]:
        more = f"; so may {len(small) - 1} more" if len(small) > 1 else ""
        raise ValueError(
            f"client {collator.client_data(small[0]).name!r} may have a training step with one graph of one node, for "
            f"which BatchNorm in model.net has no variance ({TOO_FEW}){more}: set data.drop_last to true, or a larger "
            "data.batch_size, or take a net without BatchNorm"
        )


def is_ours(part: Any) -> bool:
    """Whether a class or function, or the one that it completes, is of this package or of PyTorch and PyG."""
    while isinstance(part, functools.partial):
        part = part.func
    return (getattr(part, "__module__", None) or "").startswith(("fl_lightning.", "torch.", "torch_geometric."))


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values, including nan."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())


_Arguments = Callable[[ClientModule, Parameters, Batch], tuple[Any, ...]]
#: How what a client's methods return is checked, and what they are called with for that.
_RETURNS: dict[str, tuple[Callable[[Any, Any], object], _Arguments]] = {
    "loss": (check_loss, lambda client, parameters, batch: (client.output(parameters, batch), batch)),
    "objective": (check_loss, lambda client, parameters, batch: (parameters, batch, client.context)),
    "scores": (check_scores, lambda client, parameters, batch: (client.output(parameters, batch), batch)),
    "clip": (check_tensors, lambda _, parameters, __: ({n: torch.zeros_like(p)[None] for n, p in parameters.items()},)),
    "constrain": (check_tensors, lambda client, parameters, _: (parameters, client.context)),
    "example_count": (check_count, lambda _, __, batch: (batch,)),
}

#: Results of a trial, those that are compared in the scale of the largest of them under one name.
_Results = dict[str, dict[str, Tensor]]


def _trained(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    running = statistics_of(client.net)
    moved = {name: parameters[name].clone() for name in running}  # changed by the forward pass
    loss = client.objective({**parameters, **moved}, batch, client.context)
    return {"losses": {"": loss}, "running statistics": moved}


def _table(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    table = client.score_table(parameters, batch, client.context)
    return {name: {"": value} for name, value in table.items()}


def _outputs(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    _table(client, parameters, batch)  # which must run; ranks among outputs that are all but equal may differ
    return {}


def _predictions(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    return {"predictions": {"": client.predictions(client.output(parameters, batch))}}


def _count(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    return {"example counts": {"": torch.as_tensor(client.example_count(batch)).double()}}


def _clipped(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    """Of gradients that are as the parameters, on a stack beside another client's; alone it is a stack of one."""
    is_alone = not batch.key.dim()
    gradients: dict[str, Tensor | None] = {
        name: parameter.detach()[None] if is_alone else torch.cat([parameter, 3 * parameter]).detach()
        for name, parameter in parameters.items()
    }
    given = {name: gradient for name, gradient in client.clip(gradients).items() if gradient is not None}
    return {"clipped gradients": {name: gradient[0] if is_alone else gradient for name, gradient in given.items()}}


def _constrained(client: ClientModule, parameters: Parameters, batch: Batch) -> _Results:
    return {"constrained parameters": dict(client.constrain(parameters, client.context))}


#: What is tried of methods around a step of the optimizer, if they are the user's.
_OF_STEP = {"clip": _clipped, "constrain": _constrained}


def _run(
    client: ClientModule,
    net: nn.Module,
    compute: Callable[[ClientModule, Parameters, Batch], _Results],
    batch: Batch,
    *,
    mapped: bool,
    time_limit: float | None,
) -> tuple[str, _Results]:
    """What a client computes from the parameters of a net, as a stack of one if it is mapped.

    Returns:
        The first line of the error that occurs, empty if none does, and the results, with gradients of a loss.
    """
    generator = torch.Generator().manual_seed(1)
    leaves = {}
    for name, parameter in net.named_parameters():
        value = parameter.detach().clone()
        if parameter.requires_grad and not value.any():  # what begins at zero is to be seen
            value += 0.1 * torch.randn(value.shape, generator=generator).to(value)
        leaves[name] = (value[None] if mapped else value).requires_grad_(parameter.requires_grad)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}

    def result_of(parameters: Parameters, batch: Batch) -> _Results:
        client.context = Context(anchor=parameters)
        return compute(client, parameters, batch)

    try:
        with within(time_limit), torch.random.fork_rng(), torch.set_grad_enabled(compute is _trained):
            if compute in (_count, _clipped):  # a stack is counted as it is
                results = result_of(leaves, batch if mapped else single(batch))
            elif mapped:
                results = torch.vmap(lambda p, t: result_of(p, batch.replace(t)))(leaves, batch.tensors())
            else:
                results = result_of(leaves, single(batch))
            if compute is _trained and results["losses"][""].requires_grad:
                total = results["losses"][""].sum()
                gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
                results["gradients"] = {
                    name: torch.zeros_like(leaf) if gradient is None else gradient
                    for (name, leaf), gradient in zip(trained.items(), gradients, strict=True)
                }
    except Exception as error:  # it is the user's code
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}", {}
    if mapped:
        results = {what: {n: t[0] if t.dim() else t[None] for n, t in each.items()} for what, each in results.items()}
    return "", results


def _unlike(alone: _Results, stacked: _Results) -> str:
    """What differs between a client's results and those with padding, which may have more rows; empty for nothing."""
    if alone.keys() != stacked.keys():
        return "scores"
    for what, expected in alone.items():
        largest = max((float(t.detach().abs().nan_to_num().max()) for t in expected.values() if t.numel()), default=0.0)
        for name, one in expected.items():
            other = stacked[what][name].detach()
            other = other[: len(one)] if one.dim() and other.dim() == one.dim() else other
            far = TOLERANCES.get(one.dtype, 0.1) if one.device.type == "cpu" else 0.1
            far *= OF_NORMS if far < 0.1 and alone.get("running statistics") else 1
            if one.shape != other.shape or not torch.allclose(
                other.double(), one.detach().double(), rtol=0.0, atol=far * max(largest, 1e-3), equal_nan=True
            ):
                return what
    return ""


def _definer(client: ClientModule, name: str) -> type:
    return next(kind for kind in type(client).__mro__ if name in vars(kind))
