"""Leases: which process trains which run, in files that processes on any number of machines see."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_lightning.study.store import locked


@dataclass
class _Look:
    """When a lease was last renewed, as far as this process has seen.

    Attributes:
        renewed: Its time of renewal, by the clock of the file system.
        since: Since when it has been seen unchanged, by this process's clock.
        last: When it was last looked at.
    """

    renewed: int
    since: float
    last: float


class Leases(AbstractContextManager["Leases"]):
    """The runs that this process trains, and those that others do.

    A lease is a file ``<run>.<number>``, created exclusively, which is atomic on network file systems too, and renewed
    by its holder as long as it lives. One that was not renewed for ``silence_seconds`` of an observer's own clock, or
    whose process on this machine has ended, is replaced by that of the next number. A holder that was only stopped
    sees, before it records anything, that it has lost its lease.

    Args:
        folder: Their folder, which all processes share; it is created.
        silence_seconds: After how many seconds without renewal a holder is taken to be dead; those of a network file
            system's cache (60) must fit in.
    """

    def __init__(self, folder: Path, *, silence_seconds: float = 120.0) -> None:
        self.folder = folder
        self.silence_seconds = silence_seconds
        self._mine: dict[str, tuple[Path, str]] = {}
        self._looks: dict[Path, _Look] = {}
        self._is_over = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Leases":
        self._renewal.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._renewal.join()
        for run in list(self._mine):
            self.release(run)

    def claim(self, run: str, progress: Path) -> int | None:
        """Claim a run.

        Args:
            run: Its key.
            progress: File that changes as the run proceeds; it need not exist.

        Returns:
            How many holders in a row have died without a change of ``progress``; None if another holder is alive.
        """
        reached = progress.stat().st_mtime_ns if progress.exists() else 0
        with locked(self.folder / run):
            numbers = self._numbers(run)
            deaths = 0
            if numbers:
                last = self._path(run, max(numbers))
                owner = _read(last)
                if not self._is_dead(last, owner):
                    return None
                deaths = 1 + (owner.get("deaths", 0) if owner.get("reached") == reached else 0)
            path, token = self._path(run, max(numbers, default=0) + 1), secrets.token_hex(8)
            content = {**_here(), "token": token, "deaths": deaths, "reached": reached}
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            except FileExistsError:
                return None
            with os.fdopen(file, "w") as written:
                json.dump(content, written)
            self._mine[run] = path, token
            for number in numbers:
                self._path(run, number).unlink(missing_ok=True)
        return deaths

    @contextmanager
    def held(self, run: str) -> Iterator[bool]:
        """Keep others from claiming a run during the block; yields whether this process still has its lease."""
        with locked(self.folder / run):
            path, token = self._mine.get(run, (None, ""))
            yield path is not None and _read(path).get("token") == token

    def release(self, run: str) -> None:
        """Give a run back, whether or not this process still has its lease."""
        with self.held(run) as is_mine:
            if is_mine:
                self._mine[run][0].unlink(missing_ok=True)
            self._mine.pop(run, None)

    def _path(self, run: str, number: int) -> Path:
        return self.folder / f"{run}.{number}"

    def _numbers(self, run: str) -> list[int]:
        ends = (path.name.removeprefix(f"{run}.") for path in self.folder.glob(f"{run}.*"))
        return [int(end) for end in ends if end.isdigit()]

    def _is_dead(self, path: Path, owner: dict[str, Any]) -> bool:
        here = _here()
        if all(owner.get(name) == here[name] for name in ("host", "started", "processes")) and not _is_alive(
            owner.get("pid", 0)
        ):
            return True
        try:
            with path.open("rb") as file:  # opened, since a network file system then asks its server
                renewed = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:  # it was given back just now
            return False
        now = time.monotonic()
        look = self._looks.get(path)
        if look is None or look.renewed != renewed or now - look.last > self.silence_seconds / 2:
            look = self._looks[path] = _Look(renewed, now, now)  # this process may have been stopped itself
        look.last = now
        return now - look.since > self.silence_seconds

    def _renew(self) -> None:
        while not self._is_over.wait(min(10.0, self.silence_seconds / 10)):
            for path, _ in list(self._mine.values()):
                with contextlib.suppress(OSError):  # lost, or the file system does not respond: the next time counts
                    os.utime(path, follow_symlinks=False)


def _here() -> dict[str, Any]:
    """This process: its machine since it was started, among which processes it is seen, and its number there."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        processes = ""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # hosts may have one name
    except OSError:
        started = ""
    return {"host": socket.gethostname(), "started": started, "processes": processes, "pid": os.getpid()}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> dict[str, Any]:
    """The holder of a lease; empty if it has not been written (yet) or is gone."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
