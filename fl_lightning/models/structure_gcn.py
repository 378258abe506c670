"""The net of FedStruct: a decoupled GCN on features, beside a map of structure features.

Aliakbari, Östman, Graell i Amat: "Decoupled Subgraph Federated Learning", ICLR 2025. With Ã = A + I of the client's own
edges, D̃ its degrees, and the structure features t of each node, which the strategy has gathered along all edges,

    logits = (D̃^-1 Ã)^L MLP(x) + W t

Shape legend: N nodes, F features, D hidden channels, S structure features, K classes.
"""

from torch import nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.kernels.randomness import dropout as drop
from fl_lightning.models.gin import FeatureMap
from fl_lightning.models.output import NetOutput

#: S of the default settings of FedStruct.
STRUCTURE_CHANNELS = 128


class StructureGCN(nn.Module):
    """A perceptron (``features.*``, ``head.*``), averaged over neighbors, and a map of structure (``structure.*``).

    Until FedStruct has gathered structure features, and with other strategies, t is 0.

    Args:
        in_channels: F.
        out_channels: K.
        hidden_channels: D.
        num_layers: L, hops of the features, at least 0.
        structure_channels: S, which follows from FedStruct's settings.
        dropout: Drop probability after the hidden layer, in [0, 1).

    Shapes:
        logits ``(N, K)``; embedding ``(N, D)``, of the hidden layer.

    Raises:
        ValueError: A setting is out of range.
    """

    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 64,
        num_layers: int = 1,
        structure_channels: int = STRUCTURE_CHANNELS,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_widths(hidden_channels=hidden_channels, structure_channels=structure_channels)
        if num_layers < 0:
            raise ValueError(f"num_layers must be at least 0, got {num_layers}")
        self.num_layers, self.dropout = num_layers, check_dropout(dropout)
        self.features = FeatureMap(in_channels, hidden_channels)
        self.head = Linear(hidden_channels, out_channels)
        self.structure = Linear(structure_channels, out_channels, bias=False)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all nodes of one client."""
        embedding_ND = self.features(batch).relu()
        h_ND = drop(embedding_ND, batch.key, self.dropout) if self.training and self.dropout else embedding_ND
        logits_NK = self.head(h_ND)
        share_N1 = (batch.degree + 1).to(logits_NK).reciprocal().unsqueeze(-1)
        for _ in range(self.num_layers):
            logits_NK = share_N1 * (batch.sum_neighbors(logits_NK) + logits_NK)
        if batch.structure is not None:
            logits_NK = logits_NK + self.structure(batch.structure)
        return NetOutput(logits_NK, embedding_ND)
