"""Runs ``fl-train`` in forks of a process that has imported everything: ``python worker.py`` updates jobs on stdin.

A job is a line of JSON: ``arguments``, the ``folder`` to work in, and ``kill_after``, seconds until SIGKILL or null.
The update is a line: the exit ``code`` (negative for a signal) and ``seconds``; standard error is in ``said.txt``.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


class Worker:
    """The other end: starts the process and hands it jobs. Leaving it ends the process and all its forks."""

    def __enter__(self) -> "Worker":
        variables = {"OMP_NUM_THREADS": "1", "JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def start(self, arguments: Sequence[str], folder: Path, *, kill_after: float | None = None) -> None:
        """Hand over a job."""
        folder.mkdir(parents=True, exist_ok=True)
        assert self.process.stdin is not None
        job = {"arguments": list(arguments), "folder": str(folder), "kill_after": kill_after}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        """The update to the job."""
        assert self.process.stdout is not None
        response: dict[str, Any] = json.loads(self.process.stdout.readline())
        return response

    def run(self, arguments: Sequence[str], folder: Path, *, kill_after: float | None = None) -> dict[str, Any]:
        """Hand over a job and wait for the update."""
        self.start(arguments, folder, kill_after=kill_after)
        return self.wait()


def serve() -> None:
    """Update jobs until standard input ends."""
    import resource

    import torch
    from limits import MEMORY_BYTES

    from fl_lightning.cli import main

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        job, start = json.loads(line), time.monotonic()
        child = os.fork()
        if not child:
            _work(main, job["arguments"], Path(job["folder"]))
        ended = os.pidfd_open(child)
        if job["kill_after"] is not None and not select.select([ended], [], [], job["kill_after"])[0]:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(ended)
        response = {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - start}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


def _work(main: Any, arguments: Sequence[str], folder: Path) -> None:
    """Run a command in a fork, and end it."""
    os.chdir(folder)
    os.environ["FL_CACHE_DIR"] = str(folder / "cache")
    os.environ.pop("FL_DATA_ROOT", None)
    for number, name in ((0, "/dev/null"), (1, "/dev/null"), (2, "said.txt")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    code = 1
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
