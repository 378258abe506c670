"""One exchange of a round: the server sends, the clients work, the clients respond.

What a client computes in it is said by pure functions of one client: its module, parameters, batch and
:class:`Context`. Both executors call them, the stacked one for all clients at once under ``torch.vmap``.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.round.client import ClientModule, Objective, OptimizerFactory, OutputRule, Penalty
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.participation import epochs_of
from fl_lightning.round.payload import FLAT, Payload
from fl_lightning.round.program import PLAIN, LocalProgram

#: A pure function of (client, parameters, batch, context), evaluated after training in eval mode and without gradient.
#: Several tensors that come of one computation are a mapping: client output ``name`` is then communicated as
#: ``name/key``.
ClientOutput = Callable[[ClientModule, Parameters, Batch, Context], Tensor | Mapping[str, Tensor]]

Phase = Literal["initial", "round", "onboarding", "callback"]


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """A tensor of a client's state.

    Attributes:
        initial: Its first value; of one example where it is ``per_example``.
        per_example: There is one for each of the client's examples, (N, *shape).
        lasting: It lives on and is in checkpoints; else it is set to its first value at the start of every stage.
    """

    initial: Tensor
    per_example: bool = False
    lasting: bool = True


@dataclass(frozen=True, kw_only=True)
class Persistence:
    """What lives on of a client from one round to the next, beside its client state (``Strategy.client_state``).

    Nothing else is in checkpoints or takes client state between rounds. Within a round, from stage to stage and to the
    evaluation, everything lives on.

    Attributes:
        parameters: Shell-style patterns of the parameters that do: those that a round neither sends to the clients nor
            makes anew, and those by which a client predicts though it was not sent them. The others are the initial
            model's as a round begins.
        optimizer: Whether the state of the client's optimizer does.
    """

    parameters: tuple[str, ...] = ("*",)
    optimizer: bool = True

    def keeps(self, name: str) -> bool:
        """Whether a parameter lives on."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.parameters)


@dataclass(frozen=True, kw_only=True)
class StageAddress:
    """Where a stage is found, so that whoever has the strategy can make it again: stages hold functions.

    Attributes:
        phase: ``initial``, ``round``, ``onboarding`` (of unseen clients), or ``callback`` (made by a callback, not
            found).
        round_idx: The round, or the coming one.
        name: The stage's.
    """

    phase: Phase
    round_idx: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows, or the numbers, of a client output tell of, where that is not the client as a whole.

    Attributes:
        of: ``example``: there is a row for each of the client's examples, (N, ...). ``single``: each row tells of one
            example, though not of every one. ``class``: there is a row for each class, (K, ...). ``score``: it scores
            a model, a sum over examples and their number, (2,), or the two as a mapping that has the number as
            ``count``; or ``models`` of them, (models, 2).
        counted_by: Of classes, the name of the client output that counts the examples of each class behind it, (K,);
            empty
            where none does, and its training examples count.
        models: How many models are scored.
    """

    of: Literal["example", "single", "class", "score"]
    counted_by: str = ""
    models: int = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the clients do between receiving a payload and answering it.

    Attributes:
        name: For messages, logs and random keys; unique within a round.
        num_epochs: Local epochs.
        num_steps: Local steps instead of epochs.
        trained: Shell-style patterns of the parameters that are trained.
        objective: The local loss instead of the client's own. A function with a true attribute ``takes_stacks``
            computes on a stack of clients by itself if the net does, and returns a loss for each, (C,).
        penalty: Term added to the local loss.
        program: What a strategy alone needs around the steps: pure functions of one client.
        optimizer: Builds an optimizer for this stage alone, whose state ends with it; None for the client's own.
        reset_optimizer: Start the local optimizer anew instead of keeping its state over the rounds.
        upload: Names of the parameters sent up; ``(FLAT,)`` for all of them as one row, padded with zeros to the
            longest client's, where clients have different architectures.
        as_update: Send the change since the start of the stage instead of the parameters.
        client_outputs: What goes up beside them, by name.
        rows: Of the client outputs that do not tell of the client as a whole, what they tell of, by name.
        client_state: New values of the client's state, by name, computed as client outputs are; kept only if the client
    succeeds.
    """

    name: str
    num_epochs: int = 0
    num_steps: int | None = None
    trained: tuple[str, ...] = ("*",)
    objective: Objective | None = None
    penalty: Penalty | None = None
    program: LocalProgram = PLAIN
    optimizer: OptimizerFactory | None = None
    reset_optimizer: bool = False
    upload: tuple[str, ...] = ()
    as_update: bool = False
    client_outputs: Mapping[str, ClientOutput] = field(default_factory=dict)
    rows: Mapping[str, Rows] = field(default_factory=dict)
    client_state: Mapping[str, ClientOutput] = field(default_factory=dict)

    @property
    def flat(self) -> bool:
        """Whether all parameters are sent up as one row."""
        return self.upload == (FLAT,)

    @property
    def per_example(self) -> tuple[str, ...]:
        """Names of the client outputs that hold a row for each of the client's examples."""
        return tuple(name for name, rows in self.rows.items() if rows.of == "example")

    @property
    def per_class(self) -> dict[str, str]:
        """Names of the client outputs that hold a row for each class, and what counts the examples behind them."""
        return {name: rows.counted_by for name, rows in self.rows.items() if rows.of == "class"}

    @property
    def single(self) -> tuple[str, ...]:
        """Names of the client outputs whose rows tell of one example each, though not of every one."""
        return tuple(name for name, rows in self.rows.items() if rows.of == "single")

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the client outputs that score a model."""
        return tuple(name for name, rows in self.rows.items() if rows.of == "score")

    @property
    def num_scored(self) -> int:
        """How many models the client outputs score."""
        return sum(self.rows[name].models for name in self.scores)

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.trained)

    def schedule(self, work_fraction: float, steps_per_epoch: int) -> tuple[int, int]:
        """Local epochs of a client and the steps of each; steps that are set are one epoch.

        Args:
            work_fraction: Fraction of the work that the client does, in [0, 1].
            steps_per_epoch: Batches of its data that make an epoch.
        """
        if self.num_steps is not None:
            return 1, epochs_of(work_fraction, self.num_steps) * self.program.repeat
        return epochs_of(work_fraction, self.num_epochs), steps_per_epoch * self.program.repeat


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which model of each client is evaluated, and how.

    Attributes:
        payload: Parameters that replace the client's own, which keeps what is not in it, and tensors to be received.
            None: its own.
        tuning: Training on a copy before the evaluation; the client's own state is untouched.
        output: The predictions that are scored instead of the net's own output.
        prefer_trained: Score clients that have taken part in the round by the parameters that they have made; the
            payload is for the others.
        others: Clients that are evaluated in a way of their own.
    """

    payload: Payload | None = None
    tuning: Stage | None = None
    output: OutputRule | None = None
    prefer_trained: bool = False
    others: "Mapping[int, Evaluation]" = field(default_factory=dict)

    def ways(self, clients: Sequence[int], active: Collection[int] = ()) -> "list[tuple[Evaluation, list[int]]]":
        """The ways in which clients are evaluated, each with its clients.

        Args:
            clients: Who is evaluated.
            active: Who has taken part in the round.
        """
        ways: dict[tuple[int, bool], tuple[Evaluation, list[int]]] = {}
        for client in clients:
            way = self.others.get(client, self)
            trained = way.prefer_trained and client in active
            if (id(way), trained) not in ways:
                ways[id(way), trained] = way.without_parameters() if trained else way, []
            ways[id(way), trained][1].append(client)
        return list(ways.values())

    def without_parameters(self) -> "Evaluation":
        """The same of clients' own parameters."""
        payload = self.payload
        if payload is not None:
            payload = dataclasses.replace(payload, parameters={}) if payload.extras else None
        return dataclasses.replace(self, payload=payload)


def tune(num_epochs: int, *, trained: tuple[str, ...] = ("*",)) -> Stage:
    """Fine-tuning with the client's own objective and a fresh optimizer of its own kind."""
    return Stage(name="finetune", num_epochs=num_epochs, trained=trained)
