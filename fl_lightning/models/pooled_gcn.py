"""A graph convolutional network for whole graphs: its output for their nodes is pooled."""

from fl_lightning.models.gcn import GCN
from fl_lightning.models.readout import PooledStack, Readout, ReadoutKind


class PooledGCN(PooledStack, GCN):
    """:class:`GCN` whose head reads the pooled output of the last convolution.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
        batch_norm: Normalize the output of each convolution over the nodes of the graphs.
        pooling: ``sum``, ``mean``, ``max`` or ``attention`` over the nodes of a graph.

    Shapes:
        batch: Of G graphs. logits ``(G, out_channels)``; embedding ``(G, hidden_channels)``, pooled likewise.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 64,
        num_layers: int = 3,
        dropout: float = 0.5,
        batch_norm: bool = False,
        pooling: ReadoutKind = "mean",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        self.readout = Readout(hidden_channels, pooling)
