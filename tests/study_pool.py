"""A pool that works in the process itself, by itself or with invented metrics."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from fl_lightning.study.pool import Pool
from fl_lightning.study.worker import TASKS


def invented(arguments: tuple[str, ...], *others: Any) -> dict[str, Any]:
    """What a training could have come to, drawn from its arguments."""
    digest = hashlib.sha256(" ".join(arguments).encode()).digest()
    val, test, worst = (byte / 255 for byte in digest[:3])
    return {
        "error": "",
        "warnings": [],
        "seconds": 1.0,
        "cpu_seconds": 1.0,
        "monitor": "val/acc",
        "mode": "max",
        "result": {"val/acc": val, "test/acc": test, "test/acc_worst": worst, "best_round": 1},
        "marks": {},
        "near": {"rounds": 2, "bytes": 40},
        "kinds": {"trained": [val, test]},
        "clients": {"client": [0, 1], "val": [val, val], "test": [test, test]},
        "malicious": [],
        "rounds": {"round": [0.0, 1.0], "val/acc": [0.0, val]},
        "num_rounds": 2,
        "bytes": {"up": 10, "down": 10},
        "training_seconds": 0.5,
        "failures": 0,
        "partition": partition(arguments)["partition"],
    }


def partition(arguments: tuple[str, ...]) -> dict[str, Any]:
    """A hash of the partition, by the data's seed."""
    (seed,) = (argument for argument in arguments if argument.startswith("--data.seed="))
    return {"error": "", "partition": f"hash of {seed}"}


class HerePool(Pool):
    """Does the tasks in the process itself.

    Args:
        real: Whether anything is trained; otherwise metrics are invented.
        lose: Whether a task, of the so many-eth training, ends as if its worker had been killed.
        tasks: What is done in place of other tasks, by name.
    """

    def __init__(
        self,
        *,
        real: bool = False,
        lose: Callable[[Any, int], bool] = lambda task, number: False,
        **tasks: Callable[..., dict[str, Any]],
    ) -> None:
        super().__init__(1)
        self.lose = lose
        fake = {"train": invented, "partition": partition, "build": lambda arguments: {"error": ""}}
        self.tasks = {**(TASKS if real else fake), **tasks}
        self.trained: list[Any] = []
        self._results: deque[tuple[Any, dict[str, Any] | None]] = deque()

    @property
    def num_busy(self) -> int:
        return len(self._results)

    def submit(self, task: Any, name: str, *arguments: Any) -> None:
        if name == "train":
            self.trained.append(task)
        lost = name == "train" and self.lose(task, len(self.trained))
        self._results.append((task, None if lost else self.tasks[name](*arguments)))

    def finished(self, seconds: float = float("inf")) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        if self._results:
            yield self._results.popleft()
