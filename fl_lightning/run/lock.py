"""A lock that keeps a second process from writing to the folder of a run."""

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

from fl_lightning.files import writing


class RunLock:
    """A file ``run.lock`` in the run's folder that names host and process, locked as long as the process lives.

    The operating system releases the lock when the process ends, however it ends, so the lock of a killed process on
    this machine is taken over. Whether a process of another machine is still running is unknown, so its lock is
    respected.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.lock"
        self._lock = FileLock(self.path)
        self._is_held = False

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            ValueError: Another process has it, a process of another machine left it behind, or it is a link.
        """
        if self.path.is_symlink():
            raise ValueError(f"{self.path} is a link, which is not followed: delete it and try again")
        owner = self._owner()
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            owner = owner or {"pid": "another", "host": "this machine", "since": "just now"}
            raise ValueError(
                f"run {self.path.parent} is being written by process {owner['pid']} on {owner['host']} (since "
                f"{owner['since']}): wait until it has ended, or start a new run without --ckpt_path"
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
        with writing(self.path):
            self.path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))

    def release(self) -> None:
        """Release the lock, if this process has it; the file is deleted first, while nobody else can lock it."""
        if self._is_held:
            self.path.unlink(missing_ok=True)
            self._lock.release()
            self._is_held = False

    def _owner(self) -> dict[str, Any] | None:
        """The owner of the lock; None if it has not been written (yet)."""
        try:
            owner = json.loads(self.path.read_text())
        except (OSError, json.JSONDecodeError):
            return None
        return owner if isinstance(owner, dict) and {"host", "pid", "since"} <= owner.keys() else None


@contextmanager
def locked(fabric: Fabric, folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a run's folder; it is deleted if it stays empty. Collective.

    Raises:
        ValueError: Another process is writing to it.
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
            with suppress(OSError):  # usually it is not empty
                folder.rmdir()
