"""Shows the progress of a run and its results."""

import math
import time
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fl_lightning.direction import metric_on_test
from fl_lightning.round.metrics import client_values
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.terminal import plain_text

from .result_table import client_table, evaluation_table, further_tables, next_steps, number, result_table

#: From this width in columns the bar is longer.
_WIDE = 100


class RoundProgressBar(Callback):
    """A bar over the rounds, and a table of results at the end.

    Where the terminal is narrow, what comes last on the line gives way: the stage, the seconds of a round and the test
    metric, but not the round, the time left and the monitored metric. If the output is not a terminal (but a file or a
    batch system), a line is written periodically instead of the bar.

    Args:
        refresh_seconds: Seconds between updates of the bar.
        line_seconds: Seconds between lines without a terminal.
        worst_clients: Number of rows in the table of single clients at the end, worst first; 0 for no such table.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(self, *, refresh_seconds: float = 0.5, line_seconds: float = 30.0, worst_clients: int = 0) -> None:
        if refresh_seconds <= 0:
            raise ValueError(f"RoundProgressBar.refresh_seconds must be positive, got {refresh_seconds}")
        for name, value in {"line_seconds": line_seconds, "worst_clients": worst_clients}.items():
            if value < 0:
                raise ValueError(f"RoundProgressBar.{name} must not be negative, got {value}")
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self.worst_clients = worst_clients
        self.console = Console()
        self.clients: list[list[float]] = []
        self._bar: Progress | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Draw the bar."""
        if trainer.run.round_idx == 0:
            self.clients = []
        self._values: dict[str, float] = {}
        self._seconds = math.nan
        self._in_round = False
        self._round_start = self._last_line = time.perf_counter()
        if trainer.fabric.is_global_zero and self.console.is_terminal:
            rounds = f"round {{task.completed:>{len(str(trainer.num_rounds))}.0f}}/{{task.total:.0f}}"
            self._bar = Progress(
                TextColumn(rounds, markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=20 if self.console.width >= _WIDE else 8),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                TextColumn("left  {task.fields[monitored]}", markup=False, table_column=Column(no_wrap=True)),
                TextColumn(
                    "{task.fields[figures]}{task.description}",
                    markup=False,
                    table_column=Column(ratio=1, no_wrap=True, overflow="crop"),  # an ASCII terminal has no ellipsis
                ),
                console=self.console,
                transient=True,
                expand=True,
                refresh_per_second=1 / self.refresh_seconds,
            )
            self._task: TaskID = self._bar.add_task(
                "", total=trainer.num_rounds, completed=trainer.run.round_idx, monitored="", figures=""
            )
            self._bar.start()

    def on_round_start(self, trainer: Trainer) -> None:
        """Start the clock of the round."""
        self._round_start = time.perf_counter()
        self._in_round = True

    def on_send(self, trainer: Trainer, stage: Stage, payload: Payload | None) -> None:
        """Name the stage."""
        if self._bar is not None:
            when = "" if self._in_round else "unseen clients: " if trainer.run.history else "before the rounds: "
            self._stage, self._done = f"{when}{stage.name.replace('_', ' ')}", 0
            self._bar.update(self._task, description=self._stage)

    def on_clients_done(self, trainer: Trainer, stage: Stage, num_clients: int) -> None:
        """Count the clients of the stage."""
        if self._bar is not None:
            self._done += num_clients
            self._bar.update(self._task, description=f"{self._stage}, {self._done} clients done")

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Show the round's metrics, and keep each client's if it is the best so far."""
        self._in_round = False
        seconds = time.perf_counter() - self._round_start
        self._seconds = seconds if math.isnan(self._seconds) else 0.9 * self._seconds + 0.1 * seconds
        monitor = trainer.run.selection.monitor
        shown = (monitor, metric_on_test(monitor))
        self._values |= {name: metrics[name] for name in shown if name in metrics}
        if trainer.run.selection.best_round == trainer.run.round_idx:
            scores = trainer.run.scores[""]
            if all(name in scores.extras for name in shown):
                columns = (client_values(scores, name).tolist() for name in shown)
                self.clients = [list(row) for row in zip(scores.clients, *columns, strict=True)]
        monitored, *others = [f"{name} {number(self._values[name])}" for name in shown if name in self._values] or [""]
        figures = "  ".join([*others, f"{self._seconds:.3g} s/round"])
        if self._bar is not None:
            self._bar.update(self._task, advance=1, monitored=monitored, figures=f"{figures}  ")
        elif trainer.fabric.is_global_zero and time.perf_counter() - self._last_line >= self.line_seconds:
            self._last_line = time.perf_counter()
            self._show(
                f"round {trainer.run.round_idx + 1}/{trainer.num_rounds}  {monitored}  {figures}", highlight=False
            )

    def on_fit_end(self, trainer: Trainer) -> None:
        """Replace the bar by the results."""
        self._stop()
        if trainer.fabric.is_global_zero:
            for table in (result_table(trainer, self.clients), *further_tables(trainer)):
                self._show(table)
            if trainer.run.trace is not None:
                self._show(trainer.run.clock.table())
            if self.worst_clients and self.clients:
                self._show(client_table(trainer, self.clients, self.worst_clients))
            for line in next_steps(trainer):
                self._show(line, highlight=False, soft_wrap=True)  # no break in the middle of a command

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Close the bar so that the terminal stays readable."""
        self._stop()

    def on_evaluation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Show the metrics of ``validate`` or ``test``."""
        if trainer.fabric.is_global_zero:
            self._show(evaluation_table(trainer, metrics))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def state_dict(self) -> dict[str, Any]:
        """Index, validation and test value of each client at the best round."""
        return {"clients": self.clients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.clients = state["clients"]

    def _show(self, what: RenderableType, *, highlight: bool = True, soft_wrap: bool = False) -> None:
        """Print; characters that the terminal does not support are shown as escapes."""
        what = plain_text(what) if isinstance(what, str) else what
        try:
            self.console.print(what, highlight=highlight, soft_wrap=soft_wrap)
        except UnicodeEncodeError as error:
            with self.console.capture() as captured:
                self.console.print(what, highlight=highlight, soft_wrap=soft_wrap)
            plain = captured.get().encode(error.encoding, errors="backslashreplace").decode(error.encoding)
            self.console.file.write(plain)
