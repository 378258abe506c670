"""A callback that saves a checkpoint in the middle of a run."""

from pathlib import Path
from typing import Any

from fl_lightning import Callback


class SavesAfter(Callback):
    """Writes the complete state after some rounds.

    Args:
        num_rounds: How many.
        path: The checkpoint.
        stops: Whether it then ends the run as an interrupt does.
    """

    def __init__(self, num_rounds: int, path: Path, *, stops: bool = False) -> None:
        self.num_rounds = num_rounds
        self.path = path
        self.stops = stops

    def on_checkpoint_point(self, trainer: Any) -> None:
        if trainer.run.round_idx == self.num_rounds:
            trainer.save_checkpoint(self.path)
            if self.stops:
                raise KeyboardInterrupt
