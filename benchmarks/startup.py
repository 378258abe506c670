"""How long it takes to start, as a ratio to ``import torch``.

    .venv/bin/python benchmarks/startup.py [--repetitions 5]

Every command is run in its own process, in turn with ``import torch``, so that a busy machine slows both alike; the
time is the processes' own (user and system). ``fit`` is measured to the end of the first round of the quickstart.
Writes benchmarks/results/startup.json and .md.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fl_lightning import Callback
from fl_lightning.run.callback import Trainer

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
TRAIN = [sys.executable, "-m", "fl_lightning.command_line"]
CONFIG = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"

#: What is measured: its command, its exit code and the most it may take of ``import torch``.
CASES: dict[str, tuple[list[str], int, float]] = {
    "fl-train --help": ([*TRAIN, "--help"], 0, 0.3),
    "fl-train --version": ([*TRAIN, "--version"], 0, 0.3),
    "fl-train fit --config missing.yaml": ([*TRAIN, "fit", "--config=missing.yaml"], 2, 0.3),
    "import fl_lightning": ([sys.executable, "-c", "import fl_lightning"], 0, 0.3),
    "from fl_lightning import FederatedTrainer": (
        [sys.executable, "-c", "from fl_lightning import FederatedTrainer"],
        0,
        5.0,  # lightning and PyG import much that nothing here uses; the command line defers it, a library must not
    ),
    "fl-train data --help": ([*TRAIN, "data", "--help"], 0, 2.5),
    "fl-train fit, to the end of the first round": (
        [*TRAIN, "fit", CONFIG, "--trainer.callbacks+=startup.StopAfterFirstRound"],
        0,
        2.5,
    ),
}
TORCH = [sys.executable, "-c", "import torch"]


class StopAfterFirstRound(Callback):
    """Ends the process, without what follows a run."""

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Leave."""
        os._exit(0)


def seconds(command: list[str], exit_code: int, folder: str) -> float:
    """Processor time of a command."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        "FL_CACHE_DIR": folder,
        "JSONARGPARSE_DEPRECATION_WARNINGS": "off",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != exit_code:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    metrics: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for command, exit_code, _ in CASES.values():  # once before, for what is cached on the disk
            seconds(command, exit_code, folder)
        for name, (command, exit_code, limit) in CASES.items():
            pairs = [(seconds(TORCH, 0, folder), seconds(command, exit_code, folder)) for _ in range(repetitions)]
            metrics[name] = {
                "ratio": round(statistics.median(own / torch for torch, own in pairs), 3),
                "limit": limit,
                "seconds": round(statistics.median(own for _, own in pairs), 3),
                "torch_seconds": round(statistics.median(torch for torch, _ in pairs), 3),
            }
            print(name, metrics[name], flush=True)
    (RESULTS / "startup.json").write_text(json.dumps(metrics, indent=1) + "\n")
    lines = [
        "`python benchmarks/startup.py`",
        "",
        f"Processor time, medians of {repetitions} runs in turn with `import torch`.",
        "",
        "| command | ratio to `import torch` | at most | seconds |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {row['ratio']:.2f} | {row['limit']} | {row['seconds']:.2f} |"
            for name, row in metrics.items()
        ),
    ]
    (RESULTS / "startup.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
