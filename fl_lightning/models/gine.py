"""The graph isomorphism network that reads attributes of edges, for nodes and for whole graphs.

Hu, Liu, Gomes, Zitnik, Liang, Pande, Leskovec: "Strategies for Pre-training Graph Neural Networks", ICLR 2020, as PyG's
``GINEConv`` has it: h'_v = MLP(h_v + Σ over the edges from u to v ReLU(h_u + W e_uv + b)).

Shape legend: N nodes and E edges of one client, K attributes of an edge, D width.
"""

from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear, check_widths
from fl_lightning.models.gin import GIN
from fl_lightning.models.readout import ReadoutKind


class GINEConvolution(nn.Module):
    """MLP(h_v + Σ over the edges ReLU(h_u + W e + b)), the MLP with one hidden layer.

    Args:
        channels: Width of the input, of the hidden layer and of the output.
        edge_channels: K.
    """

    def __init__(self, channels: int, edge_channels: int) -> None:
        super().__init__()
        self.edge = Linear(edge_channels, channels)
        self.first = Linear(channels, channels)
        self.last = Linear(channels, channels)

    def forward(self, h_ND: Tensor, batch: GraphBatch) -> Tensor:
        """Convolve.

        Raises:
            ValueError: The edges have no attributes, or another number of them.
        """
        width = self.edge.in_features
        if batch.edge_attr is None or batch.edge_attr.shape[-1] != width:
            there = 0 if batch.edge_attr is None else batch.edge_attr.shape[-1]
            raise ValueError(f"edge_channels is {width}, but edges have {there} attributes")
        sum_ND = batch.sum_messages(h_ND, self.edge(batch.edge_attr))
        result: Tensor = self.last(self.first(h_ND + sum_ND).relu())
        return result


class GINE(GIN):
    """:class:`GIN` whose convolutions read the attributes of edges, such as the bonds of molecules.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        edge_channels: Number of attributes of an edge; 13 for the bonds of molecules.
        hidden_channels: Width of all layers.
        num_layers: Convolutions.
        dropout: Drop probability after each convolution and the hidden layer, in [0, 1).
        batch_norm: Normalize the output of each convolution over the nodes of the graphs.
        pooling: ``sum``, ``mean``, ``max`` or ``attention`` over the nodes of a graph.
        virtual_node: Between two convolutions, all nodes of a graph exchange messages with one more node; of sets of
            graphs alone.
    """

    takes_edge_attr = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        edge_channels: int,
        hidden_channels: int = 64,
        num_layers: int = 3,
        dropout: float = 0.5,
        batch_norm: bool = False,
        pooling: ReadoutKind = "sum",
        virtual_node: bool = False,
    ) -> None:
        check_widths(edge_channels=edge_channels)
        super().__init__(
            in_channels,
            out_channels,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            dropout=dropout,
            batch_norm=batch_norm,
            pooling=pooling,
            virtual_node=virtual_node,
        )
        self.edge_channels = edge_channels
        self.convs = nn.ModuleList(GINEConvolution(hidden_channels, edge_channels) for _ in self.convs)
