"""Short descriptions of large tensors that tell other values from the rounding of another machine."""

import math

import torch
from torch import Tensor

#: How far apart two descriptions of the same values may be, relative to the mean absolute value.
TOLERANCE = 1e-6
_ROWS = 4096


def sketch(values_NF: Tensor) -> str:
    """The shape, the mean absolute value and a mean with a weight of its own for every place.

    Example:
        >>> sketch(torch.eye(2))
        '2x2 0.5 0.3229816454'
    """
    rows_N, columns_F = (torch.arange(size, dtype=torch.float64).cos() for size in values_NF.shape)
    size = weighted = 0.0
    for start in range(0, len(values_NF), _ROWS):  # which may be mapped from a file
        part = values_NF[start : start + _ROWS].double()
        size += float(part.abs().sum())
        weighted += float(rows_N[start : start + _ROWS] @ part @ columns_F)
    count = max(1, values_NF.numel())
    return f"{'x'.join(map(str, values_NF.shape))} {size / count:.10g} {weighted / count:.10g}"


def are_alike(one: str, other: str) -> bool:
    """Whether some descriptions, one after another, are of the same values but for rounding."""
    if one == other:
        return True
    parts = [text.split() for text in (one, other)]
    if len(parts[0]) != len(parts[1]) or parts[0][::3] != parts[1][::3]:
        return False
    numbers = [[float(number) for index, number in enumerate(part) if index % 3] for part in parts]
    return all(
        math.isclose(a, b, rel_tol=0.0, abs_tol=TOLERANCE * numbers[0][index - index % 2])
        for index, (a, b) in enumerate(zip(*numbers, strict=True))
    )
