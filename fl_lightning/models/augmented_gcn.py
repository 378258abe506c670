"""A GCN with an augmentor, which draws a second view of a graph from edges that it learns.

Wan, Huang, Ye: "Federated Graph Learning under Domain Shift with Generalizable Prototypes", AAAI 2024. With A₂ the
edges, loops and proposed edges, Â₂ their normalization, U the augmentor's weights:

    H = ReLU(Â₂ Â₂ X U₁ U₂),  S = H Hᵀ,  R ~ relaxed Bernoulli(S / (2 max S) + A₂ / 2), straight through

and the second view is the convolutions on the normalized R, symmetric with loops. Everything is dense, (N, N).

Shape legend: N nodes, D width, P proposed neighbors of a node.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.block_sparse import block_matmul
from fl_lightning.kernels.randomness import dropout, random_uniform, subkey
from fl_lightning.models.gcn import GCN, GraphConvolution
from fl_lightning.models.output import NetOutput


class SecondView(NamedTuple):
    """The result of the second view, and what it was drawn from.

    Attributes:
        output: Logits and embeddings.
        score: S, (N, N).
        edges: A₂, (N, N), 0 or 1.
    """

    output: NetOutput
    score: Tensor
    edges: Tensor


class AugmentedGCN(GCN):
    """:class:`~fl_lightning.models.GCN` with the augmentor's weights ``augmentor.*``.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution and of the augmentor.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
    """

    takes_stacks = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(
            in_channels, out_channels, hidden_channels=hidden_channels, num_layers=num_layers, dropout=dropout
        )
        widths = ((in_channels, hidden_channels), (hidden_channels, hidden_channels))
        self.augmentor = nn.ParameterList(nn.Parameter(nn.init.xavier_uniform_(torch.empty(*pair))) for pair in widths)

    def forward(  # type: ignore[override]
        self, batch: GraphBatch, proposed_NP: Tensor | None = None, key: Tensor | None = None
    ) -> NetOutput | SecondView:
        """Logits and embeddings; with proposed neighbors (indices, or -1 for none) those of a second view.

        Args:
            batch: One client's graph.
            proposed_NP: The proposed neighbors, for a second view.
            key: Random key of the second view's edges.
        """
        if proposed_NP is None or key is None:
            return super().forward(batch)
        return self.second_view(batch, proposed_NP, key)

    def second_view(self, batch: GraphBatch, proposed_NP: Tensor, key: Tensor) -> SecondView:
        """Draw a view, and compute on it."""
        edge_NN = proposed_edges(batch, proposed_NP)
        operator_NN = normalized(edge_NN)
        h_ND = operator_NN @ (operator_NN @ batch.transform(self.augmentor[0])) @ self.augmentor[1]
        h_ND = h_ND.relu()
        score_NN = h_ND @ h_ND.T
        share_NN = 0.5 * score_NN / (score_NN.amax() + 1e-6) + 0.5 * edge_NN
        drawn_NN = random_uniform(subkey(key, "view"), *score_NN.shape).to(score_NN)
        share_NN, drawn_NN = share_NN.clamp(1e-6, 1 - 1e-6), drawn_NN.clamp(1e-6, 1 - 1e-6)
        soft_NN = (share_NN.logit() + drawn_NN.logit()).sigmoid()
        view_NN = ((soft_NN > 0.5).to(soft_NN) - soft_NN).detach() + soft_NN
        real_NN = batch.node_mask[:, None] & batch.node_mask
        upper_NN = torch.where(real_NN, view_NN, 0.0).triu(1)
        view_NN = normalized(upper_NN + upper_NN.T + torch.diag(batch.node_mask.to(soft_NN)))
        x_ND: Tensor | None = None
        for layer, conv in enumerate(self.convs):
            assert isinstance(conv, GraphConvolution)
            product_ND = batch.transform(conv.weight) if x_ND is None else x_ND @ conv.weight
            embedding_ND = view_NN @ product_ND if conv.bias is None else view_NN @ product_ND + conv.bias
            x_ND = embedding_ND.relu()
            if self.training:
                x_ND = dropout(x_ND, subkey(batch.key, "second", layer), self.dropout)
        assert x_ND is not None
        return SecondView(NetOutput(self.head(x_ND), embedding_ND), score_NN, edge_NN)


def proposed_edges(batch: GraphBatch, proposed_NP: Tensor) -> Tensor:
    """A₂: edges, loops and proposed edges, both ways, (N, N), 0 or 1."""
    num_nodes = len(batch.y)
    eye_NN = torch.eye(num_nodes, dtype=batch.dtype, device=batch.y.device)
    index_N = torch.arange(num_nodes, device=batch.y.device)
    proposed_NN = (proposed_NP[..., None] == index_N).any(dim=1) & batch.node_mask[:, None]
    edge_NN = block_matmul(batch.adjacency, eye_NN, owner=batch.node_mask) > 0
    return (edge_NN | proposed_NN | proposed_NN.T).to(batch.dtype)


def normalized(edge_NN: Tensor) -> Tensor:
    """D^(-1/2) A D^(-1/2); rows without edges stay zero."""
    scale_N = edge_NN.sum(dim=1).clamp(min=1e-6).rsqrt()
    return scale_N[:, None] * edge_NN * scale_N
