"""Comparing nested states leaf by leaf."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.strategies.server_state import ServerState, pack

#: Paths of what two equal runs need not share: wall-clock time, and how a run was resumed.
_OF_THE_RUN = re.compile(r"/seconds$|^/changes/|^/config_file")


def flattened(state: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, lists and tuples by their path, for example ``/models/head.weight``."""
    if isinstance(state, Mapping):
        items: Any = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {path: state}
    return {index: leaf for key, item in items for index, leaf in flattened(item, f"{path}/{key}").items()}


def differences(actual: Any, expected: Any, *, tolerance: float = 0.0) -> list[str]:
    """Where two nested states differ, a line each; ``nan`` equals itself.

    Args:
        actual: Nested mappings, lists and tuples of tensors, numbers and anything else that can be compared.
        expected: The expected state, of the same kinds.
        tolerance: Relative and absolute tolerance for tensors and floats; 0 for equality.
    """
    result, wanted = (
        {path: leaf for path, leaf in flattened(state).items() if not _OF_THE_RUN.search(path)}
        for state in (actual, expected)
    )
    lines = [f"{path} is in one alone" for path in sorted(result.keys() ^ wanted.keys())]
    for path in sorted(result.keys() & wanted.keys()):
        if not isinstance(result[path], Tensor | float):
            lines += [] if result[path] == wanted[path] else [f"{path}: {result[path]!r}, expected {wanted[path]!r}"]
            continue
        try:
            torch.testing.assert_close(
                *(torch.as_tensor(leaf) for leaf in (result[path], wanted[path])),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                check_device=False,
            )
        except AssertionError as error:
            lines.append(f"{path}: {' '.join(str(error).split())}")
    return lines


def assert_same(actual: Any, expected: Any, *, tolerance: float = 0.0, advice: str = "") -> None:
    """Refuse nested states that differ (:func:`differences`).

    Args:
        actual: The actual state.
        expected: The expected state.
        tolerance: Relative and absolute tolerance; 0 for equality.
        advice: Text before the differences in the message.

    Raises:
        AssertionError: They differ; the first of the leaves that do are named.
    """
    lines = differences(actual, expected, tolerance=tolerance)
    shown = [*lines[:5], *([f"and {len(lines) - 5} more"] if len(lines) > 5 else [])]
    assert not lines, "; ".join([*([advice] if advice else []), *shown])


def attributes(strategy: ServerState) -> dict[str, Any]:
    """Copies of the public attributes that could be state: of tensors, numbers, modules, ... and not of functions.

    An attribute whose name begins with an underscore is derived from the others.
    """
    result = {}
    for name, value in vars(strategy).items():
        if not name.startswith("_"):
            try:
                result[name] = copy.deepcopy(pack(value, name))
            except ValueError:  # nothing that could be saved
                continue
    return result


def learns(value: Any) -> bool:
    """Whether a value is trained by the server: a module or an optimizer."""
    return isinstance(value, nn.Module | Optimizer)
