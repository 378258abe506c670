"""Loggers for the metrics of the rounds: a CSV file that survives a killed process, TensorBoard, and Weights & Biases.

Any logger of Lightning or Fabric works as well. Fabric's own ``CSVLogger`` writes only every 100 steps, so a killed run
loses them, and overwrites its file (with a warning) when a run is resumed; its ``TensorBoardLogger`` writes each of
fifty scalars separately, which takes as long as training a short round.
"""

import contextlib
import csv
import io
import math
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch.loggers as lightning_loggers
from lightning.fabric.loggers import tensorboard
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

from fl_lightning.files import whole_file, writing


class RoundTable:
    """A CSV file with a column ``round`` that grows by appending; it is rewritten only when a new column appears.

    Every row is passed to the operating system at once, so that none is lost when the process is killed.

    Args:
        path: The file; its folder is created with the first row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, None] = {}

    def keep_before(self, round_idx: int) -> None:
        """Drop the rows of ``round_idx`` and later rounds, which a resumed run writes again."""
        self.replace(row for row in self.read() if int(row["round"]) < round_idx)

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace all rows; without any rows, there is no file."""
        written = list(rows)
        self.columns = dict.fromkeys(name for row in written for name in row)
        if not written:
            self.path.unlink(missing_ok=True)
            return
        with whole_file(self.path) as temporary:
            temporary.write_text(self._format(written, header=True))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows; missing values stay empty."""
        new = list(rows)
        if all(name in self.columns for row in new for name in row):
            with writing(self.path), self.path.open("a", newline="") as file:
                file.write(self._format(new))
        else:
            self.replace([*self.read(), *new])

    def read(self) -> list[dict[str, str]]:
        """The complete rows of the file, without one that a crash cut off."""
        if not self.path.exists():
            return []
        whole_lines = self.path.read_text().rpartition("\n")[0]
        return list(csv.DictReader(io.StringIO(whole_lines)))

    def _format(self, rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(self.columns), lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _folder(root_dir: str | None, run: Path) -> Path:
    """The folder in which a logger writes the files of the run with this folder."""
    return Path(root_dir).expanduser() / run.parent.name / run.name if root_dir else run


class RunLogger(Logger):
    """A logger that knows its run; on the command line, bare names such as ``CSVLogger`` mean these classes."""

    def begin(self, folder: Path, history: Sequence[Mapping[str, float]]) -> None:
        """Begin or continue a run.

        Args:
            folder: The run's folder.
            history: The finished rounds.
        """


class CSVLogger(RunLogger):
    """Writes ``metrics.csv``: one row per round, written as soon as the round is over.

    Args:
        root_dir: Folder in which each run has its file, ``<run_name>/version_<n>/metrics.csv``, beside the one in the
            run's folder; None for that one alone.
    """

    def __init__(self, root_dir: str | None = None) -> None:
        self.setting = root_dir
        self.table: RoundTable

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"root_dir": self.setting}

    @property
    def name(self) -> str:
        """None: the folder of the file has the run's name."""
        return ""

    @property
    def version(self) -> str:
        """None: the folder of the file has the run's version."""
        return ""

    def path(self, folder: Path) -> Path:
        """The file of the run with this folder."""
        return _folder(self.setting, folder) / "metrics.csv"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append the metrics of round ``step``."""
        self.table.append([{"round": step, **metrics}])

    @rank_zero_only
    def begin(self, folder: Path, history: Sequence[Mapping[str, float]]) -> None:
        """Make the file contain these rounds and no others.

        Raises:
            ValueError: It is in ``root_dir`` and another run's.
        """
        self.table = RoundTable(self.path(folder))
        if self.setting and not history and self.table.path.exists():
            raise ValueError(
                f"CSVLogger.root_dir is {self.setting!r}, where {self.table.path} is of another run: give another "
                "root_dir or trainer.run_name, or move the file away"
            )
        self.table.replace(history)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write nothing: config.yaml is in the same folder."""


class TensorBoardLogger(RunLogger, tensorboard.TensorBoardLogger):
    """TensorBoard's event file, with all metrics of a round written at once.

    Args:
        root_dir: Folder in which each run has its file, in ``<run_name>/version_<n>``; None for the run's folder.
    """

    def __init__(self, root_dir: str | None = None) -> None:
        super().__init__(root_dir=root_dir or "", name="", version="")
        self.setting = root_dir

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"root_dir": self.setting}

    def begin(self, folder: Path, history: Sequence[Mapping[str, float]]) -> None:
        """Begin a file; in a resumed run it hides what was logged for later rounds."""
        self._experiment = None
        self._root_dir = str(_folder(self.setting, folder))
        self._kwargs["purge_step"] = int(history[-1]["round"]) + 1 if history else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write the metrics of round ``step``."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)

    @rank_zero_only
    def log_result(self, result: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        """Write the best round's metrics with the settings, for the tab HPARAMS."""
        metrics = {f"best/{name}": value for name, value in result.items() if math.isfinite(value)}
        if metrics:
            super().log_hyperparams(dict(settings), metrics)


class WandbLogger(RunLogger, lightning_loggers.WandbLogger):
    """Weights & Biases, with one W&B run for each run of the trainer, continued when that is resumed.

    Rounds after the last checkpoint that an interrupted run had already sent are sent again by the resumed run; their
    metrics are equal, except for the seconds. Set ``WANDB_MODE=offline`` (or ``offline``) to write to disk only and
    ``wandb sync`` the folders later.

    Args:
        project: Name of the project.
        name: Name of the run; None for a name that W&B generates.
        entity: User or team; None for the account's default.
        group: Groups runs in the overview, for example the seeds of one configuration.
        tags: Labels of the run.
        offline: Write to disk only.
        save_dir: Folder in which W&B's own folder ``wandb`` is created.
    """

    def __init__(
        self,
        *,
        project: str = "fl_lightning",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        offline: bool = False,
        save_dir: str = "runs",
    ) -> None:
        super().__init__(
            project=project,
            name=name,
            save_dir=save_dir,
            log_model=False,
            entity=entity,
            group=group,
            tags=tags,
            mode="offline" if offline else None,
        )
        self._wandb_init.pop("anonymous", None)  # Lightning always passes it, and W&B warns that it is ignored
        self.settings = {"offline": offline, "save_dir": save_dir}

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return self.settings

    def continue_run(self, run_id: str) -> None:
        """Continue an earlier W&B run.

        Raises:
            ValueError: Another run has already begun.
        """
        if self._experiment is not None and self._experiment.id != run_id:
            raise ValueError(
                f"the W&B run {self._experiment.id} has begun, so {run_id} cannot be continued: use a new WandbLogger"
            )
        self._wandb_init["id"] = self._id = run_id

    @rank_zero_only
    def log_result(self, result: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        """Write the best round's metrics to the summary, which tables show and sweeps optimize."""
        self.experiment.summary.update(dict(result))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the W&B run, so that the next fit of this process gets one of its own."""
        if self._experiment is not None:
            self._id = self._experiment.id
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None
            self._wandb_init["id"] = None


#: The loggers that the trainer accepts; a bare name on the command line means the first of that name.
AnyLogger = RunLogger | lightning_loggers.Logger | Logger


def checked(given: list[Any]) -> list[Any]:
    """Check the loggers that a trainer was given.

    Raises:
        ValueError: One of them is not a logger.
    """
    if not all(hasattr(each, "log_metrics") for each in given):
        raise ValueError(f"trainer.logger is {given!r}: give loggers of Lightning's, true for files, false for none")
    return given


def begin(given: Sequence[Logger] | bool, folder: Path, history: Sequence[Mapping[str, float]]) -> list[Logger]:
    """Begin the loggers of a run.

    Args:
        given: Loggers, to which a CSV file is added; true for CSV and TensorBoard, false for none.
        folder: The run's folder.
        history: The finished rounds.
    """
    loggers: list[Logger] = [] if isinstance(given, bool) else list(given)
    if given is True:
        loggers = [CSVLogger(), TensorBoardLogger()]
    elif loggers and not any(_is_in(folder, logger) for logger in loggers):
        loggers = [CSVLogger(), *loggers]
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.begin(folder, history)
        getattr(logger, "experiment", None)  # created on first access, which takes longer than a round
    return loggers


def _is_in(folder: Path, logger: Logger) -> bool:
    """Whether a logger writes ``metrics.csv`` in the run's folder."""
    return isinstance(logger, CSVLogger) and logger.path(folder).resolve() == CSVLogger().path(folder).resolve()


def log_settings(loggers: Iterable[Logger], settings: dict[str, Any]) -> None:
    """Pass the configuration to the loggers that show settings."""
    for logger in loggers:
        # TensorBoard's logger gets them with the result, and some loggers only log metrics
        if hasattr(logger, "log_hyperparams") and not isinstance(logger, TensorBoardLogger):
            with contextlib.suppress(NotImplementedError):  # as of Fabric's CSVLogger
                logger.log_hyperparams(settings)


def end(loggers: Iterable[Logger], result: Mapping[str, float], settings: Mapping[str, Any], *, is_whole: bool) -> None:
    """Close the loggers, with the result of the run and whether it was completed; warn of those that fail."""
    for logger in loggers:
        try:
            if hasattr(logger, "log_result"):
                logger.log_result(result, settings)
            logger.finalize("success" if is_whole else "failed")
        except Exception as error:  # of any logger: the run is over, and has its result
            warnings.warn(
                f"trainer.logger: {type(logger).__name__} could not be closed ({type(error).__name__}: {error}), and "
                "may lack the end of the run: metrics.csv and result.json in the run's folder have it",
                stacklevel=2,
            )
