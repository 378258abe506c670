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
    """Base class of the strategies whose clients have a :class:`~fl_lightning.models.Twin`.

    Args:
        weighting: Average the shared models by training ``examples``, or by ``equal`` shares.
    """

    weighting: Literal["examples", "equal"] = "examples"
    personal: Sequence[str] = field(default=("personal.*",), init=False)
    blend: bool = field(default=False, init=False)

    def build_net(self, net: nn.Module) -> nn.Module:
        """Two copies of the net."""
        return Twin(net)

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """The common row of weights, (1, C)."""
        return (example_weights(upload) if self.weighting == "examples" else equal_weights(upload))[None]

    def sum_weighting(self) -> SumWeighting:
        """That of the average, unless a setting needs single clients' updates."""
        return None if self.settings_against_sums() else self.weighting

    @abstractmethod
    def join(self) -> Stage:
        """What an unseen client does, starting with both models from the server; it sends nothing."""

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients receive the shared model and make a personal one from it."""
        return [dataclasses.replace(self.join(), name="join")]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The shared model, which unseen clients also get as their personal one."""
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
    """The output of the shared model."""
    return client.part_output("shared", parameters, batch)


shared_output.takes_stacks = True  # type: ignore[attr-defined]


def blended_output(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """The mean of the two models' predictions, weighted with the share of the personal one that the server sent."""
    return blended(client, part_outputs(client, parameters, batch), context.received["share"])


blended_output.takes_stacks = True  # type: ignore[attr-defined]


def part_outputs(client: ClientModule, parameters: Parameters, batch: Batch) -> tuple[NetOutput, NetOutput]:
    """The outputs of the shared and of the personal model."""
    return client.part_output("shared", parameters, batch), client.part_output("personal", parameters, batch)


def blended(client: ClientModule, outputs: tuple[NetOutput, NetOutput], share: Tensor) -> NetOutput:
    """The weighted mean of both predictions, with the personal model's embedding.

    Args:
        client: The client, whose task defines the mean.
        outputs: Those of the shared and of the personal model.
        share: The personal model's weight, a scalar, or (C,) for a stack of clients; (S,) or (S, 1) for S means.
    """
    shared, personal = outputs
    share = share[..., None, None].to(shared.logits.dtype)
    return NetOutput(client.task.target.blend(shared.logits, personal.logits, share), personal.embedding)


def blends(client: ClientModule, outputs: tuple[NetOutput, NetOutput], shares: Sequence[float]) -> list[NetOutput]:
    """The weighted means for several shares; what does not depend on the share is computed once.

    Args:
        client: The client, whose task defines the mean.
        outputs: Those of the shared and of the personal model, of one client or of a stack.
        shares: The personal model's weights.
    """
    logits = outputs[0].logits
    mean = blended(client, outputs, logits.new_tensor(shares).view(-1, *[1] * (logits.dim() - 2)))
    return [NetOutput(logits, mean.embedding) for logits in mean.logits]
