"""The net for whole graphs of peers.py, in PyG's layers: that of OpenFGL, whose file has it inside its package."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GINConv, global_add_pool

WIDTH, LAYERS, DROPOUT = 64, 2, 0.5


class GraphNet(nn.Module):
    """Convolutions by perceptrons of twice the width with BatchNorm, a sum over nodes, and a perceptron."""

    def __init__(self, num_features: int, num_classes: int, width: int = WIDTH) -> None:
        super().__init__()
        widths = [num_features, *[width] * LAYERS]
        self.convs = nn.ModuleList(
            GINConv(
                nn.Sequential(
                    nn.Linear(before, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width)
                ),
                train_eps=True,
            )
            for before in widths[:-1]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in self.convs)
        self.hidden, self.hidden_norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """Logits of the graphs of a batch."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), DROPOUT, self.training)
        x = self.hidden_norm(self.hidden(global_add_pool(x, batch))).relu()
        logits: Tensor = self.head(F.dropout(x, DROPOUT, self.training))
        return logits
