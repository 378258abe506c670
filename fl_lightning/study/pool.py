"""Worker processes that are reused, so that start-up is paid once; one that dies does not affect the others."""

import math
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_lightning.study.runs import as_read

#: Computing libraries use one thread each.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    beat: Any  # time of its last sign of life, by a clock that all processes share
    task: Any = field(default=None)


class Pool(AbstractContextManager["Pool"]):
    """A number of spawned processes that run :func:`fl_lightning.study.worker.serve`.

    Args:
        processes: How many.
        silence_seconds: A process that has shown no sign of life for this long (it was stopped, or hangs in compiled
            code) is killed.
    """

    def __init__(self, processes: int, *, silence_seconds: float = 600.0) -> None:
        self.processes = processes
        self.silence_seconds = silence_seconds
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="fl-study-", ignore_cleanup_errors=True)
        self.scratch = Path(self._folder.name)
        self._workers: list[_Worker] = []

    @property
    def num_idle(self) -> int:
        """The number of idle workers, including those that have not started yet."""
        return self.processes - self.num_busy

    @property
    def num_busy(self) -> int:
        """The number of workers that have a task."""
        return sum(worker.task is not None for worker in self._workers)

    def submit(self, task: Any, name: str, *arguments: Any) -> None:
        """Give a task to an idle worker.

        Args:
            task: What :meth:`finished` calls it.
            name: In :data:`fl_lightning.study.worker.TASKS`.
            arguments: Of it; the first ones are those of a run.
        """
        given, *others = arguments
        self._workers = [worker for worker in self._workers if worker.task is not None or worker.process.is_alive()]
        idle = [worker for worker in self._workers if worker.task is None]
        worker = idle[0] if idle else self._start()
        worker.task = task
        worker.connection.send((name, (as_read(given, self.scratch), *others)))

    def finished(self, seconds: float = math.inf) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Wait until a worker is done or dead; yields its task and its result, which is None if it died.

        Args:
            seconds: Wait for no longer than this; those that are ready by then are there with 0, too.
        """
        busy = [worker for worker in self._workers if worker.task is not None]
        ready: list[Any] = []
        looked = time.monotonic()
        end, is_over = looked + max(seconds, 0.0), not busy
        while not ready and not is_over:
            step = min(5.0, self.silence_seconds / 4, max(end - looked, 0.0))
            ready = wait([each for worker in busy for each in (worker.connection, worker.process.sentinel)], step)
            now = time.monotonic()
            is_over = now >= end
            if step and now - looked > 3 * step:  # this process was stopped itself, maybe together with the others
                for worker in busy:
                    worker.beat.value = now
            looked = now
            for worker in busy:
                if now - worker.beat.value > self.silence_seconds:
                    worker.process.kill()  # works on a stopped process, too
        for worker in busy:
            if worker.connection in ready or worker.process.sentinel in ready:
                task, worker.task = worker.task, None
                yield task, self._answer(worker)

    def map(self, tasks: Sequence[tuple[Any, str, tuple[Any, ...]]]) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Do all tasks (a name, a verb of the worker, its arguments), in the order in which they end."""
        todo = list(tasks)[::-1]
        while todo or self.num_busy:
            while todo and self.num_idle:
                task, name, arguments = todo.pop()
                self.submit(task, name, *arguments)
            yield from self.finished()

    def _answer(self, worker: _Worker) -> dict[str, Any] | None:
        try:
            response: dict[str, Any] = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.connection.close()
            self._workers.remove(worker)
            return None
        return response

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        beat = self._context.Value("d", time.monotonic(), lock=False)
        with _environment():
            process = self._context.Process(target=_serve, args=(theirs, self.scratch, beat), daemon=True)
            process.start()
        theirs.close()
        worker = _Worker(process=process, connection=ours, beat=beat)
        self._workers.append(worker)
        return worker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()  # runs are stored as a whole or not at all: only those in progress are lost
        for worker in self._workers:
            worker.process.join()
        self._folder.cleanup()


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, scratch: Path, beat: Any) -> None:
    """Import training code only in the worker."""
    threading.Thread(target=_live, args=(beat,), daemon=True).start()
    from fl_lightning.study.worker import serve

    serve(connection, scratch)


def _live(beat: Any) -> None:
    """Give a sign of life as long as this process runs."""
    while True:
        beat.value = time.monotonic()
        time.sleep(1.0)
