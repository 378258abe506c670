"""All clients' data in one place: one training on the pool, whose model is scored on each client's own examples."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.executors.base import Executor
from fl_lightning.executors.stage_request import StageRequest, StageResult
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Persistence, Phase, Stage, StateSpec


class OnPool(Executor):
    """Trains the pool in the place of one client, whoever takes part in a round; the clients are scored alone.

    Args:
        executor: How the pool is trained, and how clients are scored.
        pool: Makes the batches of the pool.
        owner: The client in whose place it is.
    """

    def __init__(self, executor: Executor, pool: Collator, owner: int) -> None:
        super().__init__()
        self.trained, self.scored = executor, copy.copy(executor)
        self.allocate = executor.allocate
        self.pool, self.owner = pool, owner

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
        """Take over the clients of this process, and the pool where it is that of its owner."""
        self.fabric, self.client, self.collator, self.seed = fabric, client, collator, seed
        self.clients, self.num_flat = tuple(clients), client.num_communicated
        self.trained.numbers = self.numbers
        mine = [member for member in clients if member == self.owner]
        self.trained.setup(
            fabric,
            client,
            self.pool,
            mine,
            seed=seed,
            client_state=client_state,
            persistence=persistence,
            time_limit=time_limit,
        )
        nothing = Persistence(parameters=(), optimizer=False)
        self.scored.setup(
            fabric, client, collator, clients, seed=seed, persistence=nothing, num_together=1, time_limit=time_limit
        )
        self.round, self.active = None, set()

    def stored_bytes(self) -> int:
        """Those of the pool."""
        return self.trained.stored_bytes()

    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Run the stage on the pool, in full; what a callback asks for, for the clients.

        Where it fails, nobody of this process has succeeded.
        """
        asked = [client for client in self.clients if client in request.work_fraction]
        if request.address.phase == "callback":
            return self.scored.run(request, report)
        self._begin(request.address)
        result = self.trained.run(dataclasses.replace(request, work_fraction={self.owner: 1.0}))
        self.active = set(self.trained.active)
        if report is not None:
            report(len(asked))
        why = result.failures.get(self.owner)
        upload = dataclasses.replace(result.upload, num_examples=None)  # which are not its owner's
        return StageResult(upload=upload, failures={} if why is None else dict.fromkeys(asked, why))

    def _look_back(self, round_idx: int) -> None:
        super()._look_back(round_idx)
        for each in (self.trained, self.scored):
            each._look_back(round_idx)

    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Score a model on each client's own examples."""
        return self.scored._score(evaluation, clients, round_idx, collator)

    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predict each client's own examples."""
        return self.scored._predict(evaluation, clients, round_idx)

    def private_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Those of the pool."""
        return self.trained.private_steps(stage, client, work_fraction)

    def epsilons(self) -> dict[int, float]:
        """That of the pool."""
        return self.trained.epsilons()

    def of(self, client: int) -> Executor:
        """The one that scores clients."""
        return self.scored.of(client)

    def lasting_state(self) -> Payload:
        """The pool's, under its owner."""
        return self.trained.lasting_state()

    def state(self) -> Payload:
        """That of the pool for every client."""
        state = self.trained.state()
        if not state.clients:
            return state
        named = {name: tensor.expand(len(self.clients), *tensor.shape[1:]) for name, tensor in state.named().items()}
        return Payload.from_named(self.clients, named)

    def load_state(self, state: Payload, now: tuple[Phase, int] | None = None) -> None:
        """Restore the pool."""
        self.trained.load_state(state, now)
        self.round, self.active = now, set(self.trained.active)
