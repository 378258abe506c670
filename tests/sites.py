"""Federations of sites in one process, whose channel may lose, repeat and delay messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fl_lightning import ClientModule, SequentialExecutor
from fl_lightning.data import ClientGraph
from fl_lightning.executors import StageRequest, StageResult
from fl_lightning.remote import LoopbackChannel, Message, Site, SitePolicy
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Drawing

#: A site that responds whatever it is asked.
OPEN = SitePolicy(min_examples=1)
#: The server's state, of a run whose clients may be elsewhere.
SERVER = ("strategy", "selection", "history", "num_failures", "round")


def make_sites(
    graphs: Sequence[ClientGraph],
    folder: Path,
    make: Callable[[], tuple[ClientModule, Strategy]],
    policy: SitePolicy = OPEN,
    drawing: Drawing | None = None,
    own: Sequence[str] = (),
) -> list[Site]:
    """A site for each graph; made again, they go on from their folders."""
    sites = []
    for graph in graphs:
        model, strategy = make()
        sites.append(Site(graph, model, strategy, folder / graph.name, policy=policy, drawing=drawing, own=own))
    return sites


class Absent(SequentialExecutor):
    """Clients that are not there in some rounds, by (round, client)."""

    def __init__(self, absences: set[tuple[int, int]]) -> None:
        super().__init__()
        self.absences = absences

    def run(self, request: StageRequest, report: Any = None) -> StageResult:
        gone = {
            c
            for c in request.work_fraction
            if request.address.phase == "round" and (request.address.round_idx, c) in self.absences
        }
        present = {client: share for client, share in request.work_fraction.items() if client not in gone}
        result = super().run(
            StageRequest(stage=request.stage, address=request.address, work_fraction=present, payload=request.payload),
            report,
        )
        return StageResult(upload=result.upload, failures={**result.failures, **dict.fromkeys(gone, "absent")})


class BadChannel(LoopbackChannel):
    """Delivers every message and every response twice, loses the first response of client 0 each time, and more.

    Args:
        sites: The sites.
        absent: Rounds and clients whose messages do not arrive.
        late: Rounds and clients whose responses arrive a round later.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        absent: set[tuple[int, int]] = frozenset(),
        late: set[tuple[int, int]] = frozenset(),
    ) -> None:
        super().__init__(sites)
        self.absent, self.late = absent, late
        self.held_back: list[tuple[int, Message]] = []
        self.asked: set[str] = set()
        self.responses: list[tuple[Message, Message]] = []
        self.before_round: Callable[[int], None] = lambda round_idx: None
        self.rounds: set[int] = set()

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message | str]]:
        for client, message in messages.items():
            where = self._place(client, message)
            if where is not None and where[0] not in self.rounds:
                self.rounds.add(where[0])
                self.before_round(where[0])
            if where in self.absent:
                continue
            responses = [Message.read(self.sites[client].respond(message.wire)) for _ in range(2)]
            self.responses.append((message, responses[0]))
            if message.kind != "start":  # which does not train; its second response is of a state that begins anew
                assert responses[0].wire == responses[1].wire
            if where in self.late:
                self.held_back.append((client, responses[0]))
                continue
            yield from [held for held in self.held_back if held[0] == client]
            if client == 0 and f"{message.name}" not in self.asked:
                self.asked.add(message.name)
                yield client, "the line was cut"
                continue
            yield from ((client, response) for response in responses)

    @staticmethod
    def _place(client: int, message: Message) -> tuple[int, int] | None:
        address = message.about.get("address", {})
        return (address["round_idx"], client) if address.get("phase") == "round" else None


def server_of(trainer: Any) -> dict[str, Any]:
    """The server's part of a run's complete state."""
    return {name: value for name, value in trainer.state_dict().items() if name in SERVER}


def lives_on(executor: Any, name: str) -> bool:
    """Whether a tensor of a client's state outlives the round."""
    for prefix, part in getattr(executor, "parts", {}).items():  # of an architecture
        if f"/{prefix}" in name:
            return lives_on(part, name.replace(prefix, "", 1))
    kind, _, rest = name.partition("/")
    if kind == "p":
        return rest in executor.lasting
    return rest.startswith("client_state/") or executor.persistence.optimizer


def assert_same_clients(local: Any, sites: Sequence[Site]) -> None:
    """Each site's client is the one of a run in process, optimizer state and client state included.

    Of a client that is not active any more only what lives on is compared: its site has not heard of later rounds.
    """
    executor = local.run.executor
    whole = executor.state()
    for client, site in enumerate(sites):
        own = site.member.executor.state().named()
        for name, tensor in whole.rows([client]).named().items():
            if client not in executor.active and not lives_on(executor, name):
                continue
            if name not in own:  # of another architecture
                assert not tensor.any()
                continue
            rows = own[name].shape[1] if name.startswith("s/client_state") and name[2:] in whole.lengths else None
            mine = tensor if rows is None else tensor[:, :rows]
            assert torch.equal(mine, own[name]), f"{client}: {name}"
