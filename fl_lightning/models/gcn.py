"""The field's base client model: graph convolutions and a linear classifier.

Kipf, Welling: "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017, eq. 2:
H' = Â H W + b with Â = D^(-1/2) (A + I) D^(-1/2).
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.autograd import first_derivative_only
from fl_lightning.kernels.block_sparse import BlockSparse, block_matmul
from fl_lightning.kernels.linear import Linear, add_bias
from fl_lightning.kernels.randomness import dropout, dropout_multipliers, dropout_scale
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.output import NetOutput


def convolve(x_NF: Tensor | None, weight_FD: Tensor, bias_D: Tensor | None, batch: GraphBatch) -> Tensor:
    """Â x W + b, of the batch's own features where ``x_NF`` is None; on a stack with a leading client dimension.

    The features never change: dense ones are stored already propagated, sparse ones are multiplied as such. Clients may
    share weight, bias or graph, on a stack and under ``vmap``.

    A stack has only a first derivative and does not support another ``vmap``; one client, also under ``vmap``, does.
    """
    bias_D = weight_FD.new_zeros(weight_FD[..., 0, :].shape) if bias_D is None else bias_D
    features: BlockSparse | None = None
    adjacency: BlockSparse | None = batch.adjacency
    if x_NF is None:
        x_NF = batch.propagated_x
        if x_NF is not None:
            adjacency = None
        elif batch.sparse_x is not None:
            features = batch.sparse_x
        else:
            x_NF = batch.x
    if weight_FD.dim() > 2 or batch.node_mask.dim() > 1:
        if weight_FD.dim() == 2:
            weight_FD = weight_FD.expand(len(batch.node_mask), -1, -1)
        convolved: Tensor = _Convolution.apply(x_NF, weight_FD, bias_D, features, adjacency)  # type: ignore[no-untyped-call]
        return convolved
    owner = batch.node_mask
    product = x_NF @ weight_FD if features is None else block_matmul(features, weight_FD, owner=owner)  # type: ignore[operator]
    return (product if adjacency is None else block_matmul(adjacency, product, owner=owner)) + bias_D


class _Convolution(Function):
    """:func:`convolve` on a stack, with fewer passes: x is dense, or None and ``features`` sparse; None for Â is I."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        features: BlockSparse | None,
        adjacency: BlockSparse | None,
    ) -> Tensor:
        product = x @ weight if features is None else features.multiply(weight)  # type: ignore[operator]
        ctx.save_for_backward(x, weight)
        ctx.features, ctx.adjacency, ctx.dtype, ctx.bias_dtype = features, adjacency, product.dtype, bias.dtype
        return add_bias(product if adjacency is None else adjacency.multiply(product), bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        of_product = grad if ctx.adjacency is None else ctx.adjacency.multiply(grad, transpose=True)
        of_product = of_product.to(ctx.dtype)  # of another type than x and the weight under autocast
        grad_x = grad_weight = None
        if of_x:
            grad_x = (of_product @ weight.mT.to(ctx.dtype)).to(x.dtype)
        if of_weight and ctx.features is not None:
            grad_weight = ctx.features.multiply(of_product, transpose=True).to(weight.dtype)
        elif of_weight:
            grad_weight = (x.mT.to(ctx.dtype) @ of_product).to(weight.dtype)
        return grad_x, grad_weight, grad.sum(dim=-2).to(ctx.bias_dtype), None, None


def relu_dropout(x_ND: Tensor, multiplier_ND: Tensor, probability: float) -> Tensor:
    """ReLU, then dropout by multipliers that were drawn with the given probability; derivatives as :func:`convolve`."""
    if x_ND.dim() > 2:
        scale = dropout_scale(probability, x_ND.dtype)
        dropped: Tensor = _ReLUDropout.apply(x_ND, multiplier_ND, scale)  # type: ignore[no-untyped-call]
        return dropped
    return x_ND.relu() * multiplier_ND


class _ReLUDropout(Function):
    """:func:`relu_dropout` on a stack: only the result is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiplier: Tensor, scale: float) -> Tensor:
        output = x.relu().mul_(multiplier)
        ctx.save_for_backward(output)
        ctx.scale = scale
        return output

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [output] = ctx.saved_tensors  # positive where x is and where it is kept
        return torch.ops.aten.threshold_backward(grad, output, 0).mul_(ctx.scale), None, None


class GraphConvolution(nn.Module):
    """One graph convolution Â x W + b on a :class:`GraphBatch`.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
        bias: Whether there is b; it has no effect before a normalization.
    """

    #: Weights of edges are in Â.
    takes_edge_weight = True

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x_NF: Tensor | None, batch: GraphBatch) -> Tensor:
        """Convolve ``x_NF``, or the batch's own features where it is None."""
        return convolve(x_NF, self.weight, self.bias, batch)


class ConvolutionStack(nn.Module):
    """Graph convolutions, each followed by ReLU and dropout: the backbone (``convs.*``) of every classifier here.

    Args:
        convs: The convolutions, in order; their outputs are of one width.
        dropout: Drop probability after each convolution, in [0, 1).
        norms: Normalization of the output of each, over the client's nodes; none if empty.
    """

    def __init__(self, convs: Iterable[nn.Module], *, dropout: float, norms: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.dropout = dropout
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(norms)

    def encode(self, batch: GraphBatch, change: Callable[[int, Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the last convolution's output, and the same after its ReLU and dropout, each (N, hidden).

        Args:
            batch: The graph.
            change: Changes the output of each convolution, by its index.
        """
        h_ND: Tensor | None = None
        drops = self.training and self.dropout > 0
        multipliers: Sequence[Tensor] = ()
        for layer, conv in enumerate(self.convs):
            embedding_ND: Tensor = conv(h_ND, batch)
            if change is not None:
                embedding_ND = change(layer, embedding_ND)
            if len(self.norms):
                embedding_ND = self.norms[layer](embedding_ND, batch.node_mask)
            if drops and layer == 0:  # for all layers at once
                multipliers = dropout_multipliers(batch.key, len(self.convs), embedding_ND, self.dropout).unbind()
            h_ND = relu_dropout(embedding_ND, multipliers[layer], self.dropout) if drops else embedding_ND.relu()
        assert h_ND is not None
        return embedding_ND, h_ND

    def drop(self, h_ND: Tensor, batch: GraphBatch, layer: int) -> Tensor:
        """Dropout in training mode, with a separate draw for each layer; the convolutions have the first ones."""
        return dropout(h_ND, batch.key + layer, self.dropout) if self.training else h_ND


def layer_widths(in_channels: int, hidden_channels: int, num_layers: int) -> list[tuple[int, int]]:
    """Widths of the input and the output of each convolution.

    Example:
        >>> layer_widths(1433, 128, 2)
        [(1433, 128), (128, 128)]
    """
    for name, value in {"hidden_channels": hidden_channels, "num_layers": num_layers}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return list(itertools.pairwise([in_channels] + [hidden_channels] * num_layers))


class GCN(ConvolutionStack):
    """Graph convolutions, each followed by ReLU and dropout, then a linear head.

    The convolutions (``convs.*``, with their ``norms.*``) are the backbone, ``head.*`` is the classifier.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
        batch_norm: Normalize the output of each convolution (``models/batch_norm.py``).
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
        batch_norm: bool = False,
    ) -> None:
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        norms = [BatchNorm(hidden_channels) for _ in widths] if batch_norm else []
        convs = (GraphConvolution(*pair, bias=not batch_norm) for pair in widths)
        super().__init__(convs, dropout=dropout, norms=norms)
        self.head = Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all nodes of one client."""
        embedding_ND, h_ND = self.encode(batch)
        return NetOutput(self.head(h_ND), embedding_ND)


class NormalizedGCN(GCN):
    """:class:`GCN` with batch normalization.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
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
        super().__init__(
            in_channels,
            out_channels,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
            dropout=dropout,
            batch_norm=True,
        )
