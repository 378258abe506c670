"""D-PSGD: gossip averaging with the neighbours, and local steps.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
Algorithm 1, in the order that steps first and averages then. The mixing weights are Metropolis-Hastings': W_ij = 1 /
(1 + max(deg_i, deg_j)) for neighbours, and W_ii what is missing to one, which is symmetric and doubly stochastic on
every graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.kernels.moved_mixing import mix_only_moved
from fl_lightning.strategies.decentralised.base import Decentralised


def metropolis_hastings(adjacency_CC: Tensor) -> Tensor:
    """Symmetric, doubly stochastic weights on an undirected graph, (C, C)."""
    degree_C = adjacency_CC.sum(dim=1)
    weights_CC = adjacency_CC / (1 + torch.maximum(degree_C[:, None], degree_C[None, :])).double()
    return weights_CC + torch.diag(1 - weights_CC.sum(dim=1))


@dataclass(kw_only=True, eq=False)
class DPSGD(Decentralised):
    """Average with the neighbours after local training.

    Args:
        mix_only_moved: Average each number over those that moved it in local training (``kernels/moved_mixing.py``).
    """

    num_epochs: int = 3
    mix_only_moved: bool = False

    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """θ_i <- Σ_j W_ij θ_j."""
        weights_CC = metropolis_hastings(self.neighbours(clients)).to(trained_CP)
        if self.mix_only_moved:
            return mix_only_moved(weights_CC, trained_CP, self.models_CP[clients].to(trained_CP))
        return weights_CC @ trained_CP
