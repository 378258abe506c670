"""Local: every client trains alone; the baseline that collaboration has to beat."""

from collections.abc import Sequence

from fl_lightning.round.stage import Stage
from fl_lightning.strategies.base import Strategy


class Local(Strategy):
    """No communication.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
    """

    takes_architectures = True

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """Train; send nothing."""
        return [self.training(round_idx)]
