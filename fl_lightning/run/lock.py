"""Keeps a second process from writing a run that is being written."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

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
        self._file: TextIO | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ValueError: Another process has it, or a process of another machine had it and left it behind.
        """
        file = self._open()
        owner = _read(file)
        if owner and owner["host"] != socket.gethostname():
            file.close()
            raise ValueError(
                f"run {self.path.parent} was begun by process {owner['pid']} on {owner['host']} ({owner['since']}), "
                f"which cannot be seen from here: if it is no longer running, delete {self.path} and try again"
            )
        file.seek(0)
        file.truncate()
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, file)
        file.flush()
        self._file = file

    def _open(self) -> TextIO:
        """The file, locked."""
        while True:
            file = self.path.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_ino == os.stat(self.path).st_ino:
                    return file
            except BlockingIOError:
                owner = _read(file) or {"pid": "another", "host": "this machine", "since": "just now"}
                file.close()
                raise ValueError(
                    f"run {self.path.parent} is being written by process {owner['pid']} on {owner['host']} (since "
                    f"{owner['since']}): wait until it has ended, or start a run of its own, without --ckpt_path"
                ) from None
            except FileNotFoundError:
                pass
            except OSError:  # a file system without locks
                return file
            file.close()  # it was deleted between opening and locking: its owner has just ended

    def release(self) -> None:
        """Let go of the lock, if it is held."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def _read(file: TextIO) -> dict[str, Any] | None:
    """Who wrote the lock; None where nobody had the time to."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except json.JSONDecodeError:
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
