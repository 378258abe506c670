"""A local program: what a client does around the steps of its optimizer, said by pure functions of one client.

As in fedjax, where ``for_each_client`` is given ``client_init``, ``client_step`` and ``client_final``; but the gradient
and the optimizer's step stay with the executor, so that a program says only what is special about it. For each batch
that is drawn:

    init                      before the first step
    repeat times:
        gradient of the stage's objective and penalty
        step                  what the optimizer is given, and what else a step changes
        clipping, the optimizer, the client's constraint
    final                     after the last step

``context.step`` counts the steps of the stage. Both executors run programs, the stacked one for all clients at once
under ``torch.vmap``, so that branches are on numbers of Python's, ``context.step`` among them.
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
    """New values, by name; what is not named stays.

    Attributes:
        parameters: Of the client; of ``step`` they are set after the optimizer's step.
        anchor: Of the context's anchor.
        client_state: Of the client's state.
        gradients: What the optimizer is given in place of the gradients, of ``step`` alone; a parameter that is not
            named is then not stepped. None for the gradients themselves.
    """

    parameters: Parameters = field(default_factory=dict)
    anchor: Parameters = field(default_factory=dict)
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Parameters | None = None

    def values(self) -> dict[str, dict[str, Tensor]]:
        """All but the gradients, by kind and name."""
        return {kind: dict(getattr(self, kind)) for kind in ("parameters", "anchor", "client_state")}


#: A pure function of (parameters, context).
AroundBatch = Callable[[Parameters, Context], Change]
#: A pure function of (client, parameters, gradients, batch, context): of what the step begins with, in training mode.
#: The gradients are those before clipping. In private training there is no batch, for it would tell of examples.
Step = Callable[[ClientModule, Parameters, Parameters, Batch | None, Context], Change]
#: A function of (client, parameters, what the client holds, context): what it holds from now on.
Rewrite = Callable[[ClientModule, Parameters, Any, Context], Any]


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """What clients do in a stage around the steps of their optimizer.

    Attributes:
        init: Before the first step on each batch.
        step: At each step, when its gradients are known.
        final: After the last step on each batch.
        repeat: Steps in a row on each batch that is drawn, each with a dropout of its own.
        restart: Start the optimizer anew with every batch but the first.
        send_anchor: Send the anchor, which the program has moved, instead of the parameters.
        rewrite: What the client holds after the stage, its graph changed; kept only if the client succeeds.
    """

    init: AroundBatch | None = None
    step: Step | None = None
    final: AroundBatch | None = None
    repeat: int = 1
    restart: bool = False
    send_anchor: bool = False
    rewrite: Rewrite | None = None


#: The program of stages that have none.
PLAIN = LocalProgram()
