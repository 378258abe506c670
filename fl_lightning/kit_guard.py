"""What the NVFlare processes of a kit refuse beyond NVFlare's own checks.

``fl-train provision`` names these components in ``local/resources.json`` of each kit, so that NVFlare builds them in
the main process and in the process of each job, before anything of a job is read:

- a job's id is a UUID, as the server makes it. Its folder is ``<kit>/<id>``, which is deleted before a job is deployed
  and when the server says so: a job named ``startup`` or ``local`` would take the keys or the policy with it;
- configurations are JSON. NVFlare also reads HOCON, which includes files, URLs and modules of Python, and YAML;
- an app consists of the files that :meth:`fl_lightning.remote.submit.Submission.write_job` writes, and its signatures;
- a job unpacks to a bounded size, which is checked before anything of it is unpacked;
- a site executes no shell commands for the server: NVFlare's ``cat`` prints any file of the machine.

This module is not in ``remote``, and imports nothing of it: the main processes train nothing and need no torch.
"""

import os
import re
import sys
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import zip_utils
from nvflare.fuel.utils.config import Config, ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils.app_deployer import AppDeployer

#: What the description of a job may say; the server itself adds its study.
META_KEYS = frozenset({"name", "min_clients", "mandatory_clients", "deploy_map", "resource_spec", "study"})
_SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
#: The files of an app.
APP_FILES = frozenset(
    {
        *_SIGNATURES,
        *(f"config/{name}" for name in ("config_fed_server.json", "config_fed_client.json", "job.json", *_SIGNATURES)),
    }
)
#: Bytes to which a job may unpack: its largest file, job.json, has at most 1 MiB.
MOST_UNPACKED = 1 << 24
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_run_dir_of_any = Workspace.get_run_dir
_check_entries_of_any = zip_utils._validate_zip_entries
_meta_of_any = JobMetaValidator._validate_zf


def check_job_id(job_id: Any) -> None:
    """Refuse the id of a job that is not a UUID as the server makes it, such as the name of a folder of the kit.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(job_id, str) or not _ID.fullmatch(job_id):
        raise ValueError(f"the id of the job is {job_id!r:.80}: leave job_id out of meta.json, the server chooses it")


def check_meta(meta: Any) -> None:
    """Refuse a job whose description says what fl_lightning's does not.

    Args:
        meta: The content of ``meta.json``.

    Raises:
        ValueError: It does, such as an id for the job.
    """
    unknown = sorted(map(str, set(meta) - META_KEYS)) if isinstance(meta, dict) else ["no settings"]
    if unknown:
        raise ValueError(f"the job's meta.json has {unknown[0]!r:.80}: submit jobs with fl-train submit")
    if meta.get("resource_spec"):
        raise ValueError("the job's meta.json has a resource_spec that is not empty: submit jobs with fl-train submit")


def check_files(names: Iterable[str]) -> None:
    """Refuse an app with files other than those of fl_lightning's jobs.

    Args:
        names: Its files, relative to the app's folder; names of folders end with a slash.

    Raises:
        ValueError: There is another file or folder.
    """
    if other := sorted(set(names) - APP_FILES - {"config/"}):
        raise ValueError(f"the job's app has {other[0]!r:.80}, which no job has here: submit jobs with fl-train submit")


def check_size(content: ZipFile) -> None:
    """Refuse a job that unpacks to more than jobs have: a few megabytes may unpack to what fills a disk.

    Args:
        content: Its archive, of which no more is unpacked than its directory declares.

    Raises:
        ValueError: It does.
    """
    size = sum(each.file_size for each in content.infolist())
    if size > MOST_UNPACKED:
        raise ValueError(
            f"the job unpacks to {size:,} bytes, of at most {MOST_UNPACKED:,}: submit jobs with fl-train submit"
        )


class JobGuard(FLComponent):  # type: ignore[misc]
    """Closes this process to jobs that are not fl_lightning's; the server's refuses them when they are submitted.

    Raises:
        RuntimeError: The folder in which the process was started is searched for modules.
    """

    def __init__(self) -> None:
        super().__init__()
        if not sys.flags.safe_path:
            raise RuntimeError("start a kit with its startup/start.sh, or set PYTHONSAFEPATH=1: jobs are stored in it")
        if "" in (search := os.environ.get("PYTHONPATH") or "none").split(os.pathsep):
            raise RuntimeError(f"PYTHONPATH is {search!r}: remove its empty entry, which is the current folder")
        close()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Block a submitted job that has a description of its own."""
        if event_type == EventType.SUBMIT_JOB:
            try:
                check_meta(fl_ctx.get_prop(FLContextKey.JOB_META))
            except ValueError as error:
                fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, str(error), private=True, sticky=False)


class JobDeployer(AppDeployer):  # type: ignore[misc]
    """Deploys an app at a site, after its id and the names of its files were checked."""

    def deploy(
        self, workspace: Workspace, job_id: str, job_meta: dict[str, Any], app_name: str, app_data: bytes, fl_ctx: Any
    ) -> str | None:
        """Deploy it; returns why it is refused, None if it is not."""
        try:
            check_job_id(job_id)
            with ZipFile(BytesIO(app_data)) as content:
                check_files(content.namelist())
        except (ValueError, BadZipFile) as error:
            return str(error)
        result: str | None = super().deploy(workspace, job_id, job_meta, app_name, app_data, fl_ctx)
        return result


class AppFiles(AppValidator):  # type: ignore[misc]
    """Checks the files of an app that the server has unpacked for itself."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Why the app is refused, empty if it is not; and nothing else that NVFlare should know of it."""
        names = []
        for folder, folders, files in os.walk(app_folder):
            here = Path(folder).relative_to(app_folder)
            names += [str(here / name) for name in files] + [f"{here / name}/" for name in folders]
        try:
            check_files(names)
        except ValueError as error:
            return str(error), {}
        return "", {}


class _JsonAlone(ConfigLoader):  # type: ignore[misc]
    """In place of the reader of another format."""

    def load_config(self, file_path: str) -> Config:
        raise ValueError(f"{Path(file_path).name} is not read here: write JSON, into a file whose name ends with .json")

    def load_config_from_str(self, config_str: str) -> Config:
        raise ValueError(f"{self.format.value} is not read here: write JSON, into a file whose name ends with .json")

    def load_config_from_dict(self, config_dict: dict[str, Any]) -> Config:
        return self.load_config_from_str("")


class _NoShell(ShellCommandProcessor):  # type: ignore[misc]
    """In place of what executes shell commands."""

    def process(self, req: Message, app_ctx: Any) -> Message:
        return error_reply("this site executes no shell commands")


def _run_dir(workspace: Workspace, job_id: str) -> str:
    """The folder of a job, in place of :meth:`Workspace.get_run_dir`, through which all of NVFlare finds it."""
    check_job_id(job_id)
    result: str = _run_dir_of_any(workspace, job_id)
    return result


def _check_entries(content: ZipFile, folder: str) -> None:
    """What is checked before an archive is unpacked, in place of what NVFlare checks."""
    check_size(content)
    _check_entries_of_any(content, folder)


def _meta(validator: JobMetaValidator, job_name: str, content: ZipFile) -> dict[str, Any]:
    """The description in a submitted archive, in place of :meth:`JobMetaValidator._validate_zf`."""
    check_size(content)
    result: dict[str, Any] = _meta_of_any(validator, job_name, content)
    return result


def close() -> None:
    """Close NVFlare in this process: JSON alone, folders of UUIDs alone, bounded archives, no shell commands."""
    for each in ConfigFormat:
        if each is not ConfigFormat.JSON:
            ConfigFactory._fmt2Loader[each] = _JsonAlone(each)
    Workspace.get_run_dir = _run_dir
    zip_utils._validate_zip_entries = _check_entries
    JobMetaValidator._validate_zf = _meta
    processors = ClientRequestProcessors.request_processors
    processors[:] = [_NoShell() if isinstance(each, ShellCommandProcessor) else each for each in processors]


def is_closed() -> bool:
    """Whether this process is closed; that of a job is not if its kit was made by an earlier version."""
    return Workspace.get_run_dir is _run_dir and sys.flags.safe_path
