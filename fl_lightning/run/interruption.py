"""Signals that end a run in an orderly way."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interruption:
    """A context in which SIGINT and SIGTERM end the run after the round, and a second signal ends it at once.

    Attributes:
        received: Number of the signal that was received; None for none.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Interruption":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        except ValueError:  # not in the main thread, which alone can handle signals
            self._previous = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep SIGINT and SIGTERM back during the block.

    Raises:
        KeyboardInterrupt: One of them arrived; the block was done.
    """
    with Interruption() as interruption:
        yield
    if interruption.received is not None:
        raise KeyboardInterrupt
