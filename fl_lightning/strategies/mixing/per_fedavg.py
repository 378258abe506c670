"""Per-FedAvg: a global model that is good after one step of gradient descent on a client's own data.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, Algorithm 1. The federation minimizes the mean of f_i(w - α ∇f_i(w)). A local step takes three
batches of the client's and goes along an estimate of the gradient of that:

    y = x - α ∇f_i(x; D)                                                   q = ∇f_i(y; D')
    first-order   d = q
    Hessian-free  d = q - α (∇f_i(x + δ q; D'') - ∇f_i(x - δ q; D'')) / 2δ

The paper's outer step is x <- x - β d; here the clients' optimizer takes it, SGD or any other. The two gradients of the
difference have batch and dropout in common, else noise would be multiplied by 1 / 2δ. D, D' and D'' are random parts
of the step's batch, for a client has one graph: draws of three times the size come to the same. Before it is evaluated,
w takes its step on the client's training data; some released codes take it on test data.

Departure: δ is such that δ q has a set length, ``hessian_step``. With the δ = 1e-3 of released code it nears the
resolution of float32 (of 200,000 parameters, as q shrinks), and d becomes rounding errors.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import SGD

from fl_lightning.batches.base import Batch
from fl_lightning.kernels.per_client import along
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.base import SumWeighting
from fl_lightning.strategies.mixing.base import Mixing, equal_weights
from fl_lightning.strategies.objectives import gradients_at


@dataclass(frozen=True, kw_only=True)
class MetaObjective:
    """⟨d, θ⟩ with a constant d, so that its gradient is d; its value has no meaning.

    Attributes:
        inner_lr: α.
        hessian_step: ‖δ q‖; None for the first-order d.
        split: D, D' and D'' are parts of the batch; else each is all of it.
    """

    inner_lr: float
    hessian_step: float | None
    split: bool
    takes_stacks: ClassVar[bool] = True

    def __call__(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """Find d."""
        number = 2 if self.hessian_step is None else 3
        first, second, *third = batch.split(number) if self.split else [batch] * number
        x = {name: parameter.detach() for name, parameter in parameters.items()}
        y = moved(x, gradients_at(client, x, first, context), -self.inner_lr)
        q = d = gradients_at(client, y, second, context)
        for last in third:
            assert self.hessian_step is not None
            delta = self.hessian_step / inner_product(q, q, batch).sqrt().clamp(min=1e-12)
            ahead = gradients_at(client, moved(x, q, delta), last, context)
            behind = gradients_at(client, moved(x, q, -delta), last, context)
            d = moved(q, moved(ahead, behind, -torch.ones_like(delta)), -self.inner_lr / (2 * delta))
        return inner_product(d, parameters, batch)


def inner_product(left: Parameters, right: Parameters, batch: Batch) -> Tensor:
    """⟨left, right⟩ over all parameters, scalar, or one for each client of a stack."""
    return torch.stack([(left[n] * p).reshape(*batch.key.shape, -1).sum(dim=-1) for n, p in right.items()]).sum(dim=0)


def moved(start: Parameters, direction: Parameters, rate: float | Tensor) -> Parameters:
    """Start + rate direction; the rate is a number, or a tensor with one for each client of a stack."""
    rates = torch.as_tensor(rate, device=next(iter(start.values())).device)
    return {name: tensor + along(rates, tensor) * direction[name] for name, tensor in start.items()}


@dataclass(kw_only=True, eq=False)
class PerFedAvg(Mixing):
    """FedAvg with equal weights, for a model that clients adapt by a step of their own.

    Args:
        inner_lr: α, at least 0.
        hessian: How the second derivatives are approximated: by a ``finite_difference`` of gradients, or ``none``.
        hessian_step: Length of δ q in the finite difference, positive.
        batches: D, D' and D'' are parts of a step's batch (``split``), or each is all of it (``same``).
        num_adaptation_steps: Steps of gradient descent with rate α before a model is evaluated, at least 1.
    """

    inner_lr: float = 0.01
    hessian: Literal["finite_difference", "none"] = "finite_difference"
    hessian_step: float = 0.01
    batches: Literal["split", "same"] = "split"
    num_adaptation_steps: int = 1
    personal: Sequence[str] = field(default=(), init=False)
    blend: bool = field(default=False, init=False)

    takes_statistics = False

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "inner_lr")
        self.require_at_least(1, "num_adaptation_steps")
        self.require_positive("hessian_step")

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """Equal shares, (1, C)."""
        return equal_weights(upload)[None]

    def sum_weighting(self) -> SumWeighting:
        """Equal, unless a setting needs single clients' updates."""
        return None if self.settings_against_sums() else "equal"

    def training(self, round_idx: int) -> Stage:
        """Train by steps along d."""
        hessian_step = self.hessian_step if self.hessian == "finite_difference" else None
        objective = MetaObjective(inner_lr=self.inner_lr, hessian_step=hessian_step, split=self.batches == "split")
        return dataclasses.replace(super().training(round_idx), objective=objective)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The adapted models are the result; ``global/...`` is what they start from."""
        shared = super().evaluations(clients)[""]
        step = functools.partial(SGD, lr=self.inner_lr)
        adapt = Stage(name="adapt", num_steps=self.num_adaptation_steps, optimizer=step)
        return {"": dataclasses.replace(shared, tuning=adapt), "global/": shared}
