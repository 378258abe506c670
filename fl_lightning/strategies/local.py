"""Local: every client trains alone; the baseline that collaboration has to beat."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.round.stage import Stage
from fl_lightning.strategies.base import Strategy


@dataclass(kw_only=True, eq=False)
class Local(Strategy):
    """No communication."""

    takes_architectures = True

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """Train; send nothing."""
        return [self.training(round_idx)]
