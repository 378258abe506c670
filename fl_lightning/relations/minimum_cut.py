"""The lightest cut of a complete weighted graph.

Stoer, Wagner: "A Simple Min-Cut Algorithm", Journal of the ACM 44(4), 1997.
"""

import torch
from torch import Tensor


def minimum_cut(weight_CC: Tensor) -> Tensor:
    """One side of the global minimum cut, boolean (C,); the side without the first vertex.

    Every phase begins at the first vertex; of equally tight vertices the first is taken, of equal cuts the first found.

    Args:
        weight_CC: Symmetric and not negative, at least two vertices; the diagonal is not read.

    Example:
        >>> pairs = torch.tensor([[0.0, 2, 0, 1], [2, 0, 0, 0], [0, 0, 0, 2], [1, 0, 2, 0]])
        >>> minimum_cut(pairs).tolist()
        [False, False, True, True]
    """
    weights = weight_CC.double().tolist()
    merged = {vertex: {vertex} for vertex in range(len(weights))}
    lightest, side = float("inf"), {0}
    while len(merged) > 1:
        first, *others = merged
        before, last, tight = first, first, weights[first].copy()
        while others:
            before, last = last, max(others, key=tight.__getitem__)
            others.remove(last)
            cut = tight[last]
            tight = [own + other for own, other in zip(tight, weights[last], strict=True)]
        if cut < lightest:
            lightest, side = cut, merged[last]
        merged[before] |= merged.pop(last)
        for other in merged:
            weights[before][other] += weights[last][other]
            weights[other][before] = weights[before][other]
    on_side_C = torch.tensor([vertex in side for vertex in range(len(weights))], device=weight_CC.device)
    return ~on_side_C if on_side_C[0] else on_side_C
