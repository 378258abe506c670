"""FedAvg: one global model, the average of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1: θ = Σ_i w_i θ_i with w_i the client's share of the training examples.
"""

from torch import Tensor

from fl_lightning.round.payload import Payload
from fl_lightning.strategies.mixing.base import Mixing, example_weights


class FedAvg(Mixing):
    """Federated averaging.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        personal: Shell-style patterns of parameters that never leave their client.
        aggregation: A robust rule in place of θ <- W θ, from ``strategies.mixing``; None for W θ itself.
    """

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """The common row of training shares, (1, C)."""
        return example_weights(upload)[None]
