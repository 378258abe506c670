"""FedStar's client: a GIN over features, beside it a GCN over what the shape of the graph alone says of its nodes.

Tan, Liu, Long, Jiang, Lu, Zhang: "Federated Learning on Non-IID Graphs via Structural Knowledge Sharing", AAAI 2023.

Shape legend: N nodes of one client, G graphs (where nodes are the examples, the nodes), F features, D width, S width of
the structure embedding.
"""

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch, Pooling, check_pooling
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.kernels.node_facts import node_facts, walk_returns
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.gcn import GraphConvolution
from fl_lightning.models.gin import FeatureMap, GINConvolution
from fl_lightning.models.output import NetOutput


class StructureChannel(nn.Module):
    """s⁰ = W_s s, s <- tanh(GCN(s)), of random walks and degrees; it reads no features.

    Args:
        hidden_channels: D.
        num_layers: Convolutions.
        num_walk_steps: K: s has the probabilities that a random walk is back after 1 … K steps.
        num_degrees: P: and the node's degree, one-hot from 1 to P; P stands for more, and 1 for 0.
    """

    def __init__(self, hidden_channels: int, num_layers: int, num_walk_steps: int, num_degrees: int) -> None:
        super().__init__()
        self.num_walk_steps, self.num_degrees = num_walk_steps, num_degrees
        self.first = Linear(num_walk_steps + num_degrees, hidden_channels)
        self.convs = nn.ModuleList(GraphConvolution(hidden_channels, hidden_channels) for _ in range(num_layers))

    def embedding(self, batch: GraphBatch) -> Tensor:
        """The structure embedding s, (N, S)."""
        walk_NK = node_facts(batch.edge_operator, walk_returns, self.num_walk_steps, owner=batch.node_mask)
        degree_P = torch.arange(1, self.num_degrees + 1, device=batch.degree.device)
        degree_NP = batch.degree.clamp(1, self.num_degrees).unsqueeze(-1) == degree_P
        return torch.cat([walk_NK, degree_NP], dim=-1).to(batch.dtype)

    def forward(self, batch: GraphBatch) -> list[Tensor]:
        """What the nodes have before the first convolution, and after each of them, (N, D)."""
        result = [self.first(self.embedding(batch))]
        for conv in self.convs:
            result.append(conv(result[-1], batch).tanh())
        return result


class DecoupledGIN(nn.Module):
    """Both channels: ``structure.*``, which FedStar shares, and ``features.*``, ``convs.*``, ``joint.*``; a head.

    x⁰ = W_x x, x <- dropout(ReLU(GIN([x ‖ s]))); W_j [x ‖ s] of the last layer is pooled, then a hidden layer and
    ``head.*``. GIN(h) = MLP(h_v + Σ over the neighbors h_u), with two linear layers.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        hidden_channels: Width of all layers.
        num_layers: Convolutions of either channel.
        dropout: Drop probability after each convolution and the hidden layer, in [0, 1).
        num_walk_steps: Of random walks, whose return probabilities are embedded.
        num_degrees: Degrees that are told apart.
        pooling: ``sum``, ``mean`` or ``max`` over the nodes of a graph.

    Shapes:
        logits ``(G, out_channels)``; embedding ``(G, hidden_channels)``, of the hidden layer before its ReLU.

    Raises:
        ValueError: A width or a number is below 1, the dropout no probability below 1, or the pooling none of these.
    """

    #: Its outputs are of graphs, where these are the examples.
    pools = True
    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 64,
        num_layers: int = 3,
        dropout: float = 0.5,
        num_walk_steps: int = 16,
        num_degrees: int = 16,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        check_widths(hidden_channels=hidden_channels, num_layers=num_layers)
        check_widths(num_walk_steps=num_walk_steps, num_degrees=num_degrees)
        self.dropout, self.pooling = check_dropout(dropout), check_pooling(pooling)
        self.structure = StructureChannel(hidden_channels, num_layers, num_walk_steps, num_degrees)
        self.features = FeatureMap(in_channels, hidden_channels)
        self.convs = nn.ModuleList(GINConvolution(2 * hidden_channels, hidden_channels) for _ in range(num_layers))
        self.joint = Linear(2 * hidden_channels, hidden_channels)
        self.hidden = Linear(hidden_channels, hidden_channels)
        self.head = Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all examples of one client."""
        x_ND, structure = self.features(batch), self.structure(batch)
        for layer, conv in enumerate(self.convs):
            x_ND = self.drop(conv(torch.cat([x_ND, structure[layer]], dim=-1), batch).relu(), batch, layer)
        pooled_GD = batch.pool(self.joint(torch.cat([x_ND, structure[-1]], dim=-1)), self.pooling)
        embedding_GD = self.hidden(pooled_GD)
        return NetOutput(self.head(self.drop(embedding_GD.relu(), batch, len(self.convs))), embedding_GD)

    def drop(self, value: Tensor, batch: GraphBatch, layer: int) -> Tensor:
        """Dropout in training mode, with a draw of its own for each layer."""
        return dropout(value, batch.key + layer, self.dropout) if self.training else value
