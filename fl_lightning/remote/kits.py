"""Startup kits with certificates, made by NVIDIA FLARE's provisioning, and the processes that are started from them."""

import ctypes
import json
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

from fl_lightning.remote.job import SITE_FILE

#: The classes that a kit lets a job of ours use, beside FLARE's own.
CLASSES = ["fl_lightning.remote.flare.FederationController", "fl_lightning.remote.flare.SiteExecutor"]
#: What who submits runs may do at a site: FLARE's own list has looking into its logs and bringing code too.
_SITE_RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "lead": {"submit_job": "any", "manage_job": "n:submitter", "download_job": "n:submitter", "view": "any"}
    },
}
_ORGANISATION = "federation"
_BUILDERS: list[dict[str, Any]] = [
    {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
    {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
    {"path": "nvflare.lighter.impl.cert.CertBuilder"},
    {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
]
_SITE_TEMPLATE = """# What this site is, and what it refuses. (fl_lightning/remote/job.py tells all of it.)
# client: 0
# data:
#   source: {class_path: FileSource, init_args: {path: /data/graph.pt}}
#   partitioner: {class_path: RandomPartitioner, init_args: {num_clients: 1}}
#   splitter: {class_path: ClientSplit}
# policy:
#   strategies: [FedAvg, FedPer]
#   min_examples: 5
"""


def provision(
    folder: Path, *, name: str, sites: Sequence[str], server: str, port: int, admin: str, address: str | None = None
) -> Path:
    """Make a kit for the server, for each site and for who submits runs.

    Args:
        folder: Where to.
        name: Of the federation, once for all of its kits.
        sites: Names of the sites.
        server: Host name of the server, which its certificate is made out for.
        port: Of the server.
        admin: Name of who submits runs, like an e-mail address.
        address: Where the server is found, if not under its name.

    Returns:
        The folder of the kits, each under its participant's name.

    Raises:
        ValueError: A name will not do.
    """
    people: list[dict[str, Any]] = [{"name": admin, "type": "admin", "org": _ORGANISATION, "role": "lead"}]
    where = {} if address is None else {"default_host": address, "host_names": [address]}
    project = {
        "api_version": 3,
        "name": name,
        "description": name,
        "gen_scripts": True,
        "participants": [
            {"name": server, "type": "server", "org": _ORGANISATION, "fed_learn_port": port, **where},
            *({"name": site, "type": "client", "org": _ORGANISATION} for site in sites),
            *people,
        ],
        "builders": _BUILDERS,
    }
    found = Provisioner(str(folder.absolute()), prepare_builders(project)).provision(prepare_project(project))
    if found.get("build_error"):
        raise ValueError(f"nvflare provision failed for {name}, {server}, {', '.join(sites)}")
    kits = Path(found.get_result_location())
    _allow(kits / server)
    for site in sites:
        _allow(kits / site)
        (kits / site / "local" / "authorization.json").write_text(json.dumps(_SITE_RIGHTS, indent=2) + "\n")
        (kits / site / "local" / SITE_FILE).write_text(_SITE_TEMPLATE)
    return kits


def _allow(kit: Path) -> None:
    """Let the kit's owner run our jobs, and keep its logs: FLARE would send them to the server.

    A server waits a minute for a busy site to take a job, instead of 10 seconds.
    """
    settings = json.loads((kit / "local" / "resources.json.default").read_text())
    settings["class_allow_list"] = [*settings["class_allow_list"], *CLASSES]  # no other class is let in
    if "servers" in settings:
        settings["servers"][0]["admin_timeout"] = 60.0
    else:
        settings["allow_log_streaming"] = False
    (kit / "local" / "resources.json").write_text(json.dumps(settings, indent=2) + "\n")


def keep_together(kit: Path) -> None:
    """Keep a server's jobs in its kit's folder instead of in one that all servers of the machine share."""
    path = kit / "local" / "resources.json"
    settings = json.loads(path.read_text())
    text = json.dumps(settings).replace("/tmp/nvflare", str(kit.absolute() / "storage"))
    path.write_text(json.dumps(json.loads(text), indent=2) + "\n")


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that connections are given by themselves.

    Raises:
        OSError: There is none.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free on 127.0.0.1")


class Processes:
    """A server and sites on this machine, which end with the block, and with this process.

    Args:
        kits: Their kits.
        server: The server's name.
    """

    def __init__(self, kits: Path, server: str) -> None:
        self.kits = kits
        self.server = server
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        _adopt_orphans(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        _adopt_orphans(False)

    def start(self, name: str) -> None:
        """Start a participant; what it says goes to ``process.log`` in its kit."""
        kit = self.kits / name
        role, module = ("server", "server.server_train") if name == self.server else ("client", "client.client_train")
        uid = [] if name == self.server else [f"uid={name}"]
        command = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}", "-m", str(kit.absolute())]
        command += ["-s", f"fed_{role}.json", "--set", "secure_train=true", *uid]
        command += [f"org={_ORGANISATION}", "config_folder=config"]
        with (kit / "process.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
            )

    def of_job(self, name: str) -> list[psutil.Process]:
        """The processes that a participant has started for jobs."""
        found: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.running[name].pid).children(recursive=True)
        return found

    def check(self) -> None:
        """Notice a participant that has ended.

        Raises:
            RuntimeError: One has.
        """
        for name, process in self.running.items():
            if process.poll() is not None:
                log = self.kits / name / "process.log"
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise RuntimeError(f"{name} has ended with code {process.returncode}: {' | '.join(last)} ({log})")

    def stop(self) -> None:
        """End all participants, the sites first, and all that they have started."""
        own = [process for name in self.running for process in self.of_job(name)]
        for process in own + [psutil.Process(p.pid) for p in self.running.values() if p.poll() is None]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for popen in self.running.values():
            popen.wait()
        _, alive = psutil.wait_procs(own, timeout=10)
        for name in self.running:  # those that were started meanwhile; they are ours since their parents died
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
    """In a new process: end when the one that started it does (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _adopt_orphans(adopt: bool) -> None:
    """Become the parent of processes whose own parents die, so that they are found (Linux), or be it no more."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def wait_until_connected(session: Any, sites: Sequence[str], processes: Processes, *, seconds: float) -> None:
    """Wait for all sites.

    Raises:
        TimeoutError: Some did not come.
    """
    deadline = time.monotonic() + seconds
    missing = set(sites)
    while missing:
        processes.check()
        with suppress(NoConnection):
            missing = set(sites) - {client.name for client in session.get_connected_client_list()}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"sites did not connect within {seconds:g} seconds: {', '.join(sorted(missing))}")
        if missing:
            time.sleep(0.2)
