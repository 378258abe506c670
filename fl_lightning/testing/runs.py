"""The runs that the checks of a strategy look at, each of which is run once."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.executors import Executor, SequentialExecutor, StackedExecutor
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.strategies import Strategy
from fl_lightning.testing.comparison import attributes
from fl_lightning.trainer import FederatedTrainer

#: Rounds of the long runs.
NUM_ROUNDS = 4
#: Clients of the federation.
NUM_CLIENTS = 5
#: The client that fails.
FAILING = 2


@dataclasses.dataclass
class SeenStage:
    """What crossed between server and clients in one stage.

    Attributes:
        round_idx: How many rounds were over.
        stage: The stage.
        sent: A copy of what the server sent.
        upload: A copy of what arrived, of all clients.
        peer_bytes: What each client sent to others, of a strategy that says so.
        clients_wrote: Tensors of the server's payload that clients wrote into.
        shared_memory: Parameters of clients that changed when the upload was overwritten.
        server_wrote: Tensors of the upload that the server wrote into.
    """

    round_idx: int
    stage: Stage
    sent: Payload | None
    upload: Payload = dataclasses.field(default_factory=lambda: Payload(clients=()))
    peer_bytes: Sequence[int] | None = None
    clients_wrote: list[str] = dataclasses.field(default_factory=list)
    shared_memory: list[str] = dataclasses.field(default_factory=list)
    server_wrote: list[str] = dataclasses.field(default_factory=list)


class _Recorder(Callback):
    """Copies what crosses between server and clients, and the complete state after every round.

    The server is given a copy of every upload, and the upload itself is overwritten.

    Args:
        folder: Where a checkpoint is written after every round; None for none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.stages: list[SeenStage] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.attributes: dict[int, dict[str, Any]] = {}
        self.scores: dict[int, dict[str, Any]] = {}
        self.checkpoints: dict[int, Path] = {}
        self.trained: set[str] = set()
        self.joined: dict[str, Any] = {}

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float], prefix: str) -> None:
        """Copy the server that unseen clients have joined."""
        if prefix == "unseen/":
            self.joined = copy.deepcopy(trainer.run.strategy.state_dict())

    def on_send(self, trainer: Trainer, stage: Stage, payload: Payload | None) -> None:
        """Copy what is sent."""
        self._given = payload
        sent = None if payload is None else payload.copy()
        self.stages.append(SeenStage(len(trainer.run.history), stage, sent))

    def on_upload(self, trainer: Trainer, stage: Stage, payload: Payload) -> Payload:
        """Copy what arrives, and overwrite it."""
        seen = self.stages[-1]
        seen.upload, given = payload.copy(), payload.copy()
        if self._given is not None and seen.sent is not None:
            seen.clients_wrote = changed(self._given, seen.sent)
        before = copy.deepcopy(dict(trainer.run.executor.state().parameters))
        start = trainer.run.architectures[0]
        self.trained |= {
            name
            for name, first in start.items()
            if not torch.allclose(before[name], first.to(before[name]), 1e-9, 1e-12)
        }
        for tensor in payload.tensors().values():
            tensor.fill_(1)
        after = trainer.run.executor.state().parameters
        seen.shared_memory = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
        if hasattr(trainer.run.strategy, "peer_bytes"):
            seen.peer_bytes = trainer.run.strategy.peer_bytes(stage, payload)
        return given

    def on_stage_end(self, trainer: Trainer, stage: Stage, payload: Payload) -> None:
        """See whether the server has written into what it was given."""
        seen = self.stages[-1]
        seen.server_wrote = changed(payload, seen.upload.rows(payload.clients))

    def on_checkpoint_point(self, trainer: Trainer) -> None:
        """Copy the complete state, and write a checkpoint if there is a folder."""
        run, num_rounds = trainer.run, trainer.run.round_idx
        state = {name: part for name, part in trainer.state_dict().items() if name not in ("random", "callbacks")}
        self.states[num_rounds] = copy.deepcopy(state)
        self.attributes[num_rounds] = attributes(run.strategy)
        self.scores[num_rounds] = {kind: dict(scores.extras) for kind, scores in run.scores.items()}
        if self.folder is not None:
            self.checkpoints[num_rounds] = self.folder / f"after-{num_rounds}" / "state.ckpt"
            trainer.save_checkpoint(self.checkpoints[num_rounds])


def changed(payload: Payload, copied: Payload) -> list[str]:
    """Tensors of a payload that are not what they were when it was copied."""
    now, then = payload.named(), copied.named()
    return [name for name, tensor in then.items() if not torch.equal(now[name].nan_to_num(), tensor.nan_to_num())]


class _Fails(Callback):
    """All inputs of one client are nan."""

    needs_data = True

    def on_clients(self, trainer: Trainer, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Spoil the client's inputs."""
        spoiled = _spoiled(clients[FAILING])
        return (*clients[:FAILING], spoiled, *clients[FAILING + 1 :])


def _spoiled(held: Any) -> Any:
    """What a client holds, with inputs of nan; of many graphs those of their union."""
    if hasattr(held, "union"):
        return dataclasses.replace(held, union=_spoiled(held.union))
    inputs = next(name for name in ("x_NF", "x_NX") if hasattr(held, name))
    return dataclasses.replace(held, **{inputs: torch.full_like(getattr(held, inputs), torch.nan)})


class _Absent(Participation):
    """Everyone takes part but one client."""

    def draw(self, clients: Sequence[int], round_idx: int, seed: int) -> tuple[dict[int, float], list[int]]:
        """The others, for the whole round."""
        return {client: 1.0 for client in clients if client != FAILING}, []


class _LastHeldOut(Participation):
    """All clients but the last take part."""

    def training_clients(self, num_clients: int, seed: int) -> tuple[int, ...]:
        """The first ones."""
        return tuple(range(num_clients - 1))


class _Silent(Callback):
    """Nothing that one client sends arrives, also where it is asked before round 0."""

    def on_upload(self, trainer: Trainer, stage: Stage, payload: Payload) -> Payload:
        """Lose what the client sends."""
        return payload.rows([client for client in payload.clients if client != FAILING])


@dataclasses.dataclass
class StrategyRun:
    """A run that is over.

    Attributes:
        trainer: Its trainer.
        result: What ``fit`` returned.
        seen: What was recorded of it.
    """

    trainer: FederatedTrainer
    result: dict[str, float]
    seen: _Recorder

    @property
    def strategy(self) -> Strategy:
        """The strategy that was run."""
        return self.trainer.run.strategy

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of each round."""
        return self.trainer.run.history


class StrategyRuns:
    """A strategy on a small federation of five clients, and its runs; the strategy itself is never run, but copies.

    Args:
        strategy: With its settings.
        data: A federation that is set up.
        folder: For checkpoints.
        client: What the clients are; None for the strategy's default.
        accelerator: Where they run.
    """

    def __init__(
        self,
        strategy: Strategy,
        data: Any,
        folder: Path,
        client: ClientModule | None = None,
        accelerator: str = "cpu",
    ) -> None:
        self.strategy, self.data, self.folder, self.client = strategy, data, folder, client
        self.accelerator = accelerator
        num_clients = max(3, strategy.min_updates)
        #: Everything that participation can do to a round.
        self.busy = functools.partial(
            Participation,
            num_clients=num_clients,
            dropout_probability=0.2,
            straggler_probability=0.5,
            held_out_fraction=0.2,
            max_failed_rounds=NUM_ROUNDS,
        )

    def parts(self) -> tuple[ClientModule | None, Any, Strategy]:
        """The arguments of a trainer's verbs: new copies of client and strategy, and the data."""
        return copy.deepcopy(self.client), self.data, copy.deepcopy(self.strategy)

    def trainer(self, executor: Executor | None = None, **settings: Any) -> FederatedTrainer:
        """A trainer in float64 that writes nothing."""
        defaults = {
            "num_rounds": NUM_ROUNDS,
            "accelerator": self.accelerator,
            "precision": "64-true",
            "seed": 1,
            "logger": False,
            "default_callbacks": False,
            "default_root_dir": str(self.folder),
        }
        return FederatedTrainer(executor=executor or StackedExecutor(max_padding=0.9), **{**defaults, **settings})

    def run(
        self,
        executor: Executor | None = None,
        *,
        checkpoints: str = "",
        resumed: Path | None = None,
        data: Any = None,
        **settings: Any,
    ) -> StrategyRun:
        """Run a copy of the strategy.

        Args:
            executor: The stacked one, with all clients in one group, where it is left out.
            checkpoints: Folder for one after every round; none where it is empty.
            resumed: The checkpoint to go on from.
            data: Another federation.
            settings: The trainer's.
        """
        seen = _Recorder(self.folder / checkpoints if checkpoints else None)
        trainer = self.trainer(executor, **{**settings, "callbacks": [*settings.get("callbacks", []), seen]})
        client, usual, strategy = self.parts()
        result = trainer.fit(client, data or usual, strategy, ckpt_path=None if resumed is None else str(resumed))
        return StrategyRun(trainer, result, seen)

    # ------------------------------------------------------------------ four rounds, of some clients

    @cached_property
    def sequential(self) -> StrategyRun:
        """Under the sequential executor, with a checkpoint after every round; some clients take part."""
        return self.run(SequentialExecutor(), participation=self.busy(), checkpoints="sequential")

    @cached_property
    def stacked(self) -> StrategyRun:
        """The same under the stacked executor."""
        return self.run(participation=self.busy(), checkpoints="stacked")

    # ------------------------------------------------------------------ two rounds, of all clients

    @cached_property
    def everyone_sequential(self) -> StrategyRun:
        """All clients under the sequential executor."""
        return self.run(SequentialExecutor(), num_rounds=2)

    @cached_property
    def everyone(self) -> StrategyRun:
        """All clients under the stacked executor."""
        return self.run(num_rounds=2)

    @cached_property
    def repeated(self) -> StrategyRun:
        """The same once more, with another state of the global generators."""
        with torch.random.fork_rng([]):
            torch.manual_seed(99)
            return self.run(num_rounds=2)

    # ------------------------------------------------------------------ two rounds, of all clients but the last

    def last_held_out(self) -> StrategyRun:
        """The last client joins at the end."""
        return self.run(SequentialExecutor(), num_rounds=2, participation=_LastHeldOut())

    def without_last(self) -> StrategyRun:
        """There is no last client."""
        return self.run(SequentialExecutor(), num_rounds=2, data=_without_last(self.data))

    # ------------------------------------------------------------------ a client that fails

    def failing(self) -> StrategyRun:
        """The same where one client computes nan, and nothing of it arrives."""
        return self.run(num_rounds=2, callbacks=[_Fails(), _Silent()])

    def without(self) -> StrategyRun:
        """The same where that client is not asked."""
        return self.run(num_rounds=2, callbacks=[_Silent()], participation=_Absent())


def _without_last(data: Any) -> Any:
    """A copy of a federation that is set up, without its last client."""
    result, allocation = copy.copy(data), data.allocation
    result.__dict__.pop("registry", None)  # is made anew
    few = {name: getattr(allocation, name)[:-1] for name in ("clients", "groups", "own_outputs")}
    result._allocation = dataclasses.replace(allocation, **few)
    result._relation_CC = None if data.relation_CC is None else data.relation_CC[:-1, :-1]
    return result


def rows_of(tensors: dict[str, Tensor], clients: Sequence[int]) -> dict[str, Tensor]:
    """The rows of some clients."""
    return {name: tensor[list(clients)] for name, tensor in tensors.items()}
