"""The channel to the sites over NVIDIA FLARE 2.9, run by a controller; a FLARE executor runs each site.

NVFlare comes with the extra ``flare``. Certificates, connections, processes and logs are FLARE's; the
federation is ``trainer.fit`` in the server's job process, and a :class:`Site` in each client's.

Each client has a task of its own: data of a broadcast are copied once for all. A client known to be dead is not asked.
FLARE ends a job if a client's process dies, and does not let it rejoin a running one: ``fl-train submit`` submits the
job again, which resumes from its last checkpoint (docs/how-to/real-federation.md).
"""

import atexit
import gc
import json
import logging
import os
import queue
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fl_lightning.files import secret_file
from fl_lightning.kit_guard import is_closed
from fl_lightning.remote.channel import read_response
from fl_lightning.remote.federation import federate
from fl_lightning.remote.job import (
    JOB_FILE,
    SERVER_FILE,
    SITE_FILE,
    ServerParts,
    make_private,
    memory_of,
    open_server,
    open_site,
)
from fl_lightning.remote.job_schema import Job, NotAJob
from fl_lightning.remote.message import Message
from fl_lightning.remote.names import check_run_name
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.schema import LONGEST_REASON
from fl_lightning.remote.site import Site

_log = logging.getLogger(__name__)

TASK = "ask"
#: File with the outcome of a job, in its result.
OUTCOME_FILE = "outcome.json"
#: File with the id of a run, in its folder: a run that is resumed keeps it.
RUN_ID_FILE = "run_id"
_CHECK_SECONDS = 0.05
#: Time within which all sites' processes must be there.
_ARRIVAL_SECONDS = 600


# Otherwise the interpreter would inspect all of torch's objects, for more than a second, before a job's process ends.
atexit.register(gc.freeze)


class Aborted(RuntimeError):
    """FLARE has ended the job."""


class FlareChannel:
    """The clients of a FLARE job.

    Args:
        controller: The job's controller.
        names: The clients' names, by index.
        timeout_seconds: Time within which a client must respond.
        abort_signal: Ends the job.

    Attributes:
        num_bytes: Bytes of all messages (``down``) and all responses (``up``).
    """

    def __init__(
        self, controller: Controller, names: Sequence[str], *, timeout_seconds: int, abort_signal: Signal
    ) -> None:
        self.controller = controller
        self.names: Sequence[str] = list(names)
        self.timeout_seconds = timeout_seconds
        self.abort_signal = abort_signal
        self.num_bytes = {"down": 0, "up": 0}

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message | str]]:
        """Send a task to each client, and yield responses as they arrive."""
        arrived: queue.Queue[tuple[int, bytes | None, str]] = queue.Queue()
        with self.controller._engine.new_context() as context:
            waiting = set()
            for client, message in messages.items():
                if self.controller.get_client_disconnect_time(self.names[client]):
                    yield client, "its site is disconnected"
                    continue
                waiting.add(client)
                self.num_bytes["down"] += len(message.wire)
                self.controller.send(self._task(client, message, arrived), context, targets=[self.names[client]])
        while waiting:
            if self.abort_signal.triggered:
                raise Aborted("the job was ended")
            try:
                client, wire, why = arrived.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                continue
            waiting.discard(client)
            if wire is None:
                yield client, why
            else:
                self.num_bytes["up"] += len(wire) if isinstance(wire, bytes) else 0
                yield client, read_response(wire)

    def _task(self, client: int, message: Message, arrived: "queue.Queue[tuple[int, bytes | None, str]]") -> Task:
        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            code = result.get_return_code() if result is not None else "no result"
            wire = result.get("wire") if code == ReturnCode.OK else None
            arrived.put((client, wire, f"its site failed ({code})"))

        def on_end(task: Task, fl_ctx: FLContext) -> None:
            if task.completion_status != TaskCompletionStatus.OK:
                status = getattr(task.completion_status, "value", task.completion_status)
                arrived.put((client, None, f"its site did not respond ({status})"))

        data = Shareable()
        data["wire"] = message.wire
        timeout = self.timeout_seconds
        return Task(name=TASK, data=data, timeout=timeout, result_received_cb=on_result, task_done_cb=on_end)


class FederationController(Controller):  # type: ignore[misc]
    """Runs the federation of a job in the server's job process; the job is read from its file."""

    def __init__(self) -> None:
        super().__init__(task_check_period=_CHECK_SECONDS)
        self.parts: ServerParts | None = None
        self._arrived: set[str] = set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Note which sites' processes ask for tasks."""
        if event_type == EventType.BEFORE_PROCESS_TASK_REQUEST:
            self._arrived.add(fl_ctx.get_peer_context().get_identity_name())

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    stop_controller = start_controller

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a response that arrived too late; the site rolls back by itself."""
        _log.info("%s responded too late", client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Train, and leave the run's folder in the job's result."""
        workspace, job_id = fl_ctx.get_engine().get_workspace(), fl_ctx.get_job_id()
        result, root = Path(workspace.get_run_dir(job_id)), Path(workspace.get_root_dir())
        own_file = Path(workspace.get_site_config_dir()) / SERVER_FILE
        outcome: dict[str, Any] = {"status": "failed", "message": ""}
        started, num_bytes = time.time(), {"down": 0, "up": 0}
        try:
            check_kit()
            folder = isolate(root, job_id, memory_of(own_file))
            job = Job.read((Path(workspace.get_app_config_dir(job_id)) / JOB_FILE).read_bytes())
            self.parts = open_server(job, own_file, own_folder(root, "federations"), folder)
            channel = FlareChannel(self, job.sites, timeout_seconds=job.timeout_seconds, abort_signal=abort_signal)
            num_bytes = channel.num_bytes
            os.chdir(folder)
            outcome |= self._fit(job, self.parts, channel)
        except Aborted as error:
            outcome["message"] = str(error)
        except (ValueError, SystemExit) as error:
            outcome |= {"status": "refused", "message": str(error)}
        except Exception as error:
            _log.exception("the federation failed")
            outcome["message"] = f"{type(error).__name__}: {error}"
            self.system_panic(outcome["message"], fl_ctx)
        outcome |= {"bytes": num_bytes, "seconds": time.time() - started, "started": started, **self._identified()}
        outcome["message"] = outcome["message"][:LONGEST_REASON]
        if (made := self._made()) is not None:
            outcome["folder"] = made.name
            copy_files(made, result / "run" / made.name, within=own_folder(root, "federations"))
        (result / OUTCOME_FILE).write_text(json.dumps(outcome, indent=1) + "\n")
        self._await_sites(abort_signal, fl_ctx)

    def _await_sites(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Wait until all sites' processes are there: one that came later would wait for this one until its timeout."""
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        awaited = {client.name for client in fl_ctx.get_engine().get_clients()}
        while awaited and not abort_signal.triggered and time.monotonic() < deadline:
            time.sleep(_CHECK_SECONDS)
            awaited = {name for name in awaited - self._arrived if not self.get_client_disconnect_time(name)}

    def _made(self) -> Path | None:
        """The folder of this job's run; None if there is none yet."""
        if self.parts is None or not self.parts.trainer.has_run:
            return None
        folder = self.parts.trainer.run.folder
        return folder if folder.name and folder.is_dir() else None

    def _identified(self) -> dict[str, str]:
        """The id of this job's run; nothing if there is none yet."""
        if (made := self._made()) is None:
            return {}
        return {"run": secret_file(made / RUN_ID_FILE, lambda: uuid.uuid4().hex.encode()).decode()}

    def _fit(self, job: Job, parts: ServerParts, channel: FlareChannel) -> dict[str, Any]:
        data = federate(
            parts.trainer,
            channel,
            parts.strategy,
            num_outputs=job.num_outputs,
            relation_graph=parts.relation_graph,
            seed=job.data_seed,
            secure=job.secure,
            secure_share=job.secure_share,
            max_outputs=parts.max_outputs,
        )
        metrics = parts.trainer.fit(
            parts.model,
            data,  # type: ignore[arg-type]
            parts.strategy,
            ckpt_path="last" if job.resume else None,
        )
        made = parts.trainer.run.folder
        if job.predict:
            parts.trainer.predict()
        return {"status": "finished", "folder": made.name, "result": metrics}


class SiteExecutor(Executor):  # type: ignore[misc]
    """Runs a site in the client's job process; the folder of a run outlives the job."""

    def __init__(self) -> None:
        super().__init__()
        self.site: Site | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Respond to a message."""
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        wire: bytes = shareable["wire"]
        reply = make_reply(ReturnCode.OK)
        try:
            if self.site is None:
                self.site = self._open(fl_ctx)
            reply["wire"] = self.site.respond(wire)
        except (Exception, SystemExit) as error:
            _log.exception("the site cannot be opened")
            is_shareable = isinstance(error, Refused | NotAJob)  # their text contains no data of the site
            why = str(error) if is_shareable else f"{type(error).__name__}; see the site's log"
            reply["wire"] = Message(kind="failure", about={"to": Message.read(wire).name, "why": why}).wire
        return reply

    def _open(self, fl_ctx: FLContext) -> Site:
        workspace, job_id = fl_ctx.get_engine().get_workspace(), fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)
        root, own_file = Path(workspace.get_root_dir()), Path(workspace.get_site_config_dir()) / SITE_FILE
        check_kit()
        work = isolate(root, job_id, memory_of(own_file))
        job = Job.read((Path(workspace.get_app_config_dir(job_id)) / JOB_FILE).read_bytes())
        check_run_name(job.name)
        site = open_site(
            job,
            own_file,
            own_folder(root, "federations") / job.name,
            fl_ctx.get_identity_name(),
            account=own_folder(root, "account"),
            startup=Path(workspace.get_startup_kit_dir()),
        )
        os.chdir(work)  # the owner's file may name data relative to where the site was started
        return site


def check_kit() -> None:
    """Refuse to work in the kit of an earlier version, whose processes are open to jobs of any kind.

    Raises:
        Refused: This is the process of a job in such a kit.
    """
    if not is_closed():
        raise Refused(
            "this kit is of an earlier version, which jobs could misuse: provision again (with the folder state), and "
            "copy startup and local/resources.json of the new kit into this one; fl-train sites needs a new --folder"
        )


def own_folder(root: Path, name: str) -> Path:
    """A folder of this package in a kit, beside those of NVFlare's jobs, under a name that no job's id can have.

    A kit of an earlier version has it without the underscore: it is moved.

    Args:
        root: The kit's folder.
        name: What is in it: ``account``, ``federations`` or ``work``.

    Raises:
        Refused: It is there under both names.
    """
    folder, former = root / f"_{name}", root / name
    if former.is_dir():
        if folder.exists():
            raise Refused(f"the kit has both {name} and {folder.name}: leave the right one, as {folder.name}")
        with suppress(FileNotFoundError):  # another job's process has moved it
            former.rename(folder)
    return folder


def isolate(root: Path, job_id: str, memory_gib: float | None) -> Path:
    """Isolate a job's process from other jobs and other users, and bound its memory.

    Nothing is imported from the folder in which the process was started, nor from inside the kit, where jobs are
    stored; files are accessible to their owner only; and the process works in a folder of its own.

    Args:
        root: The kit's folder.
        job_id: FLARE's id of the job.
        memory_gib: GiB that the process may use beyond what it has; None for what is free now.

    Returns:
        The working folder, which is empty and is deleted with the process.

    Raises:
        ValueError: The system cannot enforce the bound.
    """
    os.umask(0o077)
    sys.path[:] = [each for each in sys.path if not _is_open_to_jobs(each, root)]
    limit_memory(memory_gib)
    check_run_name(job_id)
    work = own_folder(root, "work") / job_id
    make_private(work.parent)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    return work


def _is_open_to_jobs(entry: str, root: Path) -> bool:
    """Whether an entry of the module search path is in the kit, or is the current folder without being named.

    Folders outside the kit that the owner names in PYTHONPATH remain.
    """
    path = Path(entry or ".").resolve()
    named = {Path(each).resolve() for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    return path.is_relative_to(root.resolve()) or (path == Path.cwd().resolve() and path not in named)


def limit_memory(gib: float | None) -> None:
    """Bound the memory of this process (Linux: ``RLIMIT_DATA``): exceeding it raises an error in the process.

    Args:
        gib: GiB beyond what the process has; None for what is free now, and for no bound on other systems.

    Raises:
        ValueError: This system cannot enforce the bound.
    """
    if not sys.platform.startswith("linux"):
        if gib is not None:
            raise ValueError("policy.max_memory_gib needs Linux: leave it out here")
        return
    import resource

    process = psutil.Process()
    free = psutil.virtual_memory().available if gib is None else int(min(gib, 2**32) * 2**30)
    most, hard = process.memory_info().data + free, resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def copy_files(source: Path, target: Path, *, within: Path) -> None:
    """Copy plain files and folders; links are left out.

    Args:
        source: The folder to copy.
        target: The folder to create.
        within: The folder that must contain the source.

    Raises:
        ValueError: It does not.
    """
    if not source.resolve().is_relative_to(within.resolve()) or source.is_symlink():
        raise ValueError(f"{source} is not in {within}: nothing is copied")
    for folder, _, names in os.walk(source, followlinks=False):
        here = Path(folder)
        (target / here.relative_to(source)).mkdir(parents=True, exist_ok=True)
        for name in names:
            if (here / name).is_file() and not (here / name).is_symlink():
                shutil.copyfile(here / name, target / here.relative_to(source) / name, follow_symlinks=False)
