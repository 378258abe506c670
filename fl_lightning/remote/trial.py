"""A server and sites on one machine, on its loopback address alone, for a try-out."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_lightning.remote.job import SITE_FILE
from fl_lightning.remote.kits import Processes, free_port, keep_together, provision, wait_until_connected
from fl_lightning.yaml_input import dump_yaml

SERVER, ADMIN = "localhost", "lead@localhost.org"


class Trial:
    """Kits, processes and ports of a try-out, all of which are gone after the block but the files.

    Site k holds client k of the run's data.

    Args:
        folder: Of kits, logs, and what server and sites keep; one that was used before is gone on with.
        num_sites: Sites.
        seconds: In which all must have connected.
    """

    def __init__(self, folder: Path, num_sites: int, *, seconds: float = 120.0) -> None:
        self.folder = folder
        self.sites = [f"site-{place + 1:0{len(str(num_sites))}d}" for place in range(num_sites)]
        self.seconds = seconds
        self.kits = self._provision()
        self.processes = Processes(self.kits, SERVER)
        self.admin_kit = self.kits / ADMIN

    def _provision(self) -> Path:
        note = self.folder / "trial.json"
        if note.exists():
            known = json.loads(note.read_text())
            if known["sites"] != self.sites:
                raise ValueError(f"{self.folder} has {len(known['sites'])} sites: give another --folder, or delete it")
            return Path(known["kits"])
        kits = provision(
            self.folder,
            name="trial",
            sites=self.sites,
            server=SERVER,
            port=free_port(),
            admin=ADMIN,
            address="127.0.0.1",
        )
        keep_together(kits / SERVER)
        for client, site in enumerate(self.sites):
            settings = {"client": client, "policy": {"min_examples": 1}}
            (kits / site / "local" / SITE_FILE).write_text(dump_yaml(settings))
        note.write_text(json.dumps({"sites": self.sites, "kits": str(kits)}))
        return kits

    def __enter__(self) -> "Trial":
        self.processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.processes.__exit__(kind, error, traceback)

    def start(self) -> None:
        """Start the server, then the sites."""
        self.processes.start(SERVER)
        time.sleep(1.0)
        for site in self.sites:
            self.processes.start(site)

    def wait(self, session: Any) -> None:
        """Wait for the sites."""
        wait_until_connected(session, self.sites, self.processes, seconds=self.seconds)
