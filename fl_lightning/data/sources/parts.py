"""Examples whose roles are given, by a mapping of what trains, validates and tests: ``{"train": ..., "test": ...}``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.allocation import Asked
from fl_lightning.data.sources.base import Source
from fl_lightning.data.split import GivenSplit, Role

#: The parts, by the names that they have.
PARTS = {"train": Role.TRAIN, "val": Role.VAL, "test": Role.TEST}
_CALLED = ", ".join(map(repr, PARTS))
#: What others call a part.
_OTHER_NAMES = {"training", "valid", "validation", "eval", "evaluation", "dev", "testing"}


def has_parts(given: Any) -> bool:
    """Whether this is a mapping of what trains, validates and tests, each a pair, a data set or a list.

    Raises:
        ValueError: A part has another name.
    """
    if not isinstance(given, Mapping) or not given or not all(map(_may_be_part, given.values())):
        return False
    lower = {str(name).lower(): name for name in given}
    others = [name for key, name in lower.items() if key in _OTHER_NAMES or (key in PARTS and name not in PARTS)]
    if others and set(lower) <= {*PARTS, *_OTHER_NAMES}:
        raise ValueError(f"data.source has {others[0]!r}: call what trains, validates and tests {_CALLED}")
    return set(given) <= set(PARTS)


def _may_be_part(given: Any) -> bool:
    """Whether this can hold several examples; a graph, a source and the name of a file do not."""
    is_one = isinstance(given, str | Path | Data | Mapping | Source)
    return given is None or (not is_one and hasattr(given, "__getitem__"))


def parts_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that have examples, those that train first.

    Raises:
        ValueError: Nothing trains.
    """
    result = {name: given[name] for name in PARTS if given.get(name) is not None and _size(given[name])}
    if "train" not in result:
        what = "'train' is empty" if "train" in given else "nothing is called 'train'"
        raise ValueError(f"{what} in what has {', '.join(map(repr, given))}: say what trains")
    return result


def _size(given: Any) -> int:
    """How many examples a part has: of a pair of inputs and targets, those."""
    return len(given[0]) if is_pair(given) else len(given)


def is_pair(given: Any) -> bool:
    """Whether this is a pair of inputs and targets."""
    is_two = isinstance(given, list | tuple) and len(given) == 2
    return is_two and all(hasattr(each, "__array__") for each in given)  # tensors, arrays, what pandas has


def roles_of(sizes: Mapping[str, int]) -> Tensor:
    """The roles of the parts' examples one after another, int8, from how many each has."""
    return torch.cat([torch.full((size,), PARTS[name], dtype=torch.int8) for name, size in sizes.items()])


def check_used(asked: Asked, *, given: bool, title: str) -> None:
    """Refuse to split at random what comes with a split, unless a splitter was chosen.

    Args:
        asked: The settings of the data module.
        given: Whether it says what trains and what tests.
        title: What messages call it.

    Raises:
        ValueError: No splitter was, and the source's default does not go by these roles.
    """
    if given and not asked.splitter_is_given and not isinstance(asked.splitter, GivenSplit):
        raise ValueError(
            f"{title} says what trains and what tests: set data.splitter to GivenSplit to go by it, or to another "
            f"splitter, such as {type(asked.splitter).__name__}, for a random split of all"
        )
