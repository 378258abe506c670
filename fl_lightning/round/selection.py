"""The choice of the best round: on validation examples, never on test examples."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fl_lightning.direction import KNOWN, Direction, direction_of, metric_of, metric_on_test
from fl_lightning.round.metrics import client_values
from fl_lightning.round.payload import Payload

#: A gain that is smaller in relation to the values is a tie, which the earlier round wins: rounding errors must not
#: decide.
SMALLEST_GAIN = 1e-9


class Selection:
    """Follows the monitored validation metric over the rounds.

    Args:
        monitor: Name of the metric, ``val/acc`` for its mean over clients, or of its mean weighted by examples
            (``val/acc_weighted``) or its worst client (``val/acc_worst``).
        mode: Whether ``max`` or ``min`` of it is best; None to look it up in ``directions``.
        directions: Whether more or less of a metric is better, by its bare name (``ClientModule.directions``).
    """

    def __init__(
        self,
        monitor: str = "val/acc",
        mode: Direction | None = None,
        directions: Mapping[str, Direction] = KNOWN,
    ) -> None:
        self.monitor = monitor
        #: The metric itself, if the monitor is a summary of it over clients; :meth:`take` says so.
        self.metric = monitor
        #: The clients' metrics; :meth:`take` says which.
        self.metrics: tuple[str, ...] = ()
        self.directions = {**directions, **({monitor.rpartition("/")[2]: mode} if mode else {})}
        self.reset()

    @property
    def test(self) -> str:
        """The test metric that is reported: of the mean over clients, whichever summary chooses the round."""
        return metric_on_test(self.metric)

    def take(self, metrics: Collection[str]) -> None:
        """Learn the clients' metrics, so that the monitor may be a summary of one."""
        self.metrics = tuple(metrics)
        is_metric = self.monitor.endswith(self.metrics)
        self.metric = self.monitor if is_metric else metric_of(self.monitor)

    def check(self) -> None:
        """Refuse a metric by which no round can be chosen.

        Raises:
            ValueError: It is unknown whether more or less of it is better.
        """
        if direction_of(self.monitor, self.directions) is None:
            bare = self.monitor.rpartition("/")[2]
            raise ValueError(
                f"trainer.monitor is {self.monitor!r}, and it is unknown whether more or less of it is better: set "
                f"trainer.monitor_mode to max or min, or declare it in the client's class, metric_directions = "
                f'{{"{bare}": "min"}}'
            )

    @property
    def mode(self) -> Direction:
        """Whether ``max`` or ``min`` of the monitored metric is best."""
        result = direction_of(self.monitor, self.directions)
        assert result is not None  # :meth:`check` has refused that
        return result

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.mode == "max" else -1

    def reset(self) -> None:
        """Forget every round."""
        self.best_round = -1
        self.best_value: float | None = None
        self.best_test: float | None = None
        self.result: dict[str, float] = {}
        #: Validation and test value of each client at its own best round, by its index.
        self.best_of_clients: dict[int, list[float]] = {}
        self.best_of_others: dict[str, list[float]] = {}

    def update(self, round_idx: int, metrics: Mapping[str, float], scores: Payload) -> None:
        """Record the metrics of a round and each client's scores.

        Raises:
            ValueError: The monitored metric is not among the metrics, nor was it in an earlier round.
        """
        if self.monitor not in metrics and self.best_value is None:
            raise ValueError(f"trainer.monitor is {self.monitor!r}, which is not among {', '.join(sorted(metrics))}")
        if self.test in metrics and self._is_better(metrics[self.test], self.best_test):
            self.best_test = metrics[self.test]
        value = metrics.get(self.monitor, math.nan)  # all clients that it is of may have failed
        if self._is_better(value, self.best_value):
            self.best_value, self.best_round = value, round_idx
            self.result = {**metrics, "best_round": round_idx}
        self._choose_per_client(scores)
        self._choose_for_other_models(metrics)
        if self.best_test is not None:
            self.result[f"test/{self.mode}_over_rounds"] = self.best_test

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(best):
            return True
        return self.sign * (value - best) > 0 and not math.isclose(value, best, rel_tol=SMALLEST_GAIN)

    def _choose_per_client(self, scores: Payload) -> None:
        """Select the best round of each client on its own validation examples."""
        if self.metric not in scores.extras or self.test not in scores.extras:
            return
        columns = (client_values(scores, name).tolist() for name in (self.metric, self.test))
        sign = self.sign
        for client, value, test in zip(scores.clients, *columns, strict=True):
            best = self.best_of_clients.get(client, [math.nan])[0]
            if math.isnan(best) or sign * (value - best) > 0:
                self.best_of_clients[client] = [value, test]
        chosen = [test for _, (_, test) in sorted(self.best_of_clients.items())]
        self.result[f"{self.test}_per_client_selection"] = float(torch.tensor(chosen).nanmean())

    def _choose_for_other_models(self, metrics: Mapping[str, float]) -> None:
        """Choose a round for each other evaluated model (``gen/``, ``trained/``, ...) by its own validation metric."""
        for name, value in metrics.items():
            model = name.removesuffix(self.monitor)
            if model in ("", name) or model + self.test not in metrics:
                continue
            if self._is_better(value, self.best_of_others.get(model, [None])[0]):
                self.best_of_others[model] = [value, metrics[model + self.test]]
        for model, (_, test) in self.best_of_others.items():
            self.result[f"{model}{self.test}_at_own_best_round"] = test

    def state_dict(self) -> dict[str, Any]:
        """Everything followed so far, and by which metric."""
        return {
            "monitor": self.monitor,
            "mode": direction_of(self.monitor, self.directions),
            "best_round": self.best_round,
            "best_value": self.best_value,
            "best_test": self.best_test,
            "result": dict(self.result),
            "best_of_clients": {client: list(best) for client, best in self.best_of_clients.items()},
            "best_of_others": {model: list(best) for model, best in self.best_of_others.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], history: Sequence[Mapping[str, float]] = ()) -> None:
        """Restore :meth:`state_dict`; if that followed another metric, choose anew among the rounds of the history.

        The history has no scores of single clients: each client's own best round is then that of later rounds.
        """
        known = {name: value for name, value in state.items() if name not in ("monitor", "mode")}
        if self.follows(state):
            for name, value in known.items():
                setattr(self, name, value)
            return
        self.reset()
        reported = {*state["result"], self.monitor, self.test}
        for row in history:
            if self.monitor in row:
                metrics = {name: value for name, value in row.items() if name in reported}
                self.update(int(row["round"]), metrics, Payload(clients=()))

    def follows(self, state: Mapping[str, Any]) -> bool:
        """Whether a :meth:`state_dict` is of the same metric; older ones do not say of which they are."""
        mode = direction_of(self.monitor, self.directions)
        return "monitor" not in state or (state["monitor"], state["mode"]) == (self.monitor, mode)
