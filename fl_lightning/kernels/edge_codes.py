"""Edges as single numbers, source · N + target, which are sorted and compared in place.

A large graph's edges take most of its memory, (2, E) int64 tensors. Nothing here needs more than the given edges, their
codes twice and the result, which are together two and a half times the result.

Shape legend: N nodes, E edges.
"""

import torch
from torch import Tensor


def codes(source_E: Tensor, target_E: Tensor, num_nodes: int) -> Tensor:
    """The codes of edges, int64 (E,), in their order."""
    return (source_E * num_nodes).add_(target_E)


def distinct_codes(edge_index_2E: Tensor, num_nodes: int) -> Tensor:
    """The codes of edges (2, E) without self-loops, each once, ascending.

    Example:
        >>> distinct_codes(torch.tensor([[2, 0, 1, 2], [0, 1, 1, 0]]), 3)
        tensor([1, 6])
    """
    source_E, target_E = edge_index_2E
    code_E = codes(source_E, target_E, num_nodes)
    code_E = _chosen(code_E, source_E != target_E)
    return distinct(code_E)


def with_reverses(code_E: Tensor, num_nodes: int) -> Tensor:
    """Distinct codes and those of the reverse edges, each once, ascending.

    Example:
        >>> with_reverses(torch.tensor([1, 6]), 3)
        tensor([1, 2, 3, 6])
    """
    back_E = reversed_codes(code_E, num_nodes)
    if torch.equal(code_E, back_E):
        return code_E
    return distinct(torch.cat([code_E, back_E]))


def reversed_codes(code_E: Tensor, num_nodes: int) -> Tensor:
    """The codes of the reverse edges, ascending: the same codes, if all edges go both ways."""
    source_E = code_E.div(num_nodes, rounding_mode="floor")
    return _sorted(code_E.remainder(num_nodes).mul_(num_nodes).add_(source_E))


def edges_of(code_E: Tensor, num_nodes: int, given_2E: Tensor | None = None) -> Tensor:
    """The edges (2, E) of codes: the given ones, if these have the same codes."""
    if (
        given_2E is not None
        and len(code_E) == given_2E.shape[1]
        and torch.equal(code_E, codes(given_2E[0], given_2E[1], num_nodes))
    ):
        return given_2E.contiguous()
    edges_2E = torch.empty(2, len(code_E), dtype=torch.int64)
    torch.div(code_E, num_nodes, rounding_mode="floor", out=edges_2E[0])
    torch.remainder(code_E, num_nodes, out=edges_2E[1])
    return edges_2E


def is_ascending(code_E: Tensor) -> bool:
    """Whether every code is larger than the one before it, so that edges are sorted and none repeats."""
    return bool((code_E[1:] > code_E[:-1]).all())


def distinct(code_E: Tensor) -> Tensor:
    """Each code once, ascending; the codes are sorted in place."""
    if is_ascending(code_E):
        return code_E
    code_E = _sorted(code_E)
    is_new_E = torch.ones(len(code_E), dtype=torch.bool)
    torch.ne(code_E[1:], code_E[:-1], out=is_new_E[1:])
    return _chosen(code_E, is_new_E)


def _chosen(code_E: Tensor, is_chosen_E: Tensor) -> Tensor:
    """Some of the codes, by NumPy: ``code_E[is_chosen_E]`` would make an index as large as they are."""
    return code_E if bool(is_chosen_E.all()) else torch.from_numpy(code_E.numpy()[is_chosen_E.numpy()])


def _sorted(code_E: Tensor) -> Tensor:
    """The codes, sorted in place: ``torch.sort`` would make an index as large beside them."""
    code_E.numpy().sort()
    return code_E
