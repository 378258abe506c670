"""Worker processes that stay alive, so that start-up is paid once, and may die without taking others with them."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

#: The libraries that compute take one thread each.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    task: Any = field(default=None)


class Pool(AbstractContextManager["Pool"]):
    """So many spawned processes of :func:`fl_lightning.study.worker.serve`.

    Args:
        processes: How many.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="fl-study-", ignore_cleanup_errors=True)
        self.scratch = Path(self._folder.name)
        self._workers: list[_Worker] = []

    @property
    def num_idle(self) -> int:
        """Workers that have nothing to do, those that have not begun yet among them."""
        return self.processes - self.num_busy

    @property
    def num_busy(self) -> int:
        """Workers that have a task."""
        return sum(worker.task is not None for worker in self._workers)

    def submit(self, task: Any, name: str, *arguments: Any) -> None:
        """Give a task to an idle worker.

        Args:
            task: What :meth:`finished` calls it.
            name: In :data:`fl_lightning.study.worker.TASKS`.
            arguments: Of it.
        """
        self._workers = [worker for worker in self._workers if worker.task is not None or worker.process.is_alive()]
        idle = [worker for worker in self._workers if worker.task is None]
        worker = idle[0] if idle else self._start()
        worker.task = task
        worker.connection.send((name, arguments))

    def finished(self) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Wait until a worker is done or dead; what it came to, None for one that died, with its task."""
        busy = [worker for worker in self._workers if worker.task is not None]
        ready = wait([each for worker in busy for each in (worker.connection, worker.process.sentinel)])
        for worker in busy:
            if worker.connection in ready or worker.process.sentinel in ready:
                task, worker.task = worker.task, None
                yield task, self._answer(worker)

    def map(self, tasks: Sequence[tuple[Any, str, tuple[Any, ...]]]) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Do all tasks, each a name for it, that in the worker's list and its arguments; in the order they end."""
        todo = list(tasks)[::-1]
        while todo or self.num_busy:
            while todo and self.num_idle:
                task, name, arguments = todo.pop()
                self.submit(task, name, *arguments)
            yield from self.finished()

    def _answer(self, worker: _Worker) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.connection.close()
            self._workers.remove(worker)
            return None
        return answer

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        with _environment():
            process = self._context.Process(target=_serve, args=(theirs, self.scratch), daemon=True)
            process.start()
        theirs.close()
        worker = _Worker(process=process, connection=ours)
        self._workers.append(worker)
        return worker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()  # cells are whole or not there: nothing is lost but what was being trained
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


def _serve(connection: Connection, scratch: Path) -> None:
    """Import what trains in the worker only."""
    from fl_lightning.study.worker import serve

    serve(connection, scratch)
