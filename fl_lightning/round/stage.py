"""One exchange of a round: the server sends, the clients work, the clients respond.

What a client computes is defined by pure functions of one client: its module, parameters, batch and :class:`Context`.
Both executors call them, the stacked one for all clients at once under ``torch.vmap``.
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
#: Several tensors from one computation are a mapping: client output ``name`` is then communicated as ``name/key``.
ClientOutput = Callable[[ClientModule, Parameters, Batch, Context], Tensor | Mapping[str, Tensor]]

Phase = Literal["initial", "round", "onboarding", "callback"]


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """A tensor of a client's state.

    Attributes:
        initial: Its initial value; for one example if it is ``per_example``.
        per_example: Whether there is one for each of the client's examples, (N, *shape).
        lasting: Whether it lives on and is in checkpoints; otherwise every stage begins with its initial value.
    """

    initial: Tensor
    per_example: bool = False
    lasting: bool = True


@dataclass(frozen=True, kw_only=True)
class Persistence:
    """What lives on from one round to the next in addition to the client state (``Strategy.client_state``).

    Nothing else is in checkpoints or takes memory between rounds. Within a round, everything lives on from stage to
    stage and to the evaluation.

    Attributes:
        parameters: Shell-style patterns of the parameters that live on: those that a round neither sends to the clients
            nor computes from scratch, and those with which a client predicts although it was not sent them. All others
            are those of the initial model when a round begins.
        optimizer: Whether the state of the client's optimizer lives on.
    """

    parameters: tuple[str, ...] = ("*",)
    optimizer: bool = True

    def keeps(self, name: str) -> bool:
        """Whether a parameter lives on."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.parameters)


@dataclass(frozen=True, kw_only=True)
class StageAddress:
    """The address of a stage, with which another process that has the strategy can recreate it (it has functions).

    Attributes:
        phase: ``initial``, ``round``, ``onboarding`` (of unseen clients), or ``callback`` (made by a callback, so it
            cannot be recreated).
        round_idx: The round, or the coming one.
        name: The name of the stage.
    """

    phase: Phase
    round_idx: int
    name: str

    @property
    def scheduled_round(self) -> int | None:
        """The round whose learning rate clients have; None outside the rounds, where it is that without schedule."""
        return self.round_idx if self.phase == "round" else None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the rows or numbers of a client output describe, if that is not the client as a whole.

    Attributes:
        of: ``example``: there is a row for each of the client's examples, (N, ...). ``single``: each row describes one
            example, though not every example has a row. ``class``: there is a row for each class, (K, ...). ``score``:
            it scores a model by a sum over examples and their number, (2,), or a mapping with the number as ``count``;
            or ``models`` of them, (models, 2).
        counted_by: For classes, the name of the client output that counts the examples of each class behind it, (K,);
            empty if there is none and the client's training examples count.
        models: How many models are scored.
    """

    of: Literal["example", "single", "class", "score"]
    counted_by: str = ""
    models: int = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the clients do between receiving a payload and responding to it.

    Attributes:
        name: For messages, logs and random keys; unique within a round.
        num_epochs: Number of local epochs.
        num_steps: Number of local steps, instead of epochs.
        trained: Shell-style patterns of the parameters that are trained.
        objective: The local loss, instead of the client's own. A function with a true attribute ``takes_stacks``
            itself computes on a stack of clients if the net does, and returns a loss for each, (C,). The same holds for
            functions of the program and for client outputs.
        penalty: Term added to the local loss. If it has an attribute ``gradient``, a function of the same arguments
            that computes on one client and on a stack, new tensors by name, the stacked executor adds that to the
            gradient instead.
        program: What the strategy needs around the steps: pure functions of one client.
        optimizer: Builds an optimizer for this stage alone, whose state ends with it; None for the client's own.
        reset_optimizer: Reset the local optimizer instead of keeping its state over the rounds.
        upload: Names of the parameters sent up; ``(FLAT,)`` for all of them as one row, padded with zeros to the
            longest client's, where clients have different architectures.
        as_update: Send the change since the start of the stage instead of the parameters.
        client_outputs: What is sent up in addition, by name.
        rows: What client outputs describe that do not describe the client as a whole, by name.
        client_state: New values of the client state, by name, computed as client outputs are; kept only if the client
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
        """Names of the client outputs that have a row for each of the client's examples."""
        return tuple(name for name, rows in self.rows.items() if rows.of == "example")

    @property
    def per_class(self) -> dict[str, str]:
        """Names of the client outputs that have a row for each class, and what counts the examples behind them."""
        return {name: rows.counted_by for name, rows in self.rows.items() if rows.of == "class"}

    @property
    def single(self) -> tuple[str, ...]:
        """Names of the client outputs whose rows describe one example each, though not every example has one."""
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
        """The number of local epochs of a client and of steps in each; ``num_steps`` counts as one epoch.

        Args:
            work_fraction: Share of the steps that the client does, in [0, 1].
            steps_per_epoch: Number of batches of its data in an epoch.
        """
        if self.num_steps is not None:
            return 1, epochs_of(work_fraction, self.num_steps) * self.program.repeat
        return epochs_of(work_fraction, self.num_epochs), steps_per_epoch * self.program.repeat


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which model of each client is evaluated, and how.

    Attributes:
        payload: Parameters that replace those of the client (it keeps the others), and tensors that it receives. None
            for its own parameters.
        tuning: Training on a copy before the evaluation; the client's own state is untouched.
        output: The predictions that are scored instead of the net's own output.
        prefer_trained: Score clients that have taken part in the round with the parameters that they trained; the
            payload is for the others.
        others: Clients that are evaluated in another way.
        training_examples: Whether training examples are scored too. Otherwise they are left out, unless that saves
            nothing: outputs of a graph's nodes are computed together.
    """

    payload: Payload | None = None
    tuning: Stage | None = None
    output: OutputRule | None = None
    prefer_trained: bool = False
    others: "Mapping[int, Evaluation]" = field(default_factory=dict)
    training_examples: bool = True

    def ways(self, clients: Sequence[int], active: Collection[int] = ()) -> "list[tuple[Evaluation, list[int]]]":
        """The ways in which clients are evaluated, each with its clients.

        Args:
            clients: The clients that are evaluated.
            active: The clients that have taken part in the round.
        """
        ways: dict[tuple[int, bool], tuple[Evaluation, list[int]]] = {}
        for client in clients:
            way = self.others.get(client, self)
            trained = way.prefer_trained and client in active
            if (id(way), trained) not in ways:
                ways[id(way), trained] = way.without_parameters() if trained else way, []
            ways[id(way), trained][1].append(client)
        return list(ways.values())

    def is_same_model_as(self, other: "Evaluation") -> bool:
        """Whether clients have the same model in both, evaluated in the same way."""
        return self.payload is other.payload and self.tuning is other.tuning and self.output == other.output

    def without_parameters(self) -> "Evaluation":
        """The same evaluation with the clients' own parameters."""
        payload = self.payload
        if payload is not None:
            payload = dataclasses.replace(payload, parameters={}) if payload.extras else None
        return dataclasses.replace(self, payload=payload)


def tune(num_epochs: int, *, trained: tuple[str, ...] = ("*",)) -> Stage:
    """Fine-tuning with the client's own objective and a newly created optimizer of the client's kind."""
    return Stage(name="finetune", num_epochs=num_epochs, trained=trained)
