"""An executor runs a stage for the clients of one process; it is independent of servers and other processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import AnyBatch, Batch, Collator
from fl_lightning.counts import Counted
from fl_lightning.executors.keys import derive_keys
from fl_lightning.executors.stage_request import StageRequest, StageResult, join, part_of
from fl_lightning.executors.storage import Allocate, in_memory
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Parameters
from fl_lightning.round.payload import Payload, from_wire, pad_examples, to_wire
from fl_lightning.round.privacy import KeyedNumbers
from fl_lightning.round.stage import Evaluation, Persistence, Phase, Stage, StageAddress, StateSpec


class Executor(Counted, ABC):
    """Has the clients of one process, and runs stages and evaluations for them.

    A client that takes part in a round is active until the round is over. Then only what the strategy declares lives on
    (``Strategy.persistence`` and ``Strategy.client_state``); everything else is that of the initial model again.

    Attributes:
        num_flat: Length of the rows of parameters that are communicated flat.
        allocate: Makes tensors for the state of many clients, in memory or on disk.
        round: Phase and index of the current round; None before the first stage.
        active: Clients that have begun a stage of the current round.
        said: Stages of which it is known whether they leave out a client's own methods, and which method.
        numbers: Source of the random draws and the noise of private training.
    """

    #: Whether it runs clients of different architectures itself, without one executor per architecture.
    takes_architectures: ClassVar[bool] = False

    fabric: Fabric
    client: ClientModule
    collator: Collator
    clients: tuple[int, ...]
    seed: int
    num_flat: int

    def __init__(self) -> None:
        self.allocate: Allocate = in_memory
        self.numbers = KeyedNumbers()
        self.round: tuple[Phase, int] | None = None
        self.active: set[int] = set()
        self.said: set[tuple[str, str]] = set()

    def suited(self, client: ClientModule) -> "Executor":
        """This executor, or another one that a client with hooks of its own needs."""
        return self

    def tried(
        self, client: ClientModule, first: Callable[[], Batch], fabric: Fabric, time_limit: float | None
    ) -> "Executor":
        """This executor, or another one that a client's own code needs.

        Args:
            client: The built client.
            first: Makes a batch of one client, to try the code on.
            fabric: The Fabric, for its precision.
            time_limit: Seconds that a trial may take; None for no bound.

        Raises:
            ValueError: The time limit cannot be enforced.
        """
        return self

    @abstractmethod
    def setup(
        self,
        fabric: Fabric,
        client: ClientModule,
        collator: Collator,
        clients: Sequence[int],
        *,
        seed: int,
        client_state: Mapping[str, StateSpec] | None = None,
        persistence: Persistence | None = None,
        num_together: int | None = None,
        time_limit: float | None = None,
    ) -> None:
        """Set up the clients of this process; all start from the given client's parameters.

        Args:
            fabric: The Fabric, for device and precision.
            client: The built client module.
            collator: Makes batches of clients.
            clients: Indices of this process's clients, ascending.
            seed: Root of every random key.
            client_state: Specification of the client state, by name.
            persistence: What else lives on between rounds; None for everything.
            num_together: Smallest number of this process's clients in a round, for the required memory; None for all
                of them.
            time_limit: Seconds that a client may take for a stage or an evaluation; None for no bound.

        Raises:
            ValueError: The net or its optimizer is not supported, the client overrides a hook that is never called,
                training changes a buffer of the net, BatchNorm would see a batch of one example, the clients do not
                fit into memory, or the time limit cannot be enforced.
        """

    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes that live on for this process's clients (without client state), once all of them have taken part.

        Raises:
            ValueError: The optimizer cannot step clients.
        """

    @abstractmethod
    def private_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Number of steps of a stage that count toward a client's privacy budget; 0 without private training."""

    @abstractmethod
    def epsilons(self) -> dict[int, float]:
        """ε that each of this process's clients has spent; empty without ``model.privacy``."""

    def of(self, client: int) -> "Executor":
        """The executor that scores a client: this one, unless it has others for that."""
        return self

    def probe(self) -> StageResult:
        """One client's scores with the common initial model, before training, for the names of the metrics."""
        return self.evaluate({"": Evaluation()}, self.clients[:1], 0)[""]

    def received_parameters(self, payload: Payload | None, clients: Sequence[int]) -> dict[str, Tensor]:
        """Parameters that the server sent to some clients, by the names of this executor's net, (C, *shape).

        Raises:
            ValueError: The net has no such parameter.
        """
        if payload is None:
            return {}
        shapes = {name: parameter.shape for name, parameter in self.client.communicated(self.client.net).items()}
        tensors = from_wire(payload.rows(clients).parameters, shapes)
        for name, tensor in tensors.items():
            if shapes.get(name) != tensor.shape[1:]:
                has = f"has it in shape {tuple(shapes[name])}" if name in shapes else f"has {', '.join(shapes)}"
                raise ValueError(
                    f"the strategy sends a parameter {name!r} of shape {tuple(tensor.shape[1:])}, but the clients' net "
                    f"{has}: send what is not a parameter of it as an extra"
                )
        return tensors

    def received(self, payload: Payload | None, clients: Sequence[int], num_examples: int) -> dict[str, Tensor]:
        """Tensors that the server sent to some clients, (C, ...), with as many rows of examples as the batch."""
        if payload is None or not payload.extras:
            return {}
        mine = payload.rows(clients)
        return {
            name: pad_examples(tensor, num_examples) if name in mine.lengths else tensor
            for name, tensor in mine.extras.items()
        }

    def sent(self, stage: Stage, trained: Parameters, start: Parameters, anchor: Parameters) -> dict[str, Tensor]:
        """What some clients send: copies of the parameters, of their change, or of the anchor, (C, *shape)."""
        names = tuple(self.client.communicated(self.client.net)) if stage.flat else stage.upload
        source = anchor if stage.program.send_anchor else trained
        wire = {name: source[name] - start[name] if stage.as_update else source[name].clone() for name in names}
        return to_wire(wire, self.num_flat) if stage.flat else wire

    @property
    def evaluation_collator(self) -> Collator:
        """What makes the batches that models are scored on."""
        return self.collator.evaluation or self.collator

    def num_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Number of local steps of a client in a stage."""
        return math.prod(stage.schedule(work_fraction, self.collator.steps_per_epoch(client)))

    @abstractmethod
    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Run a stage for its clients that belong to this process.

        The stage of a callback (``address.phase``) leaves the clients unchanged.

        A client that raises, takes too long, or whose parameters or update are not finite is restored to its state at
        the beginning of the stage (including what it received), with a new optimizer, and is reported in ``failures``.

        Args:
            request: The stage, its clients, and what the server sends.
            report: Called with the number of clients that have just finished.
        """

    def ask(self, stage: Stage, clients: Sequence[int], round_idx: int, models: Payload | None = None) -> Payload:
        """What clients of this process compute for a callback, without being changed.

        Args:
            stage: What to compute.
            clients: The clients.
            round_idx: The current round, or the one that was evaluated last.
            models: Models of clients that have not trained one in that round; None for those that live on.
        """
        address = StageAddress(phase="callback", round_idx=round_idx, name=stage.name)
        self._begin(address)
        ways = Evaluation(payload=models, prefer_trained=True).ways(clients, self.active)
        works = [
            StageRequest(stage=stage, address=address, work_fraction=dict.fromkeys(members, 1.0), payload=way.payload)
            for way, members in ways
        ]
        return join([self.run(request) for request in works]).upload

    def evaluate(
        self,
        evaluations: Mapping[str, Evaluation],
        clients: Sequence[int],
        round_idx: int,
        *,
        collator: Collator | None = None,
    ) -> dict[str, StageResult]:
        """Score models of each of the given clients that belong to this process.

        Only the main model (prefix ``""``) is scored on training examples wherever these are.

        Args:
            evaluations: The models, by the prefix of their metrics.
            clients: The clients.
            round_idx: The round, for the random keys of fine-tuning.
            collator: Makes the batches that are scored, instead of the clients' own.

        Returns:
            For each model, the scores, (C, 2) for each metric, and the clients that could not be scored.
        """
        self._look_back(round_idx)
        done: list[tuple[Evaluation, set[int], StageResult]] = []

        def scored(way: Evaluation, members: list[int]) -> StageResult:
            """The scores of a model, which are those of an earlier evaluation if that is of the same model."""
            wanted = set(members)
            for other, asked, result in done:
                if wanted <= asked and way.is_same_model_as(other):
                    return part_of(result, wanted)
            done.append((way, wanted, self._score(way, members, round_idx, collator or self.collator.evaluation)))
            return done[-1][2]

        def scores(kind: str) -> StageResult:
            ways = evaluations[kind].ways(clients, self.active)
            return join([scored(replace(way, training_examples=not kind), members) for way, members in ways])

        results = {kind: scores(kind) for kind in sorted(evaluations)}  # the main model first
        return {kind: results[kind] for kind in evaluations}

    @abstractmethod
    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Score one model of each of the given clients that belong to this process."""

    def predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predictions for every example of each given client of this process, (N_i, num_outputs).

        Without the evaluation's ``training_examples``, those for validation and test examples alone, in their order,
        where examples are independent.

        Args:
            evaluation: The model.
            clients: The clients whose examples are predicted.
            round_idx: As in :meth:`evaluate`: with the same round, the predictions are those that were scored.
        """
        self._look_back(round_idx)
        parts = [self._predict(way, members, round_idx) for way, members in evaluation.ways(clients, self.active)]
        return {client: result for part in parts for client, result in part.items()}

    @abstractmethod
    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predictions of one model of each of the given clients that belong to this process."""

    def _begin(self, address: StageAddress) -> None:
        """Record the round of the coming stage; in a new round, no client is active."""
        self.client.round_idx = address.round_idx
        if address.phase == "callback":
            self._look_back(address.round_idx)
        elif self.round != (address.phase, address.round_idx):
            self.round = address.phase, address.round_idx
            self.active = set()

    def _look_back(self, round_idx: int) -> None:
        """End the current round if another one is evaluated, so that no client is active."""
        self.client.round_idx = round_idx
        if self.round is not None and self.round[1] != round_idx:
            self.active = set()

    @abstractmethod
    def lasting_state(self) -> Payload:
        """What lives on for this process's clients: parameters, and as extras optimizer state and client state.

        There is no row for clients without anything that lives on: those that have not taken part, or all clients if
        the strategy keeps nothing.
        """

    def state(self) -> Payload:
        """The complete current state of every client, including what ends with the round.

        Otherwise it is like :meth:`lasting_state`. For a client that is not active, what does not live on is initial.
        """
        return self.lasting_state()

    def rewritten_data(self) -> dict[int, dict[str, Tensor]]:
        """Data of this process's clients whose graphs a stage has changed, by client and field."""
        return {}

    def rewrite(self, client_data: Mapping[int, Any]) -> None:
        """Replace the data of clients; their own examples come first in the new data.

        The client state of new examples is the initial one.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot change the clients' data")

    def load_rewritten_data(self, rewritten_data: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore :meth:`rewritten_data` of this process's clients, before their state is loaded."""

    def reset(self, clients: Sequence[int]) -> None:
        """Bring clients back to their initial state, with the data that they had before any stage."""
        state, gone = self.lasting_state(), set(clients)
        self.load_state(state.rows([client for client in state.clients if client not in gone]))

    @abstractmethod
    def load_state(self, state: Payload, now: tuple[Phase, int] | None = None) -> None:
        """Restore this process's clients; a client without a row in the state is reset to its initial state.

        Args:
            state: The result of :meth:`lasting_state` (possibly with more clients) or of :meth:`state`.
            now: The round in which the latter was taken, if it was taken within one.
        """

    def keys(self, round_idx: int, stage: str, clients: Sequence[int], num_steps: int) -> Tensor:
        """The random key of every local step of some clients, (steps, C)."""
        return derive_keys(
            self.seed, stage, round_idx, torch.tensor(clients, dtype=torch.int64), torch.arange(num_steps)[:, None]
        ).to(self.fabric.device)

    def sum_scores(self, batch: Batch, compute: Callable[[Batch], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Numerators and denominators (..., 2) of every metric, over all parts of a batch."""
        tables, parts = [], []
        with torch.no_grad(), self.fabric.autocast():
            for part in batch.parts():
                tables.append(compute(part))
                parts += [part] if self.client.whole_metrics else []
        if len(tables) == 1 and not parts:
            return tables[0]
        return self.client.scores_of_parts(parts, tables)


def spread_outputs(result: Mapping[str, Tensor | Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name each tensor of a client output that consists of several: ``name/key``."""
    named: dict[str, Tensor] = {}
    for name, value in result.items():
        named |= {name: value} if isinstance(value, Tensor) else {f"{name}/{key}": t for key, t in value.items()}
    return named


def draw_batches(batch: AnyBatch, keys: Tensor, repeat: int) -> Iterator[AnyBatch]:
    """The batch of each step: every drawn batch ``repeat`` times, with separate dropout for each.

    Args:
        batch: All data of one client or of a stack.
        keys: The random key of every step, (steps, C), or (steps,).
        repeat: Number of steps on each drawn batch.
    """
    if repeat == 1:
        yield from batch.draws(keys)
        return
    for first, drawn in zip(range(0, len(keys), repeat), batch.draws(keys[::repeat]), strict=True):
        for key in keys[first : first + repeat]:
            yield drawn.replace({"key": key})
