"""Distributes clients over the processes of a Fabric, and gathers their payloads."""

import atexit
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed
from lightning.fabric import Fabric
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fl_lightning.round.payload import Payload, concatenate, unflatten

T = TypeVar("T")


def shard(costs: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """Assign each process clients of about equal total work: largest first, each to the process with the least so far.

    Args:
        costs: Work of each client, for example its nodes plus edges.
        num_processes: Number of processes, at most the number of clients.

    Returns:
        Client indices of each process, ascending.

    Raises:
        ValueError: There are more processes than clients.

    Example:
        >>> shard([5, 1, 4, 2], 2)
        [(0, 1), (2, 3)]
    """
    if num_processes > len(costs):
        raise ValueError(
            f"{num_processes} processes for {len(costs)} clients: set trainer.devices x num_nodes to at "
            f"most {len(costs)}"
        )
    if num_processes == 1:
        return [tuple(range(len(costs)))]
    loads = [0] * num_processes
    shards: list[list[int]] = [[] for _ in range(num_processes)]
    for client in sorted(range(len(costs)), key=lambda client: (-costs[client], client)):
        process = min(range(num_processes), key=lambda process: (loads[process], len(shards[process])))
        loads[process] += costs[client]
        shards[process].append(client)
    return [tuple(sorted(clients)) for clients in shards]


#: Floating point types of the clients' computations, by Fabric's name of the precision.
_DTYPES = {
    "32-true": torch.float32,
    "32": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
    "64": torch.float64,
}


def dtype_of(precision: str) -> torch.dtype:
    """Floating point type of batches.

    Raises:
        ValueError: There is no such precision.
    """
    if precision not in _DTYPES:
        raise ValueError(f"trainer.precision must be one of {', '.join(sorted(_DTYPES))}, got {precision!r}")
    return _DTYPES[precision]


def make_fabric(
    accelerator: str, devices: list[int] | int | str, num_nodes: int, precision: str, strategy: str
) -> Fabric:
    """Make the Fabric of a trainer from its settings.

    Raises:
        ValueError: There is no such device or strategy, or there are too few devices.
    """
    if str(accelerator) in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(f"trainer.accelerator is {accelerator!r}, but there is no GPU here: use cpu or auto")
    try:
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
        )
    except (TypeError, ValueError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise ValueError(
            f"trainer.devices is {devices!r}, trainer.accelerator {accelerator!r}, trainer.num_nodes {num_nodes}, "
            f"trainer.strategy {strategy!r}: {error}"
        ) from error
    check_cores(fabric.accelerator, fabric.world_size // num_nodes)
    return fabric


def check_cores(accelerator: Accelerator, num_processes: int) -> None:
    """Refuse more processes on this machine than it has CPU cores, unless ``FL_OVERSUBSCRIBE=1`` asks for them.

    Raises:
        ValueError: There are more processes than cores.
    """
    cores = os.cpu_count() or num_processes
    wanted = os.environ.get("FL_OVERSUBSCRIBE", "0") == "1"
    if isinstance(accelerator, CPUAccelerator) and num_processes > cores and not wanted:
        raise ValueError(
            f"trainer.devices asks for {num_processes} processes, but this machine has {cores} CPU cores: set it to at "
            "most as many (one process with all threads is fastest), or set FL_OVERSUBSCRIBE=1 to start them anyway"
        )


def launch(fabric: Fabric) -> None:
    """Start the other processes, and leave their group, if there is one, before the interpreter shuts down.

    Fabric does this only for NCCL; Gloo's threads, if still running, can abort a process whose work is done.
    """

    def leave() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    fabric.launch()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        atexit.register(leave)


def gather(fabric: Fabric, payload: Payload) -> Payload:
    """Gather the payloads of all processes on every process, clients ascending.

    A tensor that only some processes have (such as optimizer state before other clients have begun) is zero elsewhere.

    Raises:
        ValueError: The clients of two processes sent a tensor in different shapes.
    """
    if fabric.world_size == 1:
        return payload
    parts = [Payload(clients=()) for _ in range(fabric.world_size)]
    shapes = gather_objects(fabric, _describe(payload))
    longest = max(len(clients) for clients, _ in shapes)
    template: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for _, described in shapes:
        for name, kind in described.items():
            known = template.setdefault(name, kind)
            if f"l/{name[2:]}" in described and name.startswith("s/") and kind[0][1:] == known[0][1:]:
                template[name] = max(known, kind, key=lambda result: result[0][0])  # a row for every example
            elif known != kind:
                raise ValueError(f"processes sent {name[2:]!r} in different forms: {template[name]} and {kind}")
    rows: list[dict[str, Tensor]] = [{} for _ in shapes]
    for dtype in sorted({dtype for _, dtype in template.values()}, key=str):
        alike = {name: shape for name, (shape, local) in template.items() if local == dtype}
        for rank, tensors in enumerate(_all_gather(fabric, payload, alike, longest, dtype)):
            rows[rank] |= {name: tensor[: len(shapes[rank][0])] for name, tensor in tensors.items()}
    for rank, (clients, _) in enumerate(shapes):
        parts[rank] = Payload.from_named(clients, rows[rank])
    return concatenate(parts)


def gather_by_client(fabric: Fabric, local: Mapping[int, T]) -> dict[int, T]:
    """Gather small objects of every process's clients, by client."""
    return {client: item for part in gather_objects(fabric, dict(local)) for client, item in part.items()}


def gather_objects(fabric: Fabric, item: T) -> list[T]:
    """Gather every process's small object, by rank."""
    if fabric.world_size == 1:
        return [item]
    everyone: list[T] = [item] * fabric.world_size
    torch.distributed.all_gather_object(everyone, item)
    return everyone


def _describe(payload: Payload) -> tuple[tuple[int, ...], dict[str, tuple[torch.Size, torch.dtype]]]:
    return payload.clients, {name: (tensor.shape[1:], tensor.dtype) for name, tensor in payload.named().items()}


def _all_gather(
    fabric: Fabric, payload: Payload, shapes: Mapping[str, torch.Size], num_rows: int, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Gather tensors of one type, by rank and name, in one message, since messages cost more than their bytes."""
    packed = torch.zeros(num_rows, sum(shape.numel() for shape in shapes.values()), dtype=dtype, device=fabric.device)
    local, ragged = payload.named(), {f"s/{name}" for name in payload.lengths}
    for name, tensor in unflatten(packed, shapes).items():
        if name in local:
            mine = tensor[: len(payload.clients)]
            (mine if name not in ragged else mine[:, : local[name].shape[1]]).copy_(local[name])
    everyone = [torch.empty_like(packed) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(everyone, packed)
    return [unflatten(matrix, shapes) for matrix in everyone]
