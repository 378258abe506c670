"""Submits a run to the server of a federation, follows it, and fetches its result."""

import dataclasses
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import NoConnection
from nvflare.fuel.flare_api.flare_api import new_secure_session

from fl_lightning.remote.flare import TASK, FederationController, SiteExecutor
from fl_lightning.remote.job import JOB_FILE
from fl_lightning.remote.job_schema import Job, job_of
from fl_lightning.remote.names import check_run_name
from fl_lightning.remote.outcome import Outcome, fetched
from fl_lightning.remote.registry import Registry
from fl_lightning.remote.schema import LONGEST_REASON, shown
from fl_lightning.yaml_input import parse_yaml

#: How often a site asks for the next message (FLARE's own: 2), and how often the job's state is looked at.
FETCH_SECONDS, FOLLOW_SECONDS = 0.1, 0.5
#: How long a server may be unreachable while a run is followed, and how long it may take to respond to the submitter.
PATIENCE_SECONDS, RESPONSE_SECONDS = 120, 30.0


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run for sites.

    Attributes:
        job: What is sent.
        config: The configuration from which the job was made, YAML. It stays here, since it has the data of a
            simulation and the folders of this machine.
        classes: Classes of the job that are not from this package; server and sites must list them.
    """

    job: Job
    config: str
    classes: Sequence[str] = ()

    @classmethod
    def of_config(cls, config: str, **facts: Any) -> "Submission":
        """The submission of a configuration.

        Args:
            config: A configuration of ``fl-train fit``, YAML; its classes are looked up on this machine.
            facts: Passed to :func:`fl_lightning.remote.job_schema.job_of`.

        Raises:
            ValueError: It cannot be a job.
        """
        job, classes = job_of(parse_yaml(config), **facts)
        job.check(Registry(classes))
        return cls(job=job, config=config, classes=tuple(dict.fromkeys(classes)))

    def write_job(self, folder: Path) -> Path:
        """Write the job folder for FLARE."""
        name, sites = self.job.name, list(self.job.sites)
        check_run_name(name)
        job = folder / name
        config = job / "app" / "config"
        config.mkdir(parents=True)
        files: dict[Path, dict[str, Any]] = {
            job / "meta.json": {
                "name": name,
                "min_clients": len(sites),
                "mandatory_clients": sites,
                "deploy_map": {"app": ["server", *sites]},
                "resource_spec": {},
            },
            config / "config_fed_server.json": {
                "format_version": 2,
                "server": {"task_request_interval": FETCH_SECONDS},  # which goes before the clients' own
                "workflows": [{"id": "federation", "path": _path(FederationController), "args": {}}],
                "components": [],
            },
            config / "config_fed_client.json": {
                "format_version": 2,
                "default_task_fetch_interval": FETCH_SECONDS,
                "max_runner_sync_timeout": self.job.timeout_seconds,  # in which the server's process must be there too
                "executors": [{"tasks": [TASK], "executor": {"path": _path(SiteExecutor), "args": {}}}],
                "components": [],
            },
        }
        for path, content in files.items():
            path.write_text(json.dumps(content, indent=1))
        (config / JOB_FILE).write_text(self.job.write())
        return job


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@contextmanager
def session_of(kit: Path, *, seconds: float = 30.0) -> Iterator[Any]:
    """An admin session, which is always closed: an open one keeps the interpreter from exiting.

    Raises:
        ValueError: It is not a submitter's kit, or the server refuses it or does not respond.
    """
    file = kit / "startup" / "fed_admin.json"
    if not file.is_file():
        raise ValueError(f"--kit {kit} is not a submitter's kit: it has no startup/fed_admin.json")
    name = json.loads(file.read_text())["admin"]["username"]
    try:
        session = new_secure_session(name, str(kit.absolute()), timeout=seconds, command_timeout=RESPONSE_SECONDS)
    except Exception as error:  # FLARE's own kinds, and those of its connections
        raise ValueError(f"the server of --kit {kit} cannot be reached, or refuses it: {_said(error)}") from error
    try:
        yield session
    finally:
        with suppress(Exception):
            session.close()


def run_job(session: Any, submission: Submission, destination: Path, watch: Callable[[], None]) -> Outcome:
    """Submit a job, follow it to its end, and fetch its result.

    Args:
        session: Of :func:`session_of`.
        submission: The run.
        destination: Where its folder is put, as ``<name>/version_<n>``: in place of an earlier one of the same run, and
            beside all others.
        watch: Called again and again meanwhile; it may raise.

    Raises:
        RuntimeError: The server cannot be reached, refuses the job, or returns what is no result.
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
        return fetched(result, status, submission.config, destination / submission.job.name, submitted)


def _patiently(action: Callable[[], Any]) -> Any:
    """Do something over a connection that may be gone for a while.

    Raises:
        RuntimeError: It stays gone, or the server refuses.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return action()
        except NoConnection as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server was not reached for {PATIENCE_SECONDS} seconds: {_said(error)}"
                ) from error
            time.sleep(FOLLOW_SECONDS)
        except Exception as error:  # FLARE's own kinds, with the server's words
            raise RuntimeError(f"the server refuses, or its response cannot be used: {_said(error)}") from error


def _said(error: Exception) -> str:
    return shown(f"{type(error).__name__}: {' '.join(str(error).split())}", LONGEST_REASON)


def connected_sites(session: Any) -> list[str]:
    """Names of the sites that are connected to the server.

    Args:
        session: Of :func:`session_of`.

    Raises:
        RuntimeError: The server cannot be reached, or refuses.
    """
    return sorted(str(client.name) for client in _patiently(session.get_connected_client_list))


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
        warn: MetricsRelease of every job that failed.
    """
    outcome = run_job(session, submission, destination, watch)
    for _ in range(attempts - 1):
        if outcome.status != "failed":
            break
        warn(f"{submission.job.name}: {outcome.message}; submitted again, from its last checkpoint")
        submission = dataclasses.replace(submission, job=dataclasses.replace(submission.job, resume=True))
        outcome = run_job(session, submission, destination, watch)
    return outcome
