"""The graph isomorphism network, for nodes and for whole graphs.

Xu, Hu, Leskovec, Jegelka: "How Powerful are Graph Neural Networks?", ICLR 2019, eq. 4.1 with ε = 0:
h'_v = MLP(h_v + Σ over the neighbors h_u).

Shape legend: N nodes of one client, G graphs (where nodes are the examples, the nodes), F features, D width.
"""

import torch
from torch import Tensor, nn

from fl_lightning.batches.graph_sets import GraphSetBatch
from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.kernels.randomness import dropout as drop
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.output import NetOutput
from fl_lightning.models.readout import Readout, ReadoutKind


class FeatureMap(nn.Module):
    """A linear map of the features, dense or sparse.

    Args:
        in_channels: F.
        out_channels: D.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_channels, out_channels)))
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, batch: GraphBatch) -> Tensor:
        """X W + b, (N, D)."""
        return batch.transform(self.weight) + self.bias.unsqueeze(-2)


class GINConvolution(nn.Module):
    """MLP(h_v + Σ over the neighbors h_u), the MLP with one hidden layer.

    Args:
        in_channels: Width of the input.
        out_channels: Of the hidden layer and of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = Linear(in_channels, out_channels)
        self.last = Linear(out_channels, out_channels)

    def forward(self, h_ND: Tensor, batch: GraphBatch) -> Tensor:
        """Convolve."""
        result: Tensor = self.last(self.first(batch.sum_with_neighbors(h_ND)).relu())
        return result


class VirtualNode(nn.Module):
    """A node that is joined to all of its graph: v <- v + MLP(v + Σ h), then h <- h + v.

    Gilmer, Schoenholz, Riley, Vinyals, Dahl: "Neural Message Passing for Quantum Chemistry", ICML 2017, section 5.2.

    Args:
        channels: D.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = Linear(channels, channels), Linear(channels, channels)

    def forward(self, virtual_GD: Tensor | float, h_ND: Tensor, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Update v and h; v begins at 0.

        Raises:
            ValueError: The batch is no set of graphs.
        """
        if not isinstance(batch, GraphSetBatch):
            raise ValueError("virtual_node is for sets of graphs, but here nodes are the examples: set it to false")
        moved_GD: Tensor = virtual_GD + self.last(self.first(virtual_GD + batch.pool(h_ND, "sum")).relu())
        return moved_GD, h_ND + batch.spread(moved_GD)


class GIN(nn.Module):
    """A linear map of the features, convolutions with ReLU and dropout, a readout, a hidden layer and a linear head.

    It is the net of GCFL and of the protocol that FedStar and others follow: ``features.*``, ``convs.*`` (with their
    ``norms.*`` and ``virtual.*``), ``readout.*``, ``hidden.*``, ``head.*``.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        hidden_channels: Width of all layers.
        num_layers: Convolutions.
        dropout: Drop probability after each convolution and the hidden layer, in [0, 1).
        batch_norm: Normalize the output of each convolution over the nodes of the graphs.
        pooling: ``sum``, ``mean``, ``max`` or ``attention`` over the nodes of a graph.
        virtual_node: Between two convolutions, all nodes of a graph exchange messages with one more node; of sets of
            graphs alone.

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
        batch_norm: bool = False,
        pooling: ReadoutKind = "sum",
        virtual_node: bool = False,
    ) -> None:
        super().__init__()
        check_widths(hidden_channels=hidden_channels, num_layers=num_layers)
        self.dropout = check_dropout(dropout)
        layers = range(num_layers)
        self.features = FeatureMap(in_channels, hidden_channels)
        self.convs = nn.ModuleList(GINConvolution(hidden_channels, hidden_channels) for _ in layers)
        self.norms = nn.ModuleList(BatchNorm(hidden_channels) for _ in layers) if batch_norm else nn.ModuleList()
        self.virtual = nn.ModuleList(VirtualNode(hidden_channels) for _ in layers[1:] if virtual_node)
        self.readout = Readout(hidden_channels, pooling)
        self.hidden = Linear(hidden_channels, hidden_channels)
        self.head = Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all examples of one client."""
        probability = self.dropout if self.training else 0.0
        h_ND, virtual_GD = self.features(batch), 0.0
        for layer, conv in enumerate(self.convs):
            h_ND = conv(h_ND, batch)
            if len(self.norms):
                h_ND = self.norms[layer](h_ND, batch.node_mask)
            h_ND = drop(h_ND.relu(), batch.key + layer, probability)
            if layer < len(self.virtual):
                virtual_GD, h_ND = self.virtual[layer](virtual_GD, h_ND, batch)
        embedding_GD = self.hidden(self.readout(h_ND, batch))
        return NetOutput(self.head(drop(embedding_GD.relu(), batch.key + len(self.convs), probability)), embedding_GD)
