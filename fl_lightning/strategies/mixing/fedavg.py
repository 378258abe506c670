"""FedAvg: one global model, the average of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1: θ = Σ_i w_i θ_i with w_i the client's share of the training examples.
"""

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.round.payload import Payload
from fl_lightning.strategies.mixing.base import Mixing, example_weights


@dataclass(kw_only=True, eq=False)
class FedAvg(Mixing):
    """Federated averaging."""

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """The common row of training shares, (1, C)."""
        return example_weights(upload)[None]
