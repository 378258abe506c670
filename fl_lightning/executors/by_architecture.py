"""Clients of different architectures: each architecture has an executor of its own, so each is still run at once."""

import copy
import dataclasses
import weakref
from collections.abc import Mapping, Sequence

from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.executors.base import Executor, Outcome, Work
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload, concatenate
from fl_lightning.round.stage import Evaluation


class ByArchitecture(Executor):
    """Runs the clients of each architecture by a copy of an executor.

    Parameters travel as flat rows (``Stage.flat``), since the architectures' names differ.

    Args:
        executor: How the clients of one architecture are run.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor
        self.allocate = executor.allocate

    def setup(
        self, fabric: Fabric, client: ClientModule, collator: Collator, clients: Sequence[int], *, seed: int
    ) -> None:
        """Take over the clients of this process; the nets are given to the clients in turn."""
        self.clients = tuple(clients)
        self.collator = collator
        self.parts: dict[str, Executor] = {}
        whole = weakref.proxy(self)  # parts that held the whole would be freed late
        variants = client.variants()
        for kind, variant in enumerate(variants):
            own = [member for member in clients if member % len(variants) == kind]
            if not own:
                continue
            part = copy.deepcopy(self.executor)
            part.setup(fabric, variant, collator, own, seed=seed)
            part.num_flat = max(other.num_parameters for other in variants)
            part.report = lambda num_clients: whole.report(num_clients)
            self.parts[f"net{kind}/"] = part

    def _allocate(self) -> None:
        """Each part creates its own clients."""

    def run(self, work: Work) -> Outcome:
        """Run the stage, one architecture after another."""
        outcomes = [part.run(_of(work, part.clients)) for part in self.parts.values()]
        failures = {client: why for outcome in outcomes for client, why in outcome.failures.items()}
        return Outcome(upload=concatenate(outcome.upload for outcome in outcomes), failures=failures)

    def evaluate(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, *, collator: Collator | None = None
    ) -> Payload:
        """Score the clients, one architecture after another."""
        return concatenate(
            part.evaluate(evaluation, clients, round_idx, collator=collator) for part in self.parts.values()
        )

    def predict(self, evaluation: Evaluation, clients: Sequence[int]) -> dict[int, Tensor]:
        """Predict the clients, one architecture after another."""
        return {c: found for part in self.parts.values() for c, found in part.predict(evaluation, clients).items()}

    def state(self) -> Payload:
        """Each architecture's state under ``net<k>/...``, with zeros for the clients of the others."""
        whole = Payload(clients=self.clients)
        for prefix, part in self.parts.items():
            whole = _widen(whole, prefix, part.state())
        return whole

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
    return dataclasses.replace(work, num_epochs={c: n for c, n in work.num_epochs.items() if c in mine})


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
