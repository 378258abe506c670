"""A server's generator of pseudo nodes of given classes, for distillation without data (FedTAD).

Zhu, Li, Wu, Wu, Hu, Li: "FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph Federated Learning",
IJCAI 2024.
"""

import itertools

import torch
from torch import Tensor, nn

from fl_lightning.batches import ClientGraph
from fl_lightning.kernels.linear import Linear


class PseudoNodeGenerator(nn.Module):
    """Features of nodes from their classes and noise: three hidden layers with tanh, then a linear one.

    Args:
        num_classes: Number of classes, each with an embedding as wide as there are classes.
        noise_channels: Width of the noise.
        num_features: Width of the features.

    Shapes:
        Classes (M,) and noise (M, noise_channels) to features (M, num_features).
    """

    def __init__(self, num_classes: int, noise_channels: int, num_features: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(num_classes, num_classes)
        widths = (num_classes + noise_channels, 64, 128, 256, num_features)
        self.layers = nn.ModuleList(Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, y_M: Tensor, noise_MZ: Tensor) -> Tensor:
        """Return the features, neither bounded nor normalized."""
        h_MD = torch.cat([self.classes(y_M), noise_MZ], dim=1)
        for layer in self.layers[:-1]:
            h_MD = layer(h_MD).tanh()
        features_MF: Tensor = self.layers[-1](h_MD)
        return features_MF


def nearest_neighbor_graph(x_MF: Tensor, y_M: Tensor, num_neighbors: int) -> ClientGraph:
    """A graph whose nodes are linked to those with the most similar directions, both ways; it has no gradient."""
    unit_MF = nn.functional.normalize(x_MF.detach(), dim=1)
    cosine_MM = (unit_MF @ unit_MF.T).fill_diagonal_(-torch.inf)
    nearest_MI = cosine_MM.topk(min(num_neighbors, len(x_MF) - 1), dim=1).indices
    linked_MM = torch.zeros_like(cosine_MM, dtype=torch.bool).scatter(1, nearest_MI, True)
    everyone_M = torch.ones_like(y_M, dtype=torch.bool)
    return ClientGraph(
        name="pseudo",
        x_NF=x_MF.detach(),
        edge_index_2E=(linked_MM | linked_MM.T).nonzero().T,
        y_N=y_M,
        train_mask_N=everyone_M,
        val_mask_N=~everyone_M,
        test_mask_N=~everyone_M,
        node_idx_N=torch.arange(len(y_M)),
    )
