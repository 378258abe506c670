"""FedPer: the backbone is averaged, the classifier stays at home.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", arXiv:1912.00818,
Algorithm 1.
"""

from collections.abc import Sequence

from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.fedavg import FedAvg


class FedPer(FedAvg):
    """FedAvg of everything but the personal layers.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        personal: Shell-style patterns of the personal layers' parameters.
        aggregation: A robust rule in place of θ <- W θ, from ``strategies.mixing``; None for W θ itself.
    """

    def __init__(
        self,
        *,
        num_epochs: int = 3,
        reset_optimizer: bool = False,
        personal: Sequence[str] = ("head.*",),
        aggregation: Aggregation | None = None,
    ) -> None:
        super().__init__(
            num_epochs=num_epochs, reset_optimizer=reset_optimizer, personal=personal, aggregation=aggregation
        )
