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
)
from torch import nn
from torch.optim import SGD

from fl_lightning import ClientModule
from fl_lightning.models import MLP, LinearModel

kinds = pytest.mark.parametrize(
    ("build", "shape"),
    [
        (functools.partial(MLP, 5, 3), (5,)),
        (functools.partial(MLP, (2, 3), 2, hidden_channels=4, num_layers=2, dropout=0.5), (2, 3)),
        (functools.partial(MLP, 5, 1, num_layers=1), (5,)),
        (functools.partial(LinearModel, 5, 3), (5,)),
        (functools.partial(LinearModel, (2, 3, 2), 1), (2, 3, 2)),
    ],
    ids=str,
)


@kinds
@pytest.mark.parametrize("training", [True, False])
def test_stack_and_vmap_and_one_client_are_equal(build, shape, training) -> None:
    check_both_ways(build().train(training), shape)


@kinds
def test_padding_changes_nothing(build, shape) -> None:
    check_rows_are_independent(build(), shape)


@kinds
def test_every_parameter_is_trained(build, shape) -> None:
    check_training_reaches_everything(build(), shape)


def test_it_is_the_usual_perceptron() -> None:
    net, x = MLP(6, 3).double(), random(4, 6)
    layers = [*net.layers, net.head]
    plain = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    output = net(batch_of(x, KEYS[0], 1))

    assert_close(output.logits, plain(x))
    assert_close(output.embedding, plain[:4](x))
    assert num_parameters(net) == 6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3


def test_linear_model_reads_the_flat_input() -> None:
    net, x = LinearModel((2, 3), 4).double(), random(5, 2, 3)

    output = net(batch_of(x, KEYS[0], 2))

    assert_close(output.embedding, x.flatten(1))
    assert_close(output.logits, torch.nn.functional.linear(x.flatten(1), net.head.weight, net.head.bias))
    assert [name for name, _ in net.named_parameters()] == ["head.weight", "head.bias"]


def test_dropout_is_drawn_from_the_key_in_training_only() -> None:
    net, x = MLP(6, 3, dropout=0.5).double(), random(4, 6)
    outputs = [net(batch_of(x, KEYS[i], 1)).logits for i in (0, 0, 1)]

    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    net.eval()
    assert torch.equal(net(batch_of(x, KEYS[0], 1)).logits, net(batch_of(x, KEYS[1], 1)).logits)


def test_executors_agree(make_trainer, assert_same) -> None:
    model = ClientModule(functools.partial(MLP, dropout=0.5), functools.partial(SGD, lr=0.05))
    check_executors_agree(model, Noise((3, 2)), make_trainer, assert_same)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (functools.partial(MLP, 5, 3, num_layers=0), "num_layers=0 is impossible: set it to"),
        (functools.partial(MLP, 5, 3, hidden_channels=0), "hidden_channels=0 is impossible: set it to"),
        (functools.partial(MLP, 5, 3, dropout=1.0), "dropout=1.0 is impossible: set it to"),
        (functools.partial(MLP, (5, 0), 3), "in_features=0 is impossible"),
        (functools.partial(LinearModel, 5, 0), "num_outputs=0 is impossible"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()
