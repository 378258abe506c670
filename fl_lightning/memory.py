"""Checks of memory before it is allocated: what cannot fit is refused at once, instead of being killed hours later.

The required memory is a lower bound (tensors that exist at the same time, without temporaries), and the available
memory includes swap and caches that the system can free: nothing that would fit is refused.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

#: A cgroup without a limit reports this number or a larger one.
_UNLIMITED = 2**60


def require(num_bytes: int, what: str, remedy: str, device: torch.device | str = "cpu") -> None:
    """Check that so much memory is available.

    Args:
        num_bytes: Bytes needed in addition to those already in use.
        what: What needs them, for the message.
        remedy: Which settings need less, for the message.
        device: The device on which they are needed.

    Raises:
        ValueError: Fewer bytes are available.
    """
    free = available(torch.device(device))
    if free is not None and num_bytes > free:
        raise ValueError(
            f"{what} would take {num_bytes:,} bytes of memory ({num_bytes / 2**30:,.1f} GiB) on {device}, where "
            f"{free:,} ({free / 2**30:,.1f} GiB) are available: {remedy}"
        )


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return None
    bounds = [bound for bound in (_of_machine(), _of_cgroups()) if bound is not None]
    return min(bounds, default=None)


def state_copies(optimizer: Optimizer) -> int:
    """How many numbers an optimizer stores for each parameter value, measured by a step on zeros.

    Raises:
        ValueError: It cannot step.

    Example:
        >>> [state_copies(kind([torch.zeros(3)])) for kind in (torch.optim.Adam, torch.optim.SGD)]
        [2, 0]
    """
    shape, state, _ = step_on_zeros(optimizer)
    return sum(isinstance(value, Tensor) and value.shape == shape for value in state.values())


def step_on_zeros(optimizer: Optimizer) -> tuple[torch.Size, dict[str, Any], set[str]]:
    """What an optimizer keeps after a step on zeros, which leaves itself and its parameters unchanged.

    Returns:
        The shape of the parameter that was stepped, its state, and which values of its group, and numbers and
        collections of a user's optimizer itself, the step has changed.

    Raises:
        ValueError: It cannot step.
    """
    group = next((group for group in optimizer.param_groups if group["params"]), None)
    if group is None:
        return torch.Size(), {}, set()
    least = min(group["params"], key=lambda parameter: (not parameter.dim(), parameter.numel()))
    zeros = torch.zeros_like(least, requires_grad=True)
    zeros.grad = torch.zeros_like(least)
    trial = object.__new__(type(optimizer))
    trial_group = {**group, "params": [zeros]}
    own = {} if type(optimizer).__module__.startswith("torch.") else _values_of(optimizer)
    trial.__dict__ |= vars(optimizer) | own | {"state": defaultdict(dict), "param_groups": [trial_group]}
    try:
        trial.step()
    except Exception as error:  # it may be the user's code
        raise ValueError(f"{type(optimizer).__name__} cannot step: {error}") from error
    changed = {n for n, v in trial_group.items() if n != "params" and v is not group.get(n) and v != group.get(n)}
    for name in own:
        now, before = vars(trial).get(name), vars(optimizer)[name]
        if now is not before and not (_is_plain(now) and now == before):
            changed.add(name)
    return zeros.shape, trial.state[zeros], changed


def _values_of(optimizer: Optimizer) -> dict[str, Any]:
    """Copies of what a user's optimizer itself holds besides its groups: numbers, and collections of numbers."""
    known = vars(SGD([torch.zeros(1)])).keys() | {"_need_device_dtype_check_for_fused", "_opt_called"}
    return {
        name: copy.deepcopy(value) for name, value in vars(optimizer).items() if name not in known and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    return (
        value is None or isinstance(value, bool | int | float | str) or (torch.is_tensor(value) and value.numel() == 1)
    )


def _of_machine(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory and swap that the machine has available."""
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        kib = {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1}
        return 1024 * (kib["MemAvailable"] + kib.get("SwapFree", 0))
    except (OSError, KeyError, ValueError):
        return None  # not Linux


def _of_cgroups(root: Path = Path("/sys/fs/cgroup"), local: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the limits of the process's control groups (version 1 or 2) leave; None without limits."""
    bounds = []
    try:
        groups = [line.split(":", 2) for line in local.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top, limit, used, cache = root, "memory.max", "memory.current", "inactive_file"
        if controllers:
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            bounds += _of_group(folder, limit, used, cache)
            if folder == top:
                break
    return min(bounds, default=None)


def _of_group(folder: Path, limit: str, used: str, cache: str) -> list[int]:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _UNLIMITED:
            return []
        metrics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [int(most) - int((folder / used).read_text()) + int(metrics.get(cache, 0))]
    except (OSError, ValueError):
        return []
