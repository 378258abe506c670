"""Searches over planted curves: what a training comes to follows from its method, its setting and its length."""

import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.choice.answer import Answer

#: A federation that is never trained here.
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"num_rounds": 90, "accelerator": "cpu", "run_name": "planted"},
    "strategy": {"class_path": "FedAvg", "init_args": {"num_epochs": 1}},
    "model": {
        "class_path": "ClientModule",
        "init_args": {
            "net": {"class_path": "fl_lightning.models.GCN", "init_args": {"hidden_channels": 8}},
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    },
    "data": {
        "source": {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 120, "num_communities": 4}},
        "partitioner": "GivenPartitioner",
    },
}


def drawn(what: str) -> float:
    """A number in [-1, 1), the same for the same."""
    return zlib.crc32(what.encode()) / 2**31 - 1


class Planted:
    """Trainings that come to what was planted.

    Args:
        levels: What validation comes to, by method.
        rates: What is added for each method, by its learning rate.
        speed: Rounds after which a curve is at two thirds of its level.
        scatter: How far seeds are from the level at most.
        each: Seconds of a round, by method; 1 by default.
        sent: Bytes of a round.
        refused: Methods that cannot be trained, with the refusal.

    Attributes:
        data: What the data are now.
    """

    data = "planted"

    def __init__(
        self,
        levels: Mapping[str, float],
        *,
        rates: Mapping[float, float] | None = None,
        speed: Mapping[str, float] | None = None,
        scatter: float = 0.002,
        each: Mapping[str, float] | None = None,
        sent: Mapping[str, int] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.levels, self.rates, self.speed = levels, rates or {}, speed or {}
        self.scatter, self.each, self.sent, self.refused = scatter, each or {}, sent or {}, refused or {}
        self.trained: list[tuple[str, int, int]] = []
        self.seconds = 0.0

    def train(self, arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
        """What :func:`fl_lightning.study.worker.train` would return."""
        given = dict(word.removeprefix("--").partition("=")[::2] for word in arguments)
        method = json.loads(given["strategy"])["class_path"].rpartition(".")[2]
        length, seed = int(given["trainer.num_rounds"]), int(given["seed_everything"])
        state: Path | None = others[4] if len(others) > 4 else None
        before = int(state.read_text()) if state is not None and state.exists() else 0
        before = before if before <= length else 0
        self.trained.append((method, before, length))
        seconds = 1.0 + self.each.get(method, 1.0) * (length - before)
        self.seconds += seconds
        if method in self.refused:
            return {"error": self.refused[method], "seconds": 0.5, "cpu_seconds": 0.5}
        if state is not None:
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text(str(length))
        rate = float(given.get("model.optimizer.lr", 0.01))
        level = self.levels[method] + self.rates.get(rate, 0.0)
        value = level * (1 - math.exp(-length / self.speed.get(method, 5.0)))
        val = value + self.scatter * drawn(f"{method} {seed} val")
        test = value + self.scatter * drawn(f"{method} {seed} test")
        rising = {"still_rising": "the last fifth is better"} if length < 3 * self.speed.get(method, 5.0) else {}
        return {
            "error": "",
            "warnings": [],
            "seconds": seconds,
            "cpu_seconds": seconds,
            "monitor": "val/acc",
            "mode": "max",
            "result": {"val/acc": val, "test/acc": test, "test/acc_worst": test - 0.1, "best_round": length - 1},
            "marks": rising,
            "near": {},
            "kinds": {},
            "clients": {},
            "malicious": [],
            "resumed": before,
            "num_rounds": length,
            "bytes": {"up": self.sent.get(method, 10) * length},
            "training_seconds": self.each.get(method, 1.0) * length,
            "failures": 0,
            "partition": self.partition(arguments)["partition"],
        }

    def partition(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        """What :func:`fl_lightning.study.worker.partition_of` would return."""
        (seed,) = (word for word in arguments if word.startswith("--data.seed="))
        return {"error": "", "partition": f"{self.data}, {seed}"}


Choose = Callable[..., tuple[Answer, list[str]]]
