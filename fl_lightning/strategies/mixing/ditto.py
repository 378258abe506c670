"""Ditto: FedAvg, and in addition a personal model in every client that is kept near the global one.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
With θ the global model as it was received, each local step is taken on one batch by both of a client's models:

    u <- u - η ∇f_i(u),  u = θ at the start of the round;       v_i <- v_i - η (∇f_i(v_i) + λ (v_i - θ))

and θ <- Σ_i w_i u_i. The pull never enters u, so that θ is FedAvg's. λ = 0 is Local.

Choices and departures: both models take the same steps, of one rate (the paper leaves their numbers free); the weights
w_i are shares of the training examples (the paper draws clients by them and averages plainly, which is the same in
expectation). An unseen client starts its v_i at θ and trains it alone for as long as a round. ``reset_optimizer``
resets the optimizers of both models.
"""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.models.twin import Twin
from fl_lightning.round.client import ClientModule, parameters_of
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.mixing.twins import Twins
from fl_lightning.strategies.objectives import Proximal


@dataclass(kw_only=True, eq=False)
class Ditto(Twins):
    """Personal models near the global one.

    Args:
        proximal_weight: λ, at least 0; 0 is Local. About 0.1 with Adam, 1 with SGD.
        decoupled: Pull after each step, v <- v - ηλ (v - θ) with η the clients' learning rate, instead of through
            the gradient, which an adaptive optimizer rescales.
    """

    proximal_weight: float = 0.1
    decoupled: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "proximal_weight")

    def setup(self, federation: Federation) -> None:
        """Start from the common model, and check the length of the pull."""
        super().setup(federation)
        step = federation.learning_rate * self.proximal_weight
        if step >= 2:
            warnings.warn(
                f"the pull to the global model diverges: learning rate {federation.learning_rate:g} x "
                f"strategy.proximal_weight {self.proximal_weight:g} is {step:.3g}, which must be below 2; lower "
                "either (Adam's steps do not diverge, but jump around the global model)",
                stacklevel=2,
            )

    def penalty(self) -> Proximal | None:
        """λ/2 ‖v - θ‖²."""
        return Proximal(self.proximal_weight, center=received) if self.proximal_weight and not self.decoupled else None

    def training(self, round_idx: int) -> Stage:
        """Both models take a step on every batch."""
        program = self.pull(self.federation.learning_rate_in(round_idx))
        return dataclasses.replace(super().training(round_idx), objective=both_losses, program=program)

    def pull(self, learning_rate: float) -> LocalProgram:
        """The pull as a step of its own, if it is one."""
        is_step = self.decoupled and self.proximal_weight
        if not is_step:
            return LocalProgram()
        return LocalProgram(final=Pull(learning_rate * self.proximal_weight, self.federation.statistics))

    def join(self) -> Stage:
        """An unseen client trains its personal model for as long as a round."""
        program = self.pull(self.federation.learning_rate)
        return dataclasses.replace(self.training(0), trained=("personal.*",), program=program)


@dataclass(frozen=True)
class Pull:
    """v <- v - step (v - θ), but for running statistics, which are of what v has seen."""

    step: float
    statistics: frozenset[str] = frozenset()
    takes_stacks: ClassVar[bool] = True

    def __call__(self, parameters: Parameters, context: Context) -> Change:
        """The pulled parameters."""
        thetas = {name: theta for name, theta in received(context).items() if name not in self.statistics}
        return Change(parameters={n: parameters[n] - self.step * (parameters[n] - t) for n, t in thetas.items()})


def both_losses(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """f(u) + f(v): each model has the gradient of its own loss."""
    shared, personal = (client.loss(client.part_output(part, parameters, batch), batch) for part in Twin.models)
    return shared + personal


both_losses.takes_stacks = True  # type: ignore[attr-defined]


def received(context: Context) -> Parameters:
    """The shared model as received, θ, by the names of the personal parameters."""
    return {f"personal.{name}": theta for name, theta in parameters_of("shared", context.anchor).items()}
