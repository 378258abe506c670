"""A local program: what a client does around the steps of its optimizer, as pure functions of one client.

It resembles the ``client_init``, ``client_step`` and ``client_final`` of fedjax's ``for_each_client``; but the gradient
and the optimizer's step stay with the executor, so that a program has only what is special about it. For each drawn
batch:

    init                      before the first step
    repeat times:
        gradient of the stage's objective and penalty
        step                  what the optimizer is given, and what else a step changes
        clipping, the optimizer, the client's constraint
    final                     after the last step

``context.step`` counts the steps of the stage. Both executors run programs, the stacked one for all clients at once
under ``torch.vmap``, so a branch may depend only on Python numbers such as ``context.step``. ``vmap`` takes longer than
small steps do; what a function computes value by value needs none of it. It then has a true attribute ``takes_stacks``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters


@dataclass(frozen=True, kw_only=True)
class Change:
    """New values, by name; what is not named stays as it is.

    Attributes:
        parameters: New values of the client's parameters; those of ``step`` are set after the optimizer's step.
        anchor: New values of the anchor.
        client_state: New values of the client state.
        gradients: Only for ``step``: what the optimizer gets in place of the gradients; a parameter that is not named
            is then not stepped. None for the gradients themselves.
    """

    parameters: Parameters = field(default_factory=dict)
    anchor: Parameters = field(default_factory=dict)
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Parameters | None = None

    def values(self) -> dict[str, dict[str, Tensor]]:
        """All values except the gradients, by kind and name."""
        return {kind: dict(getattr(self, kind)) for kind in ("parameters", "anchor", "client_state")}


#: A pure function of (parameters, context).
AroundBatch = Callable[[Parameters, Context], Change]
#: A pure function of (client, parameters, gradients, batch, context) before the step, in training mode. The gradients
#: are those before clipping. In private training there is no batch, since it would reveal examples.
Step = Callable[[ClientModule, Parameters, Parameters, Batch | None, Context], Change]
#: A function of (client, parameters, client data, context) that returns the client's new data.
Rewrite = Callable[[ClientModule, Parameters, Any, Context], Any]


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """What clients do in a stage around the steps of their optimizer.

    Attributes:
        init: Before the first step on each batch.
        step: At each step, when its gradients are known.
        final: After the last step on each batch.
        repeat: Number of steps in a row on each drawn batch, each with a dropout of its own.
        restart: Reset the optimizer with every batch but the first.
        send_anchor: Send the anchor, which the program has moved, instead of the parameters.
        rewrite: The client's data after the stage, with a changed graph; kept only if the client succeeds.
    """

    init: AroundBatch | None = None
    step: Step | None = None
    final: AroundBatch | None = None
    repeat: int = 1
    restart: bool = False
    send_anchor: bool = False
    rewrite: Rewrite | None = None


#: The program of ordinary stages, which does nothing.
PLAIN = LocalProgram()
