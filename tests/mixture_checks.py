"""What must hold for every net under vmap: whatever all clients have in common, each gets what it would get alone.

A mixture says which parameters are common, whether the key is, and whether clients run their own batch or a shared one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from net_checks import random
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.batches import Batch, Collator
from fl_lightning.batches.base import single

Parameters = dict[str, Tensor]
#: What a client computes from its parameters, its batch and a number of its own.
Computation = Callable[[nn.Module, Parameters, Batch, Tensor], Any]


def value(net: nn.Module, parameters: Mapping[str, Tensor], batch: Batch, scale: Tensor) -> Tensor:
    """Weighs every logit and every number of the embeddings of real examples differently; (C,) on a stack."""
    total = 0.0 * scale
    for number, out in enumerate(functional_call(net, dict(parameters), (batch,))):
        rows, columns = (torch.arange(length, dtype=torch.float64) for length in out.shape[-2:])
        weights = (7 * rows[:, None] + 3 * columns + number).cos()
        kept = torch.where(batch.example_mask[..., None], out, 0.0)
        total = total + (kept.sin() * weights).sum(dim=(-2, -1))
    return scale * total


def inner_gradient(net: nn.Module, parameters: Parameters, batch: Batch, scale: Tensor) -> Parameters:
    """Of the value, by ``torch.func``."""
    return torch.func.grad(lambda own: value(net, own, batch, scale))(parameters)


def adapted(net: nn.Module, parameters: Parameters, batch: Batch, scale: Tensor) -> Tensor:
    """The value after a step, as first-order MAML has it."""
    gradient = inner_gradient(net, parameters, batch, scale)
    return value(net, {name: own - 0.01 * gradient[name].detach() for name, own in parameters.items()}, batch, scale)


def beside_fixed(net: nn.Module, parameters: Parameters, batch: Batch, scale: Tensor) -> Tensor:
    """The value times that of the net's initial parameters, which all clients share and nothing trains."""
    with torch.no_grad():
        fixed = value(net, dict(net.named_parameters()), batch, torch.ones_like(scale))
    return value(net, parameters, batch, scale) * fixed


def beside_received(net: nn.Module, parameters: Parameters, batch: Batch, scale: Tensor) -> Tensor:
    """The value times that of the same parameters, detached."""
    with torch.no_grad():
        fixed = value(net, parameters, batch, torch.ones_like(scale))
    return value(net, parameters, batch, scale) * fixed


EVERY_COMPUTATION = (value, inner_gradient, adapted, beside_fixed, beside_received)


class Mixture:
    """Three clients' parameters, batches, keys and numbers, some of them the same for all.

    Args:
        net: The net, in float64.
        collator: Three or more clients of unequal sizes.
        clients: Which three.
        common: Names of the parameters that all clients share.
        common_key: All draw the same.
        shared: Index of a client whose batch all of them run; None for their own.
    """

    def __init__(
        self,
        net: nn.Module,
        collator: Collator,
        clients: Sequence[int],
        *,
        common: Collection[str] = (),
        common_key: bool = False,
        shared: int | None = None,
    ) -> None:
        self.net = net
        self.num_clients = len(clients)
        self.common = common
        self.parameters = {}
        for number, (name, parameter) in enumerate(net.named_parameters()):
            shape = parameter.shape if name in common else (self.num_clients, *parameter.shape)
            self.parameters[name] = (parameter.detach() + 0.1 * random(*shape, seed=number)).requires_grad_()
        self.keys = torch.arange(self.num_clients) * 1_000_003 + 17
        self.key_dim = None if common_key else 0
        self.scale = torch.linspace(0.5, 2.0, self.num_clients, dtype=torch.float64)
        self.batch = collator(clients) if shared is None else single(collator([shared]))
        members = clients if shared is None else [shared] * self.num_clients
        self.alone = [single(collator([client])) for client in members]
        self.is_shared = shared is not None

    def together(self, computation: Computation) -> Any:
        """The results of all clients under ``vmap``, with a leading dimension."""
        key = self.keys if self.key_dim == 0 else self.keys[0]
        tensors = {"key": key} if self.is_shared else self.batch.tensors() | {"key": key}
        parameter_dims = {name: None if name in self.common else 0 for name in self.parameters}
        tensor_dims = {name: self.key_dim if name == "key" else 0 for name in tensors}

        def one(parameters: Parameters, tensors: dict[str, Tensor], scale: Tensor) -> Any:
            return computation(self.net, parameters, self.batch.replace(tensors), scale)

        return torch.vmap(one, in_dims=(parameter_dims, tensor_dims, 0))(self.parameters, tensors, self.scale)

    def directly(self) -> Tensor:
        """The values by one call on the stack, without ``vmap``."""
        key = self.keys if self.key_dim == 0 else self.keys[0].expand(self.num_clients)
        return value(self.net, self.parameters, self.batch.replace({"key": key}), self.scale)

    def in_turn(self, computation: Computation) -> list[Any]:
        """The results of one client after another."""
        results = []
        for client, batch in enumerate(self.alone):
            own = {name: t if name in self.common else t[client] for name, t in self.parameters.items()}
            key = self.keys[client if self.key_dim == 0 else 0]
            results.append(computation(self.net, own, batch.replace({"key": key}), self.scale[client]))
        return results

    def gradients(self, value_C: Tensor) -> dict[str, Tensor]:
        """Of the sum of the values in all parameters."""
        actual = torch.autograd.grad(
            value_C.sum(), list(self.parameters.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(self.parameters, actual, strict=True))


def assert_close(actual: Any, expected: Any, what: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda message: f"{what}: {message}")


def check(mixture: Mixture, what: object, *computations: Computation) -> None:
    """Values and their gradients by outer autograd, or inner gradients, equal those of one client after another."""
    for computation in computations:
        label = f"{what}, {computation.__name__}"
        actual, in_turn = mixture.together(computation), mixture.in_turn(computation)
        if isinstance(actual, Tensor):
            expected = torch.stack(in_turn)
            assert_close(actual, expected, label)
            assert_close(mixture.gradients(actual), mixture.gradients(expected), label)
        else:
            assert_close(actual, {name: torch.stack([own[name] for own in in_turn]) for name in actual}, label)


def check_mixtures(net: nn.Module, collator: Collator, clients: Sequence[int], shared: int) -> None:
    """All parameters stacked, all common, each alone common, each alone stacked; keys and batches of both kinds."""
    net = net.double().train()
    names = [name for name, _ in net.named_parameters()]
    for common in ((), names):
        for batch in (None, shared):
            settings = {"common": common, "shared": batch}
            check(Mixture(net, collator, clients, **settings), settings, *EVERY_COMPUTATION)
            check(Mixture(net, collator, clients, **settings, common_key=True), settings, value)
    for name in names:
        others = [other for other in names if other != name]
        for common, batch in (([name], None), (others, None), ([name], shared)):
            settings = {"common": common, "shared": batch}
            mixture = Mixture(net, collator, clients, **settings)
            check(mixture, settings, value, *([inner_gradient] if batch is None else []))
            if batch is None and getattr(net, "takes_stacks", False):
                check_directly(mixture, settings)


def check_directly(mixture: Mixture, what: object) -> None:
    """A call on the stack without ``vmap`` gives the values and the gradients of one client after another."""
    actual, expected = mixture.directly(), torch.stack(mixture.in_turn(value))
    assert_close(actual, expected, what)
    assert_close(mixture.gradients(actual), mixture.gradients(expected), what)


def check_directly_with_common_parameters(net: nn.Module, collator: Collator, clients: Sequence[int]) -> None:
    """A call on the stack with the parameters of one client gives what all would get with them."""
    names = [name for name, _ in net.named_parameters()]
    check_directly(Mixture(net.double().train(), collator, clients, common=names), "all common")


def check_second_derivatives(net: nn.Module, collator: Collator, clients: Sequence[int]) -> None:
    """Outer autograd through ``torch.func.grad`` inside of vmap, of parameters of both kinds."""
    net = net.double().train()
    names = [name for name, _ in net.named_parameters()]

    def steepness(net: nn.Module, parameters: Parameters, batch: Batch, scale: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in inner_gradient(net, parameters, batch, scale).values()]).sum()

    for common in ((), names[:1], names):
        mixture = Mixture(net, collator, clients, common=common)
        actual, expected = mixture.together(steepness), torch.stack(mixture.in_turn(steepness))
        assert_close(actual, expected, f"common {common}")
        assert_close(mixture.gradients(actual), mixture.gradients(expected), f"common {common}")
