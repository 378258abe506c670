import functools

import pytest
import torch
from net_checks import (
    KEYS,
    Noise,
    assert_close,
    batch_of,
    check_both_ways,
    check_executors_agree,
    check_rows_are_independent,
    check_training_reaches_everything,
    num_parameters,
    random,
    stacked_parameters,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD

from fl_lightning import ClientModule
from fl_lightning.models import CNN
from fl_lightning.models.cnn import PooledConvolution, _ConvolvePool

kinds = pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"filters": (3,)}, (1, 8, 8)),  # no row is left out
        ({"filters": (3, 4), "hidden_units": 8}, (1, 11, 11)),  # an odd row is left out twice
        ({"filters": [2, 3], "kernel_size": 5, "dropout": 0.5}, (3, 17, 19)),
        ({"filters": (3,), "kernel_size": 1, "hidden_units": 4, "dropout": 0.25}, (2, 3, 5)),
    ],
    ids=str,
)


def plain(net: CNN, x: Tensor) -> tuple[Tensor, Tensor]:
    """The net of PyTorch's own layers, without dropout."""
    for conv in net.convs:
        x = nn.functional.max_pool2d(nn.functional.conv2d(x, conv.weight, conv.bias).relu(), 2)
    embedding = x.flatten(1)
    if net.hidden is not None:
        embedding = net.hidden(embedding).relu()
    return net.head(embedding), embedding


@kinds
@pytest.mark.parametrize("training", [True, False])
def test_stack_and_vmap_and_one_client_are_equal(settings, shape, training) -> None:
    check_both_ways(CNN(shape, 4, **settings).train(training), shape)


@kinds
def test_it_is_built_of_torch_layers(settings, shape) -> None:
    net, x = CNN(shape, 4, **settings).double().eval(), random(3, *shape)

    output, expected = net(batch_of(x, KEYS[0], 3)), plain(net, x)

    assert_close(tuple(output), expected)
    weight = random(3, 4, seed=2)
    own = torch.autograd.grad((output.logits * weight).sum(), list(net.parameters()))
    of_torch = torch.autograd.grad((expected[0] * weight).sum(), list(net.parameters()))
    for actual, wanted in zip(own, of_torch, strict=True):
        assert_close(actual, wanted)


@kinds
def test_padding_changes_nothing(settings, shape) -> None:
    check_rows_are_independent(CNN(shape, 4, **settings), shape)


@kinds
def test_every_parameter_is_trained(settings, shape) -> None:
    torch.manual_seed(0)
    check_training_reaches_everything(CNN(shape, 4, **settings), shape)


@pytest.mark.parametrize(
    ("settings", "of_mnist", "of_cifar"),
    [
        ({"filters": (16,)}, 27_210, 36_458),
        ({"filters": (24, 48)}, 22_666, 28_378),  # 23 and 28 thousand, which Table 2 gives for the small net
        ({"filters": (32, 64), "hidden_units": 120}, 212_146, 297_202),  # 212 and 297 thousand, as Table 2
        ({"filters": (32, 64)}, 34_826, 42_442),
    ],
    ids=str,
)
def test_parameters_of_the_papers_nets(settings, of_mnist, of_cifar) -> None:
    assert num_parameters(CNN((1, 28, 28), 10, **settings)) == of_mnist
    assert num_parameters(CNN((3, 32, 32), 10, **settings)) == of_cifar


def test_derivatives() -> None:
    """First and second, of images and parameters; clients that share their images, too."""
    tensors = [random(*shape, seed=i) for i, shape in enumerate([(2, 2, 6, 6, 2), (2, 3, 2, 3, 3), (2, 3)])]

    def convolve(*tensors: Tensor) -> Tensor:
        return _ConvolvePool.apply(*tensors)[0]

    inputs = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(convolve, inputs)
    assert torch.autograd.gradgradcheck(convolve, inputs)
    conv = PooledConvolution(2, 3, kernel_size=3).double()
    parameters = stacked_parameters(conv)
    images = random(2, 6, 6, 2)
    shared = torch.vmap(lambda p: functional_call(conv, p, (images,)))(parameters)
    assert_close(shared, functional_call(conv, parameters, (images.expand(3, *images.shape),)))


def test_frozen_convolutions_need_no_gradient() -> None:
    net = CNN((1, 8, 8), 4, filters=(2,)).double()
    x = random(3, 1, 8, 8)
    weight, bias = net.convs.parameters()
    expected = torch.autograd.grad(net(batch_of(x, KEYS[0], 3)).logits.square().sum(), bias)
    weight.requires_grad_(False)

    assert_close(torch.autograd.grad(net(batch_of(x, KEYS[0], 3)).logits.square().sum(), bias), expected)


def test_it_runs_in_half_precision() -> None:
    net, x = CNN((1, 12, 12), 4, filters=(2, 3), hidden_units=5), random(6, 1, 12, 12).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(batch_of(x, KEYS[0], 3))
    output.logits.square().mean().backward()

    torch.testing.assert_close(output.logits.float(), net(batch_of(x, KEYS[0], 3)).logits, rtol=0.1, atol=0.05)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in net.parameters())


def test_executors_agree(make_trainer, assert_same) -> None:
    net = functools.partial(CNN, filters=(2, 3), hidden_units=6, dropout=0.25)
    model = ClientModule(net, functools.partial(SGD, lr=0.05))
    check_executors_agree(model, Noise((1, 11, 11)), make_trainer, assert_same)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (functools.partial(CNN, 5, 3), "in_features=5 is not the shape of an image.*give CNN"),
        (functools.partial(CNN, (28, 28), 3), "is not the shape of an image"),
        (functools.partial(CNN, (1, 8, 8), 3), r"kernel_size=3 with filters=\(32, 64\) is impossible.*Set a smaller"),
        (functools.partial(CNN, (1, 28, 28), 3, filters=()), r"filters=\(\) is impossible: give"),
        (functools.partial(CNN, (1, 28, 28), 3, filters=(4, 0)), "filters=0 is impossible: set it to"),
        (functools.partial(CNN, (1, 28, 28), 3, hidden_units=0), "hidden_units=0 is impossible"),
        (functools.partial(CNN, (1, 28, 28), 3, kernel_size=0), "kernel_size=0 is impossible"),
        (functools.partial(CNN, (1, 28, 28), 3, dropout=1.5), "dropout=1.5 is impossible"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()
