"""Every strategy at its published defaults on the same clients: accuracy, time and traffic of a round.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/methods.py
    FL_DATA_ROOT=... .venv/bin/python benchmarks/methods.py --only fedavg moon --cases Cora-10 --seeds 0
    FL_DATA_ROOT=... .venv/bin/python benchmarks/methods.py --missing

A method is a file configs/<name>_cora.yaml or configs/papers/<name>_cora.yaml; ``--only`` names some, and its default
is all that were measured before. Every metric is of one ``fl-train fit`` whose command stands beside it; test accuracy
is that of the round that validation chose. Writes benchmarks/results/methods.csv, one row for each run (what is there
of other runs is kept), and methods.md, a table of it beside the best public metrics known (benchmarks/published.csv).

Seconds are of the process's CPU, for one thread: those of the exchanges (``train``) and of the whole round, with its
evaluation. The runs are made one after another in one process; they do not depend on each other.
"""

import argparse
import csv
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fl_lightning import Callback
from fl_lightning.cli import FederatedCLI

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: What a case adds to the command of a configuration for Cora.
CASES = {
    f"{name}-{count}": (f"--data.source.init_args.name={name}", f"--data.partitioner.init_args.num_clients={count}")
    for name in ("Cora", "CiteSeer")
    for count in (10, 20)
}
KEY = ("method", "case", "seed")
FIGURES = ("val", "test", "best_round", "rounds", "cpu_train", "cpu_round", "megabytes")
Rows = dict[tuple[str, ...], dict[str, str]]


class CpuClock(Callback):
    """Adds the CPU time of each round, and of its exchanges, to its metrics."""

    def on_round_start(self, trainer: Any) -> None:
        """Begin."""
        self.start = self.trained = time.process_time()

    def on_stage_end(self, trainer: Any, stage: Any, payload: Any) -> None:
        """The last stage of the round ends its exchanges."""
        self.trained = time.process_time()

    def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Add them."""
        metrics["cpu_train"] = self.trained - self.start
        metrics["cpu_round"] = time.process_time() - self.start


def config_of(method: str) -> Path:
    """The configuration of a method, which may be a paper's."""
    files = (Path("configs", folder, f"{method}_cora.yaml") for folder in ("", "papers"))
    return next(file for file in files if (ROOT / file).exists())


def command(method: str, case: str, seed: int) -> list[str]:
    """The arguments of ``fl-train`` for one metric."""
    seeds = (f"--data.seed={seed}", f"--seed_everything={seed}")
    return ["fit", f"--config={config_of(method)}", *CASES[case], *seeds]


def run(arguments: list[str]) -> dict[str, float]:
    """Train once, without logs and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"--trainer.default_root_dir={folder}", "--trainer.logger=false"]
        cli = FederatedCLI([*arguments, *quiet, "--trainer.callbacks+=methods.CpuClock"])
        trainer: Any = cli.trainer
        if trainer.run.interruption.received is not None:
            raise SystemExit("interrupted: the last run is not counted")
        history, result = trainer.run.history, trainer.run.selection.result
        return {
            "val": result["val/acc"],
            "test": result["test/acc"],
            "best_round": result["best_round"],
            "rounds": len(history),
            "cpu_train": statistics.median(row["cpu_train"] for row in history),
            "cpu_round": statistics.median(row["cpu_round"] for row in history),
            "megabytes": history[-1]["comm/bytes_total"] / len(history) / 1e6,
        }


def read(path: Path, key: tuple[str, ...] = KEY) -> Rows:
    """The rows of a file, by what they are of."""
    if not path.exists():
        return {}
    with path.open() as file:
        return {tuple(row[name] for name in key): row for row in csv.DictReader(file)}


def write(path: Path, rows: Rows, columns: tuple[str, ...] = (*KEY, *FIGURES, "command")) -> None:
    """Rewrite the file, in order."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def table(rows: Rows) -> str:
    """A line for each method: mean and standard deviation over seeds; time beside FedAvg's of the same case."""
    with (ROOT / "benchmarks" / "published.csv").open() as file:
        published = {
            (row["method"], row["case"]): f"{row['accuracy']} ({row['source']})" for row in csv.DictReader(file)
        }
    cases = [case for case in CASES if any(key[1] == case for key in rows)]
    heads = [head for case in cases for head in (f"{case} test, %", "val, %", "public", "s a round", "× FedAvg", "MB")]
    lines = ["| method | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 1)]
    for method in dict.fromkeys(key[0] for key in sorted(rows)):
        runs = []
        for case in cases:
            result = [row for key, row in rows.items() if key[:2] == (method, case)]
            fedavg = [float(row["cpu_train"]) for key, row in rows.items() if key[:2] == ("fedavg", case)]
            seconds = [float(row["cpu_train"]) for row in result]
            runs += [_percent(result, "test"), _percent(result, "val"), published.get((method, case), "")]
            runs += [f"{statistics.median(seconds):.3f}" if result else ""]
            runs += [f"{statistics.median(seconds) / statistics.median(fedavg):.1f}" if result and fedavg else ""]
            runs += [f"{statistics.mean(float(row['megabytes']) for row in result):.1f}" if result else ""]
        lines.append(f"| {method} | " + " | ".join(runs) + " |")
    return "\n".join(lines) + "\n"


def _percent(result: list[dict[str, str]], name: str) -> str:
    values = [100 * float(row[name]) for row in result]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" if values else ""


def main() -> None:
    """Run what was asked for and rewrite file and table."""
    path = RESULTS / "methods.csv"
    known = sorted(
        file.stem.removesuffix("_cora")
        for file in (ROOT / "configs").rglob("*_cora.yaml")
        if file.parent.name != "sweeps"
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=known, metavar="NAME")
    parser.add_argument("--cases", nargs="*", default=["Cora-10", "CiteSeer-10"], choices=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--missing", action="store_true", help="leave out the runs that have a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = sorted({key[0] for key in read(path)} | {"fedavg", "local"})
    methods = measured if options.only is None else options.only
    for seed, case, method in itertools.product(options.seeds, options.cases, methods):
        if options.missing and (method, case, str(seed)) in read(path):
            continue
        arguments = command(method, case, seed)
        metrics = {name: f"{value:.6g}" for name, value in run(arguments).items()}
        row = dict(zip(KEY, (method, case, str(seed)), strict=True)) | metrics
        rows = read(path)  # another process may write to it
        rows[method, case, str(seed)] = row | {"command": " ".join(["fl-train", *arguments])}
        write(path, rows)
        (RESULTS / "methods.md").write_text(table(rows))


if __name__ == "__main__":
    main()
