"""TwinScaffold: SCAFFOLD's model and a personal one near it; each client predicts with the weighted mean of the two.

An experimental method of this project, made of two published ones (docs/results/twin-scaffold.md). A client has
two copies of its net (:class:`~fl_lightning.models.Twin`): θ is shared and trained with SCAFFOLD's controls; v_i
never leaves its client and is kept near θ as in Ditto. The prediction is

    p(y | x) = (1 - s_i) softmax(f_θ(x)) + s_i softmax(f_v(x));

in regression the outputs themselves are averaged. s_i = 0 is SCAFFOLD, s_i = 1 is Ditto near SCAFFOLD's model. In some
rounds each client sends its validation metric for every s of a grid, with θ as received and v_i as just trained. From
these the server chooses s_i; a client with few examples gets mostly the federation's (``strategies/share_choice.py``).

With SCAFFOLD a single large gradient can become a control that leads the next steps to still larger gradients. Here a
correction r = c - c_i is therefore at most as long as the gradient g that it corrects,

    y <- y - η (g + r min(1, ρ ‖g‖ / ‖r‖)),  ρ = 1.

SCAFFOLD's fixed points remain: there g = c_i and c = 0, so both have the same length. What leaves the client is what
SCAFFOLD sends, twice FedAvg's bytes, and in some rounds two numbers for each s.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.kernels.per_client import along, norm
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import PLAIN, Change, LocalProgram
from fl_lightning.round.stage import Evaluation, Rows, Stage
from fl_lightning.strategies.base import SumWeighting
from fl_lightning.strategies.mixing.ditto import Ditto
from fl_lightning.strategies.mixing.scaffold import SCAFFOLD, corrected, corrections, summed
from fl_lightning.strategies.mixing.twins import blended_output, blends, part_outputs, shared_output
from fl_lightning.strategies.share_choice import ShareChoice
from fl_lightning.strategies.trials import SHARES, require_direction, score_of


@dataclass(kw_only=True, eq=False)
class TwinScaffold(Ditto, SCAFFOLD):
    """SCAFFOLD and Ditto side by side; each client predicts with a mean of both. Experimental.

    Args:
        shares: The grid of s, the personal model's share, increasing, in [0, 1]. With a single value nothing is chosen.
        prior_examples: The number of a client's validation examples that weigh as much in its choice as the whole
            federation; at inf every client takes the federation's choice.
        validate_every: Rounds between choices; the first is made in the second round.
        max_correction: ρ, at least 0. 0 trains θ as FedAvg with equal weights, inf as SCAFFOLD.
    """

    shares: Sequence[float] = SHARES
    prior_examples: float = 100.0
    validate_every: int = 5
    max_correction: float = 1.0
    control: Literal["gradient_mean"] = field(default="gradient_mean", init=False)
    weighting: Literal["equal"] = field(default="equal", init=False)
    decoupled: bool = field(default=False, init=False)

    server_state = ("choice",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "prior_examples", "max_correction", may_be_infinite=True)
        self.require_at_least(1, "validate_every")
        if not self.shares or list(self.shares) != sorted({share for share in self.shares if 0 <= share <= 1}):
            raise ValueError(f"strategy.shares must be a list of increasing numbers in [0, 1], got {list(self.shares)}")

    def setup(self, federation: Federation) -> None:
        """Start without scores."""
        super().setup(federation)
        if len(self.shares) > 1:
            require_direction(federation.client, f"strategy.shares is {list(self.shares)}", "set it to a single one")
        self.choice = ShareChoice(self.shares, self.prior_examples, federation.num_clients, federation.device)

    def training(self, round_idx: int) -> Stage:
        """Both models take a step on every batch, the shared one a corrected step."""
        program = LocalProgram(step=corrected if math.isinf(self.max_correction) else self.bounded)
        return dataclasses.replace(super().training(round_idx), program=program)

    def bounded(
        self, client: ClientModule, parameters: Parameters, gradients: Parameters, batch: Batch | None, context: Context
    ) -> Change:
        """SCAFFOLD's step with a bounded correction."""
        received = {name: r for name, r in corrections(context).items() if name in gradients}
        gradient = norm([gradients[name] for name in received], is_stack=context.is_stack)
        correction = norm(list(received.values()), is_stack=context.is_stack)
        factor = (self.max_correction * gradient / correction.clamp(min=1e-30)).clamp(max=1)
        bounded = {name: torch.addcmul(gradients[name], along(factor, r), r) for name, r in received.items()}
        return Change(gradients={**gradients, **bounded}, client_state=summed(gradients, context))

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """SCAFFOLD's exchange, in some rounds with scores for the choice of s."""
        (stage,) = super().stages(round_idx)
        if len(self.shares) == 1 or round_idx == 0 or (round_idx - 1) % self.validate_every:
            return [stage]
        outputs, rows = {**stage.client_outputs, "scores": self.scores}, Rows(of="score", models=len(self.shares))
        return [dataclasses.replace(stage, client_outputs=outputs, rows={"scores": rows})]

    def scores(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The validation metric of the received model blended with the personal one, for each share, (S, 2)."""
        current = {name: context.anchor[name] if name in self.shared else own for name, own in parameters.items()}
        outputs = blends(client, part_outputs(client, current, batch), self.shares)
        scores = [score_of(client, current, batch, context, lambda *_, output=output: output) for output in outputs]
        return torch.stack(scores, dim=-2)

    bounded.takes_stacks = scores.takes_stacks = True  # type: ignore[attr-defined]

    def join(self) -> Stage:
        """An unseen client trains its personal model alone."""
        return dataclasses.replace(super().join(), program=PLAIN)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The shared model and each client's correction, of which unseen clients need none."""
        payload = super().configure(stage, clients)
        return dataclasses.replace(payload, extras={}) if stage.name == "join" else payload

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average, learn the controls, and keep the scores."""
        super().aggregate(stage, upload)
        if "scores" in upload.extras:
            self.choice.note(upload.clients, upload.extras["scores"])

    def sum_weighting(self) -> SumWeighting:
        """None: each client has controls of its own."""
        return None

    def model_for(self, clients: Sequence[int]) -> Payload:
        """The shared model and each client's share s_i."""
        return dataclasses.replace(self.mixed_models(clients), extras={"share": self.choice.of(clients)})

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Blended predictions are the result; ``global/...`` is the shared model, ``personal/...`` the client's own."""
        blend = Evaluation(payload=self.model_for(clients), output=blended_output)
        shared = Evaluation(payload=self.mixed_models(clients), output=shared_output)
        return {"": blend, "global/": shared, "personal/": Evaluation()}

    def metrics(self) -> Mapping[str, float]:
        """The mean share over the training clients."""
        return {**super().metrics(), "server/share": float(self.choice.of(self.federation.training_clients).mean())}
