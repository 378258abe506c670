"""APFL: every client predicts by a mixture of its own model and the global one.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020, Algorithm 1. With w_i = w as
received and the mixture v̄_i = α_i v_i + (1 - α_i) w_i, each local step is taken at one point and on one batch:

    w_i <- w_i - η ∇f_i(w_i);    v_i <- v_i - η α_i ∇f_i(v̄_i);    α_i <- clip(α_i - η_α <v_i - w_i, ∇f_i(v̄_i)>, 0, 1)

and w <- Σ_i ω_i w_i, which is FedAvg's for every α. These are the gradients of f(w) + f(α v + (1 - α) stop(w)). Models,
not their logits, are mixed, and v stays itself: it is never overwritten by the mixture.

Departures: the weights ω_i are shares of the training examples (paper: equal ones, ``weighting``); α has plain gradient
steps of a rate of its own, whatever optimizer the models have. (Adam undoes most of the factor α in v's step.)

v̄_i is evaluated: for clients that responded in the last round with their own trained w_i, for the others and for
unseen clients (whose v is w) with the current w; ``server/own_mixtures`` is the share of the former. ``present/`` uses
w for all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.kernels.per_client import along
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule, parameters_of
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.base import SumWeighting
from fl_lightning.strategies.mixing.twins import Twins


@dataclass(kw_only=True, eq=False)
class APFL(Twins):
    """Mixtures of personal models and the global one.

    Args:
        mixture: α, the personal model's share, in [0, 1]; its initial value if it is learned.
        adaptive: Learn α: ``none``, at the first step of each ``round``, or at every ``step``.
        mixture_lr: η_α; None for the clients' learning rate.
    """

    mixture: float = 0.25
    adaptive: Literal["none", "round", "step"] = "none"
    mixture_lr: float | None = None

    takes_statistics = False
    server_state = ("responded",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_within(0, 1, "mixture")
        if self.mixture_lr is not None and not (self.mixture_lr > 0 and self.adaptive != "none"):
            raise ValueError(
                f"strategy.mixture_lr is {self.mixture_lr:g}: it must be positive, and strategy.adaptive round or step"
            )

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """A learned α is also kept local."""
        return self.personal if self.adaptive == "none" else (*self.personal, "alpha")

    def build_net(self, net: nn.Module) -> nn.Module:
        """Two copies of the net, and α if it is learned."""
        twin = super().build_net(net)
        if self.adaptive != "none":
            twin.register_parameter("alpha", nn.Parameter(torch.tensor(self.mixture)))
        return twin

    def setup(self, federation: Federation) -> None:
        """Start from the common model, before any client has responded."""
        super().setup(federation)
        self.responded: list[int] = []

    def training(self, round_idx: int) -> Stage:
        """Both models and α take a step on every batch; that of α does not use the optimizer."""
        stage = dataclasses.replace(super().training(round_idx), objective=self.losses)
        if self.adaptive == "none":
            return stage
        rate = self.federation.learning_rate_in(round_idx) if self.mixture_lr is None else self.mixture_lr
        step = MixtureStep(rate, is_once=self.adaptive == "round")
        return dataclasses.replace(stage, program=LocalProgram(step=step))

    def losses(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """f(w) + f(α v + (1 - α) stop(w))."""
        fixed = {name: p.detach() if name.startswith("shared.") else p for name, p in parameters.items()}
        shared = client.part_output("shared", parameters, batch)
        return client.loss(shared, batch) + client.loss(self.mixed_output(client, fixed, batch, context), batch)

    def mixed_output(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
        """The output of α v + (1 - α) w; w is the received one if the client should not use its own."""
        mixed = {}
        for name, v in parameters_of("personal", parameters).items():
            w = parameters[f"shared.{name}"]
            received = context.received.get(f"shared.{name}")  # of a layer that is each client's own, nothing
            if "own" in context.received and received is not None:
                w = torch.where(along(context.received["own"], w), w, received)
            alpha = along(parameters["alpha"], v) if "alpha" in parameters else self.mixture
            mixed[f"personal.{name}"] = alpha * v + (1 - alpha) * w
        return client.part_output("personal", mixed, batch)

    losses.takes_stacks = mixed_output.takes_stacks = True  # type: ignore[attr-defined]

    def predicts_trained(self) -> bool:
        """True: the shared model that a client mixes with its own also lives on."""
        return True

    def join(self) -> Stage:
        """Nothing: an unseen client's models are the global one, and so is their mixture."""
        return Stage(name="join")

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average, and record which clients have responded."""
        super().aggregate(stage, upload)
        self.responded = list(upload.clients)

    def sum_weighting(self) -> SumWeighting:
        """That of the average; which clients have responded is known anyway."""
        return super().sum_weighting()

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The mixtures are the result: with the w_i of those that have just been trained, and with w for all."""
        result = super().evaluations(clients)
        present = result["global/"].payload
        assert present is not None
        own_C = torch.tensor([client in self.responded for client in clients], device=self.federation.device)
        latest = Payload(clients=present.clients, extras={**present.parameters, "own": own_C})
        payloads = {"": latest, "present/": present}
        return {**result, **{kind: Evaluation(payload=p, output=self.mixed_output) for kind, p in payloads.items()}}

    def metrics(self) -> Mapping[str, float]:
        """The share of the evaluated mixtures with the client's own w_i."""
        return {"server/own_mixtures": len(self.responded) / len(self.federation.training_clients)}


@dataclass(frozen=True)
class MixtureStep:
    """α <- clip(α - η_α ∂/∂α, 0, 1); the optimizer gets the other gradients."""

    rate: float
    is_once: bool
    takes_stacks: ClassVar[bool] = True

    def __call__(
        self, client: ClientModule, parameters: Parameters, gradients: Parameters, batch: Batch | None, context: Context
    ) -> Change:
        """The new α, at the first step of a round or at every one."""
        others = {name: gradient for name, gradient in gradients.items() if name != "alpha"}
        if self.is_once and context.step > 0:
            return Change(gradients=others)
        alpha = (parameters["alpha"] - self.rate * gradients["alpha"]).clamp(0, 1)
        return Change(gradients=others, parameters={"alpha": alpha})
