"""What is recorded of a run while it is trained: its configuration, metrics, profile and result."""

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
    """Begin the records of a run, and end them when it ends, however that may be.

    Args:
        run: The run; its folder is there, and what a checkpoint tells.
        trainer: For its settings and loggers, and whether the training has ``started``: else nothing has come of it.
        hooks: The callbacks, who are told of an error.
        profile: Whether to record where the time of the rounds goes.
    """
    run.loggers = loggers.begin(trainer.logger, run.folder, run.history)
    run.written = write_configuration(run, trainer)
    loggers.log_settings(run.loggers, run.written)
    run.trace = RoundTrace(run.folder / f"trace{run.fabric.global_rank or ''}.json") if profile else None
    try:
        yield
        _write_profile(run)
    except BaseException as error:
        hooks.call("on_exception", error)
        with suppress(OSError):  # which would hide what ended the run
            _end(run, error, started=trainer.started)
        raise
    _end(run, None, started=True)


def _end(run: Run, error: BaseException | None, *, started: bool) -> None:
    loggers.end(run.loggers, run.selection.result, run.written, is_whole=error is None)
    if started and run.fabric.is_global_zero:
        result.write(run, error)


def _write_profile(run: Run) -> None:
    if run.trace is not None:
        run.trace.close()
        if run.fabric.is_global_zero:
            run.clock.to_csv(run.folder / "profile.csv")
