"""Secure aggregation: what a lying server gets from two sums, and from two responses under the masks of one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from sites import OPEN
from torch import Tensor

from fl_lightning import Participation
from fl_lightning.remote import LoopbackChannel, Message, Site, SitePolicy, TopK, federate, masking, sum_server
from fl_lightning.remote.channel import read_response
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.metrics import NUM_SUMMED
from fl_lightning.remote.questions import run_of
from fl_lightning.remote.schema import WrongMessage
from fl_lightning.remote.secure import wrong_weight
from fl_lightning.remote.sum_server import Sum, SumServer
from fl_lightning.strategies import FedAvg

pytest.importorskip("Crypto.Protocol.SecretSharing", reason="needs the extra remote")
pytestmark = pytest.mark.filterwarnings("ignore:.*it is left out")

JOB = Job(
    name="wards", sites=["a", "b", "c", "d"], strategy={"class": "FedAvg"}, secure=True, trainer={"num_rounds": 3}
)
ROUND = {"phase": "round", "name": "train"}


class Recorder(LoopbackChannel):
    """Remembers the last message of each kind to each client."""

    def ask(self, messages):
        for client, message in messages.items():
            self.sent = {**getattr(self, "sent", {}), (message.kind, client): message}
            yield client, read_response(self.sites[client].respond(message.wire))


class Server:
    """Drives sites by hand, with the package's own part of a secure sum.

    Args:
        sites: Sites that have not been asked anything.
        sent: What an honest server has sent to others with the same data.
    """

    def __init__(self, sites: Sequence[Site], sent: Mapping[tuple[str, int], Message]) -> None:
        self.sites, self.sent = list(sites), sent
        self.names = [site.client_data.name for site in sites]
        self.states: dict[int, str] = {}
        self.start()

    def start(self, **changed: Any) -> None:
        """Start a federation, the honest server's but for some facts."""
        for client, site in enumerate(self.sites):
            start = self.sent["start", client]
            response = Message.read(site.respond(dataclasses.replace(start, about={**start.about, **changed}).wire))
            assert response.kind == "response", response.about
            self.states[client] = response.about["state"]

    def ask(
        self, messages: Mapping[int, Message], read: Callable[[int, Message], None] = lambda client, response: None, /
    ) -> tuple[dict[int, Message], dict[int, str]]:
        responses, lost = {}, {}
        for client, message in messages.items():
            response = Message.read(self.sites[client].respond(message.wire))
            try:
                if response.kind == "failure":
                    raise WrongMessage(response.about["why"])
                read(client, response)
            except WrongMessage as error:
                lost[client] = str(error)
                continue
            responses[client] = response
            self.states[client] = response.about.get("state", self.states[client])
        return responses, lost

    def sum(self, round_idx: int, fractions: Mapping[int, float] | None = None) -> Sum:
        """A stage's sum over all clients, who all get the same model; some do less than all of the work."""
        states, model = dict(self.states), self.sent["run", 0].tensors

        def work(client: int, shares: Mapping[str, str]) -> Message:
            about = {"address": {**ROUND, "round_idx": round_idx}, "state": states[client], "shares": dict(shares)}
            return Message(
                kind="run", about={**about, "work_fraction": (fractions or {}).get(client, 1.0)}, tensors=model
            )

        length = sum(tensor.numel() for tensor in model.values()) + 1
        where = ["round", round_idx, "train"]
        return self._sums().run("run", where, states.__getitem__, list(states), work, length, wrong_weight)

    def scores(self, round_idx: int = 0) -> Sum:
        """An evaluation's sum over all clients."""
        states = dict(self.states)

        def work(client: int, shares: Mapping[str, str]) -> Message:
            question = self.sent["evaluate", client]
            own = {"state": states[client], "shares": dict(shares), "forget": [], "round_idx": round_idx}
            return dataclasses.replace(question, about={**question.about, **own})

        names = self.sites[1].member.metric_names
        length = NUM_SUMMED * len(names) * len(self.sent["evaluate", 0].about["evaluations"]) + 1
        where = ["evaluate", round_idx]
        return self._sums().run("evaluate", where, states.__getitem__, list(states), work, length, lambda *_: "")

    def _sums(self) -> SumServer:
        return SumServer(self.ask, self.names, 2 / 3)


@pytest.fixture
def site_of(make_model, tmp_path):
    """A site, whose processes share its folder."""

    def build(graph: Any, folder: str = "attacked", job: Job | None = None, policy: SitePolicy = OPEN) -> Site:
        own = tmp_path / folder / graph.name
        return Site(graph, make_model(), FedAvg(num_epochs=3), own, policy=policy, job=job)

    return build


@pytest.fixture
def attacked(graphs, make_model, make_trainer, site_of):
    """A server of four sites, and what an honest one has sent to others."""

    def build(job: Job | None = None) -> Server:
        trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=3)
        channel = Recorder([site_of(graph, "honest") for graph in graphs[:4]])
        trainer.fit(make_model(), federate(trainer, channel, strategy, secure=True), strategy)
        return Server([site_of(graph, job=job) for graph in graphs[:4]], channel.sent)

    return build


# ---------------------------------------------------------------- two sums


def test_one_member_alone_cannot_train_for_longer(attacked, monkeypatch) -> None:
    """Two rounds of the same model differed by what one client did in its further epochs, exact to 1e-8."""
    server = attacked()
    less = dict.fromkeys(range(4), 0.0)
    assert server.sum(0, less).total_D is not None
    alone = {**less, 3: 1.0}
    (why,) = set(server.sum(1, alone).failures.values())
    assert "sends its clients different models or work fractions" in why
    monkeypatch.setattr(sum_server, "received_by_all", lambda message: "")  # a server that goes on all the same
    result = server.sum(2, alone)
    assert result.total_D is None
    assert "a site sent numbers that are not its own" in next(iter(result.failures.values()))


@pytest.mark.parametrize("job", [JOB, None], ids=["job", "none"])
def test_a_jobs_state_is_summed_once_whatever_the_server_calls_the_run(job, attacked) -> None:
    """Without a job, whose sites have no certificates either, the attack goes through."""
    server = attacked(job)
    assert server.sum(0).total_D is not None
    server.start(federation="ab" * 32)
    again = server.sum(0, dict.fromkeys(range(4), 0.0))
    assert (again.total_D is None) == (job is not None)
    if job is not None:
        assert "already summed with other clients or for another address" in "".join(again.failures.values())
        server.start(federation="cd" * 32)
        assert server.sum(0).total_D is not None  # the same work once more


def test_a_run_is_named_after_the_job_that_was_signed() -> None:
    about = {"federation": "ab" * 32}
    assert run_of(about, None) == about["federation"]
    name = run_of(about, JOB)
    assert name == run_of({"federation": "cd" * 32}, Job.read(JOB.write())) != about["federation"]
    for alike in (
        {"name": "again"},
        {"resume": True},
        {"timeout_seconds": 9},
        {"predict": True},
        {"planned_rounds": 7},
        {"trainer": {"num_rounds": 9, "precision": "32-true"}},
    ):
        assert run_of(about, dataclasses.replace(JOB, **alike)) == name, alike
    for other in (
        {"seed": 1},
        {"sites": ["a", "b", "c"]},
        {"strategy": {"class": "FedProx"}},
        {"secure_share": 0.9},
        {"trainer": {"num_rounds": 3, "precision": "64-true"}},
    ):
        assert run_of(about, dataclasses.replace(JOB, **other)) != name, other


def test_stragglers_are_refused_before_anything_starts(make_trainer, site_of, graphs) -> None:
    slow = make_trainer(participation=Participation(straggler_probability=0.5))
    channel = LoopbackChannel([site_of(graph) for graph in graphs[:3]])
    why = r"participation\.straggler_probability is 0\.5, but under secure aggregation .* leave it at 0"
    with pytest.raises(ValueError, match=why):
        federate(slow, channel, FedAvg(), secure=True)
    assert not hasattr(channel, "sent")
    federate(slow, channel, FedAvg())


# ---------------------------------------------------------------- two responses


class Twice:
    """Site 0, of which another process is asked for its summand as well.

    Args:
        server: The server.
        kind: The message that asks for it.
        other: Opens the other process, before the first one responds.
    """

    def __init__(self, server: Server, kind: str, other: Callable[[], Any]) -> None:
        self.site, self.kind, self.other = server.sites[0], kind, other
        self.responses: list[Message] = []
        server.sites[0] = self

    def respond(self, wire: bytes) -> bytes:
        if Message.read(wire).kind != self.kind:
            return self.site.respond(wire)
        other = self.other()
        first = self.site.respond(wire)
        self.responses = [Message.read(first), Message.read(other.respond(wire))]
        return first


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("run", SitePolicy(min_examples=1, filters=[TopK(fraction=0.5)])),
        ("evaluate", SitePolicy(min_examples=1, metrics="off")),
    ],
    ids=["run", "evaluate"],
)
@pytest.mark.parametrize("changed", [True, False])
def test_two_processes_of_a_site_hide_one_response(kind, policy, changed, attacked, site_of, graphs) -> None:
    """Both have the keys of a sum: what they masked with them differed by numbers of this site alone."""
    server = attacked()
    site = Twice(server, kind, lambda: site_of(graphs[0], policy=policy if changed else OPEN))
    result = server.sum(0) if kind == "run" else server.scores()
    assert result.total_D is not None
    first, second = site.responses
    if changed:
        assert second.kind == "failure"
        assert "the masks of this sum have hidden another response" in second.about["why"]
        assert not second.tensors
    else:
        assert torch.equal(first.tensors["s/masked"], second.tensors["s/masked"])


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", "bfloat16"), ("32-true", "float32")])
def test_a_federation_that_starts_again_ends_the_sum(precision, dtype, attacked) -> None:
    """With another precision the site masked the server's own model with the masks of its response."""
    server = attacked()

    class StartsAgain:
        def respond(self, wire: bytes) -> bytes:
            start = server.sent["start", 0]
            about = {**start.about, "precision": precision, "dtype": dtype}
            assert Message.read(site.site.respond(dataclasses.replace(start, about=about).wire)).kind == "response"
            question = Message.read(wire)
            tensors = {n: tensor.to(getattr(torch, dtype)) for n, tensor in question.tensors.items()}
            state = {**question.about, "state": site.site.current}
            return site.site.respond(dataclasses.replace(question, about=state, tensors=tensors).wire)

    site = Twice(server, "run", StartsAgain)
    server.sum(0)
    first, second = site.responses
    assert (first.kind, second.kind) == ("response", "failure")
    assert "no sum was started" in second.about["why"]
    assert site.site.sum.state == {}


def test_the_same_numbers_may_be_masked_again(attacked) -> None:
    server = attacked()
    server.sum(0)
    member = server.sites[0].sum
    count = sum(tensor.numel() for tensor in server.sent["run", 0].tensors.values())
    member.state["label"] = "ab" * 32

    def masked(numbers_D: Tensor) -> Tensor:
        return member.hide(masking.to_whole(numbers_D, 2.0, len(member.state["members"])))

    first = masked(torch.zeros(count, dtype=torch.float64))
    assert torch.equal(masked(torch.zeros(count, dtype=torch.float64)), first)
    with pytest.raises(ValueError, match="have hidden another response"):
        masked(torch.full((count,), 2.0**-masking.FRACTION_BITS, dtype=torch.float64))
    member.state["label"] = "cd" * 32
    assert not torch.equal(masked(torch.ones(count, dtype=torch.float64)), first)
