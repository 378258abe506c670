"""FedAvg: one global model, the average of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1: θ = Σ_i w_i θ_i with w_i the client's share of the training examples.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fl_lightning.round.payload import Payload
from fl_lightning.strategies.base import SumWeighting
from fl_lightning.strategies.mixing.base import Mixing, equal_weights, example_weights


@dataclass(kw_only=True, eq=False)
class FedAvg(Mixing):
    """Federated averaging.

    Args:
        weighting: w: each client's share of the training ``examples``, or ``equal`` shares.
    """

    weighting: Literal["examples", "equal"] = "examples"

    shares_statistics = True

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """The common row w, (1, C)."""
        return (example_weights if self.weighting == "examples" else equal_weights)(upload)[None]

    def sum_weighting(self) -> SumWeighting:
        """That of w, unless a setting needs single clients' updates."""
        return None if self.settings_against_sums() else self.weighting
