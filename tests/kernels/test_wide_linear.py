import pytest
import torch
import torch.nn.functional as F

from fl_lightning.kernels.wide_linear import BLOCK, WideLinear, wide_linear


@pytest.mark.parametrize("num_outputs", [7, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 5])
def test_blocks_compute_what_a_linear_layer_computes(num_outputs) -> None:
    draw = torch.Generator().manual_seed(num_outputs)
    shapes = [(4, 6), (num_outputs, 6), (num_outputs,)]
    operands = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    upstream = torch.randn(4, num_outputs, generator=draw, dtype=torch.float64)
    actual = [operand.clone().requires_grad_() for operand in operands]
    expected = [operand.clone().requires_grad_() for operand in operands]

    out, reference = wide_linear(*actual), F.linear(*expected)

    torch.testing.assert_close(out, reference, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(out, actual, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(reference, expected, upstream), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 6), (6,), (2, 3, 6)])
def test_inputs_that_are_no_rows_are_mapped_as_by_a_linear_layer(shape) -> None:
    layer, x = WideLinear(6, 2 * BLOCK), torch.randn(shape)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    free = WideLinear(6, 2 * BLOCK, bias=False)
    assert torch.equal(free(x), F.linear(x, free.weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_gradient_may_be_one_number_for_all_and_inputs_may_be_fixed() -> None:
    layer = WideLinear(6, 2 * BLOCK + 3)
    x = torch.randn(4, 6)
    layer(x).sum().backward()  # its gradient is an expanded 1
    torch.testing.assert_close(layer.weight.grad, x.sum(dim=0).expand_as(layer.weight))
    torch.testing.assert_close(layer.bias.grad, torch.full_like(layer.bias, 4.0))

    layer.requires_grad_(False)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, layer.weight.sum(dim=0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_blocks_are_differentiated_once_only() -> None:
    layer, x = WideLinear(6, 2 * BLOCK), torch.randn(4, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(gradient.square().sum(), x)
