"""Hands a run to the server of a federation, follows it, and fetches what it came to."""

import dataclasses
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import NoConnection
from nvflare.fuel.flare_api.flare_api import new_secure_session

from fl_lightning.remote.flare import OUTCOME_FILE, RUN_FILE, TASK, FederationController, SiteExecutor

#: How often a site asks for the next message (FLARE's own: 2), and how often the job's state is looked at.
FETCH_SECONDS, FOLLOW_SECONDS = 0.1, 0.5
#: How long a server may be out of reach while a run is followed, and how long it may take to answer who submits.
PATIENCE_SECONDS, ANSWER_SECONDS = 120, 30.0


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run for sites.

    Attributes:
        name: Of the run; what server and sites keep of it lies under this name.
        config: The run's whole configuration, YAML.
        sites: Names of the sites, in the order of their clients.
        ckpt_path: ``last`` to go on where the run of this name stopped; None for a new one.
        timeout_seconds: In which a site must answer a message.
        num_outputs: Classes of the whole federation; None for as many as the sites have seen.
        secure: Secure aggregation.
        predict: Have each site write what its model predicts into its own folder, after the training.
    """

    name: str
    config: str
    sites: Sequence[str]
    ckpt_path: str | None = None
    timeout_seconds: int = 600
    num_outputs: int | None = None
    secure: bool = False
    predict: bool = False

    def write_job(self, folder: Path) -> Path:
        """The job that FLARE is given."""
        job = folder / self.name
        config = job / "app" / "config"
        config.mkdir(parents=True)
        controller = {
            "sites": list(self.sites),
            "run_name": self.name,
            "ckpt_path": self.ckpt_path or "",
            "timeout_seconds": self.timeout_seconds,
            "num_outputs": self.num_outputs or 0,
            "secure": self.secure,
            "predict": self.predict,
        }
        files: dict[Path, dict[str, Any]] = {
            job / "meta.json": {
                "name": self.name,
                "min_clients": len(self.sites),
                "mandatory_clients": list(self.sites),
                "deploy_map": {"app": ["server", *self.sites]},
                "resource_spec": {},
            },
            config / "config_fed_server.json": {
                "format_version": 2,
                "server": {"task_request_interval": FETCH_SECONDS},  # which goes before the clients' own
                "workflows": [{"id": "federation", "path": _path(FederationController), "args": controller}],
                "components": [],
            },
            config / "config_fed_client.json": {
                "format_version": 2,
                "default_task_fetch_interval": FETCH_SECONDS,
                "max_runner_sync_timeout": self.timeout_seconds,  # in which the server's process must be there too
                "executors": [
                    {"tasks": [TASK], "executor": {"path": _path(SiteExecutor), "args": {"run_name": self.name}}}
                ],
                "components": [],
            },
        }
        for path, content in files.items():
            path.write_text(json.dumps(content, indent=1))
        (config / RUN_FILE).write_text(self.config)
        return job


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job came to.

    Attributes:
        status: ``finished``, ``refused`` (with a message for the user), ``failed``.
        message: Why it did not finish.
        folder: The run's folder, fetched; None where there is none.
        facts: Bytes, seconds, times.
    """

    status: str
    message: str = ""
    folder: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@contextmanager
def session_of(kit: Path, *, seconds: float = 30.0) -> Iterator[Any]:
    """An admin session, which is always closed: an open one keeps the interpreter from ending.

    Raises:
        ValueError: The kit is none of who submits, or the server refuses it or does not answer.
    """
    file = kit / "startup" / "fed_admin.json"
    if not file.is_file():
        raise ValueError(f"--kit {kit} is no kit of who submits runs: it has no startup/fed_admin.json")
    name = json.loads(file.read_text())["admin"]["username"]
    try:
        session = new_secure_session(name, str(kit.absolute()), timeout=seconds, command_timeout=ANSWER_SECONDS)
    except Exception as error:  # FLARE's own kinds, and those of its connections
        raise ValueError(f"the server of --kit {kit} cannot be reached, or refuses it: {error}") from error
    try:
        yield session
    finally:
        with suppress(Exception):
            session.close()


def run_job(session: Any, submission: Submission, destination: Path, watch: Callable[[], None]) -> Outcome:
    """Submit a job, follow it to its end, fetch its result.

    Args:
        session: Of :func:`session_of`.
        submission: The run.
        destination: Where its folder is put, as ``<name>/version_<n>``.
        watch: Called again and again meanwhile; it may raise.
    """
    with tempfile.TemporaryDirectory() as folder:
        submitted, token = time.time(), uuid.uuid4().hex  # with which a job that is sent twice is one
        job = str(submission.write_job(Path(folder)))
        job_id = _patiently(lambda: session.submit_job(job, submit_token=token))
        try:
            while not (status := str(_patiently(lambda: session.get_job_status(job_id)))).startswith("FINISHED"):
                watch()
                time.sleep(FOLLOW_SECONDS)
        except BaseException:
            with suppress(Exception):
                session.abort_job(job_id)
            raise
        result = Path(_patiently(lambda: session.download_job_result(job_id, destination=folder)))
        return _outcome(result, status, submission, destination, submitted)


def _patiently(action: Callable[[], Any]) -> Any:
    """Do something over a connection that may be gone for a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return action()
        except NoConnection as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not reached for {PATIENCE_SECONDS} seconds: {error}") from error
            time.sleep(FOLLOW_SECONDS)


def follow(
    session: Any,
    submission: Submission,
    destination: Path,
    *,
    attempts: int,
    watch: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda message: None,
) -> Outcome:
    """Submit a run, again and from its last checkpoint as long as its jobs fail, until it is done.

    Args:
        session: Of :func:`session_of`.
        submission: The run.
        destination: As of :func:`run_job`.
        attempts: Jobs to submit at most.
        watch: As of :func:`run_job`.
        warn: Told of every job that failed.
    """
    outcome = run_job(session, submission, destination, watch)
    for _ in range(attempts - 1):
        if outcome.status != "failed":
            break
        warn(f"{submission.name}: {outcome.message}; submitted again, from its last checkpoint")
        submission = dataclasses.replace(submission, ckpt_path="last")
        outcome = run_job(session, submission, destination, watch)
    return outcome


def _outcome(result: Path, status: str, submission: Submission, destination: Path, submitted: float) -> Outcome:
    found = next(result.rglob(OUTCOME_FILE), None)
    if found is None:
        return Outcome(status="failed", message=f"the job ended as {status}, before its result was written")
    told = json.loads(found.read_text())
    folder = None
    if (found.parent / "run").is_dir():
        folder = destination / submission.name
        shutil.copytree(found.parent / "run", folder, dirs_exist_ok=True)
        folder = folder / told["folder"] if told.get("folder") else folder
    facts = {"bytes": told["bytes"], "seconds": told["seconds"], "seconds_to_start": told["started"] - submitted}
    return Outcome(
        status=told["status"],
        message=told["message"],
        folder=folder,
        facts={**facts, "result": told.get("result", {})},
    )
