"""D-PSGD: gossip averaging with the neighbors, and local steps.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
Algorithm 1, in the order that steps first and averages then. The mixing weights are Metropolis-Hastings': W_ij = 1 /
(1 + max(deg_i, deg_j)) for neighbors, and W_ii what is missing to one, which is symmetric and doubly stochastic on
every graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.kernels.masked_averaging import masked_average
from fl_lightning.strategies.decentralized.base import Decentralized


def metropolis_hastings(adjacency_CC: Tensor) -> Tensor:
    """Symmetric, doubly stochastic weights on an undirected graph, (C, C)."""
    degree_C = adjacency_CC.sum(dim=1)
    weights_CC = adjacency_CC / (1 + torch.maximum(degree_C[:, None], degree_C[None, :])).double()
    return weights_CC + torch.diag(1 - weights_CC.sum(dim=1))


@dataclass(kw_only=True, eq=False)
class DPSGD(Decentralized):
    """Average with the neighbors after local training.

    Args:
        masked_averaging: Average each coordinate over the clients that updated it in local training
            (``kernels/masked_averaging.py``).
    """

    num_epochs: int = 3
    masked_averaging: bool = False

    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """θ_i <- Σ_j W_ij θ_j."""
        weights_CC = metropolis_hastings(self.neighbors(clients)).to(trained_CP)
        if self.masked_averaging:
            return masked_average(weights_CC, trained_CP, self.models_CP[clients].to(trained_CP))
        return weights_CC @ trained_CP
