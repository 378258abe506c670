"""Weight decay that acts only where a step has a gradient."""

import dataclasses
import functools

import pytest
import torch
from both_executors import both_executors
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from fl_lightning import SequentialExecutor, StackedExecutor
from fl_lightning.memory import state_copies
from fl_lightning.optimizers import TouchedAdam, TouchedAdamW, TouchedSGD
from fl_lightning.strategies import FedAvg, Local

PAIRS = [
    (TouchedAdam, functools.partial(Adam, lr=0.1)),
    (functools.partial(TouchedAdam, amsgrad=True), functools.partial(Adam, lr=0.1, amsgrad=True)),
    (TouchedAdamW, functools.partial(AdamW, lr=0.1)),
    (functools.partial(TouchedSGD, momentum=0.5), functools.partial(SGD, lr=0.1, momentum=0.5)),
    (functools.partial(TouchedSGD, maximize=True), functools.partial(SGD, lr=0.1, maximize=True)),
]
every_kind = pytest.mark.parametrize(("touched", "plain"), PAIRS)


def steps(optimizer, gradients: Tensor) -> Tensor:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = optimizer([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(optimizer.param_groups[0]["weight_decay"] * torch.ones(1), torch.full((1,), 0.25))
    return parameter.detach()


@every_kind
def test_it_is_torchs_where_every_step_has_a_gradient(touched, plain) -> None:
    gradients = torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, 1.0]], dtype=torch.float64)

    actual = steps(functools.partial(touched, lr=0.1, weight_decay=0.25), gradients)

    torch.testing.assert_close(
        actual, steps(functools.partial(plain, weight_decay=0.25), gradients), rtol=1e-15, atol=0
    )


@every_kind
def test_a_number_without_gradient_stays_to_the_last_bit(touched, plain) -> None:
    gradients = torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.0, 1.0]], dtype=torch.float64)

    actual = steps(functools.partial(touched, lr=0.1, weight_decay=0.25), gradients)

    assert actual[1] == -2.0
    everywhere = steps(functools.partial(plain, weight_decay=0.25), gradients)
    assert everywhere[1] != -2.0
    torch.testing.assert_close(actual[[0, 2]], everywhere[[0, 2]], rtol=1e-15, atol=0)


def test_the_gradient_itself_is_left_alone() -> None:
    parameter, gradient = nn.Parameter(torch.ones(2)), torch.ones(2)
    parameter.grad = gradient

    TouchedSGD([parameter], lr=0.1, weight_decay=1.0).step()

    assert torch.equal(gradient, torch.ones(2))
    assert state_copies(TouchedAdam([parameter], weight_decay=1.0)) == 2


@both_executors
@pytest.mark.parametrize("kind", [TouchedAdam, TouchedAdamW, TouchedSGD])
def test_features_that_a_client_lacks_keep_their_weights(
    kind, executor, graphs, given_clients, make_model, make_trainer
) -> None:
    without = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    clients = given_clients([dataclasses.replace(graph, x_NF=graph.x_NF * without) for graph in graphs])
    trainer = make_trainer(executor=executor(), num_rounds=2)

    trainer.fit(make_model(optimizer=functools.partial(kind, lr=0.05, weight_decay=0.1)), clients, Local())

    weight = trainer.run.executor.state().parameters["convs.0.weight"]
    start = trainer.run.architectures[0]["convs.0.weight"]
    assert torch.equal(weight[:, 2], start[2].expand_as(weight[:, 2]))
    assert not torch.equal(weight[:, 1], start[1].expand_as(weight[:, 1]))


def test_both_executors_agree(federation, make_model, make_trainer, assert_same) -> None:
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true")
        optimizer = functools.partial(TouchedAdam, lr=0.05, weight_decay=0.01)
        trainer.fit(make_model(optimizer=optimizer), federation, FedAvg(masked_averaging=True, blend=True))
        states.append((trainer.state_dict()["clients"]["parameters"], trainer.run.history))

    assert_same(states[0][0], states[1][0], tolerance=1e-9)
    assert_same(states[0][1], states[1][1], tolerance=1e-6)
    assert "blend/val/acc" in states[0][1][-1]
