"""Distances of time series that may run at different speeds.

Shape legend: C series, L length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def time_warping(series_CL: Tensor) -> Tensor:
    """Dynamic time warping of all pairs of series, (C, C): √ of the least Σ (a - b)² along a monotone matching.

    Example:
        >>> time_warping(torch.tensor([[1.0, 2, 3], [1, 1, 3]]))[0, 1]
        tensor(1.)
    """
    cost_LLCC = (series_CL.T[:, None, :, None] - series_CL.T[None, :, None, :]).square()
    length = len(cost_LLCC)
    total = F.pad(torch.zeros_like(cost_LLCC), (0, 0, 0, 0, 1, 0, 1, 0), value=torch.inf)
    total[0, 0] = 0
    for first in range(length):
        for second in range(length):
            before = torch.stack([total[first, second + 1], total[first + 1, second], total[first, second]])
            total[first + 1, second + 1] = cost_LLCC[first, second] + before.amin(dim=0)
    return total[-1, -1].sqrt()
