"""The server's side of a remote federation: an executor whose clients are at their sites."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.executors.base import Executor
from fl_lightning.executors.hooks import check_hooks
from fl_lightning.executors.stage_request import StageRequest, StageResult, misfits
from fl_lightning.remote.channel import Channel, ask_all
from fl_lightning.remote.data import RemoteData
from fl_lightning.remote.digests import digest_of, digests_of, payload_of
from fl_lightning.remote.message import Message
from fl_lightning.remote.metrics import NUM_SUMMED, from_summands, of_model, unknown_sums, wrong_summands
from fl_lightning.remote.requests import evaluation_request, prediction_request, start_facts, work_request
from fl_lightning.remote.responses import Responses, check_response, check_start, outsized, why_wrong
from fl_lightning.remote.schema import WrongMessage, shown
from fl_lightning.remote.secure import (
    DEFAULT_SHARE,
    WARNING,
    check_share,
    check_stage,
    check_stages,
    mean_of,
    weighting_of,
    wrong_weight,
)
from fl_lightning.remote.sum_server import SumServer
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload, concatenate
from fl_lightning.round.stage import Evaluation, Persistence, Phase, Stage, StateSpec
from fl_lightning.strategies import Strategy

_log = logging.getLogger(__name__)


class RemoteExecutor(Executor):
    """Has sites run what is requested: one message for each client.

    The clients' states stay at their sites; the server knows only their digests, which are stored in its checkpoints. A
    message whose response is lost is sent again; the site does not train twice. A client fails if its response is
    wrong or missing.

    Args:
        channel: The channel to the sites.
        strategy: The algorithm of the run.
        data: What is known about the clients.
        precision: As in the trainer.
        retries: How often a message without a response is sent again.
        secure: Learn only the weighted sum of the clients' responses, and of metrics.
        secure_share: More than this share of the clients that start a sum must complete it, in [0.5, 1].

    Raises:
        ValueError: A value is out of its range, or the strategy needs more than sums.
    """

    takes_architectures = True

    def __init__(
        self,
        channel: Channel,
        strategy: Strategy,
        data: RemoteData,
        *,
        precision: str = "32-true",
        retries: int = 1,
        secure: bool = False,
        secure_share: float = DEFAULT_SHARE,
    ) -> None:
        super().__init__()
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        self.channel = channel
        self.strategy = strategy
        self.data = data
        self.precision = precision
        self.retries = retries
        self.secure = secure
        self.digests: dict[int, str] = {}
        self.pinned: set[tuple[int, str]] = set()
        self.unneeded: dict[int, list[str]] = {}
        self.sums = SumServer(self._ask, channel.names, secure_share)
        self.scored: dict[int, list[str] | str] = {}
        if secure:
            weighting_of(strategy)
            check_share(secure_share)

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
        """Have every site join as a client.

        Raises:
            ValueError: A site refuses, does not respond, or has other initial parameters than the server.
        """
        check_hooks(client)
        if time_limit is not None:
            raise ValueError(
                "participation.time_limit_seconds is for clients of this machine: leave it null, and bound the time in "
                "which a site must respond (fl-train submit --timeout_seconds)"
            )
        if fabric.world_size > 1:
            raise ValueError(
                "trainer.devices and num_nodes must be 1: the clients of a remote federation are elsewhere"
            )
        self.fabric, self.client, self.clients, self.seed = fabric, client.eval(), tuple(clients), seed
        self.num_flat, self.collator = client.num_communicated, collator
        self.round, self.active = None, set()
        self.digests, self.pinned, self.unneeded = {}, set(), {}
        self.responses = Responses(client.monitor)
        federation, registry = self.strategy.federation, self.data.registry
        self.sums.names = registry.names
        if self.secure:
            check_stages(self.strategy)
        self.architectures = tuple({n: p for n, p in net.items()} for net in federation.architectures)
        self.architecture_of = federation.architecture_of
        self.longest = max(sum(parameter.numel() for parameter in net.values()) for net in self.architectures)
        common = start_facts(
            self.strategy,
            client,
            registry,
            seed=seed,
            precision=self.precision,
            dtype=str(collator.dtype).removeprefix("torch."),
            secure=self.secure,
            secure_share=self.sums.share,
        )
        relation = {} if registry.relation_CC is None else {"relation": registry.relation_CC}
        responses = self._insist(
            {c: Message(kind="start", about={**common, "index": c}, tensors=relation) for c in self.clients},
            "join as a client",
        )
        check_start(responses, digest_of(self.architectures), registry.names)
        self.digests = {c: response.about["state"] for c, response in responses.items()}
        self.first = {c: digest for c, digest in self.digests.items() if c not in federation.training_clients}
        self.pinned |= set(self.first.items())
        self.scored = {c: response.about["scored"] for c, response in responses.items()}
        self.responses.noisy = {c for c, response in responses.items() if response.about.get("noisy")}
        if self.secure:
            _log.warning(WARNING)

    def epsilons(self) -> dict[int, float]:
        """Empty: sites do not send their privacy accounts."""
        return {}

    def probe(self) -> StageResult:
        """The names of the first client's metrics, as its site sent them; their values do not leave it."""
        client, names = self.clients[0], self.metric_names()
        if not names:
            return StageResult(upload=Payload(clients=()), failures={client: shown(self.scored[client], 1000)})
        zeros = torch.zeros(1, 2, device=self.fabric.device)
        return StageResult(upload=Payload(clients=(client,), extras=dict.fromkeys(names, zeros)))

    def stored_bytes(self) -> int:
        """Zero: the clients' states are elsewhere."""
        return 0

    def private_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Zero: sites count them."""
        return 0

    # ---------------------------------------------------------------- messages

    def _ask(
        self,
        messages: Mapping[int, Message],
        read: Callable[[int, Message], None] = lambda client, response: None,
        report: Callable[[int], None] | None = None,
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """The clients' responses, and why others failed.

        A wrong response, which ``read`` may refuse too, is a failure, as is one that raises any other error.
        """
        responses, failures = ask_all(self.channel, messages, retries=self.retries, report=report)
        for client, response in responses.items():
            try:
                check_response(messages[client], response)
                state = response.about.get("state")
                if state and any(state == digest and c != client for c, digest in self.digests.items()):
                    raise WrongMessage("it refers to the state of another client")
                if response.kind != "failure":
                    read(client, response)
            except Exception as error:  # whatever is wrong with a response is its client's failure
                failures[client] = why_wrong(error)
                continue
            if client in self.digests and state:
                self.digests[client] = state
            if response.kind == "failure":
                failures[client] = shown(response.about["why"], 1000)
        return {client: response for client, response in responses.items() if client not in failures}, failures

    def _insist(self, messages: Mapping[int, Message], what: str) -> dict[int, Message]:
        """Every client's response."""
        responses, failures = self._ask(messages)
        if failures:
            names = self.data.registry.names
            reasons = "; ".join(f"{names[client]}: {why}" for client, why in sorted(failures.items()))
            raise ValueError(f"sites that cannot {what}: {reasons}. Fix them, or leave them out of the federation")
        return responses

    # ---------------------------------------------------------------- work

    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Ask every participating client for its part of the stage."""
        if request.address.phase == "callback":
            raise ValueError(
                f"a callback asks the clients for {request.stage.name!r}, which sites cannot find in their strategy: "
                "leave the callback out of a remote federation"
            )
        clients = [client for client in self.clients if client in request.work_fraction]
        before = dict(self.digests)
        self._begin(request.address)
        result = self._run_sum(request, clients) if self.secure else self._run_open(request, clients, report)
        self.active |= set(clients) - result.failures.keys()
        for client, digest in before.items():  # states that the client has left and no checkpoint has
            if digest != self.digests[client] and (client, digest) not in self.pinned:
                self.unneeded.setdefault(client, []).append(digest)
        return result

    def _run_open(
        self, request: StageRequest, clients: Sequence[int], report: Callable[[int], None] | None
    ) -> StageResult:
        """The stage without secure aggregation."""
        uploads: dict[int, Payload] = {}

        def read(client: int, response: Message) -> None:
            net = self.architectures[self.architecture_of[client]]
            result = self.responses.upload(response, client, request.stage, net, self.longest)
            uploads[client] = result.to(self.fabric.device)

        _, failures = self._ask(
            {client: work_request(request, client, self.digests[client]) for client in clients}, read, report
        )
        failures |= misfits(uploads, request.stage.per_example) | outsized(uploads)
        upload = concatenate(uploads[client] for client in sorted(uploads) if client not in failures)
        return StageResult(upload=upload, failures=dict(sorted(failures.items())))

    def _run_sum(self, request: StageRequest, clients: Sequence[int]) -> StageResult:
        """The stage as a secure sum."""
        check_stage(request.stage)
        where = [request.address.phase, request.address.round_idx, request.address.name]
        length = sum(self.architectures[0][name].numel() for name in request.stage.upload) + 1

        def message(client: int, shares: Mapping[str, str]) -> Message:
            return work_request(request, client, self.digests[client], shares=shares)

        result = self.sums.run("run", where, self.digests.__getitem__, clients, message, length, wrong_weight)
        upload = Payload(clients=())
        if result.total_D is not None:
            total_D, net = result.total_D.to(self.fabric.device), self.architectures[0]
            upload = mean_of(total_D, result.survivors, request.stage, net)
        return StageResult(upload=upload, failures=dict(sorted(result.failures.items())))

    def evaluate(
        self,
        evaluations: Mapping[str, Evaluation],
        clients: Sequence[int],
        round_idx: int,
        *,
        collator: Collator | None = None,
    ) -> dict[str, StageResult]:
        """Ask each client once for the scores of all of its models."""
        if collator is not None:
            raise ValueError(
                "clients would be evaluated on data other than their own, which are at their sites: leave out "
                "trainer.evaluate_union, or the callback that asks for it"
            )
        mine = [client for client in self.clients if client in set(clients)]
        self._look_back(round_idx)
        if self.secure:
            return self._evaluate_sums(evaluations, mine, round_idx)
        messages = {client: self._evaluation(evaluations, client, round_idx) for client in mine}
        scores: dict[int, dict[str, Payload]] = {}

        def read(client: int, response: Message) -> None:
            scores[client] = self.responses.scores(response, client, evaluations, self.scored[client])

        responses, lost = self._ask(messages, read=read)
        for kind in evaluations:  # a client with other metrics than most is wrong in its whole response
            lost |= misfits({client: result[kind] for client, result in scores.items() if kind in result}, ())
        results = {}
        for kind in evaluations:
            reasons = {client: response.about["failures"].get(kind) for client, response in responses.items()}
            failures = {client: shown(why, 1000) for client, why in reasons.items() if why is not None} | lost
            parts = [scores[client][kind] for client in sorted(responses) if client not in failures]
            upload = concatenate(part.to(self.fabric.device) for part in parts)
            sums = {} if upload.clients else unknown_sums(self.metric_names())
            results[kind] = StageResult(upload=upload, failures=dict(sorted(failures.items())), sums=sums)
        return results

    def metric_names(self) -> list[str]:
        """The names of the clients' metrics, as most of their sites have sent them."""
        reasons: list[list[str]] = [names for names in self.scored.values() if not isinstance(names, str)]
        return max(reasons, key=reasons.count) if reasons else []

    def _evaluate_sums(
        self, evaluations: Mapping[str, Evaluation], clients: Sequence[int], round_idx: int
    ) -> dict[str, StageResult]:
        """Sums of all metrics over the clients, the only thing known about them; nan if a sum failed."""

        def message(client: int, shares: Mapping[str, str]) -> Message:
            return self._evaluation(evaluations, client, round_idx, shares=shares)

        names = sorted(f"{index}/{name}" for index in range(len(evaluations)) for name in self.metric_names())
        length, place_of_sum = NUM_SUMMED * len(names) + 1, ["evaluate", round_idx]

        def check(total_D: Tensor, count: int) -> str:
            return wrong_summands(total_D[:-1], names, count, noisy=bool(self.responses.noisy))

        result = self.sums.run("evaluate", place_of_sum, self.digests.__getitem__, clients, message, length, check)
        sums = {} if result.total_D is None else from_summands(result.total_D[:-1], names)
        results = {}
        for index, kind in enumerate(evaluations):
            reasons = {client: response.about["failures"].get(kind) for client, response in result.responses.items()}
            failures = dict(result.failures) | {c: shown(why, 1000) for c, why in reasons.items() if why is not None}
            results[kind] = StageResult(
                upload=Payload(clients=()),
                failures=dict(sorted(failures.items())),
                sums=of_model(sums, index) or unknown_sums(self.metric_names()),
            )
        return results

    def _evaluation(self, evaluations: Mapping[str, Evaluation], client: int, round_idx: int, **facts: Any) -> Message:
        ways = {kind: each.ways([client], self.active)[0][0] for kind, each in evaluations.items()}
        unneeded = self.unneeded.pop(client, [])  # this saves a message
        about = {"round_idx": round_idx, "state": self.digests[client], "forget": unneeded, **facts}
        return evaluation_request(ways, self.strategy, client, **about)

    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Evaluate one model only."""
        return self.evaluate({"": evaluation}, clients, round_idx, collator=collator)[""]

    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Have the clients write their predictions into their sites' folders; none are returned."""
        about = {client: {"round_idx": round_idx, "state": self.digests[client]} for client in clients}
        messages = {c: prediction_request(evaluation, self.strategy, c, **about[c]) for c in clients}
        self._insist(messages, "write predictions")
        return {}

    # ---------------------------------------------------------------- states

    def lasting_state(self) -> Payload:
        """The digests of the clients' states, which their sites keep until :meth:`forget`."""
        self.pinned |= set(self.digests.items())
        return payload_of({client: self.digests[client] for client in self.clients})

    def load_state(self, state: Payload, now: tuple[Phase, int] | None = None) -> None:
        """Have the clients restore the states of a checkpoint.

        Raises:
            ValueError: A site no longer has its state.
        """
        result = digests_of(state)
        self.round, self.active = now, set()
        self.pinned |= set(self.digests.items())  # an older checkpoint may have them
        self._load({client: result[client] for client in self.clients}, "restore the checkpoint")

    def reset(self, clients: Sequence[int]) -> None:
        """Have unseen clients restore the states that they began with."""
        self.round, self.active = None, set()
        self._load({client: self.first[client] for client in clients}, "begin again")

    def _load(self, states: Mapping[int, str], what: str) -> None:
        self._insist({c: Message(kind="load", about={"state": digest}) for c, digest in states.items()}, what)
        self.pinned |= set(states.items())

    def forget(self, states: Iterable[tuple[int, str]]) -> None:
        """Have sites delete states, except for the current ones.

        Args:
            states: Clients and digests of their states.
        """
        of_client: dict[int, list[str]] = {}
        for client, digest in sorted(states):
            if digest not in (self.digests[client], self.first.get(client)):
                of_client.setdefault(client, []).append(digest)
        if of_client:
            messages = {c: Message(kind="forget", about={"forget": digests}) for c, digests in of_client.items()}
            self._ask(messages)  # a site that misses this keeps a little more
        self.pinned -= {(client, digest) for client, digests in of_client.items() for digest in digests}
