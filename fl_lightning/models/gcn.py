"""The field's base client model: graph convolutions and a linear classifier.

Kipf, Welling: "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017, eq. 2:
H' = Â H W + b with Â = D^(-1/2) (A + I) D^(-1/2).
"""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fl_lightning.block_sparse import block_matmul
from fl_lightning.graph_batch import GraphBatch
from fl_lightning.models.linear import Linear
from fl_lightning.models.output import NetOutput
from fl_lightning.randomness import dropout


def convolve(x_NF: Tensor | None, weight_FD: Tensor, bias_D: Tensor, batch: GraphBatch) -> Tensor:
    """Â x W + b, of the batch's own features where ``x_NF`` is None.

    The features never change: dense ones are kept already propagated, sparse ones are multiplied as such.
    """
    if x_NF is None and batch.propagated_x is not None:
        return batch.propagated_x @ weight_FD + bias_D.unsqueeze(-2)
    xw_ND = block_matmul(batch.sparse_x, weight_FD) if x_NF is None else x_NF @ weight_FD  # type: ignore[arg-type]
    return block_matmul(batch.adjacency, xw_ND) + bias_D.unsqueeze(-2)


class GraphConvolution(nn.Module):
    """One graph convolution Â x W + b on a :class:`GraphBatch`.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x_NF: Tensor | None, batch: GraphBatch) -> Tensor:
        """Convolve ``x_NF``, or the batch's own features where it is None."""
        return convolve(x_NF, self.weight, self.bias, batch)


class ConvolutionStack(nn.Module):
    """Graph convolutions, each followed by ReLU and dropout: the backbone (``convs.*``) of every classifier here.

    Args:
        convs: The convolutions, in order.
        dropout: Drop probability after each convolution, in [0, 1).
    """

    def __init__(self, convs: Iterable[nn.Module], *, dropout: float) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.dropout = dropout
        self.convs = nn.ModuleList(convs)

    def encode(self, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        """Return the last convolution's output, and the same after its ReLU and dropout, each (N, hidden)."""
        h_ND: Tensor | None = None
        for layer, conv in enumerate(self.convs):
            embedding_ND: Tensor = conv(h_ND, batch)
            h_ND = self.drop(embedding_ND.relu(), batch, layer)
        assert h_ND is not None
        return embedding_ND, h_ND

    def drop(self, h_ND: Tensor, batch: GraphBatch, layer: int) -> Tensor:
        """Dropout in training mode, with a draw of its own for each layer."""
        return dropout(h_ND, batch.key + layer, self.dropout) if self.training else h_ND


def layer_widths(in_channels: int, hidden_channels: int, num_layers: int) -> list[tuple[int, int]]:
    """Widths of the input and the output of each convolution.

    Example:
        >>> layer_widths(1433, 128, 2)
        [(1433, 128), (128, 128)]
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    return list(itertools.pairwise([in_channels] + [hidden_channels] * num_layers))


class GCN(ConvolutionStack):
    """Graph convolutions, each followed by ReLU and dropout, then a linear head.

    The convolutions (``convs.*``) are the backbone, ``head.*`` is the classifier.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
    """

    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        super().__init__((GraphConvolution(*pair) for pair in widths), dropout=dropout)
        self.head = Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all nodes of one client."""
        embedding_ND, h_ND = self.encode(batch)
        return NetOutput(self.head(h_ND), embedding_ND)
