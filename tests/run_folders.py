"""Folders of runs that nobody trained: the files a report is made of."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fl_lightning.report.record import BestRound, Partition, Points, RunRecord, Snapshot, Timing
from fl_lightning.tasks import NodeClassification

NAMES = ("client-00", "client-01", "client-02", "client-03")


def record(values: Sequence[float | None] = (0.5, 0.6, 0.7, 0.8), **changes: Any) -> RunRecord:
    """Of four clients with two classes, one of them held out."""
    chosen = BestRound(
        round=1,
        clients=[0, 1, 2],
        scores={"": {"val/acc": [0.5, 0.6, 0.7], "test/acc": list(values[:3])}},
        examples={"": {"val/acc": [10, 10, 10], "test/acc": [10, 10, 10]}},
        confusion=[[9, 1], [2, 8]],
    )
    cosines = np.array([[1, 0.5, 0.2], [0.5, 1, np.nan], [0.2, np.nan, 1]], dtype=np.float32)
    ring = (np.ones((3, 3)) - np.eye(3)).astype(np.float32)
    content: dict[str, Any] = {
        "strategy": "FedAvg",
        "task": NodeClassification().plain,
        "examples": NodeClassification.examples,
        "monitor": "val/acc",
        "mode": "max",
        "planned_rounds": 3,
        "names": list(NAMES),
        "sizes": [20, 30, 40, 50],
        "training": [0, 1, 2],
        "regression": False,
        "seed": 0,
        "partition_hash": "abc",
        "machine": {"device": "cpu"},
        "partition": Partition(
            columns=[
                "client",
                "num_nodes",
                "num_edges",
                "edges_lost",
                "clustering",
                "num_train",
                "num_val",
                "num_test",
            ],
            rows=[[name, 20 + 10 * index, 60, 6, 0.2, 10, 5, 5] for index, name in enumerate(NAMES)],
            labels=[[10, 10], [30, 0], [0, 40], [25, 25]],
            heterogeneity=0.4,
        ),
        "best": chosen,
        "unseen_clients": {"test/acc": {"client-03": 0.4}},
        "snapshots": [Snapshot.of(0, "embedding", cosines), Snapshot.of(0, "adjacency", ring)],
        "points": Points(
            round=2, x=[0, 1, 2], y=[2, 1, 0], client=[0, 1, 2], label=[0, 1, None], explained=[0.6, 0.2], total=90
        ),
        "failures": [(2, "client-01", "FloatingPointError: it sent numbers that are not finite")],
        "timing": Timing(first_round=0, num_rounds=3, seconds={"clients": 1.0, "server": 0.5}),
    }
    return RunRecord(**{**content, **changes})


def write_run(
    folder: Path,
    *,
    run_record: RunRecord | None = None,
    test: float = 0.65,
    rounds: Sequence[Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    **result: Any,
) -> Path:
    """Write a run of three rounds, the second of which validation chose."""
    folder.mkdir(parents=True, exist_ok=True)
    if rounds is None:
        rounds = [
            {"round": index, "train/acc": 0.6, "val/acc": value, "test/acc": test - 0.1 * (index != 1), "seconds": 0.5}
            | {"test/acc_std": 0.1, "test/acc_worst": 0.4, "comm/bytes_up": 100, "comm/bytes_down": 200}
            | {
                "comm/bytes_total": 300 * (index + 1),
                "num_participants": 3,
                "num_failures": int(index == 2),
                "failed_round": 0,
            }
            for index, value in enumerate((0.4, 0.6, 0.5))
        ]
    columns = list(dict.fromkeys(name for row in rounds for name in row))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rounds)
    metrics = {"val/acc": 0.6, "test/acc": test, "test/acc_std": 0.1, "test/acc_worst": 0.4, "best_round": 1}
    content = {
        "status": "finished",
        "error": "",
        "result": metrics,
        "monitor": "val/acc",
        "failures": {"client-01": 1},
        "strategy": "FedAvg",
        "seed": 0,
        "partition_hash": "abc",
        "config": "config.yaml",
        "versions": {"torch": "2.13.0"},
    }
    (folder / "result.json").write_text(json.dumps({**content, **result}))
    default = {"strategy": {"class_path": "fl_lightning.strategies.FedAvg", "init_args": {"num_epochs": 3}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(settings or default)))
    (run_record or record()).write(folder)
    return folder
