"""A bound on the time that a client's code may take.

An alarm of the operating system (``SIGALRM``) ends it. Python answers a signal in the main thread, between two of its
own steps: loops, sleeping, waiting for files, sockets and locks end at once; a single call of compiled code (a product
of huge matrices, a backward pass on a GPU, a wait inside a library) ends only when it returns.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

#: After so many seconds the alarm rings again, for code that takes any exception for one of its own.
_AGAIN_SECONDS = 1.0


class _TimeIsUp(BaseException):
    """Ends a client's code; no ``except Exception`` in it takes it for an error."""


def check_time_limit() -> None:
    """Refuse a time limit that nothing could keep.

    Raises:
        ValueError: The system has no alarms, or this is not the main thread.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "participation.time_limit_seconds needs the main thread of a system with SIGALRM: leave it null here"
        )


@contextlib.contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Bound the time of a block; None for no bound. An alarm that was set before is set again afterwards.

    Raises:
        TimeoutError: The block took longer.
    """
    if seconds is None:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    before, again = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), _AGAIN_SECONDS)

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:
            left = before - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), again)

    try:
        try:
            yield
        finally:
            disarm()
    except _TimeIsUp:
        if signal.getsignal(signal.SIGALRM) is ring:  # it rang just before it was disarmed
            disarm()
        raise TimeoutError("it took longer than participation.time_limit_seconds allows") from None
