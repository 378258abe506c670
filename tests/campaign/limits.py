"""Bounds on what a test may take."""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from types import FrameType

MEMORY_BYTES = 8 * 2**30


class OutOfTime(BaseException):
    """The time is up; no ``except Exception`` takes it for an error."""


@contextlib.contextmanager
def limited(seconds: float, memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Bound time and address space; only in the main thread.

    Raises:
        OutOfTime: It took longer.
    """
    assert threading.current_thread() is threading.main_thread()

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
