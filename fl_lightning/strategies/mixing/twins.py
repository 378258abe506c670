"""Clients with two copies of their net: the federation averages the shared one, the personal one is kept local.

Traffic is FedAvg's: ``personal.*`` is never communicated. (An unseen client receives the server's model once, as both
of its copies.)
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from fl_lightning.batches.base import Batch
from fl_lightning.models.output import NetOutput
from fl_lightning.models.twin import Twin
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.base import SumWeighting
from fl_lightning.strategies.mixing.base import Mixing, equal_weights, example_weights


@dataclass(kw_only=True, eq=False)
class Twins(Mixing):
    """Base of the strategies whose clients have a :class:`~fl_lightning.models.Twin`.

    Args:
        weighting: Average the shared models by training ``examples``, or by ``equal`` shares.
    """

    weighting: Literal["examples", "equal"] = "examples"
    personal: Sequence[str] = field(default=("personal.*",), init=False)
    blend: bool = field(default=False, init=False)

    def build_net(self, net: nn.Module) -> nn.Module:
        """The net twice."""
        return Twin(net)

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """The common row of weights, (1, C)."""
        return (example_weights(upload) if self.weighting == "examples" else equal_weights(upload))[None]

    def sum_weighting(self) -> SumWeighting:
        """That of the average, unless a setting looks at single clients."""
        return None if self.settings_against_sums() else self.weighting

    @abstractmethod
    def join(self) -> Stage:
        """What an unseen client does, whose both models are the server's; it sends nothing."""

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients receive the shared model and make a personal one of it."""
        return [dataclasses.replace(self.join(), name="join")]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The shared model; to unseen clients as their personal one, too."""
        payload = super().configure(stage, clients)
        if stage.name != "join":
            return payload
        personal = {name.replace("shared.", "personal.", 1): model for name, model in payload.parameters.items()}
        return dataclasses.replace(payload, parameters={**payload.parameters, **personal})

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """Nothing: the clients' personal models are their own."""
        return None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The personal models are the result; the shared one is logged as ``global/...``."""
        shared = self.configure(self.stages(0)[0], clients)
        return {"": Evaluation(), "global/": Evaluation(payload=shared, output=shared_output)}


def shared_output(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """What the shared model predicts."""
    return client.part_output("shared", parameters, batch)


shared_output.takes_stacks = True  # type: ignore[attr-defined]


def blended_output(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """What the two models predict on the mean, by the personal one's share, which the server sent."""
    return blended(client, part_outputs(client, parameters, batch), context.received["share"])


blended_output.takes_stacks = True  # type: ignore[attr-defined]


def part_outputs(client: ClientModule, parameters: Parameters, batch: Batch) -> tuple[NetOutput, NetOutput]:
    """What the shared and the personal model predict."""
    return client.part_output("shared", parameters, batch), client.part_output("personal", parameters, batch)


def blended(client: ClientModule, outputs: tuple[NetOutput, NetOutput], share: Tensor) -> NetOutput:
    """The mean of both predictions, with the personal one's embedding.

    Args:
        client: The client, whose task says what a mean is.
        outputs: Of the shared and of the personal model.
        share: Weight of the personal one, scalar or of a stack of clients (C,).
    """
    shared, personal = outputs
    share = share[..., None, None].to(shared.logits.dtype)
    return NetOutput(client.task.target.blend(shared.logits, personal.logits, share), personal.embedding)
