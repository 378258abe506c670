"""What must hold for every net on examples: one client alone, a stack under vmap and the stack itself are equal."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning import ClientModule, Evaluation, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.data import Examples, ExampleSource
from fl_lightning.models import NetOutput
from fl_lightning.strategies import FedProx

KEYS = torch.tensor([11, 12, 13])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(x: Tensor, key: Tensor, num_dims: int) -> ExampleBatch:
    """The batch of inputs whose last ``num_dims`` dimensions are one example's."""
    mask = torch.ones(x.shape[:-num_dims], dtype=torch.bool)
    masks = dict.fromkeys(("example_mask", "train_mask", "val_mask", "test_mask"), mask)
    return ExampleBatch(x=x, y=mask.long(), key=key, **masks)


def stacked_parameters(net: nn.Module) -> dict[str, Tensor]:
    """Different parameters for each of three clients."""
    return {
        name: (parameter.detach() + 0.1 * random(3, *parameter.shape, seed=number)).requires_grad_()
        for number, (name, parameter) in enumerate(net.named_parameters())
    }


def gradients(output: NetOutput, parameters: dict[str, Tensor]) -> list[Tensor]:
    """Of a value that weighs every logit and every number of the embedding differently."""
    total = sum((out * random(*out.shape, seed=7)).sum() for out in output)
    return list(torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True))


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def check_both_ways(net: nn.Module, shape: Sequence[int], num_examples: int = 4) -> None:
    """Stack, vmap over the stack and every client alone give equal outputs and gradients."""
    net = net.double()
    parameters = stacked_parameters(net)
    x = random(3, num_examples, *shape)
    batch = batch_of(x, KEYS, len(shape))

    stack = functional_call(net, parameters, (batch,))
    mapped = torch.vmap(lambda p, t: functional_call(net, p, (batch.replace(t),)))(parameters, batch.tensors())

    assert type(net).takes_stacks
    assert_close(tuple(stack), tuple(mapped))
    of_all = gradients(stack, parameters)
    for of_stack, of_mapped in zip(of_all, gradients(mapped, parameters), strict=True):
        assert_close(of_stack, of_mapped)
    weights = [random(*out.shape, seed=7) for out in stack]
    for client in range(3):
        own = {name: tensor[client].detach().requires_grad_() for name, tensor in parameters.items()}
        alone = functional_call(net, own, (batch_of(x[client], KEYS[client], len(shape)),))
        assert_close(tuple(out[client] for out in stack), tuple(alone))
        total = sum((out * weight[client]).sum() for out, weight in zip(alone, weights, strict=True))
        of_one = torch.autograd.grad(total, list(own.values()), allow_unused=True, materialize_grads=True)
        for stacked, single in zip(of_all, of_one, strict=True):
            assert_close(stacked[client], single)


def check_rows_are_independent(net: nn.Module, shape: Sequence[int]) -> None:
    """Rows of padding change nothing in the others, dropout's draws among it."""
    net = net.double()
    x, key = random(4, *shape), KEYS[0]
    padded = torch.cat([x, 100 * random(2, *shape, seed=5)])

    output, of_padded = net(batch_of(x, key, len(shape))), net(batch_of(padded, key, len(shape)))

    assert_close(tuple(out[:4] for out in of_padded), tuple(output))


def check_training_reaches_everything(net: nn.Module, shape: Sequence[int]) -> None:
    """Every parameter has a gradient, and the read-out is all that is called ``head``."""
    net = copy.deepcopy(net).double()
    net(batch_of(random(4, *shape), KEYS[0], len(shape))).logits.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not list(net.buffers())
    head = {name for name, _ in net.named_parameters() if name.startswith("head.")}
    assert head == {"head.weight", "head.bias"}


class Noise(ExampleSource):
    """Random examples of three clients of unequal sizes, with two classes or, at random, targets of two numbers."""

    def __init__(self, shape: Sequence[int], *, regression: bool = False) -> None:
        self.shape = tuple(shape)
        self.regression = regression

    def load(self, root: Any, seed: int) -> Examples:
        x = [random(size, *self.shape, seed=size).float() for size in (24, 9, 16)]
        if self.regression:
            y = [random(len(x_NX), 2, seed=1).float() for x_NX in x]
        else:
            y = [torch.arange(len(x_NX)) % 2 for x_NX in x]
        return Examples(names=("a", "b", "c"), x=tuple(x), y=tuple(y), num_outputs=2)


def check_executors_agree(model: ClientModule, source: Noise, make_trainer: Any, assert_same: Any) -> None:
    """One client after another and all at once end with the same parameters; by a strategy that needs vmap, too."""
    for proximal_weight in (0.0, 0.1):
        trainers = []
        for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
            trainer = make_trainer(executor=executor, precision="64-true", num_rounds=2)
            data = FederatedDataModule(source, batch_size=4)
            trainer.fit(copy.deepcopy(model), data, FedProx(num_epochs=1, proximal_weight=proximal_weight))
            trainers.append(trainer)
        ours, theirs = (trainer.run.executor.state().parameters for trainer in trainers)
        assert_same(ours, theirs, tolerance=1e-10)
        one, other = (trainer.run.executor.predict(Evaluation(), [0, 1, 2], 0) for trainer in trainers)
        assert_same(one, other, tolerance=1e-6)


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
