"""Autograd functions under vmap with some operands mapped and others the same for all clients."""

import itertools

import pytest
import torch
from net_checks import assert_close, random
from torch import Tensor

from fl_lightning.kernels.block_sparse import BlockSparse, block_matmul
from fl_lightning.kernels.kernel_smoothing import kernel_smooth
from fl_lightning.kernels.linear import Linear
from fl_lightning.kernels.randomness import dropout


@pytest.fixture
def operator() -> BlockSparse:
    """Three different 4 x 5 blocks."""
    dense = random(3, 4, 5) * (random(3, 4, 5, seed=1) > 0)
    whole = torch.block_diag(*dense)
    built = BlockSparse.from_coordinates(whole.nonzero().T, whole[whole != 0], (4, 5), 3)
    built.dense = dense
    return built


def check_all_mixtures(function, stacked: list[Tensor]) -> None:
    """Each choice of operands that are common but not all: values and gradients, and gradients within vmap."""
    for mapped in itertools.product([True, False], repeat=len(stacked)):
        if not any(mapped):
            continue
        operands = [t.clone() if own else t[0].clone() for t, own in zip(stacked, mapped, strict=True)]
        inputs = [t.requires_grad_() for t in operands if t.is_floating_point()]
        in_dims = tuple(0 if own else None for own in mapped)
        alone = [[t[c] if own else t for t, own in zip(operands, mapped, strict=True)] for c in range(len(stacked[0]))]
        expected = torch.stack([function(*own) for own in alone])
        weights = random(*expected.shape, seed=9)

        actual = torch.vmap(function, in_dims)(*operands)
        assert_close(actual, expected)
        of_found = torch.autograd.grad((actual * weights).sum(), inputs)
        assert_close(of_found, torch.autograd.grad((expected * weights).sum(), inputs))

        indices = tuple(index for index, t in enumerate(operands) if t.is_floating_point())
        gradient = torch.func.grad(lambda *own: function(*own).sin().sum(), argnums=indices)
        in_turn = [torch.autograd.grad(function(*own).sin().sum(), [own[index] for index in indices]) for own in alone]
        for number, actual in enumerate(torch.vmap(gradient, in_dims)(*operands)):
            assert_close(actual, torch.stack([gradients[number] for gradients in in_turn]))


def test_linear_layer() -> None:
    layer = Linear(5, 2)

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    check_all_mixtures(run, [random(3, *shape) for shape in ((4, 5), (2, 5), (2,))])


def test_dropout() -> None:
    check_all_mixtures(lambda x, key: dropout(x, key, 0.4), [random(3, 6, 5), torch.tensor([3, 1, 4])])


@pytest.mark.parametrize("bandwidth", [10.0, 0.01], ids=["series", "dense"])
def test_kernel_smoothing(bandwidth) -> None:
    mask = torch.arange(90) < torch.tensor([[90], [70], [10]])
    check_all_mixtures(
        lambda h, score, mask: kernel_smooth(h, score, bandwidth=bandwidth, mask_N=mask),
        [random(3, 90, 2), random(3, 90, seed=1).tanh(), mask],
    )


@pytest.mark.parametrize("transpose", [False, True])
def test_blocks_of_the_owner_meet_one_matrix_for_all(operator, transpose) -> None:
    x = random(4 if transpose else 5, 2).requires_grad_()
    dense = operator.dense.mT if transpose else operator.dense
    owner = torch.zeros(3)

    actual = torch.vmap(lambda owner: block_matmul(operator, x, transpose=transpose, owner=owner))(owner)

    assert_close(actual, dense @ x)
    weights = random(*actual.shape, seed=5)
    (gradient,) = torch.autograd.grad(actual, x, weights)
    assert_close(gradient, (dense.mT @ weights).sum(dim=0))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_mapped_but_not_over_the_owners_is_multiplied_by_the_same_blocks(operator, place) -> None:
    x_CKMD = random(3, 4, 5, 2).requires_grad_()
    weights = random(3, 4, 4, 2, seed=5)

    several = torch.vmap(lambda x, owner: block_matmul(operator, x, owner=owner), in_dims=(place, None))
    found_CKND = torch.vmap(several)(x_CKMD.movedim(1, place + 1), torch.zeros(3))

    assert_close(found_CKND, operator.dense[:, None] @ x_CKMD)
    (gradient,) = torch.autograd.grad(found_CKND, x_CKMD, weights)
    assert_close(gradient, operator.dense.mT[:, None] @ weights)


def test_blocks_without_an_owner_do_not_meet_a_matrix_for_all(operator) -> None:
    x = random(5, 2)
    with pytest.raises(ValueError, match=r"3 blocks of 5 columns .* Under vmap name"):
        torch.vmap(lambda own: own * block_matmul(operator, x))(torch.ones(3))
    with pytest.raises(ValueError, match="3 blocks of 5 columns"):
        torch.vmap(lambda x: block_matmul(operator, x), chunk_size=2)(x.expand(3, 5, 2))
