"""Batch normalization: as PyTorch's where nothing is padded, without the padding where something is."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.models import BatchNorm, NormalizedGCN
from fl_lightning.models.batch_norm import (
    adopt_statistics,
    has_torch_norms,
    norm_parameters,
    normalize,
    statistics_of,
)


def examples(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1


def test_as_pytorch() -> None:
    ours, theirs = BatchNorm(4, momentum=0.3).double(), nn.BatchNorm1d(4, momentum=0.3).double()
    for layer in (ours, theirs):
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    everyone_N = torch.ones(6, dtype=torch.bool)
    for x in (examples(6, 4), 2 * examples(6, 4)):
        x.requires_grad_()
        outputs = [ours(x, everyone_N), theirs(x)]
        torch.testing.assert_close(*outputs)
        gradients = [torch.autograd.grad((out**3).sum(), [x])[0] for out in outputs]
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(ours.running_mean.data, theirs.running_mean)
    torch.testing.assert_close(ours.running_var.data, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x, everyone_N), theirs.eval()(x))


def test_what_is_masked_does_not_count() -> None:
    layers = [BatchNorm(3).double() for _ in range(2)]
    x, mask_N = examples(7, 3), torch.tensor([True] * 5 + [False] * 2)
    whole = layers[0](torch.cat([x[:5], 1e6 * x[5:]]), mask_N)
    part = layers[1](x[:5], mask_N[:5])
    torch.testing.assert_close(whole[:5], part)
    torch.testing.assert_close(layers[0].running_var, layers[1].running_var)


def test_no_example_leaves_the_statistics_alone() -> None:
    layer = BatchNorm(2).double()
    assert layer(examples(3, 2), torch.zeros(3, dtype=torch.bool)).isfinite().all()
    assert layer.running_mean.tolist() == [0, 0]
    assert layer.running_var.tolist() == [1, 1]


def test_stack_and_vmap_are_one_client_after_another() -> None:
    layer = BatchNorm(3).double()
    x_CND, mask_CN = examples(2, 5, 3), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])

    def fresh() -> dict[str, torch.Tensor]:
        scale = torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None]
        return {name: (p.detach() * scale).clone() for name, p in layer.named_parameters()}

    stacked, mapped = fresh(), fresh()
    outputs = [
        functional_call(layer, stacked, (x_CND, mask_CN)),
        torch.vmap(lambda p, x, mask: functional_call(layer, p, (x, mask)))(mapped, x_CND, mask_CN),
    ]
    torch.testing.assert_close(*outputs)
    for client in range(2):
        own = {name: tensor[client].clone() for name, tensor in fresh().items()}
        alone = functional_call(layer, own, (x_CND[client], mask_CN[client]))
        torch.testing.assert_close(outputs[0][client], alone)
        for actual in (stacked, mapped):
            torch.testing.assert_close(actual["running_var"][client], own["running_var"])
            torch.testing.assert_close(actual["running_mean"][client], own["running_mean"])


def test_pytorchs_statistics_become_parameters_without_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    assert has_torch_norms(net)
    adopt_statistics(net)
    assert statistics_of(net) == {"1.running_mean", "1.running_var"}
    assert not list(net.buffers())
    assert set(norm_parameters(net)) == {
        *("1.weight", "1.bias", "1.running_mean", "1.running_var"),
        *("2.weight", "2.bias"),
    }
    net(torch.randn(5, 3))
    assert (net[1].running_mean != 0).any()
    with pytest.raises(ValueError, match="0 is a BatchNorm1d with momentum None: give it one, for example"):
        adopt_statistics(nn.Sequential(nn.BatchNorm1d(4, momentum=None)))


def test_nets_with_ours() -> None:
    net = NormalizedGCN(5, 3, hidden_channels=4)
    assert statistics_of(net) == {f"norms.{layer}.running_{kind}" for layer in (0, 1) for kind in ("mean", "var")}
    assert not has_torch_norms(net)
    with pytest.raises(ValueError, match="momentum=0 is impossible: set it above 0, to at most 1"):
        BatchNorm(3, momentum=0)


@pytest.mark.parametrize("mapped", [False, True], ids=["stack", "vmap"])
def test_first_and_second_derivatives(mapped: bool) -> None:
    mask_CN = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    x_CND, weight_CD = examples(2, 5, 3).requires_grad_(), examples(2, 3).requires_grad_()

    def output(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return normalize(x, mask, None, weight, None, training=True, momentum=0.1, eps=1e-5)

    def of_all(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (torch.vmap(output) if mapped else output)(x, mask_CN, weight)

    assert torch.autograd.gradcheck(of_all, (x_CND, weight_CD))
    assert torch.autograd.gradgradcheck(of_all, (x_CND, weight_CD))
