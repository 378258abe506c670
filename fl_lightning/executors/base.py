"""An executor runs a stage for the clients of one process; it knows nothing of servers or other processes."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.batches.base import AnyBatch, Batch, Collator
from fl_lightning.counts import Counted
from fl_lightning.executors.hooks import check_hooks
from fl_lightning.executors.keys import derive_keys
from fl_lightning.executors.private import SPENT, check_client, check_examples, private_slots, rate_of
from fl_lightning.executors.storage import Allocate, in_memory
from fl_lightning.executors.time_limit import check_time_limit
from fl_lightning.executors.trial import check_batches_of_one, check_buffers
from fl_lightning.memory import require, state_copies
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Parameters
from fl_lightning.round.payload import Payload, concatenate, from_wire, pad_examples, to_wire
from fl_lightning.round.privacy import KeyedNumbers, epsilon_spent, spend
from fl_lightning.round.stage import Evaluation, Slot, Stage, StageAddress


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stage as one round asks for it.

    Attributes:
        stage: What to do.
        address: Where it is found; its round is part of the random keys.
        effort: Share of the stage's steps that each participating client manages (1, or less for a straggler).
        payload: What the server sends to (at least) these clients.
        until_failure: Whether a client that fails ends the stage, so that the others need not work for nothing.
    """

    stage: Stage
    address: StageAddress
    effort: Mapping[int, float]
    payload: Payload | None = None
    until_failure: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it: the upload of the clients that succeeded and why the others did not.

    Of an evaluation the upload's signals are each metric's numerator and denominator, (C, 2). Where clients tell only
    sums, ``sums`` has them by the metric's name, (4,): of the clients' values, how many clients have one, of the
    numerators, of the denominators; the upload is then empty.
    """

    upload: Payload
    failures: Mapping[int, str] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Executor(Counted, ABC):
    """Holds the clients of one process and runs stages and evaluations for them.

    Attributes:
        num_flat: Length of the rows of parameters that travel flat.
        allocate: Makes tensors as large as the state of all clients, where that lies.
        rewritten: What clients hold whose graphs a stage has changed.
        numbers: Where the draws and the noise of private training come from.
    """

    #: Whether it runs clients of different architectures itself, without an executor for each.
    takes_architectures: ClassVar[bool] = False

    def __init__(self) -> None:
        self.allocate: Allocate = in_memory
        self.numbers = KeyedNumbers()

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

    def setup(
        self,
        fabric: Fabric,
        client: ClientModule,
        collator: Collator,
        clients: Sequence[int],
        *,
        seed: int,
        memory: Mapping[str, Slot] | None = None,
        time_limit: float | None = None,
    ) -> None:
        """Take over the clients of this process; all start from the given client's parameters.

        Args:
            fabric: For device and precision.
            client: The built client module.
            collator: Makes batches of clients.
            clients: Indices of this process's clients, ascending.
            seed: Root of every random key.
            memory: What each client remembers, by name.
            time_limit: Seconds that a client may take for a stage or an evaluation; None for no bound.

        Raises:
            ValueError: The net or its optimiser is of a kind that clients cannot be run with, the client overrides a
                hook that is never called, training changes a buffer of the net, BatchNorm would see a batch of one
                example, the clients do not fit into memory, or nothing could keep the time limit.
        """
        if time_limit is not None:
            check_time_limit()
        check_hooks(client)
        check_client(client)
        names = dict(client.net.named_parameters()).keys()
        twins = dict(client.net.named_parameters(remove_duplicate=False)).keys() - names
        if twins:
            raise ValueError(
                f"model.net has {', '.join(sorted(twins))} as second names of parameters: a client's parameters travel "
                "once, so keep the shared layer under one name and call it where it is needed"
            )
        self.fabric = fabric
        self.client = client.eval()  # which the server may compute with
        self.collator = collator
        self.clients = tuple(clients)
        self.seed = seed
        self.time_limit = time_limit
        self.num_flat = client.num_travelling
        check_batches_of_one(client, collator, self.clients)
        self.slots = {**(memory or {}), **private_slots(client)}
        self.rewritten: dict[int, Any] = {}
        self.original_size = {member: collator.size(member) for member in clients}
        if clients:
            check_buffers(client, collator, clients[0], time_limit)
        self._arrange()
        require(
            self.needed_bytes(),
            f"{len(clients)} clients of {client.num_parameters:,} parameters (with their optimisers' state)",
            "choose fewer clients or a smaller net, or set max_group_mib and storage 'disk' of trainer.executor "
            "(StackedExecutor)",
            fabric.device,
        )
        self._allocate()
        if clients:
            check_examples(client.to(fabric.device), collator, clients[0])

    def needed_bytes(self) -> int:
        """Bytes of memory that this process's clients take at the least."""
        return self.stored_bytes()

    def stored_bytes(self) -> int:
        """Bytes of this process's clients' parameters and optimiser state.

        Raises:
            ValueError: The optimiser cannot step clients.
        """
        optimizer = check_optimizer(self.client.configure_optimizers())
        try:
            copies = 1 + state_copies(optimizer)
        except ValueError as error:
            raise ValueError(f"model.optimizer: {error}") from error
        return copies * len(self.clients) * self._parameter_bytes()

    def _parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.client.net.parameters())

    def _arrange(self) -> None:
        """Decide which clients are run together."""
        return

    @abstractmethod
    def _allocate(self) -> None:
        """Create this process's clients."""

    def probe(self) -> Outcome:
        """One client's scores with the common initial model, before anything is trained; for the metrics' names."""
        return self.evaluate({"": Evaluation()}, self.clients[:1], 0)[""]

    def received(self, payload: Payload | None, clients: Sequence[int]) -> dict[str, Tensor]:
        """Parameters that the server sent to some clients, by the names of this executor's net, (C, *shape).

        Raises:
            ValueError: The net has no such parameter.
        """
        if payload is None:
            return {}
        shapes = {name: parameter.shape for name, parameter in self.client.travelling(self.client.net).items()}
        tensors = from_wire(payload.rows(clients).parameters, shapes)
        for name, tensor in tensors.items():
            if shapes.get(name) != tensor.shape[1:]:
                has = f"has it in shape {tuple(shapes[name])}" if name in shapes else f"has {', '.join(shapes)}"
                raise ValueError(
                    f"the strategy sends a parameter {name!r} of shape {tuple(tensor.shape[1:])}, but the clients' net "
                    f"{has}: send what is no parameter of it as a signal"
                )
        return tensors

    def inbox(self, payload: Payload | None, clients: Sequence[int], num_examples: int) -> dict[str, Tensor]:
        """Signals that the server sent to some clients, (C, ...); rows of examples are as many as the batch has."""
        if payload is None or not payload.signals:
            return {}
        mine = payload.rows(clients)
        return {
            name: pad_examples(tensor, num_examples) if name in mine.lengths else tensor
            for name, tensor in mine.signals.items()
        }

    def sent(self, stage: Stage, trained: Parameters, start: Parameters, anchor: Parameters) -> dict[str, Tensor]:
        """What some clients answer: copies of parameters, of how far they moved, or of the anchor, (C, *shape)."""
        names = tuple(self.client.travelling(self.client.net)) if stage.flat else stage.upload
        source = anchor if stage.program.send_anchor else trained
        answer = {name: source[name] - start[name] if stage.as_update else source[name].clone() for name in names}
        return to_wire(answer, self.num_flat) if stage.flat else answer

    def num_steps(self, stage: Stage, client: int, effort: float) -> int:
        """Local steps of a client in a stage."""
        return math.prod(stage.schedule(effort, self.collator.steps_per_epoch(client)))

    def private_steps(self, stage: Stage, client: int, effort: float) -> int:
        """Steps of a stage that a client's privacy pays for; 0 without."""
        trained = (p.requires_grad and stage.trains(name) for name, p in self.client.net.named_parameters())
        return self.num_steps(stage, client, effort) if self.client.privacy is not None and any(trained) else 0

    def spend(self, spent_3: Tensor, stage: Stage, client: int, effort: float) -> Tensor:
        """What a client has spent of its privacy after a stage, (3,).

        Raises:
            PrivacySpent: It may not spend so much.
        """
        assert self.client.privacy is not None, "asked of private training alone"
        steps = self.private_steps(stage, client, effort)
        return spend(self.client.privacy, spent_3, rate_of(self.collator, client), steps)

    def epsilons(self) -> dict[int, float]:
        """ε of each of this process's clients for what its training has told; empty without ``model.privacy``."""
        if self.client.privacy is None:
            return {}
        return {client: epsilon_spent(self.client.privacy, self.remembered(client, SPENT)) for client in self.clients}

    def remembered(self, client: int, name: str) -> Tensor:
        """What a client remembers under a name, without a row for each example, (*shape)."""
        raise NotImplementedError(f"{type(self).__name__} keeps no memory of clients")

    @abstractmethod
    def run(self, work: Work, report: Callable[[int], None] | None = None) -> Outcome:
        """Run a stage for those of its clients that are of this process.

        A client whose parameters or answer are not finite, that raises, or that takes too long is restored to how it
        began the stage (what it received included), with a fresh optimiser, and is reported in ``failures``.

        Args:
            work: The stage, who takes part in it, and what the server sends.
            report: Called with the number of clients that have just finished.
        """

    def evaluate(
        self,
        evaluations: Mapping[str, Evaluation],
        clients: Sequence[int],
        round_idx: int,
        *,
        collator: Collator | None = None,
    ) -> dict[str, Outcome]:
        """Score models of each of the given clients that are of this process.

        Args:
            evaluations: Which models, by the prefix of their metrics.
            clients: Whose.
            round_idx: For the random keys of fine-tuning.
            collator: Makes the batches that are scored, instead of the clients' own.

        Returns:
            For each model the scores, (C, 2) for each metric, and the clients that could not be scored.
        """
        return {
            kind: join([self._score(way, members, round_idx, collator) for way, members in each.ways(clients)])
            for kind, each in evaluations.items()
        }

    @abstractmethod
    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> Outcome:
        """Score one model of each of the given clients that are of this process."""

    def predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predictions for every example of each given client of this process, (N_i, num_outputs).

        Args:
            evaluation: By which model.
            clients: Whose examples.
            round_idx: As in :meth:`evaluate`: the same round's predictions are those that were scored.
        """
        parts = [self._predict(way, members, round_idx) for way, members in evaluation.ways(clients)]
        return {client: found for part in parts for client, found in part.items()}

    @abstractmethod
    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predictions of one model of each of the given clients that are of this process."""

    @abstractmethod
    def state(self) -> Payload:
        """Everything that lives on in this process's clients: parameters; optimiser state and memory as signals."""

    def holdings(self) -> dict[int, dict[str, Tensor]]:
        """What this process's clients hold whose graphs a stage has changed, by client and field."""
        return {
            client: {name: value for name, value in vars(held).items() if isinstance(value, Tensor)}
            for client, held in self.rewritten.items()
        }

    def load_holdings(self, holdings: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore :meth:`holdings` of this process's clients, before their state is loaded."""
        mine = {client: fields for client, fields in holdings.items() if client in set(self.clients)}
        self.rewrite({c: dataclasses.replace(self.collator.held(c), **fields) for c, fields in mine.items()})

    def rewrite(self, held: Mapping[int, Any]) -> None:
        """Let clients hold other data from now on; their own examples come first among them."""
        self.rewritten |= held
        for client, each in held.items():
            self.collator.hold(client, each)

    @abstractmethod
    def load_state(self, state: Payload) -> None:
        """Restore this process's clients from a state that holds them (it may hold more)."""

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


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """What came of disjoint clients' work."""
    if len(outcomes) == 1:
        return outcomes[0]
    failures = {client: why for outcome in outcomes for client, why in outcome.failures.items()}
    return Outcome(upload=concatenate(outcome.upload for outcome in outcomes), failures=failures)


def lasting(slots: Mapping[str, Slot]) -> list[tuple[str, Slot]]:
    """What of a client's memory lives on between stages."""
    return [(name, slot) for name, slot in slots.items() if slot.lasting]


def spread_signals(found: Mapping[str, Tensor | Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name each tensor of signals that are several: ``name/key``."""
    named: dict[str, Tensor] = {}
    for name, value in found.items():
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


def check_optimizer(optimizer: Any) -> Optimizer:
    """Refuse what cannot step a client from its gradient alone.

    Raises:
        ValueError: It is no optimiser, or one that needs closures.
    """
    if not isinstance(optimizer, Optimizer):
        parts = list(optimizer.values()) if isinstance(optimizer, dict) else optimizer
        names = [type(each).__name__ for part in parts for each in (part if isinstance(part, list | tuple) else [part])]
        raise ValueError(
            f"model.configure_optimizers returned {', '.join(names)}: return one optimiser; schedulers are not "
            "supported, since clients take part in different rounds (set the rate in model.optimizer)"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "model.optimizer: LBFGS needs a closure; choose a first-order optimiser such as torch.optim.Adam"
        )
    return optimizer


def pack_optimizer_state(
    rows: Iterable[tuple[str, Sequence[Tensor], Sequence[Optimizer]]], device: torch.device
) -> dict[str, Tensor]:
    """Stack optimiser state over clients.

    Args:
        rows: For each parameter name, each client's parameter and the optimiser that steps it.
        device: Of the result.

    Returns:
        ``optimizer/<slot>/<name>`` (C, *shape), zero for clients that have none yet, and
        ``optimizer/started/<name>`` (C,), whether they have.
    """
    packed: dict[str, Tensor] = {}
    for name, parameters, optimizers in rows:
        states = [optimizer.state.get(p, {}) for p, optimizer in zip(parameters, optimizers, strict=True)]
        packed[f"optimizer/started/{name}"] = torch.tensor(
            [any(isinstance(value, Tensor) for value in state.values()) for state in states], device=device
        )
        slots = {slot: value for state in states for slot, value in state.items() if isinstance(value, Tensor)}
        for slot, example in slots.items():
            tensors = [state.get(slot, torch.zeros_like(example)) for state in states]
            packed[f"optimizer/{slot}/{name}"] = torch.stack(tensors)
    return packed


def unpack_optimizer_state(name: str, row: int, parameter: Tensor, optimizer: Optimizer, state: Payload) -> None:
    """Undo :func:`pack_optimizer_state` for one parameter of one client; ``row`` is the client's in ``state``."""
    optimizer.state.pop(parameter, None)
    if not state.signals[f"optimizer/started/{name}"][row]:
        return
    group = optimizer.param_groups[0]
    for key, tensor in state.signals.items():
        slot, _, of = key.removeprefix("optimizer/").partition("/")
        if key.startswith("optimizer/") and of == name and slot != "started":
            on_host = slot == "step" and not (group.get("fused") or group.get("capturable"))
            optimizer.state[parameter][slot] = tensor[row].clone().to("cpu" if on_host else parameter.device)
