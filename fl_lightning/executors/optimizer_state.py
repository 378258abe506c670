"""Optimizers of clients: which ones are supported, and their state as tensors with a row for each client."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.kernels.layout import stored_as
from fl_lightning.memory import step_on_zeros
from fl_lightning.round.payload import Payload


def check_optimizer(optimizer: Any) -> Optimizer:
    """Refuse what cannot step a client from its gradient alone.

    Raises:
        ValueError: It is not an optimizer, or one that needs closures.
    """
    if not isinstance(optimizer, Optimizer):
        parts = list(optimizer.values()) if isinstance(optimizer, dict) else optimizer
        parts = parts if isinstance(parts, list | tuple) else []
        names = [type(each).__name__ for part in parts for each in (part if isinstance(part, list | tuple) else [part])]
        held = f" of {', '.join(names)}" if names else ""
        raise ValueError(
            f"model.configure_optimizers returned {type(optimizer).__name__}{held}: "
            "return one optimizer; a scheduler of the learning rate, which steps once a round, is given as "
            "model.lr_scheduler"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "model.optimizer: LBFGS needs a closure; choose a first-order optimizer such as torch.optim.Adam"
        )
    return optimizer


def check_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer with state that is neither stored for clients at rest nor in checkpoints.

    Raises:
        ValueError: It cannot step, or keeps something else than tensors of each parameter.
    """
    try:
        _, state, changed = step_on_zeros(optimizer)
    except ValueError as error:
        raise ValueError(f"model.optimizer: {error}") from error
    kept = {name for name, value in state.items() if value is not None and not isinstance(value, Tensor)} | changed
    if "step" in vars(optimizer):  # a scheduler of the learning rate has replaced it
        kept.add("lr")
    if kept:
        raise ValueError(
            f"model.optimizer: {type(optimizer).__name__} keeps {', '.join(sorted(kept))} outside the tensors of its "
            "parameters' state, so a client could not continue from a checkpoint or after a pause: keep tensors in "
            "state[parameter], or reset optimizers every round (strategy.reset_optimizer)"
        )


def pack_optimizer_state(
    rows: Iterable[tuple[str, Sequence[Tensor], Sequence[Optimizer]]], device: torch.device
) -> dict[str, Tensor]:
    """Stack optimizer state over clients.

    Args:
        rows: For each parameter name, each client's parameter and the optimizer that steps it.
        device: Device of the result.

    Returns:
        ``optimizer/<slot>/<name>`` (C, *shape), zero for clients that have none yet, and
        ``optimizer/started/<name>`` (C,), whether they have.
    """
    packed: dict[str, Tensor] = {}
    for name, parameters, optimizers in rows:
        states = [optimizer.state.get(p, {}) for p, optimizer in zip(parameters, optimizers, strict=True)]
        packed[f"optimizer/started/{name}"] = torch.tensor(
            [any(isinstance(value, Tensor) for value in state.values()) for state in states], device=device
        )
        slots = {slot: value for state in states for slot, value in state.items() if isinstance(value, Tensor)}
        for slot, example in slots.items():
            tensors = [state.get(slot, torch.zeros_like(example)) for state in states]
            packed[f"optimizer/{slot}/{name}"] = torch.stack(tensors)
    return packed


def unpack_optimizer_state(name: str, row: int, parameter: Tensor, optimizer: Optimizer, state: Payload) -> None:
    """Undo :func:`pack_optimizer_state` for one parameter of one client; ``row`` is the client's in ``state``."""
    optimizer.state.pop(parameter, None)
    if not state.extras[f"optimizer/started/{name}"][row]:
        return
    group = optimizer.param_groups[0]
    for key, tensor in state.extras.items():
        slot, _, of = key.removeprefix("optimizer/").partition("/")
        if key.startswith("optimizer/") and of == name and slot != "started":
            on_host = slot == "step" and not (group.get("fused") or group.get("capturable"))
            value = tensor[row].clone().to("cpu" if on_host else parameter.device)
            optimizer.state[parameter][slot] = stored_as(value, parameter)  # fused kernels ignore other strides
