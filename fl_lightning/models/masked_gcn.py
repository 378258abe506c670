"""The GCN of FED-PUB: every weight is multiplied with a learnable mask that stays with its client.

Baek, Jeong, Jin, Yoon, Hwang: "Personalized Subgraph Federated Learning", ICML 2023, section 4.2: the client's weights
are θ ∘ μ with θ from the server and μ its own; in use, mask entries with |μ| below a threshold (λ1) count as zero.
Masks start at one, so that a new model is the plain GCN; biases have none.

All masks are parameters named ``mask``: ``personal: ["*mask*"]`` keeps them local.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.models.gcn import ConvolutionStack, GraphConvolution, convolve, layer_widths
from fl_lightning.models.output import NetOutput


def masked(weight: Tensor, mask: Tensor, *, prune_below: float) -> Tensor:
    """Multiply a weight with its mask, in which entries smaller than ``prune_below`` count as zero.

    Example:
        >>> masked(torch.tensor([2.0, 2.0]), torch.tensor([0.5, -0.01]), prune_below=0.1)
        tensor([1., 0.])
    """
    return weight * (F.hardshrink(mask, _next_below(prune_below, mask.dtype)) if prune_below else mask)


@functools.cache
def _next_below(value: float, dtype: torch.dtype) -> float:
    """The largest number of a type below the given one: ``hardshrink`` takes its threshold for small."""
    given, zero = torch.tensor([value, 0.0], dtype=dtype, device="cpu")
    return torch.nextafter(given, zero).item()


class MaskedGraphConvolution(GraphConvolution):
    """A graph convolution Â x (W ∘ M) + b.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
        prune_below: Smallest mask entry that counts in eval mode.
    """

    def __init__(self, in_channels: int, out_channels: int, *, prune_below: float) -> None:
        super().__init__(in_channels, out_channels)
        self.mask = nn.Parameter(torch.ones_like(self.weight))
        self.prune_below = prune_below

    def forward(self, x_NF: Tensor | None, batch: GraphBatch) -> Tensor:
        """Convolve ``x_NF``, or the batch's own features where it is None."""
        weight = masked(self.weight, self.mask, prune_below=0.0 if self.training else self.prune_below)
        return convolve(x_NF, weight, self.bias, batch)


class MaskedLinear(nn.Linear):
    """A linear layer x (W ∘ M)^T + b.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        prune_below: Smallest mask entry that counts in eval mode.
    """

    def __init__(self, in_features: int, out_features: int, *, prune_below: float) -> None:
        super().__init__(in_features, out_features)
        self.mask = nn.Parameter(torch.ones_like(self.weight))
        self.prune_below = prune_below

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        weight = masked(self.weight, self.mask, prune_below=0.0 if self.training else self.prune_below)
        return F.linear(input, weight, self.bias)


class MaskedGCN(ConvolutionStack):
    """:class:`~fl_lightning.models.GCN` with a mask on the weight of every convolution and of the head.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each convolution, in [0, 1).
        prune_below: Smallest mask entry that counts in eval mode (the paper's λ1), at least 0.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 2,
        dropout: float = 0.5,
        prune_below: float = 1e-3,
    ) -> None:
        if prune_below < 0:
            raise ValueError(f"prune_below must not be negative, got {prune_below}")
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        super().__init__((MaskedGraphConvolution(*pair, prune_below=prune_below) for pair in widths), dropout=dropout)
        self.head = MaskedLinear(hidden_channels, out_channels, prune_below=prune_below)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all nodes of one client."""
        embedding_ND, h_ND = self.encode(batch)
        return NetOutput(self.head(h_ND), embedding_ND)
