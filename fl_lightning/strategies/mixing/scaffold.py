"""SCAFFOLD: every local step is corrected by the difference between the client's and the federation's gradients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1. With a control c_i of each of the N training clients, c = (1/N) Σ_i c_i, all of them 0 at first,
and S the clients that responded:

    client   y <- y - η (g_i(y) + c - c_i)                  τ_i times from y = θ
    server   c_i <- (1/τ_i) Σ_k g_i(y_k)                    for i in S with τ_i > 0
             θ <- θ + η_g (1/|S|) Σ_{i in S} (y_i - θ)

The paper's option II, c_i <- c_i - c + (θ - y_i) / (τ_i η), is that mean of the gradients if a step is η times the
gradient. Here it is ``control: displacement``, and refused with any other optimizer. ``control: gradient_mean`` adds up
the gradients themselves, before they are corrected, so that c_i has the size of a gradient whatever makes steps of
them; the optimizer's weight decay, which displacement counts as part of the gradient, is not in it. The paper's
guarantees are for SGD: with momentum or Adam the correction goes through the optimizer, and none remains.

They are for clients that take equally many steps, too: only then do the corrections of all cancel in the average,
Σ_i τ_i (c - c_i) = 0. On Rotated MNIST (``studies/leaderboard_c.yaml``), where clients take one local step or two, it
diverges at the rates of the grid: with 0.3 the best round is round 11, with 0.1 the model is at chance from round 43
on. A loop of plain PyTorch, written apart from this package, diverges on the same data and steps in rounds 12 to 15 and
47 to 51: it is the method.

The controls are kept by the server, for very many clients only of those that have responded, with their running mean.
It sends θ and c - c_i instead of θ and c, and learns y_i and the sum of the
gradients instead of y_i and the change of c_i: as many bytes, and no client whose update is lost can leave c behind.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.kernels.per_client import along
from fl_lightning.round.client import ClientModule
from fl_lightning.round.client_draws import MANY_CLIENTS
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import ClientOutput, Evaluation, Stage, StateSpec
from fl_lightning.strategies.mixing.base import Mixing, equal_weights
from fl_lightning.strategies.mixing.sparse_rows import SparseRows


def corrected(
    client: ClientModule, parameters: Parameters, gradients: Parameters, batch: Batch | None, context: Context
) -> Change:
    """G + c - c_i for the optimizer, and the sum of the gradients so far, if it is needed."""
    received = corrections(context)
    return Change(
        gradients={name: g + received[name] if name in received else g for name, g in gradients.items()},
        client_state=summed(gradients, context),
    )


def corrections(context: Context) -> dict[str, Tensor]:
    """C - c_i as received, by parameter."""
    return {name.removeprefix("correction/"): correction for name, correction in context.received.items()}


def summed(gradients: Parameters, context: Context) -> dict[str, Tensor]:
    """The sum of the gradients so far, which is 0 before the first step, if it is needed."""
    totals = {name: total for name, total in context.client_state.items() if name in gradients}
    return {name: total + gradients[name] if context.step else gradients[name] for name, total in totals.items()}


def sum_of_gradients(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Parameters:
    """The sum of the gradients of all steps, Σ_k g_i(y_k)."""
    return context.client_state


corrected.takes_stacks = sum_of_gradients.takes_stacks = True  # type: ignore[attr-defined]


@dataclass(kw_only=True, eq=False)
class SCAFFOLD(Mixing):
    """One global model, trained by steps that are corrected for client drift.

    Args:
        control: How c_i is computed: from the ``gradient_mean``, or from the ``displacement`` for SGD without momentum.
        server_lr: η_g, positive.
    """

    control: Literal["gradient_mean", "displacement"] = "gradient_mean"
    server_lr: float = 1.0

    server_state = ("controls",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_positive("server_lr")

    def setup(self, federation: Federation) -> None:
        """Start with c_i = 0."""
        if self.control == "displacement" and not federation.plain_sgd:
            raise ValueError(
                "strategy.control is 'displacement', for which a step must be the learning rate times the gradient, "
                "but the clients' is not: set 'gradient_mean', or make model.optimizer torch.optim.SGD without "
                "momentum and model.gradient_clip_val null"
            )
        if self.control == "displacement" and federation.has_schedule:
            raise ValueError(
                "strategy.control is 'displacement', which divides by the learning rate, but model.lr_scheduler "
                "changes that, to 0 maybe: set 'gradient_mean', or leave model.lr_scheduler out"
            )
        super().setup(federation)
        many = federation.num_clients >= MANY_CLIENTS
        self.controls: dict[str, Any] = {
            name: SparseRows(model[0]) if many else model.new_zeros(federation.num_clients, *model.shape[1:])
            for name, model in self.models.items()
        }

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """Equal shares, (1, C)."""
        return equal_weights(upload)[None]

    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        """θ + η_g (mean of y_i - θ)."""
        return before.lerp(mixed, self.server_lr)

    def client_state(self) -> Mapping[str, StateSpec]:
        """The sum of the gradients, which starts at 0 in every stage."""
        if self.control == "displacement":
            return {}
        return {
            name: StateSpec(initial=torch.zeros_like(model[0]), lasting=False) for name, model in self.models.items()
        }

    def training(self, round_idx: int) -> Stage:
        """Train by corrected steps."""
        return dataclasses.replace(super().training(round_idx), program=LocalProgram(step=corrected))

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """The sum of the gradients; with ``displacement``, of the corrected ones."""
        return {"gradients": sum_of_gradients if self.control == "gradient_mean" else self.displacement}

    def displacement(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Parameters:
        """(θ - y) / η."""
        return {n: (context.anchor[n] - parameters[n]) / self.federation.learning_rate for n in self.shared}

    displacement.takes_stacks = True  # type: ignore[attr-defined]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The model, and each client's correction."""
        corrections = {f"correction/{name}": self.correction(name, clients) for name in self.shared}
        return dataclasses.replace(super().configure(stage, clients), extras=corrections)

    def correction(self, name: str, clients: Sequence[int]) -> Tensor:
        """C - c_i, (C, *shape)."""
        controls = self.controls[name]
        mean: Tensor = controls.sum(dim=0) / len(self.federation.training_clients)
        own: Tensor = controls[list(clients)]
        return mean - own

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Update the controls of the clients that have taken a step, and average the models."""
        super().aggregate(stage, upload)
        if not upload.clients:
            return
        assert upload.num_steps is not None
        rows = upload.num_steps.nonzero().flatten()
        clients = [upload.clients[row] for row in rows.tolist()]
        for name, model in self.models.items():
            mean = upload.extras[f"gradients/{name}"][rows] / along(upload.num_steps[rows], model)
            if self.control == "displacement":
                mean = mean - self.correction(name, clients)
            self.controls[name][clients] = mean.to(model)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The global model is the result; ``trained/...`` are the clients' before they are averaged."""
        shared = super().configure(self.stages(0)[0], clients)
        trained = Evaluation(payload=shared, prefer_trained=True)
        return {"": Evaluation(payload=shared), "trained/": trained, **self.blended(clients)}
