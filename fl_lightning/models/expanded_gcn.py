"""A GCN whose nodes have further neighbors of which only the hidden layer is known (FedGNN).

Shape legend: N nodes of one client, D width.
"""

from typing import Any

from torch import Tensor

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.models.gcn import GCN
from fl_lightning.models.output import NetOutput


class ExpandedGCN(GCN):
    """:class:`~fl_lightning.models.GCN` that can take received rows ē into its second convolution.

    With H the first convolution's output after ReLU (and dropout), W and b the second's weights, its output is

        ((1 - β) Â H + β ē) W + b,   β in [0, 1] for each node

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions, at least 2.
        dropout: Drop probability after each convolution, in [0, 1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        if num_layers < 2:
            raise ValueError(f"num_layers must be at least 2, got {num_layers}: the second one reads received rows")
        super().__init__(
            in_channels, out_channels, hidden_channels=hidden_channels, num_layers=num_layers, dropout=dropout
        )

    def forward(self, batch: GraphBatch, received_ND: Tensor | None = None, share_N: Tensor | None = None) -> NetOutput:
        """Return logits and embeddings of all nodes of one client; ``share_N`` is β."""
        if received_ND is None or share_N is None:
            return super().forward(batch)
        second: Any = self.convs[1]

        def blend(layer: int, convolved_ND: Tensor) -> Tensor:
            if layer != 1:
                return convolved_ND
            expanded_ND = received_ND @ second.weight + second.bias.unsqueeze(-2)
            blended_ND: Tensor = convolved_ND + share_N.unsqueeze(-1) * (expanded_ND - convolved_ND)
            return blended_ND

        embedding_ND, h_ND = self.encode(batch, blend)
        return NetOutput(self.head(h_ND), embedding_ND)
