"""Random keys of many clients and steps at once: :func:`fl_lightning.randomness.derive_key` on tensors."""

import zlib

import torch
from torch import Tensor


def derive_keys(*parts: int | str | Tensor) -> Tensor:
    """The keys of a path of which some parts are tensors, which are broadcast against each other.

    Args:
        parts: For example ``(seed, "train", round_idx, client_C, step_S1)``, tensors in int64.

    Returns:
        int64 keys, below 2**63 and not negative, equal to those of ``derive_key`` for each element.

    Example:
        >>> from fl_lightning.randomness import derive_key
        >>> keys = derive_keys(7, "train", torch.tensor([0, -3]))
        >>> keys.tolist() == [derive_key(7, "train", 0), derive_key(7, "train", -3)]
        True
    """
    state = torch.zeros((), dtype=torch.int64)
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = _splitmix64(state ^ (number if isinstance(number, Tensor) else _signed(number)))
    return state & _signed(2**63 - 1)


def _signed(word: int) -> int:
    """The lowest 64 bits of a number, read as an int64."""
    return (word + 2**63) % 2**64 - 2**63


def _splitmix64(state: Tensor) -> Tensor:
    state = state + _signed(0x9E3779B97F4A7C15)  # int64 wraps around
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (word >> bits).bitwise_and(2 ** (64 - bits) - 1)
