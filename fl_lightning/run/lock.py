"""Keeps a second process from writing a run that is being written."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.fabric import Fabric


class RunLock:
    """A file ``run.lock`` in the run's folder that names host and process, locked as long as the process lives.

    The operating system lets go of it when the process ends, however it ends, so what a killed process leaves on this
    machine is taken over. Another machine's processes cannot be asked whether they live: their lock is refused.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.lock"
        self._lock = FileLock(self.path)
        self._is_held = False

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ValueError: Another process has it, or a process of another machine had it and left it behind.
        """
        owner = self._owner()
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            owner = owner or {"pid": "another", "host": "this machine", "since": "just now"}
            raise ValueError(
                f"run {self.path.parent} is being written by process {owner['pid']} on {owner['host']} (since "
                f"{owner['since']}): wait until it has ended, or start a run of its own, without --ckpt_path"
            ) from None
        except OSError:  # a file system without locks
            pass
        if owner and owner["host"] != socket.gethostname():
            self._lock.release()
            raise ValueError(
                f"run {self.path.parent} was begun by process {owner['pid']} on {owner['host']} ({owner['since']}), "
                f"which cannot be seen from here: if it is no longer running, delete {self.path} and try again"
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._is_held = True
        self.path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))

    def release(self) -> None:
        """Let go of the lock, if it is held; the file goes before, while nobody else can have it."""
        if self._is_held:
            self.path.unlink(missing_ok=True)
            self._lock.release()
            self._is_held = False

    def _owner(self) -> dict[str, Any] | None:
        """Who wrote the lock; None where nobody did, or had the time to."""
        try:
            owner = json.loads(self.path.read_text())
        except (OSError, json.JSONDecodeError):
            return None
        return owner if isinstance(owner, dict) and {"host", "pid", "since"} <= owner.keys() else None


@contextmanager
def locked(fabric: Fabric, folder: Path) -> Iterator[None]:
    """Keep other processes from writing a run; a folder that nothing was written to goes again. Collective.

    Raises:
        ValueError: Another process is writing it.
    """
    lock, refusal = RunLock(folder), ""
    if fabric.is_global_zero:
        try:
            lock.acquire()
        except ValueError as error:
            refusal = str(error)
    if refusal := fabric.broadcast(refusal):
        raise ValueError(refusal)
    try:
        yield
    finally:
        if fabric.is_global_zero:
            lock.release()
            with suppress(OSError):  # it is not empty, as a rule
                folder.rmdir()
