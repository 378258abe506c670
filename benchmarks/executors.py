"""Stacked against sequential: seconds a round for FedAvg on Cora with 20 clients, 3 local epochs and an evaluation.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/executors.py

Writes benchmarks/results/executors.json. The rounds of both executors alternate, so that whatever else the machine does
falls on both; the medians and their ratio are reported.
"""

import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.data import MetisPartitioner, PlanetoidSource
from fl_lightning.executors import Executor
from fl_lightning.strategies.fedavg import FedAvg

NUM_ROUNDS = 30


def seconds_per_round(executor: Executor, folder: str) -> float:
    """Median seconds of a round, of a short run without loggers and checkpoints."""
    data = FederatedDataModule(PlanetoidSource("Cora"), MetisPartitioner(20), cache_dir=folder)
    trainer = FederatedTrainer(num_rounds=NUM_ROUNDS, executor=executor, logger=False, default_root_dir=folder)
    trainer.fit(ClientModule(), data, FedAvg())
    return statistics.median(row["seconds"] for row in trainer.history)


def main() -> None:
    """Measure and write."""
    figures: dict[str, list[float]] = {"stacked": [], "sequential": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            figures["stacked"].append(seconds_per_round(StackedExecutor(), folder))
            figures["sequential"].append(seconds_per_round(SequentialExecutor(), folder))
    seconds = {name: statistics.median(values) for name, values in figures.items()}
    result = {
        "task": "Cora, METIS, 20 clients, FedAvg, GCN 128-128, 3 epochs + evaluation a round",
        "seconds_a_round": seconds,
        "ratio": seconds["sequential"] / seconds["stacked"],
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = Path(__file__).parent / "results" / "executors.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
