"""Attention within each graph: equal to the plain one graph by graph, on a stack, and in its gradients."""

import math

import pytest
import torch
from torch import Tensor

from fl_lightning.kernels import graph_attention as module
from fl_lightning.kernels.graph_attention import graph_attention

SIZES = torch.tensor([[3, 1, 9, 0, 17], [8, 0, 2, 11, 1]])
NUM_NODES, NUM_HEADS, WIDTH = 32, 2, 4


def inputs(*lead: int) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (*lead, NUM_NODES, NUM_HEADS, WIDTH)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def plain(query: Tensor, key: Tensor, value: Tensor, size: Tensor) -> Tensor:
    """One graph after another."""
    parts, start = [], 0
    for count in size.tolist():
        q, k, v = (each[start : start + count].transpose(0, 1) for each in (query, key, value))
        parts.append(((q @ k.mT / math.sqrt(WIDTH)).softmax(dim=-1) @ v).transpose(0, 1))
        start += count
    return torch.cat([*parts, torch.zeros_like(value[start:])])


@pytest.mark.parametrize("most", [module.MOST_NUMBERS, 1])
def test_it_is_the_attention_of_each_graph(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NUMBERS", most)
    parts = inputs()
    torch.testing.assert_close(graph_attention(*parts, SIZES[0]), plain(*parts, SIZES[0]))
    assert torch.autograd.gradcheck(lambda *given: graph_attention(*given, SIZES[0]), parts)


def test_a_stack_is_each_client_alone() -> None:
    parts = inputs(2)
    expected = torch.stack([plain(*(each[client] for each in parts), SIZES[client]) for client in range(2)])
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), parts)
    for stacked in (graph_attention(*parts, SIZES), torch.vmap(graph_attention)(*parts, SIZES)):
        torch.testing.assert_close(stacked, expected)
        for found, gradient in zip(torch.autograd.grad((stacked * weight).sum(), parts), gradients, strict=True):
            torch.testing.assert_close(found, gradient)

    def loss(query: Tensor, key: Tensor, value: Tensor, size: Tensor, weight: Tensor) -> Tensor:
        return (graph_attention(query, key, value, size) * weight).sum()

    of_each = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*parts, SIZES, weight)
    for found, gradient in zip(of_each, gradients, strict=True):
        torch.testing.assert_close(found, gradient)


def test_a_client_that_has_diverged_changes_no_other() -> None:
    parts = [each.detach() for each in inputs(2)]
    before = graph_attention(*parts, SIZES)
    for each in parts:
        each[0] = torch.nan
    after = graph_attention(*parts, SIZES)
    assert after[0, :30].isnan().all()
    assert torch.equal(after[1], before[1])


def test_a_second_derivative_is_refused() -> None:
    parts = inputs()
    (first,) = torch.autograd.grad(graph_attention(*parts, SIZES[0]).sum(), parts[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(first.sum(), parts[:1])
