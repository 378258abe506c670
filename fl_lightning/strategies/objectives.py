"""Terms that a strategy may add to its clients' local objective, as pure functions of their parameters.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2: the
proximal term. Baek, Jeong, Jin, Yoon, Hwang: "Personalized Subgraph Federated Learning", ICML 2023, section 4.2: the L1
norm of personal masks beside a proximal term.

Each term also has its ``gradient`` in closed form, in new tensors, which costs a fraction of the way through autograd.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.round.client import ClientModule, Penalty
from fl_lightning.round.context import Context, Parameters
from fl_lightning.strategies.base import select_names


@dataclass(frozen=True)
class Proximal:
    """μ/2 ‖θ - center‖².

    Attributes:
        weight: μ.
        names: The parameters in θ; None for all that have a center.
        center: What they are pulled to, by name; None for the parameters as the stage began.
    """

    weight: float
    names: tuple[str, ...] | None = None
    center: Callable[[Context], Parameters] | None = None

    def __call__(self, parameters: Parameters, context: Context) -> Tensor:
        """Half the weighted squared distance."""
        return 0.5 * self.weight * _total(each.square().sum() for each in self._apart(parameters, context).values())

    def gradient(self, parameters: Parameters, context: Context) -> Parameters:
        """μ (θ - center)."""
        return {name: each.mul_(self.weight) for name, each in self._apart(parameters, context).items()}

    def _apart(self, parameters: Parameters, context: Context) -> dict[str, Tensor]:
        center = context.anchor if self.center is None else self.center(context)
        return {name: parameters[name] - center[name] for name in (center if self.names is None else self.names)}


@dataclass(frozen=True)
class L1Norm:
    """λ ‖θ‖_1, which makes θ sparse.

    Attributes:
        weight: λ.
        names: The parameters in θ.
    """

    weight: float
    names: tuple[str, ...]

    def __call__(self, parameters: Parameters, context: Context) -> Tensor:
        """The weighted sum of absolute values."""
        return self.weight * _total(parameters[name].abs().sum() for name in self.names)

    def gradient(self, parameters: Parameters, context: Context) -> Parameters:
        """λ sign(θ)."""
        return {name: parameters[name].sign().mul_(self.weight) for name in self.names}


@dataclass(frozen=True)
class Sum:
    """Several terms, each with its own weight.

    Attributes:
        terms: At least one.
    """

    terms: "tuple[Proximal | L1Norm, ...]"

    def __call__(self, parameters: Parameters, context: Context) -> Tensor:
        """The sum of the terms."""
        return _total(term(parameters, context) for term in self.terms)

    def gradient(self, parameters: Parameters, context: Context) -> Parameters:
        """The sum of the terms' gradients."""
        total: dict[str, Tensor] = {}
        for term in self.terms:
            for name, each in term.gradient(parameters, context).items():
                total[name] = total[name] + each if name in total else each
        return total


def sparse_masks(
    names: Sequence[str], received: Sequence[str], *, sparsity_weight: float, proximal_weight: float
) -> Penalty | None:
    """λ1 ‖masks‖_1 + λ2 ‖θ - θ_received‖² for nets with masks, without terms of weight 0; None if both weights are 0.

    Args:
        names: Names of the net's parameters; those with ``mask`` in their name are masks.
        received: Names of the parameters that come from the server.
        sparsity_weight: λ1.
        proximal_weight: λ2.

    Raises:
        ValueError: The net has no masks to make sparse.
    """
    terms: list[Proximal | L1Norm] = []
    if sparsity_weight:
        terms += [L1Norm(sparsity_weight, select_names(names, ["*mask*"]))]
    if proximal_weight:
        terms += [Proximal(2 * proximal_weight, tuple(name for name in received if "mask" not in name))]
    return Sum(tuple(terms)) if terms else None


def gradients_at(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Parameters:
    """The gradients of a client's own objective at any point, for objectives that are built from gradients.

    It works for one client, also under ``vmap``, or for each client of a stack; the gradients are constants.
    """
    if not batch.key.dim():
        result: Parameters = torch.func.grad(client.objective)(dict(parameters), batch, context)
        return result
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    with torch.enable_grad():  # torch.func does not handle functions on stacks
        loss_C = client.objective(leaves, batch, context)
    inputs = list(leaves.values())
    gradients = torch.autograd.grad(loss_C, inputs, torch.ones_like(loss_C), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _total(numbers: Iterable[Tensor]) -> Tensor:
    first, *others = numbers
    return sum(others, first)
