"""Counter-based random numbers: every draw is a hash of (seed, round, stage, client, step, element).

A draw depends on nothing but its key, so the sequential and the stacked executor, any order of the clients and any
number of processes see the same numbers, and a resumed run needs no generator state to continue exactly.

The mixing functions are SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014)
for keys and one multiply-xorshift round on 32-bit words for the elements.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import quick

MASK_64 = (1 << 64) - 1
MASK_63 = (1 << 63) - 1

#: The constants of the element hash, as tensors: as numbers they would be made into such in every pass.
_15, _12, _MASK_17, _MASK_20, _FACTOR_1, _FACTOR_2 = torch.tensor(
    [15, 12, 0x1FFFF, 0xFFFFF, 0x2C1B3C6D, 0x297A2D39], dtype=torch.int32, device="cpu"
)


def splitmix64(state: Any) -> Any:
    """One step of the generator on an integer of 64 bits, or on an array of type uint64."""
    state = (state + 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def part_number(part: int | str) -> int:
    """A part of a key's path as 64 bits."""
    return (zlib.crc32(part.encode()) if isinstance(part, str) else part) & MASK_64


def derive_key(*parts: int | str) -> int:
    """Hash a path of integers and names to a 63-bit key.

    Args:
        parts: For example ``(seed, "dropout", round_idx, client)``; the order matters.

    Returns:
        A non-negative integer below 2**63 that fits an int64 tensor and seeds a ``torch.Generator``.

    Example:
        >>> derive_key(0, "train", 3) == derive_key(0, "train", 3)
        True
        >>> derive_key(0, "train", 3) == derive_key(0, "train", 4)
        False
    """
    state = 0
    for part in parts:
        state = splitmix64(state ^ part_number(part))
    return state & MASK_63


def generator(*parts: int | str) -> torch.Generator:
    """Return a CPU ``torch.Generator`` seeded by :func:`derive_key`."""
    return torch.Generator().manual_seed(derive_key(*parts))


def subkey(key: Tensor, *parts: int | str) -> Tensor:
    """Keys that follow from others, for draws that must not meet theirs; also under ``vmap``.

    Args:
        key: int64 keys of any shape.
        parts: What the draws are for, such as a name and a number; the order matters.

    Returns:
        int64 keys of that shape, below 2**63 and not negative.

    Example:
        >>> int(subkey(torch.tensor(5), 3)) == splitmix64(5 ^ 3) & MASK_63
        True
    """
    for part in parts:
        state = (key ^ _signed(part_number(part))) + _signed(0x9E3779B97F4A7C15)
        state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
        state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
        key = (state ^ _shifted(state, 31)) & MASK_63
    return key


def _signed(number: int) -> int:
    """The number whose int64 has the bits of the given one of 64 bits."""
    return number - (1 << 64) if number > MASK_63 else number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """The bits of an int64 moved to the right, zeros before them."""
    return (number >> bits) & (MASK_64 >> bits)


def _mix(word: Tensor) -> Tensor:
    """One multiply-xorshift round over int32 words, in place (arithmetic shifts are masked to be logical)."""
    word.bitwise_xor_((word >> _15).bitwise_and_(_MASK_17)).mul_(_FACTOR_1)
    word.bitwise_xor_((word >> _12).bitwise_and_(_MASK_20)).mul_(_FACTOR_2)
    return word.bitwise_xor_((word >> _15).bitwise_and_(_MASK_17))


@functools.lru_cache(maxsize=256)
def _indices(counts: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The mixed indices 0..count-1 of each (count, salt), one after the other; int32."""
    return torch.cat([_mix(torch.arange(n, device=device, dtype=torch.int32) ^ salt) for n, salt in counts])


def _words(key: Tensor, *counts: tuple[int, int]) -> Sequence[Tensor]:
    """Hash (key, 0..count-1) to int32 words of shape (*key.shape, count), for each (count, salt).

    The index is mixed before it meets the key: plain sums would give neighboring keys the same words, shifted.
    """
    low = (key & 0x7FFFFFFF).to(torch.int32)
    high = ((key >> 31) & 0x7FFFFFFF).to(torch.int32)
    word = _mix(low[..., None] ^ _indices(counts, key.device))
    return torch.split(_mix(word ^ high[..., None]), [count for count, _ in counts], dim=-1)


def keep_mask(key: Tensor, num_rows: int, num_columns: int, drop_probability: float) -> Tensor:
    """Draw which elements a dropout layer keeps, one random byte an element.

    The drop probability is rounded to a multiple of 1/256 (0.5 is exact; see :func:`kept_fraction`),
    and is 1/256 to 255/256 unless it is 0.

    Args:
        key: int64 keys, shape (*batch).
        num_rows: Rows of one mask. A row's bits do not depend on how many rows there are, so padding changes nothing.
        num_columns: Columns of one mask.
        drop_probability: In [0, 1).

    Returns:
        Boolean mask of shape (*batch, num_rows, num_columns).
    """
    return random_bytes(key, num_rows, num_columns) >= _threshold(drop_probability)


def random_bytes(key: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Uniform bytes of shape (*key.shape, num_rows, num_columns); see :func:`keep_mask`."""
    num_words = -(-num_columns // 4)
    row, column = _words(key, (num_rows, 0x51ED270B), (num_words, 0x2545F491))
    word = _mix(row[..., :, None] + column[..., None, :])
    return word.view(torch.uint8)[..., :num_columns]


def random_order(key: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw elements without replacement, uniformly, in random order.

    Args:
        key: int64 keys, shape (*batch).
        mask: Which elements may be drawn, (*batch, N). The draw of an element does not depend on N.
        count: How many to draw, at most N.

    Returns:
        Indices (*batch, count), and which of them were allowed: false only where fewer than ``count`` are.
    """
    drawn = _tickets(key, mask).topk(count, dim=-1, largest=False, sorted=True)
    return drawn.indices, drawn.values < _NO_TICKET


def random_places(key: Tensor, mask: Tensor) -> Tensor:
    """The rank of each element in a uniformly random order of those that the mask allows.

    Args:
        key: int64 keys, shape (*batch).
        mask: Which elements are ordered, (*batch, N). Their order does not depend on N.

    Returns:
        Ranks (*batch, N) from 0; those of the other elements follow.
    """
    return _tickets(key, mask).argsort(dim=-1).argsort(dim=-1)


def random_uniform(key: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Numbers in (0, 1), float64 (*key.shape, num_rows, num_columns); a row does not depend on how many there are.

    Also under ``vmap``. They are multiples of 2**-24, between which they lie.
    """
    row, column = _words(key, (num_rows, 0x51ED270B), (num_columns, 0x2545F491))
    word = _mix(row[..., :, None] + column[..., None, :]) & 0xFFFFFF
    return (word.double() + 0.5) / 2**24


def random_normal(key: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Standard normal numbers, drawn as :func:`random_uniform` does."""
    drawn: Tensor = torch.special.ndtri(random_uniform(key, num_rows, num_columns))
    return drawn


def pair_words(key: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Random int32 words of ordered pairs of numbers, each drawn by a key of its own; all of one shape."""
    low, high = (key & 0x7FFFFFFF).to(torch.int32), ((key >> 31) & 0x7FFFFFFF).to(torch.int32)
    word = _mix(first.to(torch.int32) ^ 0x51ED270B)
    word = _mix(word + _mix(second.to(torch.int32) ^ 0x2545F491))
    return _mix(_mix(word ^ low) ^ high)


_NO_TICKET = torch.iinfo(torch.int64).max


def _tickets(key: Tensor, mask: Tensor) -> Tensor:
    """A unique random number for each element that the mask allows, so that there are no ties; (*batch, N)."""
    num_elements = mask.shape[-1]
    (word,) = _words(key, (num_elements, 0x3C6EF372))
    ticket = (word.long() << 31) + torch.arange(num_elements, device=key.device)
    return ticket.masked_fill(~mask, _NO_TICKET)


def _threshold(drop_probability: float) -> int:
    return min(max(round(drop_probability * 256), 1), 255) if drop_probability else 0


def kept_fraction(drop_probability: float) -> float:
    """Return the exact probability with which :func:`keep_mask` keeps an element.

    Example:
        >>> kept_fraction(0.5), kept_fraction(0.6)
        (0.5, 0.3984375)
    """
    return 1.0 - _threshold(drop_probability) / 256


@functools.cache
def dropout_scale(drop_probability: float, dtype: torch.dtype) -> float:
    """What a dropout layer multiplies the kept elements with: 1 / (kept fraction), as exact as the type is."""
    return float(torch.tensor(1 / kept_fraction(drop_probability), device="cpu", dtype=torch.float64).to(dtype))


@quick
class _Multipliers(Function):
    """Under ``vmap`` one draw for all clients."""

    @staticmethod
    def forward(key: Tensor, count: int, shape: tuple[int, int], probability: float, dtype: torch.dtype) -> Tensor:
        keys = key + torch.arange(count, device=key.device).view(-1, *[1] * key.dim())
        threshold = _threshold(probability)
        # clamp(byte, threshold - 1, threshold) tells byte >= threshold without the slow passes over booleans
        keep = random_bytes(keys, *shape).clamp_(threshold - 1, threshold).sub_(threshold - 1)
        return keep.to(dtype).mul_(dropout_scale(probability, dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], key: Tensor, *args: Any) -> tuple[Tensor, int]:
        return _Multipliers.apply(key.movedim(in_dims[0], 0), *args), 1  # type: ignore[no-untyped-call]


def dropout_multipliers(key: Tensor, count: int, like: Tensor, probability: float) -> Tensor:
    """What dropout multiplies with: 0 where an element is dropped and 1 / (kept fraction) elsewhere.

    Args:
        key: int64 key, scalar (one per client under ``torch.vmap``), or (C,) of a stack.
        count: Number of draws; they are those of the keys ``key``, ``key + 1``, ...
        like: Values to be multiplied, (N, F), or (C, N, F).
        probability: Drop probability in (0, 1), rounded as :func:`keep_mask` does.

    Returns:
        Multipliers (count, N, F) or (count, C, N, F), of the type of ``like``.
    """
    shape = (like.shape[-2], like.shape[-1])
    drawn: Tensor = _Multipliers.apply(key, count, shape, probability, like.dtype)  # type: ignore[no-untyped-call]
    return drawn


def dropout(x: Tensor, key: Tensor, probability: float) -> Tensor:
    """Zero each element with the given probability and scale the rest, as ``torch.nn.functional.dropout`` in training.

    Args:
        x: Values, shape (..., N, F).
        key: int64 key, scalar (one per client under ``torch.vmap``).
        probability: Drop probability in [0, 1), rounded as :func:`keep_mask` does; the scaling uses the rounded value.

    Returns:
        Tensor of x's shape.
    """
    return x if probability == 0.0 else x * dropout_multipliers(key, 1, x, probability)[0]
