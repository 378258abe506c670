"""Ablations of the sheaf diffusion, with its forward signature: graph convolution, graph attention, and nothing.

FedSheafHN (Liang et al., "Personalized Subgraph Federated Learning with Sheaf Collaboration", ECAI 2025), the
ablations of Table 5. The convolutions are between the same encoder and decoder as in :class:`SheafDiffusion`, so that
only the operator differs; like the usual stacks they have no skip connections.

Shape legend: C clients, D input channels, E edges.
"""

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv


class _ConvolutionDiffusion(nn.Module):
    """Linear, ELU, dropout, convolutions with ELU, Linear."""

    def __init__(
        self,
        in_channels: int,
        convolutions: list[nn.Module],
        hidden_channels: int,
        dropout: float,
        out_channels: int | None,
    ) -> None:
        super().__init__()
        if not convolutions:
            raise ValueError("num_layers must be at least 1; use NoDiffusion for none.")
        self.encoder = nn.Sequential(nn.Linear(in_channels, hidden_channels), nn.ELU(), nn.Dropout(dropout))
        self.convolutions = nn.ModuleList(convolutions)
        self.decoder = nn.Linear(hidden_channels, in_channels if out_channels is None else out_channels)

    def forward(self, x_CD: Tensor, edge_index_2E: Tensor) -> Tensor:
        """Return the enriched embeddings, one row per client."""
        x_CH = self.encoder(x_CD)
        for convolution in self.convolutions:
            x_CH = functional.elu(convolution(x_CH, edge_index_2E))
        enriched: Tensor = self.decoder(x_CH)
        return enriched


class GCNDiffusion(_ConvolutionDiffusion):
    """Graph convolutions (Kipf and Welling, ICLR 2017) instead of the sheaf diffusion.

    Args:
        in_channels: Width of the embeddings.
        num_layers: Convolutions, at least 1.
        hidden_channels: Width between encoder and decoder.
        dropout: Fraction of the encoded channels dropped in training.
        out_channels: Width of the result; ``in_channels`` when not given.

    Shapes:
        x_CD ``(C, in_channels)``; edge_index_2E ``(2, E)``; result ``(C, out_channels)``.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """

    def __init__(
        self,
        in_channels: int = 128,
        *,
        num_layers: int = 2,
        hidden_channels: int = 20,
        dropout: float = 0.0,
        out_channels: int | None = None,
    ) -> None:
        convolutions = [GCNConv(hidden_channels, hidden_channels) for _ in range(num_layers)]
        super().__init__(in_channels, convolutions, hidden_channels, dropout, out_channels)


class GATDiffusion(_ConvolutionDiffusion):
    """Graph attention (Velickovic et al., ICLR 2018) with one head instead of the sheaf diffusion.

    Args, Shapes and Raises are those of :class:`GCNDiffusion`.
    """

    def __init__(
        self,
        in_channels: int = 128,
        *,
        num_layers: int = 2,
        hidden_channels: int = 20,
        dropout: float = 0.0,
        out_channels: int | None = None,
    ) -> None:
        convolutions = [GATConv(hidden_channels, hidden_channels) for _ in range(num_layers)]
        super().__init__(in_channels, convolutions, hidden_channels, dropout, out_channels)


class NoDiffusion(nn.Module):
    """Pass the embeddings on without using the graph: unchanged, or through a linear layer to another width.

    Args:
        in_channels: Width of the embeddings.
        out_channels: Width of the result; when not given or equal to ``in_channels``, there are no parameters.

    Shapes:
        x_CD ``(C, in_channels)``; edge_index_2E is not read; result ``(C, out_channels)``.
    """

    def __init__(self, in_channels: int = 128, *, out_channels: int | None = None) -> None:
        super().__init__()
        same_width = out_channels is None or out_channels == in_channels
        self.projection = nn.Identity() if same_width else nn.Linear(in_channels, out_channels or in_channels)

    def forward(self, x_CD: Tensor, edge_index_2E: Tensor) -> Tensor:
        """Return the embeddings, one row per client."""
        projected: Tensor = self.projection(x_CD)
        return projected
