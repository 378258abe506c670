"""Computing for a group of clients at once, and finding those that fail.

Shape legend: C clients of the group.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.executors.failure import failure_of
from fl_lightning.executors.time_limit import within
from fl_lightning.round.payload import pad_examples


class Together:
    """Computes for all clients that have not failed, at once or else one by one.

    Args:
        num_clients: C.
        time_limit: Seconds that each client may take; together they may take their sum. None for no bound.

    Attributes:
        failures: Why clients failed, by row.
    """

    def __init__(self, num_clients: int, time_limit: float | None) -> None:
        self.num_clients = num_clients
        self.failures: dict[int, str] = {}
        self.seconds_left = None if time_limit is None else [time_limit] * num_clients

    def compute(
        self, together: Callable[[], dict[Any, Any]], some: Callable[[Sequence[int]], dict[Any, Any]]
    ) -> Iterator[tuple[Sequence[int], dict[Any, Any]]]:
        """Rows and their results, recording those that fail.

        Args:
            together: Computes it for all rows.
            some: Computes it for the given rows.
        """
        rows = [row for row in range(self.num_clients) if row not in self.failures]
        if not rows:
            return
        try:
            with self._timed(rows):
                result = some(rows) if self.failures else together()
        except Exception:  # clients run users' code: find out which client it was
            pass
        else:
            yield rows, result
            return
        for row in rows:
            try:
                with self._timed([row]):
                    result = some([row])
            except Exception as error:  # it may raise anything
                self.failures[row] = failure_of(error)
            else:
                yield [row], result

    def joined(
        self,
        together: Callable[[], dict[Any, Tensor]],
        some: Callable[[Sequence[int]], dict[Any, Tensor]],
        batch: Batch,
        per_example: Collection[Any],
    ) -> dict[Any, Tensor]:
        """The results of :meth:`compute`, (C, ...); zero for clients that fail."""
        joined: dict[Any, Tensor] = {}
        num_clients, num_examples = batch.example_mask.shape[:2]
        for rows, result in self.compute(together, some):
            if len(rows) == num_clients:
                return result
            for name, tensor in result.items():
                part = pad_examples(tensor, num_examples) if name in per_example else tensor
                joined.setdefault(name, part.new_zeros(num_clients, *part.shape[1:]))[rows] = part
        return joined

    @contextlib.contextmanager
    def _timed(self, rows: Sequence[int]) -> Iterator[None]:
        """Bound the time of some clients by the sum of their remaining times, and subtract what was used."""
        if self.seconds_left is None:
            yield
            return
        start = time.monotonic()
        with within(sum(self.seconds_left[row] for row in rows)):
            yield
        for row in rows:
            self.seconds_left[row] -= (time.monotonic() - start) / len(rows)
