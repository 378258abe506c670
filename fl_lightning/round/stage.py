"""One exchange of a round: the server sends, the clients work, the clients answer."""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.round.client import ClientModule, Penalty
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload

#: A pure function of (client module, its parameters, its batch, its context), evaluated after training in eval mode.
Signal = Callable[[ClientModule, Parameters, Batch, Context], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the clients do between receiving a payload and answering it.

    Attributes:
        name: For messages, logs and random keys; unique within a round.
        num_epochs: Local epochs.
        upload: Names of the parameters sent up.
        flat: All parameters are sent up as one row ``flat``, padded with zeros to the longest client's, in place of
            ``upload``: for clients of different architectures.
        as_update: Send the change since the start of the stage in place of the parameters.
        signals: What goes up beside them, by name.
        penalty: Term added to the local objective.
        reset_optimizer: Start the local optimiser anew in place of keeping its state over the rounds.
        trained: Shell-style patterns of the parameters that are trained.
    """

    name: str
    num_epochs: int = 0
    upload: tuple[str, ...] = ()
    flat: bool = False
    as_update: bool = False
    signals: Mapping[str, Signal] = field(default_factory=dict)
    penalty: Penalty | None = None
    reset_optimizer: bool = False
    trained: tuple[str, ...] = ("*",)

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.trained)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which model of each client is evaluated.

    Attributes:
        payload: Parameters that replace the client's own; the client keeps what is not in it. None: its own model.
        num_epochs: Local epochs on a copy before the evaluation (fine-tuning); the client's own state is untouched.
        trained: Shell-style patterns of the parameters that these epochs train.
    """

    payload: Payload | None = None
    num_epochs: int = 0
    trained: tuple[str, ...] = ("*",)
