"""A bound on the time that a client's code may take.

An alarm of the operating system (``SIGALRM``) ends it. Python handles a signal in the main thread, between two of its
own instructions: loops, sleeping, waiting for files, sockets and locks end at once; a single call of compiled code (a
product of huge matrices, a backward pass on a GPU, a wait inside a library) ends only when it returns.
"""

import signal
import threading
import time
from types import FrameType, TracebackType

#: Seconds after which the alarm rings again, for code that catches every exception.
_AGAIN_SECONDS = 1.0


class _TimeIsUp(BaseException):
    """Ends a client's code; an ``except Exception`` in it does not catch this."""


def check_time_limit() -> None:
    """Refuse a time limit that cannot be enforced.

    Raises:
        ValueError: The system has no alarms, or this is not the main thread.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "participation.time_limit_seconds needs the main thread of a system with SIGALRM: leave it null here"
        )


class within:
    """Bounds the time of a block; None for no bound. An alarm that was set before is restored afterward.

    The alarm interrupts only the block, never the arming and disarming around it: an exception out of those would
    leave the alarm ringing in unrelated code.

    Raises:
        TimeoutError: The block took longer.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        if self.seconds is not None:
            self.start = time.monotonic()
            self.handler = signal.signal(signal.SIGALRM, _ring)
            self.before = signal.setitimer(signal.ITIMER_REAL, max(self.seconds, 1e-6), _AGAIN_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.seconds is None:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.handler)
        left, again = self.before
        if left:
            passed = time.monotonic() - self.start
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, 1e-6), again)
        if kind is _TimeIsUp:
            raise TimeoutError("it took longer than participation.time_limit_seconds allows") from None


def _ring(number: int, frame: FrameType | None) -> None:
    """End the interrupted code, unless that is the arming or disarming itself; the alarm rings again."""
    while frame is not None:
        if frame.f_code in (within.__enter__.__code__, within.__exit__.__code__):
            return
        frame = frame.f_back
    raise _TimeIsUp
