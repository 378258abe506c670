"""Clients of different architectures: each architecture has an executor of its own, so each is still run at once."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.executors.base import Executor, Outcome, Work, join
from fl_lightning.federation import in_turn
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Slot, Stage


class ByArchitecture(Executor):
    """Runs the clients of each architecture by a copy of an executor.

    Parameters travel as flat rows (``Stage.flat``), since the architectures' names differ.

    Args:
        executor: How the clients of one architecture are run.
    """

    takes_architectures = True

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor
        self.allocate = executor.allocate

    def tried(
        self, client: ClientModule, first: Callable[[], Batch], fabric: Fabric, time_limit: float | None
    ) -> Executor:
        """This executor, or one that runs all architectures as one of them needs it."""
        found = [self.executor.tried(variant, first, fabric, time_limit) for variant in client.variants()]
        return next((ByArchitecture(other) for other in found if other is not self.executor), self)

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
        """Take over the clients of this process; the nets are given to the clients in turn."""
        self.clients = tuple(clients)
        self.client = client
        self.collator = collator
        self.parts: dict[str, Executor] = {}
        variants = client.variants()
        turns = in_turn(max(clients, default=0) + 1, len(variants))
        for kind, variant in enumerate(variants):
            own = [member for member in clients if turns[member] == kind]
            if not own:
                continue
            part = copy.deepcopy(self.executor)
            part.numbers = self.numbers
            part.setup(fabric, variant, collator, own, seed=seed, memory=memory, time_limit=time_limit)
            part.num_flat = max(other.num_travelling for other in variants)
            self.parts[f"net{kind}/"] = part

    def stored_bytes(self) -> int:
        """Those of all parts."""
        return sum(part.stored_bytes() for part in self.parts.values())

    def _allocate(self) -> None:
        """Each part creates its own clients."""

    def run(self, work: Work, report: Callable[[int], None] | None = None) -> Outcome:
        """Run the stage, one architecture after another."""
        outcomes: list[Outcome] = []
        for part in self.parts.values():
            if not (work.until_failure and any(outcome.failures for outcome in outcomes)):
                outcomes.append(part.run(_of(work, part.clients), report))
        return join(outcomes)

    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> Outcome:
        """Score the clients, one architecture after another."""
        return join([part._score(evaluation, clients, round_idx, collator) for part in self.parts.values()])

    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predict the clients, one architecture after another."""
        parts = [part._predict(evaluation, clients, round_idx) for part in self.parts.values()]
        return {client: found for part in parts for client, found in part.items()}

    def state(self) -> Payload:
        """Each architecture's state under ``net<k>/...``, with zeros for the clients of the others."""
        whole = Payload(clients=self.clients)
        for prefix, part in self.parts.items():
            whole = _widen(whole, prefix, part.state())
        return whole

    def private_steps(self, stage: Stage, client: int, effort: float) -> int:
        """Those of the client's architecture."""
        return self._part_of(client).private_steps(stage, client, effort)

    def remembered(self, client: int, name: str) -> Tensor:
        """What a client remembers under a name, (*shape)."""
        return self._part_of(client).remembered(client, name)

    def _part_of(self, client: int) -> Executor:
        return next(part for part in self.parts.values() if client in part.clients)

    def holdings(self) -> dict[int, dict[str, Tensor]]:
        """Those of every architecture's clients."""
        return {client: fields for part in self.parts.values() for client, fields in part.holdings().items()}

    def load_holdings(self, holdings: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore every architecture's clients."""
        for part in self.parts.values():
            part.load_holdings(holdings)

    def rewrite(self, held: Mapping[int, Any]) -> None:
        """Let clients hold other data."""
        for part in self.parts.values():
            part.rewrite({client: each for client, each in held.items() if client in set(part.clients)})

    def load_state(self, state: Payload) -> None:
        """Restore every architecture's clients."""
        for prefix, part in self.parts.items():
            own = state.rows(part.clients)
            part.load_state(
                Payload(
                    clients=own.clients,
                    parameters=_strip(own.parameters, prefix),
                    signals=_strip(own.signals, prefix),
                )
            )


def _of(work: Work, clients: Sequence[int]) -> Work:
    """The part of the work that falls to some clients."""
    mine = set(clients)
    return dataclasses.replace(work, effort={c: share for c, share in work.effort.items() if c in mine})


def _widen(whole: Payload, prefix: str, part: Payload) -> Payload:
    """Add a payload of some of the clients under prefixed names, zero for the others."""
    rows = [whole.clients.index(client) for client in part.clients]

    def spread(tensor: Tensor) -> Tensor:
        wide = tensor.new_zeros(len(whole.clients), *tensor.shape[1:])
        wide[rows] = tensor
        return wide

    return Payload(
        clients=whole.clients,
        parameters={**whole.parameters, **{prefix + name: spread(t) for name, t in part.parameters.items()}},
        signals={**whole.signals, **{prefix + name: spread(t) for name, t in part.signals.items()}},
    )


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
