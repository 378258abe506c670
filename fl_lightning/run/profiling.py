"""Measures where the time of a round goes."""

import csv
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from torch.profiler import ProfilerActivity, profile, record_function

from fl_lightning.counts import count
from fl_lightning.files import whole_file
from fl_lightning.terminal import PlainTable

#: The parts of a round, in the order of the table.
PARTS = ("clients", "payloads", "server", "evaluation", "logging", "checkpoint")

#: Such as ``USDT:2026-01-31 12:00:00 17:17 SyncActivityProfilerHandler.cpp:52] profiler_start``.
_OWN_MESSAGE = re.compile(rb"(USDT|STAGE|INFO):\d{4}-\d\d-\d\d .*ActivityProfiler")


class RoundClock:
    """Adds up the seconds of each part of the rounds; parts do not overlap."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.total = 0.0
        self.num_rounds = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attribute the time spent in the context to a part, which also has this name in a trace."""
        start = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name] += time.perf_counter() - start

    def end_round(self, seconds: float) -> None:
        """Count a round."""
        self.total += seconds
        self.num_rounds += 1

    def rows(self) -> list[tuple[str, float, float]]:
        """Part, milliseconds per round and share of the round; time outside all parts is ``other``."""
        parts = {name: self.seconds.get(name, 0.0) for name in PARTS}
        parts["other"] = max(0.0, self.total - sum(parts.values()))
        rounds, total = max(1, self.num_rounds), max(self.total, 1e-9)
        return [(name, 1000 * seconds / rounds, seconds / total) for name, seconds in parts.items()]

    def table(self) -> PlainTable:
        """The rows for a terminal."""
        table = PlainTable(title=f"Where {count(self.num_rounds, 'round')} went", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("part", style="bold")
        table.add_column("ms a round", justify="right")
        table.add_column("share", justify="right")
        for name, milliseconds, share in self.rows():
            table.add_row(name, f"{milliseconds:.1f}", f"{share:.1%}")
        return table

    def to_csv(self, path: Path) -> None:
        """Write the rows."""
        with whole_file(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["part", "milliseconds_a_round", "share"])
            writer.writerows(self.rows())


class RoundTrace:
    """Records a few rounds with ``torch.profiler``, for chrome://tracing or Perfetto.

    Args:
        path: The file to write.
        first_round: Number of rounds to skip first, in this run.
        num_rounds: Rounds to record.
    """

    def __init__(self, path: Path, *, first_round: int = 1, num_rounds: int = 2) -> None:
        self.path = path
        self.first_round = first_round
        self.last_round = first_round + num_rounds - 1
        self.rounds = 0
        self.profiler: profile | None = None

    def start_round(self) -> None:
        """Begin the recording if it is due."""
        if self.rounds == self.first_round:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            with _without_own_messages():
                self.profiler.start()

    def end_round(self) -> None:
        """End the recording and write it if it is complete."""
        if self.profiler is not None and self.rounds == self.last_round:
            self.close()
        self.rounds += 1

    def close(self) -> None:
        """Write what was recorded."""
        if self.profiler is not None:
            with _without_own_messages():
                self.profiler.stop()
            with whole_file(self.path) as temporary:
                self.profiler.export_chrome_trace(str(temporary))
            self.profiler = None


@contextmanager
def _without_own_messages() -> Iterator[None]:
    """Keep the messages of the profiler's library about its own start and end off standard error."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        standard_error = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            said.seek(0)
            os.write(2, b"".join(line for line in said if not _OWN_MESSAGE.match(line)))
