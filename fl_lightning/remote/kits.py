"""Startup kits with certificates, made by NVIDIA FLARE's provisioning, and the processes that are started from them."""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from nvflare.fuel.flare_api.api_spec import NoConnection
from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from fl_lightning.remote.job import SERVER_FILE, SITE_FILE, make_private
from fl_lightning.remote.names import check_admin_name, check_run_name, check_server_name, check_site_name

#: The only class that a kit lets a job use. FLARE's own list has some that read and write files named by a job.
SERVER_CLASS, SITE_CLASS = "fl_lightning.remote.flare.FederationController", "fl_lightning.remote.flare.SiteExecutor"
#: What closes a kit's processes to all other jobs: see ``kit_guard.py``.
_GUARD = "fl_lightning.kit_guard"
#: Python's search for modules in NVFlare's start script, whose empty last entry is the current folder; and ours.
_SEARCH, _SAFE_SEARCH = "export PYTHONPATH=/local/custom:$PYTHONPATH\n", "export PYTHONSAFEPATH=1\n"
#: What the submitter may do: FLARE's own list also includes reading logs and sending code.
_RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "lead": {"submit_job": "any", "manage_job": "n:submitter", "download_job": "n:submitter", "view": "any"}
    },
}
_ORGANIZATION = "federation"
_BUILDERS: list[dict[str, Any]] = [
    {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
    {
        "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
        "args": {"config_folder": "config", "require_signed_jobs": True},
    },
    {"path": "nvflare.lighter.impl.cert.CertBuilder"},
    {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
]
_SITE_TEMPLATE = """# What this site is, and what it refuses. (See fl_lightning/remote/job.py for all settings.)
# own: [features, outputs]   # if they mean something else here than at other sites
# client: 0
# data:
#   source: {class_path: FileSource, init_args: {path: /data/graph.pt}}
#   partitioner: {class_path: RandomPartitioner, init_args: {num_clients: 1}}
#   splitter: {class_path: ClientSplit}
# policy:
#   strategies: [FedAvg, FedPer]
#   min_examples: 5
#   local: ["head.*"]          # never leaves, whatever a job declares personal
#   max_evaluations_per_round: 8
#   max_memory_gib: 8
"""
_SERVER_TEMPLATE = """# What this server accepts. (See JobPolicy in fl_lightning/remote/policy.py for all settings.)
# policy:
#   strategies: [FedAvg, FedPer]
#   classes: [my_package.MyStrategy]   # installed here
#   max_memory_gib: 8
# accelerator: cpu
"""
#: Where the authority's private key is, below the federation's folder.
CA_FILE = Path("state") / "cert.json"


def provision(
    folder: Path, *, name: str, sites: Sequence[str], server: str, port: int, admin: str, address: str | None = None
) -> Path:
    """Make a kit for the server, for each site and for the submitter of runs.

    All folders and keys are accessible to their owner only, from the moment they are created.

    Args:
        folder: Where to create them.
        name: Name of the federation, the same for all of its kits.
        sites: Names of the sites.
        server: Host name of the server, for which its certificate is issued.
        port: Port of the server.
        admin: Name of the submitter, like an e-mail address.
        address: Address of the server, if it is not found under its name.

    Returns:
        The folder of the kits, each under its participant's name.

    Raises:
        ValueError: A name is not allowed, or there are kits whose authority's private key is missing; nothing is
            written.
    """
    check_names(name, sites, server, admin)
    made = sorted((folder / name).glob("prod_*"))
    if made and not (folder / name / CA_FILE).exists():
        raise ValueError(
            f"{made[0]} has kits, but {folder / name / CA_FILE}, the private key of their authority, is missing: bring "
            "the folder state back to add participants, or choose another folder for a federation of its own"
        )
    people: list[dict[str, Any]] = [{"name": admin, "type": "admin", "org": _ORGANIZATION, "role": "lead"}]
    where = {} if address is None else {"default_host": address, "host_names": [address]}
    project = {
        "api_version": 3,
        "name": name,
        "description": name,
        "gen_scripts": True,
        "participants": [
            {"name": server, "type": "server", "org": _ORGANIZATION, "fed_learn_port": port, **where},
            *({"name": site, "type": "client", "org": _ORGANIZATION} for site in sites),
            *people,
        ],
        "builders": _BUILDERS,
    }
    before = os.umask(0o077)
    try:
        make_private(folder.absolute())
        if (key := folder / name / CA_FILE).exists():
            key.chmod(0o600)  # created by a version that left it open; it is overwritten in place
        result = Provisioner(str(folder.absolute()), prepare_builders(project)).provision(prepare_project(project))
        if result.get("build_error"):
            raise ValueError(f"nvflare provision failed for {name}, {server}, {', '.join(sites)}")
        kits = Path(result.get_result_location())
        _allow(kits / server, SERVER_CLASS)
        (kits / server / "local" / SERVER_FILE).write_text(_SERVER_TEMPLATE)
        for site in sites:
            _allow(kits / site, SITE_CLASS)
            (kits / site / "local" / SITE_FILE).write_text(_SITE_TEMPLATE)
    finally:
        os.umask(before)
    return kits


def check_names(name: str, sites: Sequence[str], server: str, admin: str) -> None:
    """Refuse names that NVFlare would truncate, split or confuse with others.

    Raises:
        ValueError: There is such a name.
    """
    check_run_name(name, "name")
    check_server_name(server, "server")
    check_admin_name(admin, "admin")
    for site in sites:
        check_site_name(site, "sites")
    seen: set[str] = {"server"}  # what FLARE calls every server
    for each in (*sites, server, admin):
        if each.casefold() in seen:
            raise ValueError(f"{each!r} is the name of two participants, or FLARE's own for the server: rename one")
        seen.add(each.casefold())


def _allow(kit: Path, own_class: str) -> None:
    """Allow only our jobs in a kit, import nothing from it, and keep its logs there: FLARE sends them to the server.

    A server waits a minute for a busy site to take a job, instead of 10 seconds.
    """
    settings = json.loads((kit / "local" / "resources.json.default").read_text())
    settings["class_allow_list"] = [own_class]
    settings["components"].append({"id": "job_guard", "path": f"{_GUARD}.JobGuard", "args": {}})
    if "servers" in settings:
        settings["servers"][0]["admin_timeout"] = 60.0
        settings["app_validator"] = {"path": f"{_GUARD}.AppFiles", "args": {}}
    else:
        settings["allow_log_streaming"] = False
        settings["components"].append({"id": "app_deployer", "path": f"{_GUARD}.JobDeployer", "args": {}})
    (kit / "local" / "resources.json").write_text(json.dumps(settings, indent=2) + "\n")
    (kit / "local" / "authorization.json").write_text(json.dumps(_RIGHTS, indent=2) + "\n")
    script = kit / "startup" / "sub_start.sh"
    if _SEARCH not in (text := script.read_text()):
        raise ValueError(f"{script} has no line {_SEARCH.strip()!r}: install the version of nvflare of constraints.txt")
    script.write_text(text.replace(_SEARCH, _SAFE_SEARCH))


def keep_together(kit: Path) -> None:
    """Keep a server's jobs in its kit's folder instead of a folder that all servers on the machine share."""
    path = kit / "local" / "resources.json"
    settings = json.loads(path.read_text())
    text = json.dumps(settings).replace("/tmp/nvflare", str(kit.absolute() / "storage"))
    path.write_text(json.dumps(json.loads(text), indent=2) + "\n")


def free_port() -> int:
    """A free port of this machine, below the ephemeral ones.

    Raises:
        OSError: There is none.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free on 127.0.0.1")


class Processes:
    """A server and sites on this machine, which end with the ``with`` block and with this process.

    Args:
        kits: Their kits.
        server: The server's name.

    Attributes:
        running: The processes, by name.
        search: Further folders in which the processes look for modules.
    """

    def __init__(self, kits: Path, server: str) -> None:
        self.kits = kits
        self.server = server
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.search: Sequence[str] = ()

    def __enter__(self) -> "Processes":
        _adopt_orphans(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        _adopt_orphans(False)

    def start(self, name: str) -> None:
        """Start a participant, which logs to ``process.log`` in its kit."""
        kit = self.kits / name
        role, module = ("server", "server.server_train") if name == self.server else ("client", "client.client_train")
        uid = [] if name == self.server else [f"uid={name}"]
        command = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}", "-m", str(kit.absolute())]
        command += ["-s", f"fed_{role}.json", "--set", "secure_train=true", *uid]
        command += [f"org={_ORGANIZATION}", "config_folder=config"]
        search = os.pathsep.join(filter(None, [*self.search, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(kit / "process.log", flags, 0o600), "ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
                umask=0o077,
                env={**os.environ, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": search} if search else {})},
            )

    def of_job(self, name: str) -> list[psutil.Process]:
        """The processes that a participant started for jobs."""
        result: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            result = psutil.Process(self.running[name].pid).children(recursive=True)
        return result

    def check(self) -> None:
        """Raise an error if a participant has ended.

        Raises:
            RuntimeError: One has ended.
        """
        for name, process in self.running.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended with code {process.returncode}: {self.last_lines(name)}")

    def last_lines(self, name: str) -> str:
        """The last lines of a participant's error log, or of its whole log, and where they are."""
        kit = self.kits / name
        logs = sorted([*kit.glob("*/error_log.txt"), *kit.glob("error_log.txt")], key=lambda log: log.stat().st_mtime)
        for log in (*reversed(logs), kit / "process.log"):
            lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            if lines:
                return f"{' | '.join(line.strip() for line in lines[-3:])} ({log})"
        return f"it has logged nothing ({kit})"

    def last_words(self) -> str:
        """The last error lines of each participant that has logged errors, for the end of a message."""
        names = [name for name in self.running if any((self.kits / name).glob("*/error_log.txt"))]
        summary = [(name, self.last_lines(name)) for name in names]
        return "".join(f"; {name} logged: {lines}" for name, lines in summary if "error_log" in lines)

    def stop(self) -> None:
        """End all participants and all processes that they started."""
        processes = [process for name in self.running for process in self.of_job(name)]
        for process in processes + [psutil.Process(p.pid) for p in self.running.values() if p.poll() is None]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for popen in self.running.values():
            popen.wait()
        _, alive = psutil.wait_procs(processes, timeout=10)
        for name in self.running:  # those that were started in the meantime; this process has adopted them
            alive += [each for each in psutil.Process().children(recursive=True) if _is_of(each, self.kits / name)]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)
        self.running.clear()


def _is_of(process: psutil.Process, kit: Path) -> bool:
    with suppress(psutil.NoSuchProcess):
        return str(kit.absolute()) in process.cmdline()
    return False


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _die_with_parent() -> None:
    """In a new process: exit when its parent does (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _adopt_orphans(adopt: bool) -> None:
    """Adopt processes whose parents die, so that they can be found (Linux), or stop doing so."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def wait_until_connected(session: Any, sites: Sequence[str], processes: Processes, *, seconds: float) -> None:
    """Wait until all sites are connected.

    Raises:
        TimeoutError: Some did not connect in time.
    """
    deadline = time.monotonic() + seconds
    missing = set(sites)
    while missing:
        processes.check()
        with suppress(NoConnection):
            missing = set(sites) - {client.name for client in session.get_connected_client_list()}
        if missing and time.monotonic() > deadline:
            lines = "; ".join(f"{name} logged: {processes.last_lines(name)}" for name in sorted(missing))
            raise TimeoutError(f"sites did not connect within {seconds:g} seconds: {lines}")
        if missing:
            time.sleep(0.2)
