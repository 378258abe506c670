"""D-PSGD: gossip averaging with the neighbours, and local steps.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
Algorithm 1. The mixing weights are Metropolis-Hastings': W_ij = 1 / (1 + max(deg_i, deg_j)) for neighbours, and W_ii
what is missing to one, which is symmetric and doubly stochastic on every graph.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.payload import Payload
from fl_lightning.strategies.decentralised import Decentralised


def metropolis_hastings(adjacency_CC: Tensor) -> Tensor:
    """Symmetric, doubly stochastic weights on an undirected graph, (C, C)."""
    degree_C = adjacency_CC.sum(dim=1)
    weights_CC = adjacency_CC / (1 + torch.maximum(degree_C[:, None], degree_C[None, :])).double()
    return weights_CC + torch.diag(1 - weights_CC.sum(dim=1))


class DPSGD(Decentralised):
    """Average with the neighbours after local training; settings as of :class:`Decentralised`."""

    def combine(self, messages: Payload, adjacency_CC: Tensor) -> Mapping[str, Tensor]:
        """θ_i <- Σ_j W_ij θ_j."""
        weights_CC = metropolis_hastings(adjacency_CC)
        return {
            name: (weights_CC.to(tensor) @ tensor.flatten(1)).view_as(tensor)
            for name, tensor in messages.parameters.items()
        }
