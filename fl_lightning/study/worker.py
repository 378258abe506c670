"""A process that trains one run after another: what it keeps of each, and how it is talked to."""

import contextlib
import io
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fl_lightning.callbacks import CommunicationLedger, EarlyStopping
from fl_lightning.callbacks.attacks.forgery import malicious_clients
from fl_lightning.cli import FederatedCLI
from fl_lightning.files import CannotWrite
from fl_lightning.round.metrics import client_values
from fl_lightning.run import checkpoint
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.run.curve import Curve, reached
from fl_lightning.run.result import summary
from fl_lightning.study.definition import TOTAL_BYTES
from fl_lightning.trainer import FederatedTrainer

#: Significant digits to which metrics are stored.
_DIGITS = 6
_MOST_WARNINGS = 5


class _States(Callback):
    """Writes the run's state after the last round, and from time to time before; with it what the run has taken.

    A run that a signal ends before its last round leaves its state, too.

    Args:
        last: File for the last state, if that is wanted.
        partial: File for the earlier ones, if these are wanted.
        every_seconds: How often, at most, one of these is written.
    """

    def __init__(self, last: Path | None = None, partial: Path | None = None, every_seconds: float = 60.0) -> None:
        self.last, self.partial, self.every_seconds = last, partial, every_seconds
        self._written = time.monotonic()
        self._cpu_before, self._cpu_start = 0.0, time.process_time()

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the run, in all processes that trained a part of it."""
        return self._cpu_before + time.process_time() - self._cpu_start

    def state_dict(self) -> dict[str, Any]:
        """What the run has taken so far."""
        return {"cpu_seconds": self.cpu_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._cpu_before = state.get("cpu_seconds", 0.0)  # which older states do not tell

    def on_fit_start(self, trainer: Trainer) -> None:
        """Refuse a state from which the run would come to what it does not come to by itself.

        Raises:
            ValueError: It is of a run that went on where this one would have ended.
        """
        if any(isinstance(each, EarlyStopping) and each.is_overdue for each in trainer.callbacks):
            raise ValueError("the state is of a run that went on where the patience of this one was at its end")

    def on_checkpoint_point(self, trainer: Trainer) -> None:
        """Write the state, if it is time."""
        is_cut = trainer.run.interrupted and trainer.run.round_idx < trainer.num_rounds
        is_over = trainer.run.should_stop or trainer.run.round_idx >= trainer.num_rounds
        is_due = is_cut or (not is_over and time.monotonic() - self._written >= self.every_seconds)
        if self.last is not None and is_over and not is_cut:
            trainer.save_checkpoint(self.last)
        elif self.partial is not None and is_due:
            self._written = time.monotonic()
            try:
                trainer.save_checkpoint(self.partial)
            except CannotWrite as error:  # the run needs it only if it is killed
                warnings.warn(f"the run goes on without a state to resume from: {error}", stacklevel=2)


class _ChosenClients(Callback):
    """Keeps each client's validation and test value at the best round."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """The values so far."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.values = state["values"]

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Keep them if the round is the best so far."""
        selection = trainer.run.selection
        if selection.best_round == trainer.run.round_idx:
            scores = trainer.run.scores[""]
            values = {
                part: name
                for part, wanted in {"val": selection.metric, "test": selection.test}.items()
                for name in scores.extras
                if wanted.endswith(name)  # of the benign clients, for example
            }
            self.values = {"client": list(scores.clients)}
            for part, name in values.items():
                self.values[part] = [_rounded(value) for value in client_values(scores, name).tolist()]


class RunCLI(FederatedCLI):
    """The command line of a run: only ``fit``, without checkpoints, progress bar and files.

    Args:
        arguments: Of ``fl-train``.
        run: Whether to train; otherwise the objects are built and no more.
        states: Writes the run's states, if that is wanted.
    """

    def __init__(self, arguments: Sequence[str], *, run: bool = True, states: _States | None = None) -> None:
        self.trains = run
        self.clients = _ChosenClients()
        self.states = states or _States()
        super().__init__(list(arguments))

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Build the trainer; of the callbacks that it adds by itself, the ledger stays."""
        trainer = super().instantiate_trainer(**kwargs)
        given = self._get(self.config_init, "trainer")["callbacks"] or []
        named = list(given) if isinstance(given, list) else [given]
        selected = [each for each in trainer.callbacks if each in named or isinstance(each, CommunicationLedger)]
        trainer.callbacks = [*selected, self.clients, self.states]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        if self.trains:
            super()._run_subcommand(subcommand)


def train(
    arguments: Sequence[str],
    scratch: Path,
    history: Sequence[str] = (),
    keep: Sequence[str] = (),
    folder: Path | None = None,
    state: Path | None = None,
    partial: Path | None = None,
    every_seconds: float = 60.0,
) -> dict[str, Any]:
    """Train a run and return its result.

    Args:
        arguments: Of ``fl-train``.
        scratch: Folder for the run's files, which are removed again.
        history: Metrics of every round to keep.
        keep: Shell-style patterns of files in the run's folder to keep.
        folder: Where they are kept.
        state: File that has the run's state after its last round in the end. Where it has that of a shorter run of the
            same settings (``StudyRun.lineage``), the run goes on from it and comes to what it would come to by itself;
            where a longer one's, or nothing that can be gone on from, the run begins anew.
        partial: File that has the run's state from time to time while it is trained. Where it has one, left by a
            worker that was killed, the run goes on from it.
        every_seconds: How often, at most, that state is written.

    Returns:
        ``error`` (empty if there was none), and where it finished the best round's metrics (``result``), those of
        other models at the round of their own choice (``kinds``: validation and test), each client's (``clients``),
        its ``marks``, when it was ``near`` its best validation, ``rounds``, bytes, seconds, what was warned about, and
        after which round it was ``resumed``; ``seconds`` are those since then, ``cpu_seconds`` those of the whole run.
    """
    start = time.perf_counter()
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as root, _quiet() as heard:
        given = [*arguments, f"--trainer.default_root_dir={root}"]
        for resumed, origin in [*_written(partial, state), (0, None)]:
            begun = [*given, f"--ckpt_path={origin}"] if origin else given
            states = _States(state, partial, every_seconds)
            result = {**_trained(begun, history, keep, folder, states, heard), "resumed": resumed}
            if not result["error"] or result.get("interrupted"):
                break
    messages = list(dict.fromkeys(heard.warnings))[:_MOST_WARNINGS]
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": states.cpu_seconds}
    spent = {name: round(value, 3) for name, value in spent.items()}
    return {**result, "warnings": messages, **spent}


def _trained(
    arguments: Sequence[str],
    history: Sequence[str],
    keep: Sequence[str],
    folder: Path | None,
    states: _States,
    heard: "_Heard",
) -> dict[str, Any]:
    """Train once; what it came to, or why not."""
    try:
        cli = RunCLI(arguments, states=states)
        if folder is not None:
            _keep(keep, cli.trainer.run.folder, folder)  # type: ignore[attr-defined]
        return _found(cli, history)
    except SystemExit:
        return {"error": heard.refusal}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _written(*states: Path | None) -> list[tuple[int, Path]]:
    """The states that can be read, and after how many rounds each was written."""
    result = []
    for path in states:
        if path is not None and path.exists():
            with contextlib.suppress(ValueError):  # damaged, or of another format: it will be written again
                result.append((int(checkpoint.peek(path)["round"]), path))
    return result


def _keep(patterns: Sequence[str], run: Path, folder: Path) -> None:
    for path in (path for pattern in patterns for path in sorted(run.glob(pattern))):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.name)


def build(arguments: Sequence[str]) -> dict[str, Any]:
    """Build the parts of a run, without its data; ``error`` says what is wrong with its settings."""
    with _quiet() as heard:
        try:
            RunCLI(arguments, run=False)
        except SystemExit:
            return {"error": heard.refusal}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def resolve(arguments: Sequence[str]) -> dict[str, Any]:
    """Every setting of a run with its value, as YAML under ``config``; ``error`` says what is wrong with them."""
    with _quiet() as heard:
        try:
            cli = RunCLI(arguments, run=False)
        except SystemExit:
            return {"error": heard.refusal}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "", "config": cli.trainer.config}  # type: ignore[attr-defined]


def partition_of(arguments: Sequence[str]) -> dict[str, Any]:
    """The hash of the partition that a run would be computed on now."""
    with _quiet() as heard:
        try:
            data = RunCLI(arguments, run=False).datamodule
            data.prepare_data()
            data.setup()
        except SystemExit:
            return {"error": heard.refusal}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "", "partition": data.registry.partition_hash}


def _found(cli: RunCLI, history: Sequence[str]) -> dict[str, Any]:
    trainer: FederatedTrainer = cli.trainer  # type: ignore[assignment]
    run, selection = trainer.run, trainer.run.selection
    if run.interrupted and (run.round_idx < trainer.num_rounds or run.unseen_clients):
        received = run.interruption.received
        name = "a signal" if received is None else signal.Signals(received).name  # of another process
        return {"error": f"stopped by {name}", "interrupted": True}
    whole = summary(run)
    asked = dict.fromkeys([*history, selection.monitor]) if history else ()
    wanted = [name for name in asked if any(name in row for row in run.history)]
    rows = [row for row in run.history if selection.monitor in row]
    last = reached(Curve.of_rows(run.history, selection.monitor, selection.mode))
    return {
        "error": "",
        "monitor": selection.monitor,
        "mode": selection.mode,
        "result": {name: _rounded(value) for name, value in selection.result.items()},
        "kinds": {
            kind.rstrip("/"): [_rounded(value) for value in best] for kind, best in selection.best_of_others.items()
        },
        "clients": cli.clients.values,
        "marks": whole["marks"],
        "near": {} if last is None else _spent_until(run.history, last),
        "malicious": list(malicious_clients(trainer)),
        "rounds": {name: [_rounded(row.get(name, math.nan)) for row in rows] for name in ("round", *wanted)},
        "num_rounds": whole["num_rounds"],
        "bytes": whole["bytes"],
        "training_seconds": round(whole["seconds"], 3),
        "failures": sum(whole["failures"].values()),
        "partition": whole["partition_hash"],
    }


def _spent_until(history: Sequence[Mapping[str, float]], last: int) -> dict[str, int]:
    """How many rounds there were up to one, and their bytes, where they were counted."""
    total = next(row for row in history if row["round"] == last).get(TOTAL_BYTES)
    return {"rounds": last + 1, **({} if total is None else {"bytes": int(total)})}


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


class _Heard(io.StringIO):
    """What was written to standard error, and what was warned about."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    @property
    def refusal(self) -> str:
        """The line with which a run was refused."""
        return self.getvalue().rpartition("fl-train: error: ")[2].strip() or "it ended without a word"


@contextlib.contextmanager
def _quiet() -> Iterator[_Heard]:
    """Suppress the output of a run, and note its warnings."""
    heard = _Heard()
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(heard),
    ):
        warnings.simplefilter("always", UserWarning)
        try:
            yield heard
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            heard.warnings = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


# ---------------------------------------------------------------- the process


def serve(connection: Connection, scratch: Path) -> None:
    """Handle tasks until the other end is closed: a task is a name in :data:`TASKS` and its arguments.

    The process is in its own group, so that Ctrl-C reaches only the parent process, and it ends with the parent.

    Args:
        connection: Where tasks come from and results go.
        scratch: Folder of all workers, removed if the other process is killed.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, arguments = connection.recv()
            connection.send(TASKS[name](*arguments))


def _end_with_parent(scratch: Path) -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


#: What a worker can be asked to do.
TASKS: Mapping[str, Any] = {"train": train, "build": build, "partition": partition_of}
