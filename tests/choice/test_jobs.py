"""A search at sites: jobs that go on, refusals, and budgets of the sites' accounts. The sites are in this process."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.choice.candidates import WrongChoice
from fl_lightning.choice.preparation import Asked

pytest.importorskip("nvflare", reason="needs the extra flare")

from fl_lightning.choice import jobs
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.remote.job import open_server, open_site
from fl_lightning.remote.submit import Outcome, Submission

pytestmark = [pytest.mark.full, pytest.mark.flare, pytest.mark.filterwarnings("default")]

NAMES = ["client-00", "client-01", "client-02"]
DATA = {
    "source": {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 90, "num_communities": 3}},
    "partitioner": "GivenPartitioner",
}
CONFIG = {
    "seed_everything": 3,
    "model": {
        "class_path": "ClientModule",
        "init_args": {
            "net": "fl_lightning.models.GCN",
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        },
    },
    "data": DATA,
    "trainer": {"num_rounds": 9, "accelerator": "cpu", "callbacks": "FederatedCheckpoint"},
}


class Session:
    """A submitter's session with a server whose sites are in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submissions: list[Submission] = []
        self.policy: dict[str, Any] = {"min_examples": 1}
        self.stopped: set[int] = set()

    def get_connected_client_list(self) -> list[Any]:
        return [type("Client", (), {"name": name}) for name in NAMES]

    def follow(self, submission: Submission, destination: Path, **others: Any) -> Outcome:
        """A job, as NVFlare runs it."""
        self.submissions.append(submission)
        job = submission.job
        parts = open_server(job, self.folder / "server.yaml", self.folder / "federations", self.folder / "server")
        try:
            sites = [self.site(job, client) for client in range(len(NAMES))]
            data = federate(parts.trainer, LoopbackChannel(sites, NAMES), parts.strategy, secure=job.secure)
            parts.trainer.fit(parts.model, data, parts.strategy, ckpt_path="last" if job.resume else None)
            if len(self.submissions) - 1 in self.stopped:
                raise KeyboardInterrupt
        except ValueError as error:
            return Outcome(status="refused", message=str(error))
        return Outcome(status="finished", folder=parts.trainer.run.folder, facts={"bytes": {"up": 10, "down": 20}})

    def site(self, job: Any, client: int) -> Any:
        file = self.folder / f"site-{client}.yaml"
        content = {"data": {**DATA, "cache_dir": str(self.folder / "cache")}, "client": client, "named_as": "data"}
        file.write_text(yaml.safe_dump({**content, "policy": self.policy}))
        folder = self.folder / str(client)
        return open_site(job, file, folder / job.name, account=folder / "account")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session(tmp_path / "server")
    session.folder.mkdir()

    @contextmanager
    def session_of(kit: Path) -> Iterator[Session]:
        yield session

    monkeypatch.setattr(jobs, "session_of", session_of)
    monkeypatch.setattr(jobs, "follow", lambda session, *given, **others: session.follow(*given, **others))
    return session


@pytest.fixture
def choose(session: Session, tmp_path: Path) -> Callable[..., Any]:
    def run(sites: Sequence[str] = (), *, secure: bool = False, **settings: Any) -> tuple[Any, list[str]]:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
        said: list[str] = []
        given = {"config": [str(tmp_path / "mine.yaml")], "methods": ["FedAvg"], "grid": {"model.optimizer.lr": [0.01]}}
        asked = Asked(**{**given, "folder": tmp_path / "out", "seeds": 3, "command": "submit", **settings})
        return jobs.answer_at_sites(asked, tmp_path / "kit", sites, said.append, secure=secure), said

    return run


def test_settings_go_on_by_resuming_their_runs_and_nothing_is_trained_twice(session, choose) -> None:
    answer, said = choose()
    assert [each for each in said if each.startswith("Pooled is left out: ")], said
    assert list(answer.results["method"]) == ["Local", "FedAvg"]
    assert (answer.results["seeds"] == 3).all()
    assert "submit --config" in str(answer)
    submitted = [each.job for each in session.submissions]
    by_run = {name: [each for each in submitted if each.name == name] for name in {each.name for each in submitted}}
    tuned = [each for each in by_run.values() if len(each) > 1]
    assert [[job.trainer["num_rounds"] for job in each] for each in tuned] == [[1, 3, 9]] * 2
    assert [[job.resume for job in each] for each in tuned] == [[False, True, True]] * 2
    assert len(submitted) == 2 * (3 + 3)  # of Local and FedAvg: three lengths, three seeds
    planned = [job.planned_rounds for job in submitted]
    assert planned == sorted(planned, reverse=True)
    assert planned[0] - planned[-1] == 2 * (9 + 3 * 9) - 9  # all but the last job's
    assert planned[-1] >= 9
    again, said = choose()
    assert str(again) == str(answer)
    assert said[0] == (
        "13 runs of before count: whether the sites' data have changed since cannot be seen from here; if they have, "
        "give another --output"
    )
    assert len(session.submissions) == len(submitted)
    check_stopped_jobs_go_on(session, choose, answer)


def check_stopped_jobs_go_on(session: Session, choose: Callable[..., Any], expected: Any) -> None:
    """The same search in another folder, two of whose jobs are stopped: they resume from their last checkpoints."""
    number, folder = len(session.submissions), session.folder / "again"
    session.submissions.clear()
    session.stopped = {0, 8}  # of a setting and, one job later than without the first, of a seed
    for _ in session.stopped:
        with pytest.raises(KeyboardInterrupt):
            choose(folder=folder)
    actual, _ = choose(folder=folder)
    submitted = [each.job for each in session.submissions]
    for stopped in session.stopped:
        before, after = submitted[stopped : stopped + 2]
        assert before.name == after.name
        assert (before.resume, after.resume) == (False, True)
    assert len(submitted) == number + 2
    assert actual.results.drop(columns="seconds").equals(expected.results.drop(columns="seconds"))


def test_a_method_that_the_sites_refuse_is_left_out(session, choose) -> None:
    session.policy["strategies"] = ["Local"]
    answer, said = choose()
    assert any(each.startswith("FedAvg is left out: ") and "this site runs only Local" in each for each in said)
    assert list(answer.results["method"]) == ["Local"]


def test_where_the_accounts_cannot_pay_it_is_said_before_the_first_round(session, choose) -> None:
    noise = {"clip_norm": 1.0, "noise_multiplier": 5.0, "max_epsilon": 3.0}
    filters = [{"class_path": "fl_lightning.remote.GaussianNoise", "init_args": noise}]
    session.policy |= {"filters": filters, "metrics": "plain"}
    with pytest.raises(
        WrongChoice, match=r"the privacy budget does not pay for the \d+ rounds of this search: ε would"
    ):
        choose()
    assert not list(session.folder.rglob("privacy.json"))


class Invented:
    """Jobs that come to a metric of their sites without training; each has a partition of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[Any] = []

    def follow(self, session: Session, submission: Submission, destination: Path, **others: Any) -> Outcome:
        job = submission.job
        self.jobs.append(job)
        value = 0.2 * len(job.sites) + (0.05 if job.secure else 0.0)
        content = {
            "monitor": "val/acc",
            "mode": "max",
            "result": {"val/acc": value, "test/acc": value},
            "marks": {},
            "num_rounds": job.trainer["num_rounds"],
            "bytes": {"up": 1},
            "seconds": 1.0,
            "failures": {},
            "partition_hash": f"of {job.name}",
        }
        (self.folder / "result.json").write_text(json.dumps(content))
        return Outcome(status="finished", folder=self.folder, facts={"bytes": {"up": 1}})


@pytest.fixture
def invented(session: Session, monkeypatch: pytest.MonkeyPatch) -> Invented:
    invented = Invented(session.folder)
    monkeypatch.setattr(jobs, "follow", invented.follow)
    return invented


def test_jobs_at_other_sites_and_secure_ones_are_searches_of_their_own(choose, invented) -> None:
    """What a search came to at some sites says nothing of others, and no job goes on from one of theirs."""
    names: set[str] = set()
    for sites, secure, expected in ((NAMES, False, 0.6), (NAMES[1:], False, 0.4), (NAMES[1:], True, 0.45)):
        invented.jobs.clear()
        answer, _ = choose(sites, secure=secure, seeds=1)
        assert answer.results["test/acc"].tolist() == pytest.approx([expected] * 2)
        assert [(list(job.sites), job.secure) for job in invented.jobs] == [(sites, secure)] * 8
        assert sum(job.resume for job in invented.jobs) == 2 * 2
        assert invented.jobs[0].planned_rounds - invented.jobs[-1].planned_rounds == 2 * (9 + 9) - 9
        assert not names & {job.name for job in invented.jobs}
        names |= {job.name for job in invented.jobs}
    choose(sites, secure=secure, seeds=1)
    assert len(invented.jobs) == 8
    choose(sites, secure=secure, seeds=1, methods=["FedPer"])  # of what was trained, Local alone is a part of it
    assert invented.jobs[8].planned_rounds == 2 * (9 + 3 * 9) - (9 + 9)


def test_what_a_federation_fails_in_is_tried_again(
    choose, invented, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone: list[Outcome | RuntimeError] = [
        Outcome(status="failed", message="a site is gone"),
        RuntimeError("the server was not reached for 120 seconds"),
    ]

    def follow(session: Session, submission: Submission, *given: Any, **others: Any) -> Outcome:
        if gone and submission.job.strategy["class"] == "FedAvg":
            if isinstance(found := gone.pop(0), RuntimeError):
                raise found
            return found
        return invented.follow(session, submission, *given, **others)

    monkeypatch.setattr(jobs, "follow", follow)
    assert choose(seeds=1)[0].found.left_out["FedAvg"] == "a site is gone"
    with pytest.raises(WrongChoice, match=r"^the server was not reached for 120 seconds; the same command goes on$"):
        choose(seeds=1)
    assert list(choose(seeds=1)[0].results["method"]) == ["Local", "FedAvg"]
