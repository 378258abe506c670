"""CPU time of a round of a study's methods as a multiple of the first one's, in every case.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/study_speed.py studies/twin.yaml \
        --methods FedAvg SCAFFOLD FedOpt Ditto FedPer TwinScaffold

Two runs, of the first method and of another one, take turns: one round of one, then one round of the other, each in a
process of its own with one thread, so that both see the same load of the machine. A round counts from its start to the
start of the next one, with evaluation, metrics and callbacks. Ten rounds are a block, in which every case evaluates;
the figure is the median of the blocks' ratios, after a first block that does not count. Writes
benchmarks/results/study_speed.csv (what is there of other pairs is kept) and study_speed.md, with each method's median
and largest ratio over the cases.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch
from methods import RESULTS, read, write

from fl_lightning import Callback
from fl_lightning.cli import FederatedCLI
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.study.definition import Study
from fl_lightning.study.runs import make_run

FIELDS = ("study", "method", "case", "ratio", "least", "largest", "seconds", "blocks")
BLOCK = 10
Turns = tuple[Semaphore, Semaphore]


class Turn(Callback):
    """Waits for its turn before each round, and keeps the CPU time from one start to the next."""

    turns: Turns
    seconds: list[float]

    def on_round_start(self, trainer: Any) -> None:
        """Give the turn to the other run, and wait for it."""
        if hasattr(self, "start"):
            self.seconds.append(time.process_time() - self.start)
        mine, others = self.turns
        others.release()
        mine.acquire()
        self.start = time.process_time()


def train(arguments: Sequence[str], turns: Turns, result: Any) -> None:
    """Train once, in turns with another run, and send the CPU seconds of its rounds."""
    Turn.turns, Turn.seconds = turns, []
    turns[0].acquire()
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"--trainer.default_root_dir={folder}", "--trainer.logger=false"]
        FederatedCLI([*arguments, *quiet, "--trainer.callbacks+=__main__.Turn"])
    turns[1].release()
    result.send(Turn.seconds)


def in_turns(pair: Sequence[Sequence[str]]) -> list[list[float]]:
    """The CPU seconds of the rounds of two runs that take turns."""
    context = multiprocessing.get_context("fork")
    first, second = context.Semaphore(1), context.Semaphore(0)
    ends = [context.Pipe(duplex=False) for _ in pair]
    processes = [
        context.Process(target=train, args=(arguments, turns, sent), daemon=True)
        for arguments, turns, (_, sent) in zip(pair, ((first, second), (second, first)), ends, strict=True)
    ]
    for process, (_, sent) in zip(processes, ends, strict=True):
        process.start()
        sent.close()  # so that a run that fails ends this one
    seconds = [received.recv() for received, _ in ends]
    for process in processes:
        process.join()
    return seconds


def measure(study: Study, name: str, case: str, methods: tuple[str, str], blocks: int) -> dict[str, str]:
    """The ratio of a method's rounds to those of the first."""
    length = (1 + blocks) * BLOCK + 1
    runs = [make_run(study, m, case, study.seeds[0], ("", {}), "report", length) for m in methods]
    plain, other = in_turns([run.arguments for run in runs])
    starts = range(BLOCK, length - 1, BLOCK)
    sums = [(sum(plain[start : start + BLOCK]), sum(other[start : start + BLOCK])) for start in starts]
    ratios = [mine / its for its, mine in sums]
    seconds = statistics.median(mine for _, mine in sums) / BLOCK
    values = [statistics.median(ratios), min(ratios), max(ratios)]
    shown = (name, methods[1], case, *(f"{value:.2f}" for value in values), f"{seconds:.4f}", str(blocks))
    return dict(zip(FIELDS, shown, strict=True))


def table(rows: Sequence[dict[str, str]], cases: Sequence[str]) -> str:
    """A line for each method: its ratio in every case, and their median and largest."""
    lines = ["| method | " + " | ".join(cases) + " | median | largest |", "|" + "---|" * (len(cases) + 3)]
    for method in dict.fromkeys(row["method"] for row in rows):
        ratios = {row["case"]: float(row["ratio"]) for row in rows if row["method"] == method}
        ends = [statistics.median(ratios.values()), max(ratios.values())]
        shown = [f"{ratios[case]:.2f}" if case in ratios else "" for case in cases]
        lines.append(f"| {method} | " + " | ".join([*shown, *(f"{end:.2f}" for end in ends)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what was asked for and rewrite file and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--methods", nargs="+", required=True, help="the first is what the others are compared with")
    parser.add_argument("--cases", nargs="*", help="default: all")
    parser.add_argument("--blocks", type=int, default=5, help="of ten rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as the command line does
    study, path, name = Study(options.study), RESULTS / "study_speed.csv", options.study.stem
    first, *others = options.methods
    for case in options.cases or study.cases:
        for method in others:
            if case not in study.cases_of(method):
                continue
            row = measure(study, name, case, (first, method), options.blocks)
            rows = read(path, FIELDS[:3])
            rows[tuple(row[field] for field in FIELDS[:3])] = row
            write(path, rows, FIELDS)
            print(", ".join(row.values()), file=sys.stderr)
            mine = [each for key, each in sorted(rows.items()) if key[0] == name]
            path.with_suffix(".md").write_text(table(mine, list(study.cases)))


if __name__ == "__main__":
    main()
