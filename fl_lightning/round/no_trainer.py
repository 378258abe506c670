"""What Lightning's modules have of a Trainer, and clients have not: each name raises with what there is instead."""

from typing import Any, NoReturn

_ROUND = "self.round_idx is the round, and the context's step (self.context.step) counts the local steps in it"
_VALUES = (
    "a metric of the clients is what scores(output, batch) returns, and a callback's on_evaluate(trainer, metrics, "
    "prefix) may add others"
)
_STEPS = (
    "an executor takes the steps, and on_before_zero_grad(optimizer) and on_before_optimizer_step(optimizer) are given "
    "the optimizer"
)
_TRAINER = f"{_ROUND}; a callback of the trainer has the run"


class NoTrainer:
    """A base class of clients, before LightningModule, whose own would answer 0 or log to nowhere.

    Attributes:
        round_idx: The current round, from 0 on; before the first one 0. It is the same in all that a client computes in
            a stage, on both executors.
    """

    round_idx: int = 0

    def log(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError that says how metrics are reported."""
        self._refuse("log", _VALUES)

    def log_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError that says how metrics are reported."""
        self._refuse("log_dict", _VALUES)

    @property
    def logger(self) -> NoReturn:
        """Raise a RuntimeError that says how metrics are reported."""
        self._refuse("logger", _VALUES)

    @property
    def loggers(self) -> NoReturn:
        """Raise a RuntimeError that says how metrics are reported."""
        self._refuse("loggers", _VALUES)

    def optimizers(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError that names the hooks that are given the optimizer."""
        self._refuse("optimizers", _STEPS)

    def lr_schedulers(self) -> NoReturn:
        """Raise a RuntimeError that names the setting for learning rates."""
        self._refuse("lr_schedulers", "model.lr_scheduler is the scheduler, which steps once a round")

    @property
    def current_epoch(self) -> NoReturn:
        """Raise a RuntimeError that names the round."""
        self._refuse("current_epoch", _ROUND)

    @property
    def global_step(self) -> NoReturn:
        """Raise a RuntimeError that names the round."""
        self._refuse("global_step", _ROUND)

    @property
    def trainer(self) -> NoReturn:
        """Raise a RuntimeError that names the round."""
        self._refuse("trainer", _TRAINER)

    def _refuse(self, name: str, instead: str) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} uses self.{name} of Lightning's Trainer, which no client has: {instead}"
        )
