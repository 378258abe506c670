"""FedSpray's client: a GraphSAGE that classifies, and a model of features and structure proxies.

Fu, Chen, Zhang, Chen, Li: "Federated Graph Learning with Structure Proxy Alignment", KDD 2024.

Shape legend: N nodes of one client, F features, P width of the proxies, K classes.
"""

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear, check_widths
from fl_lightning.models.graph_sage import GraphSAGE


class FeatureModel(nn.Module):
    """A model that sees no edges, but features and a proxy for the neighbors.

    e = ReLU(X W + b);   logits ``head`` (e + q) with a proxy q for each node;   logits ``first_head`` e without any.

    Args:
        in_channels: F.
        out_channels: K.
        proxy_channels: P.
    """

    def __init__(self, in_channels: int, out_channels: int, proxy_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, proxy_channels))
        self.bias = nn.Parameter(torch.zeros(proxy_channels))
        nn.init.xavier_uniform_(self.weight)
        self.head = Linear(proxy_channels, out_channels)
        self.first_head = Linear(proxy_channels, out_channels)

    def forward(self, batch: GraphBatch) -> Tensor:
        """Encode the features of all nodes, e, (N, P)."""
        return (batch.transform(self.weight) + self.bias.unsqueeze(-2)).relu()


class ProxySAGE(GraphSAGE):
    """A GraphSAGE (``convs.*``, ``head.*``), which predicts, and a :class:`FeatureModel` (``features.*``).

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
        proxy_channels: Width of the structure proxies.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 64,
        num_layers: int = 2,
        dropout: float = 0.5,
        proxy_channels: int = 64,
    ) -> None:
        super().__init__(
            in_channels, out_channels, hidden_channels=hidden_channels, num_layers=num_layers, dropout=dropout
        )
        check_widths(proxy_channels=proxy_channels)
        self.features = FeatureModel(in_channels, out_channels, proxy_channels)
