"""Softmax attention within each of many graphs of many clients at once.

Graphs of similar size are one product of matrices, so that the largest graph does not pad all others: time and memory
are those of the pairs of nodes, of which few are in memory at once.

Shape legend: C clients, N nodes (padded), G graphs (padded), H heads, D width of a head, B graphs of similar size, L
nodes of the largest of these.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import lead_with_clients, quick

#: Sizes are rounded up to a multiple of this.
STEP = 8
#: Most numbers in the scores of the graphs that are computed together.
MOST_NUMBERS = 2**22


def graph_attention(query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, size_G: Tensor) -> Tensor:
    """Σ_u softmax_u(q_v · k_u / √D) v_u over the nodes u of each node's graph, (N, H, D); also under ``vmap``.

    Args:
        query_NHD: q.
        key_NHD: k.
        value_NHD: v.
        size_G: Number of nodes of each graph, which are consecutive, int64; 0 for padding.

    Returns:
        The sums, 0 for nodes of no graph. They have a first derivative only.
    """
    mixed: Tensor = _Attention.apply(query_NHD, key_NHD, value_NHD, size_G)  # type: ignore[no-untyped-call]
    return mixed


@quick
class _Attention(Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, size: Tensor) -> Tensor:
        mixed = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        for place, is_node, (query_BHLD, key_BHLD, value_BHLD) in _alike(size, [query, key, value]):
            _put(mixed, place, is_node, _shares(query_BHLD, key_BHLD, is_node) @ value_BHLD)
        return mixed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *_Gradients.apply(grad, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        return _Attention.apply(*lead_with_clients(info.batch_size, in_dims, tensors)), 0  # type: ignore[no-untyped-call]


@quick
class _Gradients(Function):
    @staticmethod
    def forward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)]
        for place, is_node, parts in _alike(size, [grad, query, key, value]):
            grad_BHLD, query_BHLD, key_BHLD, value_BHLD = parts
            share_BHLL = _shares(query_BHLD, key_BHLD, is_node)
            felt_BHLL = grad_BHLD @ value_BHLD.mT
            mean_BHL1 = (share_BHLL * felt_BHLL).sum(dim=-1, keepdim=True)
            score_BHLL = share_BHLL * (felt_BHLL - mean_BHL1) / math.sqrt(query_BHLD.shape[-1])
            results = (score_BHLL @ key_BHLD, score_BHLL.mT @ query_BHLD, share_BHLL.mT @ grad_BHLD)
            for each, result in zip(found, results, strict=True):
                _put(each, place, is_node, result)
        return found[0], found[1], found[2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        return

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError("graph_attention has a first derivative only, but was differentiated twice")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _Gradients.apply(*lead_with_clients(info.batch_size, in_dims, tensors)), (0, 0, 0)  # type: ignore[no-untyped-call]


def _alike(size: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Graphs of similar size: the places of their nodes among all, which are no padding (B, L), and what these have.

    Args:
        size: (..., G).
        tensors: (..., N, H, D), which become (B, H, L, D), 0 for padding: other clients' values may be nan.
    """
    num_nodes, num_heads = tensors[0].shape[-3:-1]
    size_PG = size.reshape(-1, size.shape[-1])
    first_P1 = torch.arange(len(size_PG), device=size.device)[:, None] * num_nodes
    first_Q, size_Q = (size_PG.cumsum(dim=1) - size_PG + first_P1).flatten(), size_PG.flatten()
    flat = [tensor.flatten(0, -3) for tensor in tensors]
    steps_Q = (size_Q + STEP - 1) // STEP
    for steps in sorted(set(steps_Q.tolist())):
        if not steps:
            continue
        length = steps * STEP
        index_L = torch.arange(length, device=size.device)
        for graph_B in (steps_Q == steps).nonzero().flatten().split(max(1, MOST_NUMBERS // (num_heads * length**2))):
            is_node_BL = index_L < size_Q[graph_B, None]
            place_BL = torch.where(is_node_BL, first_Q[graph_B, None] + index_L, 0)
            rows = [
                tensor.index_select(0, place_BL.flatten()).view(*place_BL.shape, *tensor.shape[1:]) for tensor in flat
            ]
            shown = [torch.where(is_node_BL[..., None, None], each, 0.0).transpose(1, 2) for each in rows]
            yield place_BL, is_node_BL, shown


def _shares(query_BHLD: Tensor, key_BHLD: Tensor, is_node_BL: Tensor) -> Tensor:
    """The softmax over the nodes of each graph, (B, H, L, L)."""
    score_BHLL = query_BHLD @ key_BHLD.mT / math.sqrt(query_BHLD.shape[-1])
    lowest = torch.finfo(score_BHLL.dtype).min
    return score_BHLL.masked_fill(~is_node_BL[:, None, None, :], lowest).softmax(dim=-1).to(query_BHLD.dtype)


def _put(into: Tensor, place_BL: Tensor, is_node_BL: Tensor, value_BHLD: Tensor) -> None:
    """Write what nodes have to their places."""
    rows = value_BHLD.transpose(1, 2)[is_node_BL]
    into.view(-1, *into.shape[-2:]).index_copy_(0, place_BL[is_node_BL], rows.to(into.dtype))
