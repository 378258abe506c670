"""FedStar: what clients know of the shape of graphs is averaged, what they know of features is kept local.

Tan, Liu, Long, Jiang, Lu, Zhang: "Federated Learning on Non-IID Graphs via Structural Knowledge Sharing", AAAI 2023.
Clients whose features mean different things still have graphs of nodes and edges. A client's net has two channels
(``models/decoupled_gin.py``). With A the edges, D the degrees and s_v = [(A D⁻¹)^k_vv, k = 1 … K ‖ one-hot degree]

    s⁰ = W_s s,   s <- tanh(GCN(s));      x⁰ = W_x x,   x <- dropout(ReLU(GIN([x ‖ s])))
    W_s and the GCN   <- Σ_i w_i θ_i,   w_i the client's share of the training examples

and all else is trained by its client alone, on the client's own loss. s is as wide for all clients, whatever their
features are. A node without neighbors has no walks (released code divides by its degree there), and degree 1.

Leaves the client: the structure channel, nothing of features. Where nodes are the examples, nothing is pooled.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Adam

from fl_lightning.federation import Federation
from fl_lightning.models.decoupled_gin import DecoupledGIN
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedStar(FedAvg):
    """FedAvg of the structure channel alone.

    Args:
        num_epochs: Local epochs a round.
    """

    num_epochs: int = 1
    personal: Sequence[str] = field(default=(), init=False)

    default_net = DecoupledGIN
    default_optimizer = functools.partial(Adam, lr=0.001, weight_decay=5e-4)
    own_net = True
    needs_graphs = True

    def setup(self, federation: Federation) -> None:
        """Start from the common structure channel."""
        self.require_net(federation, "structure.*", "a structure channel")
        super().setup(federation)

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """All but the structure channel."""
        return tuple(name for name in federation.parameters if not name.startswith("structure."))
