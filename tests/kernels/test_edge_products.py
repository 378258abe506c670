"""Products along edges: by dense matrices, their derivatives, whose edges they are under vmap, what is no edge."""

import pytest
import torch
from net_checks import assert_close, random
from torch import Tensor

from fl_lightning.kernels.block_sparse import BlockSparse
from fl_lightning.kernels.edge_products import Edges, edge_maxima, edge_products, edge_sums

#: Three directed graphs on five nodes, the last without edges, with loops that do not count.
LINKED = torch.stack([random(5, 5) > 0.3, random(5, 5, seed=1) > -0.3, torch.zeros(5, 5)]).double() + torch.eye(5)
NODES = torch.ones(3, 5)


def blocks(dense_CNN: Tensor) -> BlockSparse:
    whole = torch.block_diag(*dense_CNN)
    return BlockSparse.from_coordinates(whole.nonzero().T, whole[whole != 0], dense_CNN.shape[1:], len(dense_CNN))


@pytest.fixture
def operator() -> BlockSparse:
    return blocks(LINKED)


def spread(weight_KE: Tensor, client: int) -> Tensor:
    """A client's edges as dense matrices (K, N, N), from column to row."""
    linked_NN = (LINKED[client] - torch.eye(5)) > 0
    linked_NN.fill_diagonal_(False)
    dense_KNN = weight_KE.new_zeros(len(weight_KE), 5, 5)
    dense_KNN[:, linked_NN] = weight_KE[:, : int(linked_NN.sum())]
    return dense_KNN


def test_they_are_entries_of_dense_products(operator) -> None:
    to_KCND, from_KCND = random(2, 3, 5, 4), random(2, 3, 5, 4, seed=1)
    product_KCE = edge_products(operator.edges, to_KCND, from_KCND, owner=NODES)
    sum_KCND, turned_KCND = (
        edge_sums(operator.edges, product_KCE, from_KCND, owner=NODES, turned=turned) for turned in (False, True)
    )
    for client in range(3):
        dense_KNN = to_KCND[:, client] @ from_KCND[:, client].mT
        found_KNN = spread(product_KCE[:, client], client)
        assert_close(found_KNN, dense_KNN * (spread(torch.ones_like(product_KCE[:, client]), client)))
        assert_close(sum_KCND[:, client], found_KNN @ from_KCND[:, client])
        assert_close(turned_KCND[:, client], found_KNN.mT @ from_KCND[:, client])
    assert not product_KCE[:, 2].any()


@pytest.mark.parametrize("turned", [False, True])
def test_derivatives(turned, operator) -> None:
    edges = operator.edges
    ends = [random(2, 3, 5, 4).requires_grad_(), random(2, 3, 5, 4, seed=1).requires_grad_()]
    weight = random(2, 3, edges.longest, seed=2).requires_grad_()

    def both(to: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        product = edge_products(edges, to, other, owner=NODES)
        return edge_sums(edges, product.sin() + weight, other, owner=NODES, turned=turned)

    assert torch.autograd.gradcheck(both, (*ends, weight))
    assert torch.autograd.gradgradcheck(both, (*ends, weight))


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True)])
def test_every_client_has_its_own_edges_under_vmap(own, operator) -> None:
    stacked = random(3, 2, 5, 4), random(3, 2, 5, 4, seed=1)
    given = [x if is_own else x[0] for x, is_own in zip(stacked, own, strict=True)]
    dims = tuple(0 if is_own else None for is_own in own)

    def value(to: Tensor, other: Tensor, nodes: Tensor, edges: Edges = operator.edges) -> Tensor:
        share = edge_products(edges, to, other, owner=nodes).softmax(dim=0)
        return edge_sums(edges, share, other, owner=nodes).sin()

    gradient = torch.func.grad(lambda *operands: value(*operands).sum(), argnums=(0, 1))
    actual = torch.vmap(value, (*dims, 0))(*given, NODES)
    of_found = torch.vmap(gradient, (*dims, 0))(*given, NODES)
    for client in range(3):
        ends = [(x[client] if is_own else x).clone().requires_grad_() for x, is_own in zip(given, own, strict=True)]
        alone = value(*ends, NODES[client], edges=blocks(LINKED[client : client + 1]).edges)
        assert_close(actual[client], alone.detach())
        assert_close([each[client] for each in of_found], torch.autograd.grad(alone.sum(), ends))


def test_a_vmap_that_is_not_over_clients(operator) -> None:
    to_BKND, from_BKND = random(6, 2, 5, 4), random(6, 2, 5, 4, seed=1)
    edges = blocks(LINKED[:1]).edges

    def value(to: Tensor, other: Tensor) -> Tensor:
        return edge_sums(edges, edge_products(edges, to, other, owner=NODES[0]), other, owner=NODES[0])

    actual = torch.vmap(value)(to_BKND, from_BKND)
    assert_close(actual, torch.stack([value(*ends) for ends in zip(to_BKND, from_BKND, strict=True)]))


def test_an_entry_that_is_zero_is_no_edge() -> None:
    whole = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 1.0]]).double()
    values = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0]).double()
    index = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 2, 2]])
    edges = BlockSparse.from_coordinates(index, values, whole.shape, 1).edges
    assert edges.longest == 2
    ones = torch.ones(1, 3, 1).double()
    degree = edge_sums(edges, torch.ones(1, 2).double(), ones, owner=NODES[0])
    assert degree.flatten().tolist() == [1, 1, 0]


def test_the_greatest_value_at_each_node() -> None:
    """Of a stack, under vmap, and of a node without edges."""
    index = torch.tensor([[0, 1, 1, 2, 4, 5], [1, 0, 2, 1, 5, 4]])
    operator = BlockSparse.from_coordinates(index, torch.ones(6), (4, 4), 2)
    owner = torch.ones(2, 4, dtype=torch.bool)
    value = torch.tensor([[[3.0, 1.0, 5.0, -2.0], [7.0, 8.0, 99.0, 99.0]]])  # (maps, clients, edges), with padding
    low = -torch.inf
    expected = torch.tensor([[[3.0, 5.0, -2.0, low], [7.0, 8.0, low, low]]])
    assert torch.equal(edge_maxima(operator.edges, value, owner=owner), expected)
    mapped = torch.vmap(lambda v, o: edge_maxima(operator.edges, v, owner=o), in_dims=(1, 0))(value, owner)
    assert torch.equal(mapped.movedim(0, 1), expected)
    several = torch.vmap(lambda v: edge_maxima(operator.edges, v, owner=owner))(torch.stack([value, -value]))
    assert torch.equal(several[0], expected)
