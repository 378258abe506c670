"""pFedMe: personal models that are kept near copies of the global one, which follow them.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. The
federation minimizes the sum of the envelopes F_i(w) = min_x f_i(x) + λ/2 ‖x - w‖², whose gradient is λ (w - x). In a
round, from w_i = x_i = w, for each of R batches:

    K times  x_i <- x_i - η_p (∇f_i(x_i) + λ (x_i - w_i))
    then     w_i <- w_i + c (x_i - w_i)                      c = η λ
    server   w <- (1 - β) w + β Σ_i ω_i w_i

η_p is the rate of the clients' optimizer, which may be any and is reset every round; R are the batches of
``num_epochs``. As in the authors' code ω are the shares of the training examples and x_i goes on from batch to batch
(``inner_start``); its weight decay of x_i is not in the paper and not here. The personal model that is evaluated is
x_i, as the paper means it; the authors' code evaluates w_i, which is logged as ``anchored/...``. The paper lets all
clients train and samples whose w_i are averaged; here those who do not take part keep the x_i they have. One that fails
is left at w, and is evaluated as one that has no x_i yet.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.kernels.per_client import along
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.mixing.fedavg import FedAvg
from fl_lightning.strategies.objectives import Proximal


@dataclass(kw_only=True, eq=False)
class PFedMe(FedAvg):
    """Personal models x_i, and a global model w that is moved toward them.

    Args:
        proximal_weight: λ, at least 0; 15 to 30 in the paper's runs of SGD, far less where Adam scales the pull up.
        num_inner_steps: K, number of steps on each batch, at least 1.
        anchor_share: c, how far w_i follows x_i after each batch, in [0, 1]; η λ in the paper.
        inner_start: Where x_i starts on the next batch: where the ``previous`` batch left it, or at the ``anchor``
            w_i, then with a new optimizer.
        relaxation: β, at least 0; beyond 1 the server goes further than the mean.
    """

    reset_optimizer: bool = True
    proximal_weight: float = 0.01
    num_inner_steps: int = 5
    anchor_share: float = 0.5
    inner_start: Literal["previous", "anchor"] = "previous"
    relaxation: float = 1.0
    personal: Sequence[str] = field(default=(), init=False)
    blend: bool = field(default=False, init=False)

    shares_statistics = False
    server_state = ("anchors", "known_C")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "proximal_weight", "relaxation")
        self.require_at_least(1, "num_inner_steps")
        self.require_within(0, 1, "anchor_share")

    def setup(self, federation: Federation) -> None:
        """Start without any w_i."""
        super().setup(federation)
        if federation.plain_sgd and (pull := federation.learning_rate * self.proximal_weight) >= 2:
            warnings.warn(
                f"PFedMe: the clients' learning rate times strategy.proximal_weight is {pull:g}, and from 2 on their "
                "steps diverge: lower either",
                stacklevel=2,
            )
        self.anchors = {
            name: model.new_zeros(federation.num_clients, *model.shape[1:]) for name, model in self.models.items()
        }
        self.known_C = torch.zeros(federation.num_clients, dtype=torch.bool, device=federation.device)

    def predicts_trained(self) -> bool:
        """The x_i."""
        return True

    def penalty(self) -> Proximal | None:
        """λ/2 ‖x_i - w_i‖²."""
        return Proximal(self.proximal_weight) if self.proximal_weight else None

    def training(self, round_idx: int) -> Stage:
        """K steps on each batch, after which the anchor w_i follows; the anchor is sent up."""
        begins = self.inner_start == "anchor"
        program = LocalProgram(
            init=self.begin if begins else None,
            final=self.follow,
            repeat=self.num_inner_steps,
            restart=begins,
            send_anchor=True,
        )
        return dataclasses.replace(super().training(round_idx), program=program)

    def begin(self, parameters: Parameters, context: Context) -> Change:
        """x_i <- w_i before the first step on a batch, but for running statistics, which are of what x_i has seen."""
        kept = self.federation.statistics
        return Change(parameters={name: w for name, w in context.anchor.items() if name not in kept})

    def follow(self, parameters: Parameters, context: Context) -> Change:
        """w_i <- w_i + c (x_i - w_i) after the last step on a batch."""
        return Change(anchor={name: context.anchor[name].lerp(x, self.anchor_share) for name, x in parameters.items()})

    begin.takes_stacks = follow.takes_stacks = True  # type: ignore[attr-defined]

    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        """(1 - β) w + β times the mean."""
        return before.lerp(mixed, self.relaxation)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Send w, to which x_i is reset: a client has an x_i again once it has responded."""
        self.known_C[list(clients)] = False
        return super().configure(stage, clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average, and record which clients have an x_i."""
        super().aggregate(stage, upload)
        self.onboard(stage, upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Keep the w_i for their evaluation."""
        self.known_C[list(upload.clients)] = True
        for name, anchor in upload.parameters.items():
            self.anchors[name][list(upload.clients)] = anchor

    def model_for(self, clients: Sequence[int]) -> None:
        """Nothing: the clients' personal models are their own."""
        return

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The x_i are the result; a client without one trains a copy for a round. ``global/...`` is w."""
        stage = self.stages(0)[0]
        shared = super().configure(stage, clients)
        first = Evaluation(payload=shared, tuning=stage)
        others = {client: first for client in clients if not self.known_C[client]}
        own_C = self.known_C[list(clients)]
        anchored = {
            name: torch.where(along(own_C, w), self.anchors[name][list(clients)], w)
            for name, w in shared.parameters.items()
        }
        return {
            "": Evaluation(others=others),
            "global/": Evaluation(payload=shared),
            "anchored/": Evaluation(payload=dataclasses.replace(shared, parameters=anchored)),
        }
