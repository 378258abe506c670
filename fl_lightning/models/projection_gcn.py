"""The client of FedAux: node embeddings are projected on a learnable direction and smoothed along it.

Zhuo et al.: "Personalized Subgraph Federated Learning with Differentiable Auxiliary Projections", eqs. 1 to 6. With h
the embeddings of a GCN and a the auxiliary projection vector (APV, the parameter ``projection``, N(0, 1) at first), a
node's score is s_v = <h_v/‖h_v‖, a/‖a‖>; z is h smoothed with the kernel exp(-(s_u - s_v)²/σ²) (``kernel_smoothing``),
and the logits are MLP([h_v || z_v]). The ablation ``hard`` sorts the nodes by their scores, multiplies each with its
score, without which the APV would have no gradient, and convolves the sequence (Liu, Wang, Ji: "Non-Local Graph Neural
Networks", TPAMI 2021).

The paper does not say whether h is read before or after the last ReLU: after it, all embeddings lie in one orthant and
their scores differ little, so ``kernel_reads`` is ``embedding`` (before) by default. Only the smoothed half of the
MLP's input depends on this; the other half has passed ReLU and dropout as in a GCN. A hidden layer in the MLP
(``head_layers=2``) overfits on small clients, so the default is a linear layer. The released code scores and smooths h
after ReLU and dropout; here dropout comes after the smoothing (``drop_smoothed``).

Shape legend: N nodes, F features, D hidden channels.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.kernel_smoothing import kernel_smooth
from fl_lightning.models.gcn import ConvolutionStack, GraphConvolution, layer_widths
from fl_lightning.models.masked_gcn import MaskedGraphConvolution, MaskedLinear
from fl_lightning.models.output import NetOutput

KernelInput = Literal["embedding", "activation"]
Ordering = Literal["kernel", "hard"]

#: Shorter vectors have no direction: their score is 0, and no gradient passes through it.
_SHORTEST = 1e-6


def projection_scores(h_ND: Tensor, projection_D: Tensor) -> Tensor:
    """Cosine of each embedding with the projection vector, (N,), in [-1, 1]; 0 where one of them vanishes."""
    dtype = torch.promote_types(h_ND.dtype, torch.float32)
    return (_unit(h_ND.to(dtype)) @ _unit(projection_D.to(dtype))).clamp(-1, 1)


def _unit(x: Tensor) -> Tensor:
    """Scale the last dimension to length one, or to zero; the gradient is finite everywhere."""
    squared = x.square().sum(dim=-1, keepdim=True)
    has_direction = squared > _SHORTEST**2
    return torch.where(has_direction, x * torch.where(has_direction, squared, 1.0).rsqrt(), 0.0)


def sorted_rows(h_ND: Tensor, score_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sort real nodes by score, padding last and zero.

    Returns:
        The sorted rows (N, D), and for each node its index in them (N,).
    """
    order_N = torch.where(mask_N, score_N, torch.inf).argsort(stable=True)
    kept_ND = torch.where(mask_N[:, None], h_ND, 0.0)
    return kept_ND.take_along_dim(order_N[:, None], dim=0), order_N.argsort()


def sequence_windows(sequence_ND: Tensor, size: int) -> Tensor:
    """The ``size`` rows around each row, zeros beyond the ends, (N, size · D): what a Conv1D multiplies.

    A linear layer on them is ``torch.nn.Conv1d`` with zero padding, but one matrix product also under ``vmap``, where
    every client has a kernel of its own.
    """
    num_rows = len(sequence_ND)
    edge = sequence_ND.new_zeros(size // 2, sequence_ND.shape[1])
    padded = torch.cat([edge, sequence_ND, edge])
    return torch.cat([padded[offset : offset + num_rows] for offset in range(size)], dim=1)


class ProjectionGCN(ConvolutionStack):
    """A GCN whose classifier also sees the embeddings smoothed along the auxiliary projection vector.

    The convolutions are ``convs.*``, the vector is ``projection``, the classifier is ``head.*`` (and ``sequence.*``,
    the Conv1D, with ``hard``).

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution (D).
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution and in the classifier, in [0, 1).
        drop_smoothed: Also apply dropout to the smoothed embeddings, through which the vector learns.
        masked: Use FED-PUB's masks in the convolutions (``models/masked_gcn.py``).
        prune_below: Smallest mask entry that counts in eval mode.
        ordering: ``kernel`` smooths over the scores, ``hard`` sorts by them.
        kernel_reads: What is scored and smoothed: the last convolution's output before its ReLU (``embedding``) or
            after it (``activation``).
        bandwidth: σ of the kernel, above 0.
        tolerance: Largest absolute error of a kernel value.
        sequence_kernel: Width of the Conv1D of ``hard``, odd.
        head_layers: Linear layers of the classifier; with 2 there is a hidden layer of D channels.
        masked_head: Use FED-PUB's masks in the classifier, too, as the released code does.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
        drop_smoothed: bool = True,
        masked: bool = True,
        prune_below: float = 1e-3,
        ordering: Ordering = "kernel",
        kernel_reads: KernelInput = "embedding",
        bandwidth: float = 1.0,
        tolerance: float = 1e-6,
        sequence_kernel: int = 3,
        head_layers: int = 1,
        masked_head: bool = False,
    ) -> None:
        for name, value, kinds in (("ordering", ordering, Ordering), ("kernel_reads", kernel_reads, KernelInput)):
            if value not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {value!r}")
        if bandwidth <= 0 or tolerance <= 0:
            raise ValueError(f"bandwidth and tolerance must be positive, got {bandwidth} and {tolerance}")
        if sequence_kernel < 1 or sequence_kernel % 2 == 0:
            raise ValueError(f"sequence_kernel must be odd, got {sequence_kernel}")
        if head_layers < 1:
            raise ValueError(f"head_layers must be at least 1, got {head_layers}")
        if prune_below < 0:
            raise ValueError(f"prune_below must not be negative, got {prune_below}")
        convolution: Callable[[int, int], nn.Module] = GraphConvolution
        if masked:

            def convolution(source: int, target: int) -> nn.Module:
                return MaskedGraphConvolution(source, target, prune_below=prune_below)

        widths = layer_widths(in_channels, hidden_channels, num_layers)
        super().__init__((convolution(*pair) for pair in widths), dropout=dropout)
        self.drop_smoothed = drop_smoothed
        self.kernel_reads = kernel_reads
        self.bandwidth = bandwidth
        self.tolerance = tolerance
        self.sequence_kernel = sequence_kernel
        self.projection = nn.Parameter(torch.randn(hidden_channels))
        hard = ordering == "hard"
        self.sequence = nn.Linear(sequence_kernel * hidden_channels, hidden_channels) if hard else None
        head_widths = [2 * hidden_channels] + [hidden_channels] * (head_layers - 1) + [out_channels]
        linear = functools.partial(MaskedLinear, prune_below=prune_below) if masked_head else nn.Linear
        self.head = nn.ModuleList(linear(*pair) for pair in itertools.pairwise(head_widths))

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all nodes of one client."""
        embedding_ND, h_ND = self.encode(batch)
        read_ND = embedding_ND.relu() if self.kernel_reads == "activation" else embedding_ND
        score_N = projection_scores(read_ND, self.projection)
        if self.sequence is None:
            z_ND = kernel_smooth(
                read_ND, score_N, bandwidth=self.bandwidth, mask_N=batch.node_mask, tolerance=self.tolerance
            )
        else:
            weighted_ND = read_ND * score_N[:, None].to(read_ND.dtype)
            sequence_ND, index_N = sorted_rows(weighted_ND, score_N, batch.node_mask)
            convolved_ND = self.sequence(sequence_windows(sequence_ND, self.sequence_kernel))
            z_ND = convolved_ND.take_along_dim(index_N[:, None], dim=0)
        depth = len(self.convs)
        smoothed_ND = self.drop(z_ND, batch, depth) if self.drop_smoothed else z_ND
        features_ND = torch.cat([h_ND, smoothed_ND], dim=1)
        for layer, linear in enumerate(self.head[:-1], start=depth + 1):
            features_ND = self.drop(linear(features_ND).relu(), batch, layer)
        return NetOutput(self.head[-1](features_ND), embedding_ND)
