"""FedProx: FedAvg whose clients are held near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2:
each client minimises f_i(θ) + μ/2 ‖θ - θ_global‖².
"""

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.round.context import Context, Parameters
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(frozen=True)
class Proximal:
    """μ/2 ‖θ - θ_received‖², a penalty that any strategy can carry."""

    weight: float

    def __call__(self, parameters: Parameters, context: Context) -> Tensor:
        """Half the weighted squared distance to the received parameters."""
        distances = [(parameters[name] - context.anchor[name]).square().sum() for name in parameters]
        return 0.5 * self.weight * sum(distances[1:], distances[0])


class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        proximal_weight: μ; 0 is FedAvg.
        aggregation: A robust rule in place of θ <- W θ, from ``strategies.mixing``; None for W θ itself.
    """

    def __init__(
        self,
        *,
        num_epochs: int = 3,
        reset_optimizer: bool = False,
        proximal_weight: float = 0.01,
        aggregation: Aggregation | None = None,
    ) -> None:
        super().__init__(num_epochs=num_epochs, reset_optimizer=reset_optimizer, aggregation=aggregation)
        if proximal_weight < 0:
            raise ValueError(f"strategy.proximal_weight must not be negative, got {proximal_weight}")
        self.proximal_weight = proximal_weight

    def penalty(self) -> Proximal | None:
        """The proximal term."""
        return Proximal(self.proximal_weight) if self.proximal_weight else None
