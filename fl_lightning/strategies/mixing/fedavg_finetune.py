"""FedAvg-finetune: FedAvg, and each client adapts the global model to its own data before it is evaluated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fl_lightning.round.stage import Evaluation, tune
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedAvgFinetune(FedAvg):
    """FedAvg evaluated after some local epochs on a copy of the global model.

    Args:
        num_finetune_epochs: Local epochs before each evaluation, at least 1, with a new optimizer.
    """

    num_finetune_epochs: int = 5
    personal: Sequence[str] = field(default=(), init=False)  # not a setting of this strategy
    blend: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_finetune_epochs")

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The fine-tuned copies are the result; the global model is logged as ``global/...``."""
        shared = self.model_for(clients)
        tuned = Evaluation(payload=shared, tuning=tune(self.num_finetune_epochs))
        return {"": tuned, "global/": Evaluation(payload=shared)}
