"""A server and sites on one machine, only on its loopback address, for a trial."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_lightning.remote.job import SERVER_FILE, SITE_FILE
from fl_lightning.remote.kits import Processes, free_port, keep_together, provision, wait_until_connected
from fl_lightning.remote.names import check_folder_for_processes
from fl_lightning.yaml_input import dump_yaml

SERVER, ADMIN = "localhost", "lead@localhost.org"


class Trial:
    """Kits, processes and ports of a trial, of which only the files remain after the ``with`` block.

    Site k holds client k of the run's data.

    Args:
        folder: For kits, logs, and the files of server and sites; a folder that was used before is used again.
        num_sites: Number of sites.
        seconds: Time within which all sites must have connected.
    """

    def __init__(self, folder: Path, num_sites: int, *, seconds: float = 120.0) -> None:
        check_folder_for_processes(folder, "--folder")
        self.folder = folder
        self.sites = [f"site-{index + 1:0{len(str(num_sites))}d}" for index in range(num_sites)]
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
        note.write_text(json.dumps({"sites": self.sites, "kits": str(kits)}))
        return kits

    def give(self, data: Mapping[str, Any], custom_classes: Sequence[str] = (), **policy: Any) -> None:
        """Write the sites' and the server's own files, which all belong to whoever runs the trial.

        Args:
            data: Settings of the data, of which site k holds client k.
            custom_classes: Classes beyond the package's, which are found in the same way as in this process.
            policy: Settings of the sites' policies; by default one example is enough.
        """
        classes = {"classes": list(custom_classes)} if custom_classes else {}
        (self.kits / SERVER / "local" / SERVER_FILE).write_text(dump_yaml({"policy": classes}))
        for client, site in enumerate(self.sites):
            settings = {
                "client": client,
                "named_as": "data",
                "data": dict(data),
                "policy": {"min_examples": 1, **classes, **policy},
            }
            (self.kits / site / "local" / SITE_FILE).write_text(dump_yaml(settings))
        if custom_classes:
            self.processes.search = [os.getcwd()]

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
