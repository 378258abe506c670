"""Each client's own metrics, round by round."""

from collections.abc import Sequence

from fl_lightning.run.callback import Callback, Trainer, WrongSetting
from fl_lightning.run.loggers import RoundTable


class PerClientMetrics(Callback):
    """Writes ``clients.csv`` (round, client, metric, value, num_examples) to the run's folder.

    Args:
        every_n_rounds: Rounds between entries; only evaluated rounds have entries.
        metrics: Names of the clients' metrics; None for the monitored one (``val/acc`` of ``benign/val/acc``) and its
            test counterpart. A client without examples has the value nan.

    Raises:
        ValueError: ``every_n_rounds`` is out of range, or no metric is named.
    """

    def __init__(self, *, every_n_rounds: int = 1, metrics: Sequence[str] | None = None) -> None:
        if every_n_rounds < 1:
            raise ValueError(f"PerClientMetrics.every_n_rounds must be at least 1, got {every_n_rounds}")
        if metrics is not None and not metrics:
            raise ValueError("PerClientMetrics.metrics is empty: name one, or leave the callback out")
        self.every_n_rounds = every_n_rounds
        self.setting = metrics

    def given(self) -> dict[str, Sequence[str] | None]:
        """Settings that are stored under other names."""
        return {"metrics": self.setting}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the file, without the rows of rounds that a resumed run repeats.

        Raises:
            WrongSetting: The clients have no such metric.
        """
        selection = trainer.run.selection
        chosen = (selection.metric, selection.test)  # which may be of some clients or another model: benign/val/acc
        own = [next((each for each in selection.metrics if f"/{name}".endswith(f"/{each}")), name) for name in chosen]
        self.metrics = tuple(self.setting or own)
        if missing := [name for name in self.metrics if name not in selection.metrics]:
            raise WrongSetting(
                f"PerClientMetrics.metrics: {missing} are not among {', '.join(sorted(selection.metrics))}: name some "
                "of these"
            )
        if trainer.fabric.is_global_zero:
            self.table = RoundTable(trainer.run.folder / "clients.csv")
            self.table.keep_before(trainer.run.round_idx)

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Write the round, if it was evaluated and is due."""
        if trainer.run.selection.monitor not in metrics or (trainer.run.round_idx + 1) % self.every_n_rounds:
            return
        scores = trainer.run.scores[""]
        if not scores.clients:
            return  # under secure aggregation no client's metrics are known
        if not trainer.fabric.is_global_zero:
            return
        rows = []
        for name in self.metrics:
            for client, (total, count) in zip(scores.clients, scores.extras[name].tolist(), strict=True):
                rows.append(
                    {
                        "round": trainer.run.round_idx,
                        "client": trainer.run.registry.names[client],
                        "metric": name,
                        "value": total / count if count else float("nan"),
                        "num_examples": int(count),
                    }
                )
        self.table.append(rows)
