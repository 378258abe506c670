"""The way to the sites over NVIDIA FLARE 2.9: a controller that is a channel, and an executor that is a site.

Installed by ``pip install 'fl-lightning[flare]'``. Certificates, connections, processes and logs are FLARE's; the
federation is ``trainer.fit`` in the server's job process, and a :class:`Site` in each client's.

Each client has a task of its own: data of a broadcast are copied once for all. A client that is known to be dead is not
asked. FLARE ends a job whose client's process dies, and takes no client back into a running one: ``fl-train submit``
sends the job again, which goes on from its last checkpoint. (``ClientAPIExecutor`` in ``attach`` mode with
``allow_reconnect`` was tried: it takes back a process beside the client's, whose task of the moment fails, and does
nothing for the client's own; docs/how-to/real-federation.md has what was seen.)
"""

import atexit
import gc
import json
import logging
import queue
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fl_lightning.remote.channel import read_answer
from fl_lightning.remote.federation import federate
from fl_lightning.remote.job import SITE_FILE, Parts, open_site
from fl_lightning.remote.message import Message
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.site import Site

_log = logging.getLogger(__name__)

TASK = "ask"
#: The run's configuration in a job, and what it came to in the job's result.
RUN_FILE, OUTCOME_FILE = "run.yaml", "outcome.json"
_CHECK_SECONDS = 0.05


# The interpreter would look through all of torch's objects, for a second and more, before a job's process ends.
atexit.register(gc.freeze)


class Aborted(RuntimeError):
    """FLARE has ended the job."""


class FlareChannel:
    """The clients of a FLARE job.

    Args:
        controller: Of the job.
        names: The clients', by index.
        timeout_seconds: In which a client must answer.
        abort_signal: Ends the job.

    Attributes:
        num_bytes: Of all messages down, and of all answers up.
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
        """A task for each client; answers as they come."""
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
                yield client, read_answer(wire)

    def _task(self, client: int, message: Message, arrived: "queue.Queue[tuple[int, bytes | None, str]]") -> Task:
        def on_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            code = result.get_return_code() if result is not None else "no result"
            wire = result.get("wire") if code == ReturnCode.OK else None
            arrived.put((client, wire, f"its site failed ({code})"))

        def on_end(task: Task, fl_ctx: FLContext) -> None:
            if task.completion_status != TaskCompletionStatus.OK:
                status = getattr(task.completion_status, "value", task.completion_status)
                arrived.put((client, None, f"its site did not answer ({status})"))

        data = Shareable()
        data["wire"] = message.wire
        timeout = self.timeout_seconds
        return Task(name=TASK, data=data, timeout=timeout, result_received_cb=on_result, task_done_cb=on_end)


class FederationController(Controller):  # type: ignore[misc]
    """Runs the federation in the server's job process.

    Args:
        sites: Names of the clients' sites, in the order of their clients.
        run_name: Name of the run, whose folder outlives the job.
        ckpt_path: Checkpoint to continue from: ``last``, or empty for none.
        timeout_seconds: In which a site must answer.
        num_outputs: Classes of the whole federation; 0 for as many as the sites have seen.
        secure: Secure aggregation.
        predict: Have each site write its predictions after the training.
    """

    def __init__(
        self,
        sites: list[str],
        run_name: str,
        ckpt_path: str = "",
        timeout_seconds: int = 600,
        num_outputs: int = 0,
        secure: bool = False,
        predict: bool = False,
    ) -> None:
        super().__init__(task_check_period=_CHECK_SECONDS)
        self.sites = sites
        self.run_name = run_name
        self.ckpt_path = ckpt_path
        self.timeout_seconds = timeout_seconds
        self.num_outputs = num_outputs
        self.secure = secure
        self.predict = predict

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer that came too late is dropped; the site rolls back by itself."""
        _log.info("%s answered too late", client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Train, and leave the run's folder in the job's result."""
        workspace, job_id = fl_ctx.get_engine().get_workspace(), fl_ctx.get_job_id()
        result = Path(workspace.get_run_dir(job_id))
        root = Path(workspace.get_root_dir()) / "federations"
        outcome: dict[str, Any] = {"status": "failed", "message": ""}
        started = time.time()
        channel = FlareChannel(self, self.sites, timeout_seconds=self.timeout_seconds, abort_signal=abort_signal)
        run_file = Path(workspace.get_app_config_dir(job_id)) / RUN_FILE
        try:
            outcome |= self._fit(run_file, root, channel)
        except Aborted as error:
            outcome["message"] = str(error)
        except (ValueError, SystemExit) as error:
            outcome |= {"status": "refused", "message": str(error)}
        except Exception as error:
            _log.exception("the federation failed")
            outcome["message"] = f"{type(error).__name__}: {error}"
            self.system_panic(outcome["message"], fl_ctx)
        outcome |= {"bytes": channel.num_bytes, "seconds": time.time() - started, "started": started}
        if (root / self.run_name).is_dir():
            shutil.copytree(root / self.run_name, result / "run", dirs_exist_ok=True)
        (result / OUTCOME_FILE).write_text(json.dumps(outcome, indent=1) + "\n")

    def _fit(self, run_file: Path, root: Path, channel: FlareChannel) -> dict[str, Any]:
        options = [f"--trainer.default_root_dir={root}", f"--trainer.run_name={self.run_name}"]
        parts = Parts(["--config", str(run_file), *options])
        data = federate(
            parts.trainer,
            channel,
            parts.strategy,
            num_outputs=self.num_outputs or None,
            relation_graph=parts.datamodule.relation_graph,
            seed=parts.datamodule.seed,
            secure=self.secure,
        )
        figures = parts.trainer.fit(
            parts.model,
            data,  # type: ignore[arg-type]
            parts.strategy,
            ckpt_path=self.ckpt_path or None,
        )
        if self.predict:
            parts.trainer.predict()
        return {"status": "finished", "folder": parts.trainer.run.folder.name, "result": figures}


class SiteExecutor(Executor):  # type: ignore[misc]
    """A site in the client's job process; its folder outlives the job.

    Args:
        run_name: Name of the run.
    """

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name
        self.site: Site | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answer a message."""
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        wire: bytes = shareable["wire"]
        reply = make_reply(ReturnCode.OK)
        try:
            if self.site is None:
                self.site = self._open(fl_ctx)
            reply["wire"] = self.site.answer(wire)
        except (Exception, SystemExit) as error:
            _log.exception("the site cannot be opened")
            why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}; see the site's log"
            reply["wire"] = Message(kind="failure", about={"to": Message.read(wire).name, "why": why}).wire
        return reply

    def _open(self, fl_ctx: FLContext) -> Site:
        workspace, job_id = fl_ctx.get_engine().get_workspace(), fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)
        root = Path(workspace.get_root_dir())
        return open_site(
            Path(workspace.get_app_config_dir(job_id)) / RUN_FILE,
            Path(workspace.get_site_config_dir()) / SITE_FILE,
            root / "federations" / self.run_name,
            fl_ctx.get_identity_name(),
        )
