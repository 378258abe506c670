"""The base class of all callbacks: hooks into the training of a federation."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from lightning.fabric import Fabric

from fl_lightning.counts import Counted
from fl_lightning.executors.hooks import check_parameters
from fl_lightning.round.participation import Participation
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.run.assembly import Run


class Trainer(Protocol):
    """The attributes of a trainer on which a callback may rely.

    Attributes:
        fabric: Device, precision and processes.
        num_rounds: Rounds of training.
        participation: Which clients take part in a round.
        dtype: Floating point type of batches.
        callbacks: All callbacks, in the order in which they are called.
        run: The state of the current fit, test or prediction.
        should_stop: Whether the current round is the last; a callback may set it.
        datamodule: The clients' data.
    """

    fabric: Fabric
    num_rounds: int
    participation: Participation
    dtype: torch.dtype
    datamodule: Any
    should_stop: bool

    @property
    def callbacks(self) -> "Sequence[Callback]":
        """All callbacks, in the order in which they are called."""

    @property
    def run(self) -> Run:
        """The state of the current fit, test or prediction."""

    def evaluate(self, clients: Sequence[int], prefix: str = "") -> dict[str, float]:
        """Score the given clients' models as the strategy does; keep the scores in ``run.scores``."""

    def state_dict(self) -> dict[str, Any]:
        """The complete state between two rounds; collective: every process must call it."""

    def save_checkpoint(self, path: Path) -> None:
        """Write the complete state; collective: every process must call it."""


class WrongSetting(ValueError):
    """A wrong setting that can be detected only with the first metrics of the training."""


class Callback(Counted):
    """Override the hooks you need. Every process calls every hook; write files where ``fabric.is_global_zero``."""

    #: Whether it reads or changes the clients' data, so that it needs a federation whose data are all here.
    needs_data: ClassVar[bool] = False
    #: Whether it makes clients run stages or evaluations that the strategy does not have.
    invents_stages: ClassVar[bool] = False
    #: Whether the trained models depend on it, so that a resume compares its settings.
    changes_training: ClassVar[bool] = False

    def on_clients(self, trainer: Trainer, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Each client's data, before they are batched: return them, or changed copies (such as poisoned data).

        A class that overrides it sets ``needs_data``; ``trainer.run`` has no clients yet.
        """
        return clients

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first round, after a checkpoint was loaded."""

    def on_round_start(self, trainer: Trainer) -> None:
        """Before the stages of ``trainer.run.round_idx``."""

    def on_send(self, trainer: Trainer, stage: Stage, payload: Payload | None) -> None:
        """The server's payload is about to reach the clients."""

    def on_clients_done(self, trainer: Trainer, stage: Stage, num_clients: int) -> None:
        """``num_clients`` more clients of this process have finished their part of the stage."""

    def on_upload(self, trainer: Trainer, stage: Stage, payload: Payload) -> Payload:
        """What the clients sent, before the server checks it; return it, or what should arrive instead."""
        return payload

    def on_stage_end(self, trainer: Trainer, stage: Stage, payload: Payload) -> None:
        """The server has aggregated ``payload``, the updates that passed its checks."""

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float], prefix: str) -> None:
        """Models were scored, but the best round is not updated yet; metrics, numbers, may be added to ``metrics``.

        ``trainer.run.scores[prefix + kind]`` holds each client's scores, for every kind of model that was evaluated.
        """

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After the evaluation; metrics, numbers, that are added to ``metrics`` are logged with the round's."""

    def on_checkpoint_point(self, trainer: Trainer) -> None:
        """The round is over and logged: the only place where a checkpoint may be written."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last round (or the one that an interruption ended), and after onboarding."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """``fit`` is about to end with ``error``; no process may wait for another here."""

    def on_evaluation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After ``validate`` or ``test``."""

    def state_dict(self) -> dict[str, Any]:
        """What is saved in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


class Hooks:
    """Calls the hooks of a trainer's callbacks, in order.

    Args:
        trainer: The trainer, which is passed to each hook.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook that returns nothing."""
        for callback in self.trainer.callbacks:
            getattr(callback, hook)(self.trainer, *args)

    def measured(self, hook: str, metrics: dict[str, float], *args: Any) -> None:
        """Call a hook that may add metrics, which become Python's numbers.

        Raises:
            WrongSetting: A callback has added something else.
        """
        for callback in self.trainer.callbacks:
            getattr(callback, hook)(self.trainer, metrics, *args)
            take_numbers(metrics, f"callback {type(callback).__name__}")

    def passed(self, hook: str, *args: Any) -> Any:
        """Call a hook that returns its last argument or a replacement, which is passed to the next callback.

        Raises:
            WrongSetting: A callback has returned nothing, or another number of clients.
        """
        *others, value = args
        for callback in self.trainer.callbacks:
            returned = getattr(callback, hook)(self.trainer, *others, value)
            is_short = returned is not None and isinstance(value, Sequence) and len(returned) != len(value)
            if returned is None or is_short:
                what = f"{len(returned)} clients instead of {len(value)}" if is_short else "None"
                raise WrongSetting(
                    f"callback {type(callback).__name__}.{hook} returned {what}: return its last argument, or what is "
                    "to take its place"
                )
            value = returned
        return value


def take_numbers(metrics: dict[str, Any], owner: str) -> None:
    """Make metrics Python's numbers where they are those of torch or NumPy.

    Args:
        metrics: The metrics by name, changed in place.
        owner: Whose they are, for the message.

    Raises:
        WrongSetting: One is no number, or its name is no text.
    """
    for name, value in metrics.items():
        if type(value) not in (float, int) or type(name) is not str:
            metrics[name] = _number(name, value, owner)


def _number(name: Any, value: Any, owner: str) -> float:
    try:
        if isinstance(name, str) and not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # of None, of a list, of a tensor of several numbers
        pass
    given = " ".join(repr(value).split())
    raise WrongSetting(f"{owner} has the metric {name!r} with value {given}: give a name and a number")


#: The callbacks that do what some of Lightning's do.
_COUNTERPARTS = {
    "EarlyStopping": "EarlyStopping",
    "ModelCheckpoint": "FederatedCheckpoint",
    **dict.fromkeys(("ProgressBar", "RichProgressBar", "TQDMProgressBar"), "RoundProgressBar"),
}


#: The hooks that do what some of those of Lightning's callbacks do.
_HOOKS = {
    "setup": "on_fit_start",
    "on_train_start": "on_fit_start",
    "on_train_epoch_start": "on_round_start",
    "on_train_epoch_end": "on_round_end",
    "on_train_batch_end": "on_clients_done",
    "on_validation_end": "on_evaluate",
    "on_validation_epoch_end": "on_evaluate",
    "on_test_end": "on_evaluation_end",
    "on_test_epoch_end": "on_evaluation_end",
    "on_train_end": "on_fit_end",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
    "teardown": "on_fit_end",
}


def in_place_of(name: str) -> str:
    """What to give in place of a callback of Lightning's, by the name of its class."""
    advice = f"use fl_lightning.callbacks.{_COUNTERPARTS[name]}" if name in _COUNTERPARTS else "leave it out"
    return f"{advice} (Lightning's own callbacks are for its Trainer)"


def check_hooks(callback: object) -> None:
    """Refuse a callback that defines a hook which is never called (a misspelled one would be silently ignored).

    Raises:
        ValueError: It is not a :class:`Callback`, a public ``on_...`` method is not a hook, or a hook takes other
            arguments than it gets.
    """
    name = type(callback).__name__
    if isinstance(callback, type):
        raise ValueError(f"trainer.callbacks: {callback.__name__} is a class: give an instance, {callback.__name__}()")
    if not isinstance(callback, Callback):
        is_lightnings = type(callback).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        advice = (
            in_place_of(name) if is_lightnings else "give instances of fl_lightning.Callback, one or a list of them"
        )
        raise ValueError(f"trainer.callbacks: {name} is not a fl_lightning.Callback: {advice}")
    hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
    for method in dir(callback):
        if method in _HOOKS or (method.startswith("on_") and method not in hooks):
            near = [_HOOKS[method]] if method in _HOOKS else difflib.get_close_matches(method, hooks, n=1)
            advice = f"did you mean {near[0]}?" if near else f"the hooks are {', '.join(hooks)}"
            raise ValueError(f"callback {name} defines {method}, which is no hook: {advice}")
    for hook in hooks:
        check_parameters(getattr(callback, hook), getattr(Callback, hook), f"callback {name}.{hook}")
