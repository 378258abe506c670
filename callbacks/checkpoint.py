"""Writes checkpoints, often enough to lose little and rarely enough to cost little."""

import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.executors.storage import Allocate
from fl_lightning.files import free_bytes, whole_file, writing
from fl_lightning.run import checkpoint
from fl_lightning.run.assembly import Run
from fl_lightning.run.callback import Callback, Trainer


class FederatedCheckpoint(Callback):
    """Writes ``last.ckpt``, ``best.ckpt`` and ``round=000010.ckpt`` (after 10 rounds) to ``checkpoints/`` of the run.

    A state can have hundreds of megabytes and a round take milliseconds, so files are written only when
    ``every_seconds`` have passed, every ``every_n_rounds``, after the last round and when a signal ends the run; if
    writing is slow, the interval is extended so that it takes at most a fortieth of the time. The state of the best
    round is kept in memory until then, and written before ``last.ckpt``: a killed run that is resumed from there
    repeats the rounds in between, and so finds every better one again.

    The callback has no state of its own, so that a checkpoint does not depend on when others were written.

    Args:
        every_n_rounds: Rounds between the files that are named after their round; None for no such files.
        every_seconds: Minimum number of seconds between writes of ``last.ckpt`` and ``best.ckpt``; 0 to write after
            every round, however long that takes.
        keep: How many of the files named after their round are kept; None for all.
        save_last: Write ``last.ckpt``.
        save_best: Write ``best.ckpt``, of the best round by validation.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        *,
        every_n_rounds: int | None = None,
        every_seconds: float = 60.0,
        keep: int | None = 2,
        save_last: bool = True,
        save_best: bool = True,
    ) -> None:
        for name, value in {"every_n_rounds": every_n_rounds, "keep": keep}.items():
            if value is not None and value < 1:
                raise ValueError(f"FederatedCheckpoint.{name} must be at least 1, or null, got {value}")
        if every_seconds < 0:
            raise ValueError(f"FederatedCheckpoint.every_seconds must not be negative, got {every_seconds}")
        self.every_n_rounds = every_n_rounds
        self.every_seconds = every_seconds
        self.keep = keep
        self.save_last = save_last
        self.save_best = save_best

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the clock, warn if the disk is too full, and have ``best.ckpt`` be that of a resumed state."""
        self._last_write, self._pause = time.monotonic(), self.every_seconds
        self._snapshot: dict[str, Any] | None = None
        self._snapshot_is_pending = False
        self._warn_of_full_disk(trainer)
        if self.save_best and trainer.fabric.is_global_zero:
            _resume_best(trainer.run, trainer.num_rounds)

    def _warn_of_full_disk(self, trainer: Trainer) -> None:
        """Compare free space with an estimate: each file holds the server's and the clients' state."""
        run, periodic = trainer.run, (self.keep or 1) if self.every_n_rounds else 0
        size = checkpoint.num_bytes(run.strategy.state_dict()) + run.executor.stored_bytes() * trainer.fabric.world_size
        needed = size * (self.save_last + self.save_best + periodic + 1)  # one more while a file is replaced
        free = free_bytes(run.folder)
        if trainer.fabric.is_global_zero and free is not None and needed > free:
            warnings.warn(
                f"the checkpoints will take some {needed:,} bytes in {run.folder}, where {free:,} are free: free some, "
                "set trainer.default_root_dir to another folder, or keep fewer (FederatedCheckpoint)",
                stacklevel=2,
            )

    def on_checkpoint_point(self, trainer: Trainer) -> None:
        """Keep the state if the round is the best, and write what is due; all processes decide the same."""
        start = time.monotonic()
        periodic = self.every_n_rounds is not None and trainer.run.round_idx % self.every_n_rounds == 0
        is_over = trainer.run.should_stop or trainer.run.round_idx >= trainer.num_rounds
        due = periodic or is_over or self._time_is_up(trainer)
        is_best = self.save_best and trainer.run.selection.best_round == trainer.run.round_idx - 1
        state: dict[str, Any] = {}
        if is_best or periodic or (due and self.save_last):
            state = trainer.state_dict()
        if is_best and trainer.fabric.is_global_zero:
            self._snapshot = state if due else _copy(state, self._snapshot, trainer.run.executor.allocate)
            self._snapshot_is_pending = True
        if due:
            if trainer.fabric.is_global_zero:
                self._write(trainer, state, periodic=periodic)
            trainer.fabric.barrier()
            self._last_write = time.monotonic()
            if self.every_seconds:
                self._pause = max(self.every_seconds, _PATIENCE * (self._last_write - start))

    def on_fit_end(self, trainer: Trainer) -> None:
        """Free the memory."""
        self._snapshot = None

    def _time_is_up(self, trainer: Trainer) -> bool:
        time_is_up = time.monotonic() - self._last_write >= self._pause
        return bool(trainer.fabric.broadcast(time_is_up)) if trainer.fabric.world_size > 1 else time_is_up

    def _write(self, trainer: Trainer, state: dict[str, Any], *, periodic: bool) -> None:
        folder = trainer.run.folder / "checkpoints"
        for logger in trainer.run.loggers:  # a run that is resumed from these files does not log earlier rounds again
            logger.save()
        if self._snapshot_is_pending:
            assert self._snapshot is not None
            checkpoint.write(folder / "best.ckpt", self._snapshot)
            self._snapshot_is_pending = False
            if self._snapshot is state:  # it shares memory with the clients, so the next copy must not be written to it
                self._snapshot = None
        if periodic:
            checkpoint.write(folder / f"round={trainer.run.round_idx:06d}.ckpt", state)
            self._drop_old(folder, trainer.run.round_idx)
        if self.save_last:
            checkpoint.write(folder / "last.ckpt", state)

    def _drop_old(self, folder: Path, round_idx: int) -> None:
        """Keep the newest files up to this round; later ones belong to an abandoned run."""
        result = {int(match[1]): path for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))}
        past = sorted(number for number in result if number <= round_idx)
        for number in past[: -self.keep] if self.keep is not None else []:
            result[number].unlink()


def _resume_best(run: Run, num_rounds: int) -> None:
    """Have ``best.ckpt`` be the best round of the state that a run begins with, or of one to come; or set it aside."""
    best, best_round = run.folder / "checkpoints" / "best.ckpt", run.selection.best_round
    if best.exists() and not _is_of(run, num_rounds, best):
        abandoned = best.with_name(f"{best.name}.abandoned")  # not .ckpt: nothing is resumed from it unasked
        with writing(abandoned):
            best.replace(abandoned)
        warnings.warn(f"{best} is of rounds that the resumed run has not: it is now {abandoned.name}", stacklevel=3)
    if best.exists() or best_round < 0:
        return
    if best_round == run.round_idx - 1:
        resumed_from, *_ = run.checkpoints
        with whole_file(best) as temporary:
            shutil.copyfile(resumed_from, temporary)
    else:
        warnings.warn(
            f"round {best_round} was the best so far, but there is no {best}: it will be written when a better round "
            "comes",
            stacklevel=3,
        )


def _is_of(run: Run, num_rounds: int, path: Path) -> bool:
    """Whether a checkpoint is of a run's best round so far, down to its seconds, or of a round that it will repeat.

    A run that was killed has a ``best.ckpt`` that may be newer than the ``last.ckpt`` with which it goes on.
    """
    best_round = run.selection.best_round
    try:
        content = checkpoint.peek(path)
    except ValueError:  # which whoever reads it is told, unless a better round replaces it
        return True
    if repr(content["history"][-1:]) == repr(run.history[best_round : best_round + 1]):  # which may contain NaN
        return True
    is_to_come = run.round_idx < content["round"] <= num_rounds
    return bool(is_to_come and content["changes"] == run.changes)


#: Smallest ratio of the time between writes to the duration of the last write.
_PATIENCE = 40

_FILE_NAME = re.compile(r"round=(\d+)\.ckpt")


#: Values that cannot change, so that a list or dict of nothing else is copied by itself.
_FIXED = frozenset({bool, int, float, str, type(None)})


def _copy(new: Any, old: Any, allocate: Allocate) -> Any:
    """Copy tensors, dicts and lists, into the memory of an earlier copy where that fits."""
    if isinstance(new, Tensor):
        fits = isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        return (old if fits else allocate(new.shape, new.dtype, new.device)).copy_(new.detach())
    if isinstance(new, dict):
        if _FIXED.issuperset(map(type, new.values())):
            return dict(new)
        copy = old if isinstance(old, dict) else {}
        return {key: _copy(value, copy.get(key), allocate) for key, value in new.items()}
    if isinstance(new, list | tuple):
        if _FIXED.issuperset(map(type, new)):
            return type(new)(new)
        kept_list = old if isinstance(old, list | tuple) and len(old) == len(new) else [None] * len(new)
        return type(new)(_copy(value, copy, allocate) for value, copy in zip(new, kept_list, strict=True))
    return new
