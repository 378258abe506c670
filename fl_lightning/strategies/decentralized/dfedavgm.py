"""DFedAvgM: gossip averaging after several local steps with momentum.

Sun, Li, Wang: "Decentralized Federated Averaging", IEEE TPAMI 45(4), 2023, Algorithm 1. In each round, from y⁰ = θ_i
and without momentum at first,

    K times  y <- y - η ∇f_i(y) + ρ (y - y before)        then  θ_i <- Σ_j W_ij y_j

which are the steps of ``torch.optim.SGD`` with momentum ρ, reset in every round; W as in D-PSGD. With one step
and no momentum it is D-PSGD. The paper's quantized messages are left out.

Leaves the client: its model, to its neighbors.
"""

import functools
import warnings
from dataclasses import dataclass

from torch.optim import SGD

from fl_lightning.federation import Federation
from fl_lightning.strategies.decentralized.dpsgd import DPSGD


@dataclass(kw_only=True, eq=False)
class DFedAvgM(DPSGD):
    """Average with the neighbors after local training with momentum; its rate and ρ are those of ``model.optimizer``.

    Args:
        num_epochs: Number of local epochs per round.
        reset_optimizer: Reset the momentum after every round, as in the paper.
    """

    num_epochs: int = 3
    reset_optimizer: bool = True

    default_optimizer = functools.partial(SGD, lr=0.1, momentum=0.9, fused=True)

    def setup(self, federation: Federation) -> None:
        """Draw the topology, and warn if the optimizer is not SGD with momentum."""
        super().setup(federation)
        optimizer = None if federation.client is None else federation.client.configure_optimizers()
        if not isinstance(optimizer, SGD):
            warnings.warn(
                f"DFedAvgM is for SGD with momentum; with {type(optimizer).__name__} it is D-PSGD with that: set "
                "model.optimizer to torch.optim.SGD with momentum, for example 0.9",
                stacklevel=2,
            )
