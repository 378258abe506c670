"""Stops a run that no longer improves."""

from collections.abc import Mapping
from typing import Any

from fl_lightning.direction import Direction, direction_of
from fl_lightning.run.callback import Callback, Trainer, WrongSetting


class EarlyStopping(Callback):
    """Stops the run after ``patience`` evaluations in a row without improvement.

    Args:
        monitor: Name of a metric of the rounds; None for that of the trainer.
        patience: Number of evaluations without improvement.
        min_delta: Smallest change that counts as an improvement.
        mode: Whether ``max`` or ``min`` of the metric is best; None to use what the client's class declares.

    Raises:
        ValueError: ``patience``, ``min_delta`` or ``mode`` is out of range.
    """

    def __init__(
        self,
        monitor: str | None = None,
        *,
        patience: int = 20,
        min_delta: float = 0.0,
        mode: Direction | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"EarlyStopping.patience must be at least 1, got {patience}")
        if min_delta < 0:
            raise ValueError(f"EarlyStopping.min_delta must not be negative, got {min_delta}")
        if mode not in ("max", "min", None):
            raise ValueError(f"EarlyStopping.mode must be 'max' or 'min', got {mode!r}")
        self.setting = monitor
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"monitor": self.setting}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count anew, over the rounds of a run that is resumed, too: one that was stopped here is stopped again.

        Raises:
            WrongSetting: It is unknown whether more or less of the metric is better.
        """
        self.monitor = self.setting or trainer.run.selection.monitor
        mode = self.mode or direction_of(self.monitor, trainer.run.selection.directions)
        if mode is None:
            raise WrongSetting(
                f"EarlyStopping.monitor is {self.monitor!r}, and it is unknown whether more or less of it is better "
                f"(known: {', '.join(trainer.run.selection.directions)}): set EarlyStopping.mode to max or min"
            )
        self.sign = 1.0 if mode == "max" else -1.0
        self.best: float | None = None
        self.num_without_improvement = 0
        #: Whether a resumed run went on for longer than this callback would have let it.
        self.is_overdue = False
        for row in trainer.run.history:
            self.is_overdue |= self._is_due
            self._compare(row)
        self._stop_if_due(trainer)

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Compare the metric with the best so far, in rounds that were evaluated."""
        if self.monitor not in metrics:
            if trainer.run.selection.monitor in metrics:
                raise WrongSetting(
                    f"EarlyStopping.monitor is {self.monitor!r}, which is not among {', '.join(sorted(metrics))}"
                )
            return
        self._compare(metrics)
        self._stop_if_due(trainer)

    def _compare(self, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            return
        value = self.sign * metrics[self.monitor]  # nan is no improvement
        if value > (float("-inf") if self.best is None else self.sign * self.best + self.min_delta):
            self.best = metrics[self.monitor]
            self.num_without_improvement = 0
        else:
            self.num_without_improvement += 1

    @property
    def _is_due(self) -> bool:
        return self.num_without_improvement >= self.patience

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self._is_due:
            trainer.run.should_stop = True
