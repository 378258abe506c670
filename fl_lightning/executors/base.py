"""An executor runs a stage for the clients of one process; it knows nothing of servers or other processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import AnyBatch, Batch, Collator
from fl_lightning.counts import Counted
from fl_lightning.executors.keys import derive_keys
from fl_lightning.executors.stage_request import StageRequest, StageResult, join
from fl_lightning.executors.storage import Allocate, in_memory
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Parameters
from fl_lightning.round.payload import Payload, from_wire, pad_examples, to_wire
from fl_lightning.round.privacy import KeyedNumbers
from fl_lightning.round.stage import Evaluation, Persistence, Phase, Stage, StageAddress, StateSpec


class Executor(Counted, ABC):
    """Holds the clients of one process and runs stages and evaluations for them.

    A client that takes part in a round is active until the round is over. Then only what the strategy says lives on
    (``Strategy.persistence`` and ``Strategy.client_state``); the rest is the initial model's again.

    Attributes:
        num_flat: Length of the rows of parameters that are communicated flat.
        allocate: Makes tensors as large as the state of many clients, where that lies.
        round: Phase and index of the present round; None before the first stage.
        active: Clients that have begun a stage of it.
        numbers: Where the draws and the noise of private training come from.
    """

    #: Whether it runs clients of different architectures itself, without an executor for each.
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

    def suited(self, client: ClientModule) -> "Executor":
        """This executor, or the one that a client with hooks of its own needs instead."""
        return self

    def tried(
        self, client: ClientModule, first: Callable[[], Batch], fabric: Fabric, time_limit: float | None
    ) -> "Executor":
        """This executor, or the one that a client's own code needs instead.

        Args:
            client: The built client.
            first: Makes a batch of one client, to try the code on.
            fabric: For precision.
            time_limit: Seconds that a try may take; None for no bound.

        Raises:
            ValueError: Nothing could keep the time limit.
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
        """Take over the clients of this process; all start from the given client's parameters.

        Args:
            fabric: For device and precision.
            client: The built client module.
            collator: Makes batches of clients.
            clients: Indices of this process's clients, ascending.
            seed: Root of every random key.
            client_state: What each client remembers, by name.
            persistence: What else of it lives on between rounds; None for everything.
            num_together: Clients of this process that a round asks at the least, for the memory they need; None for
                all of them.
            time_limit: Seconds that a client may take for a stage or an evaluation; None for no bound.

        Raises:
            ValueError: The net or its optimizer is of a kind that clients cannot be run with, the client overrides a
                hook that is never called, training changes a buffer of the net, BatchNorm would see a batch of one
                example, the clients do not fit into memory, or nothing could keep the time limit.
        """

    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes of what lives on of this process's clients (their memory left out), once all of them have taken part.

        Raises:
            ValueError: The optimizer cannot step clients.
        """

    @abstractmethod
    def private_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Steps of a stage that a client's privacy pays for; 0 without."""

    @abstractmethod
    def epsilons(self) -> dict[int, float]:
        """ε of each of this process's clients for what its training has told; empty without ``model.privacy``."""

    def probe(self) -> StageResult:
        """One client's scores with the common initial model, before anything is trained; for the metrics' names."""
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
                    f"{has}: send what is no parameter of it as a client output"
                )
        return tensors

    def received(self, payload: Payload | None, clients: Sequence[int], num_examples: int) -> dict[str, Tensor]:
        """Tensors that the server sent to some clients, (C, ...); rows of examples are as many as the batch has."""
        if payload is None or not payload.extras:
            return {}
        mine = payload.rows(clients)
        return {
            name: pad_examples(tensor, num_examples) if name in mine.lengths else tensor
            for name, tensor in mine.extras.items()
        }

    def sent(self, stage: Stage, trained: Parameters, start: Parameters, anchor: Parameters) -> dict[str, Tensor]:
        """What some clients respond: copies of parameters, of how far they moved, or of the anchor, (C, *shape)."""
        names = tuple(self.client.communicated(self.client.net)) if stage.flat else stage.upload
        source = anchor if stage.program.send_anchor else trained
        wire = {name: source[name] - start[name] if stage.as_update else source[name].clone() for name in names}
        return to_wire(wire, self.num_flat) if stage.flat else wire

    def num_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Local steps of a client in a stage."""
        return math.prod(stage.schedule(work_fraction, self.collator.steps_per_epoch(client)))

    @abstractmethod
    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Run a stage for those of its clients that are of this process.

        What a callback asks for (``address.phase``) leaves the clients as they were.

        A client whose parameters or respond are not finite, that raises, or that takes too long is restored to how it
        began the stage (what it received included), with a fresh optimizer, and is reported in ``failures``.

        Args:
            request: The stage, who takes part in it, and what the server sends.
            report: Called with the number of clients that have just finished.
        """

    def ask(self, stage: Stage, clients: Sequence[int], round_idx: int, models: Payload | None = None) -> Payload:
        """What clients of this process compute for a callback, which leaves them as they were.

        Args:
            stage: What to compute.
            clients: Whom to ask.
            round_idx: The round that is, or was evaluated last.
            models: Of clients that have made none of their own in that round; None for what lives on of theirs.
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
        """Score models of each of the given clients that are of this process.

        Args:
            evaluations: Which models, by the prefix of their metrics.
            clients: Whose.
            round_idx: For the random keys of fine-tuning.
            collator: Makes the batches that are scored, instead of the clients' own.

        Returns:
            For each model the scores, (C, 2) for each metric, and the clients that could not be scored.
        """
        self._look_back(round_idx)
        return {
            kind: join(
                [self._score(way, members, round_idx, collator) for way, members in each.ways(clients, self.active)]
            )
            for kind, each in evaluations.items()
        }

    @abstractmethod
    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Score one model of each of the given clients that are of this process."""

    def predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predictions for every example of each given client of this process, (N_i, num_outputs).

        Args:
            evaluation: By which model.
            clients: Whose examples.
            round_idx: As in :meth:`evaluate`: the same round's predictions are those that were scored.
        """
        self._look_back(round_idx)
        parts = [self._predict(way, members, round_idx) for way, members in evaluation.ways(clients, self.active)]
        return {client: result for part in parts for client, result in part.items()}

    @abstractmethod
    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predictions of one model of each of the given clients that are of this process."""

    def _begin(self, address: StageAddress) -> None:
        """Note to which round the coming stage belongs; with another round nobody is active any more."""
        if address.phase == "callback":
            self._look_back(address.round_idx)
        elif self.round != (address.phase, address.round_idx):
            self.round = address.phase, address.round_idx
            self.active = set()

    def _look_back(self, round_idx: int) -> None:
        """What is evaluated after another round than the present one is of clients that are not active any more."""
        if self.round is not None and self.round[1] != round_idx:
            self.active = set()

    @abstractmethod
    def lasting_state(self) -> Payload:
        """What lives on of this process's clients: parameters; optimizer state and memory as client outputs.

        Of clients of which nothing does there is no row: of those that have not taken part, and of all where the
        strategy keeps nothing.
        """

    def state(self) -> Payload:
        """All that there is of every client at present, also what ends with the round; else as :meth:`lasting_state`.

        Of who is not active, what does not live on is as at first.
        """
        return self.lasting_state()

    def rewritten_data(self) -> dict[int, dict[str, Tensor]]:
        """What this process's clients hold whose graphs a stage has changed, by client and field."""
        return {}

    def rewrite(self, client_data: Mapping[int, Any]) -> None:
        """Let clients hold other data from now on; their own examples come first among them.

        What they remember of new examples is as at first.
        """
        raise NotImplementedError(f"the clients of {type(self).__name__} hold what they hold")

    def load_rewritten_data(self, rewritten_data: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore :meth:`holdings` of this process's clients, before their state is loaded."""

    @abstractmethod
    def load_state(self, state: Payload, now: tuple[Phase, int] | None = None) -> None:
        """Restore this process's clients; one of which a state holds nothing is as at first.

        Args:
            state: As :meth:`lasting_state` returned it (it may hold more clients); or as :meth:`state` did.
            now: The round within which the latter was taken, if it was within one.
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
    """Name each tensor of client outputs that are several: ``name/key``."""
    named: dict[str, Tensor] = {}
    for name, value in result.items():
        named |= {name: value} if isinstance(value, Tensor) else {f"{name}/{key}": t for key, t in value.items()}
    return named


def draw_batches(batch: AnyBatch, keys: Tensor, repeat: int) -> Iterator[AnyBatch]:
    """What each step trains on: every drawn batch ``repeat`` times, with a dropout of its own for each.

    Args:
        batch: All of the data of one client or of a stack.
        keys: The random key of every step, (steps, C), or (steps,).
        repeat: Steps on each drawn batch.
    """
    if repeat == 1:
        yield from batch.draws(keys)
        return
    for first, drawn in zip(range(0, len(keys), repeat), batch.draws(keys[::repeat]), strict=True):
        for key in keys[first : first + repeat]:
            yield drawn.replace({"key": key})
