"""The server as it is when unseen clients have joined it; after the run it is that of the last round."""

import copy
from typing import Any

from fl_lightning import Callback


class Joined(Callback):
    """Keeps the server's state when unseen clients have joined."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, float], prefix: str) -> None:
        if prefix == "unseen/":
            self.state = copy.deepcopy(trainer.run.strategy.state_dict())

    def restore(self, strategy: Any) -> None:
        """Give a strategy that state."""
        strategy.load_state_dict(self.state)
