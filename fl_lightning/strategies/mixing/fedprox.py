"""FedProx: FedAvg whose clients are kept near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2:
each client minimizes f_i(θ) + μ/2 ‖θ - θ_global‖², over what it has received: layers of its own are not pulled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fl_lightning.strategies.mixing.fedavg import FedAvg
from fl_lightning.strategies.objectives import Proximal


@dataclass(kw_only=True, eq=False)
class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Args:
        proximal_weight: μ, at least 0; 0 is FedAvg.
    """

    proximal_weight: float = 0.01
    personal: Sequence[str] = field(default=(), init=False)  # not a setting of this strategy

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "proximal_weight")

    def penalty(self) -> Proximal | None:
        """The proximal term."""
        return Proximal(self.proximal_weight, self.shared) if self.proximal_weight else None
