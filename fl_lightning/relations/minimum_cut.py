"""The lightest cut of a complete weighted graph.

Stoer, Wagner: "A Simple Min-Cut Algorithm", Journal of the ACM 44(4), 1997, by networkx.
"""

import itertools

import torch
from torch import Tensor


def minimum_cut(weight_CC: Tensor) -> Tensor:
    """One side of the global minimum cut, boolean (C,); the side without the first vertex.

    Args:
        weight_CC: Symmetric and non-negative, at least two vertices; the diagonal is ignored.

    Example:
        >>> pairs = torch.tensor([[0.0, 2, 0, 1], [2, 0, 0, 0], [0, 0, 0, 2], [1, 0, 2, 0]])
        >>> minimum_cut(pairs).tolist()
        [False, False, True, True]
    """
    import networkx

    weights, graph = weight_CC.double().tolist(), networkx.Graph()
    pairs = itertools.combinations(range(len(weights)), 2)
    graph.add_weighted_edges_from((one, other, weights[one][other]) for one, other in pairs)
    _, sides = networkx.stoer_wagner(graph)
    away = next(side for side in sides if 0 not in side)
    return torch.tensor([vertex in away for vertex in range(len(weights))], device=weight_CC.device)
