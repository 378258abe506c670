"""FedAvg-finetune: FedAvg, and each client adapts the global model to its own data before it is evaluated."""

from collections.abc import Mapping, Sequence

from fl_lightning.round.stage import Evaluation, tune
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.fedavg import FedAvg


class FedAvgFinetune(FedAvg):
    """FedAvg evaluated after some local epochs on a copy of the global model.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        num_finetune_epochs: Local epochs before each evaluation, with a fresh optimiser.
        aggregation: A robust rule in place of θ <- W θ, from ``strategies.mixing``; None for W θ itself.
    """

    def __init__(
        self,
        *,
        num_epochs: int = 3,
        reset_optimizer: bool = False,
        num_finetune_epochs: int = 5,
        aggregation: Aggregation | None = None,
    ) -> None:
        super().__init__(num_epochs=num_epochs, reset_optimizer=reset_optimizer, aggregation=aggregation)
        if num_finetune_epochs < 1:
            raise ValueError(
                f"strategy.num_finetune_epochs must be at least 1 (or use FedAvg), got {num_finetune_epochs}"
            )
        self.num_finetune_epochs = num_finetune_epochs

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The fine-tuned copies are the result; the global model is logged as ``global/...``."""
        shared = super().evaluations(clients)[""]
        tuned = Evaluation(payload=shared.payload, tuning=tune(self.num_finetune_epochs))
        return {"": tuned, "global/": shared}
