"""Clients of different architectures: each architecture has an executor of its own, which still runs it at once."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.executors.base import Executor
from fl_lightning.executors.stage_request import StageRequest, StageResult, join
from fl_lightning.federation import in_turn
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Persistence, Phase, Stage, StateSpec


class ByArchitecture(Executor):
    """Runs the clients of each architecture by a copy of an executor.

    Parameters are communicated as flat rows (``Stage.flat``), since the architectures' parameter names differ.

    Args:
        executor: The executor of one architecture.
    """

    takes_architectures = True

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor
        self.allocate = executor.allocate

    def tried(
        self, client: ClientModule, first: Callable[[], Batch], fabric: Fabric, time_limit: float | None
    ) -> Executor:
        """This executor, or one that runs all architectures by the executor that one of them needs."""
        result = [self.executor.tried(variant, first, fabric, time_limit) for variant in client.variants()]
        return next((ByArchitecture(other) for other in result if other is not self.executor), self)

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
        """Set up the clients of this process; the nets are assigned to the clients in turn."""
        self.clients = tuple(clients)
        self.client = client
        self.collator = collator
        self.parts: dict[str, Executor] = {}
        self.round, self.active = None, set()
        variants = client.variants()
        turns = in_turn(max(clients, default=0) + 1, len(variants))
        for kind, variant in enumerate(variants):
            members = [member for member in clients if turns[member] == kind]
            if not members:
                continue
            part = copy.deepcopy(self.executor)
            part.numbers = self.numbers
            part.setup(
                fabric,
                variant,
                collator,
                members,
                seed=seed,
                client_state=client_state,
                persistence=persistence,
                num_together=None if num_together is None else num_together // len(variants),
                time_limit=time_limit,
            )
            part.num_flat = max(other.num_communicated for other in variants)
            self.parts[f"net{kind}/"] = part

    def stored_bytes(self) -> int:
        """The sum over all architectures."""
        return sum(part.stored_bytes() for part in self.parts.values())

    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Run the stage, one architecture after another."""
        results: list[StageResult] = []
        self._begin(request.address)
        for part in self.parts.values():
            if not (request.until_failure and any(result.failures for result in results)):
                results.append(part.run(_of(request, part.clients), report))
                self.active |= part.active
        return join(results)

    def _look_back(self, round_idx: int) -> None:
        super()._look_back(round_idx)
        for part in self.parts.values():
            part._look_back(round_idx)

    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Score the clients, one architecture after another."""
        return join([part._score(evaluation, clients, round_idx, collator) for part in self.parts.values()])

    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predict the clients, one architecture after another."""
        parts = [part._predict(evaluation, clients, round_idx) for part in self.parts.values()]
        return {client: result for part in parts for client, result in part.items()}

    def lasting_state(self) -> Payload:
        """The state of each architecture's clients under ``net<k>/...``, with zeros for the clients of the others."""
        return _widened({prefix: part.lasting_state() for prefix, part in self.parts.items()})

    def state(self) -> Payload:
        """Likewise."""
        return _widened({prefix: part.state() for prefix, part in self.parts.items()})

    def private_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Those of the client's architecture."""
        return self.of(client).private_steps(stage, client, work_fraction)

    def epsilons(self) -> dict[int, float]:
        """Those of every architecture's clients."""
        return {client: epsilon for part in self.parts.values() for client, epsilon in part.epsilons().items()}

    def of(self, client: int) -> Executor:
        """That of the client's architecture."""
        return next(part for part in self.parts.values() if client in part.clients)

    def rewritten_data(self) -> dict[int, dict[str, Tensor]]:
        """Those of every architecture's clients."""
        return {client: fields for part in self.parts.values() for client, fields in part.rewritten_data().items()}

    def load_rewritten_data(self, rewritten_data: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore every architecture's clients."""
        for part in self.parts.values():
            part.load_rewritten_data(rewritten_data)

    def rewrite(self, client_data: Mapping[int, Any]) -> None:
        """Replace the data of clients."""
        for part in self.parts.values():
            part.rewrite({client: each for client, each in client_data.items() if client in set(part.clients)})

    def reset(self, clients: Sequence[int]) -> None:
        """Bring clients of every architecture back to their initial state."""
        self.round, self.active = None, set()
        for part in self.parts.values():
            part.reset(clients)

    def load_state(self, state: Payload, now: tuple[Phase, int] | None = None) -> None:
        """Restore every architecture's clients."""
        self.round, self.active = now, set()
        for prefix, part in self.parts.items():
            mine = set(part.clients)
            members = state.rows([client for client in state.clients if client in mine])
            rows = Payload(
                clients=members.clients,
                parameters=_strip(members.parameters, prefix),
                extras=_strip(members.extras, prefix),
            )
            part.load_state(rows, now)
            self.active |= part.active


def _of(request: StageRequest, clients: Sequence[int]) -> StageRequest:
    """The part of a request that belongs to some clients."""
    mine = set(clients)
    return dataclasses.replace(
        request, work_fraction={c: share for c, share in request.work_fraction.items() if c in mine}
    )


def _widened(parts: Mapping[str, Payload]) -> Payload:
    """Rows of disjoint clients in one payload, under prefixed names; zero for the clients of other parts."""
    clients = sorted(client for part in parts.values() for client in part.clients)
    index = {client: row for row, client in enumerate(clients)}
    parameters: dict[str, Tensor] = {}
    client_outputs: dict[str, Tensor] = {}
    for prefix, part in parts.items():
        rows = [index[client] for client in part.clients]
        for target, tensors in ((parameters, part.parameters), (client_outputs, part.extras)):
            for name, tensor in tensors.items():
                wide = target[prefix + name] = tensor.new_zeros(len(clients), *tensor.shape[1:])
                wide[rows] = tensor
    return Payload(clients=tuple(clients), parameters=parameters, extras=client_outputs)


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
