"""Examples whose roles are given, by a mapping of what trains, validates and tests: ``{"train": ..., "test": ...}``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.allocation import Asked
from fl_lightning.data.split import GivenSplit, Role

#: The parts, by the names that they have.
PARTS = {"train": Role.TRAIN, "val": Role.VAL, "test": Role.TEST}


def has_parts(given: Any) -> bool:
    """Whether this is a mapping of parts.

    Raises:
        ValueError: It has one that is called ``train``, and others that are no parts.
    """
    if not isinstance(given, Mapping) or "train" not in given:
        return False
    if others := [name for name in given if name not in PARTS]:
        raise ValueError(f"data.source has 'train' and {others[0]!r}: call what trains, validates and tests {_CALLED}")
    return True


_CALLED = ", ".join(map(repr, PARTS))


def roles_of(sizes: Mapping[str, int]) -> Tensor:
    """The roles of the parts' examples one after another, int8, from how many each has."""
    return torch.cat([torch.full((size,), PARTS[name], dtype=torch.int8) for name, size in sizes.items()])


def check_used(asked: Asked, roles: Sequence[Tensor | None] | None, title: str) -> None:
    """Refuse to split at random what comes with a split, unless a splitter was chosen.

    Raises:
        ValueError: No splitter was, and the source's default does not go by these roles.
    """
    given = roles is not None and any(role is not None for role in roles)
    if given and not asked.splitter_is_given and not isinstance(asked.splitter, GivenSplit):
        raise ValueError(
            f"{title} says what trains and what tests: set data.splitter to GivenSplit to go by it, or to another "
            f"splitter, such as {type(asked.splitter).__name__}, for a random split of all"
        )
