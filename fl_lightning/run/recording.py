"""The records of a run during training: its configuration, metrics, profile and result."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fl_lightning.run import loggers, result
from fl_lightning.run.assembly import Run
from fl_lightning.run.callback import Hooks
from fl_lightning.run.description import write_configuration
from fl_lightning.run.profiling import RoundTrace


@contextmanager
def recorded(run: Run, trainer: Any, hooks: Hooks, *, profile: bool) -> Iterator[None]:
    """Begin the records of a run, and close them when it ends, in whatever way; a signal does not end it before.

    Args:
        run: The run, with its folder and after a checkpoint was loaded.
        trainer: The trainer, for its settings and loggers, and for whether training has ``started`` (if not, there is
            no result).
        hooks: The callbacks, which are notified of an error.
        profile: Whether to record where the time of the rounds goes.
    """
    run.loggers = loggers.begin(trainer.logger, run.folder, run.history)
    run.written = write_configuration(run, trainer)
    loggers.log_settings(run.loggers, run.written)
    run.trace = RoundTrace(run.folder / f"trace{run.fabric.global_rank or ''}.json") if profile else None
    with run.interruption:  # until the result is written
        try:
            yield
            _write_profile(run)
        except BaseException as error:
            hooks.call("on_exception", error)
            with suppress(OSError):  # it would hide the error that ended the run
                _end(run, error, started=trainer.started)
            raise
        _end(run, None, started=True)


def _end(run: Run, error: BaseException | None, *, started: bool) -> None:
    try:
        if started and run.fabric.is_global_zero:
            result.write(run, error)
    finally:
        loggers.end(run.loggers, run.selection.result, run.written, is_whole=error is None)


def _write_profile(run: Run) -> None:
    if run.trace is not None:
        run.trace.close()
        if run.fabric.is_global_zero:
            run.clock.to_csv(run.folder / "profile.csv")
