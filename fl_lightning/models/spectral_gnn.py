"""FedSSP's client: convolutions along edges whose weights are filters of each graph's spectrum.

Tan, Wan, Huang, Ye: "Federated Graph Learning with Spectral Knowledge and Personalized Preference", NeurIPS 2024, with
the net of Bo, Shi, Wang, Liao: "Specformer: Spectral Graph Neural Networks Meet Transformers", ICLR 2023.

Shape legend: N nodes of one client, G graphs (where nodes are the examples, one graph), E edges in both directions, W
eigenvectors that a node has entries of, F features, D width, H filters, which are as many as the heads of the
attention.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.graphs import GraphBatch, Pooling, check_pooling
from fl_lightning.kernels.edge_products import edge_products
from fl_lightning.kernels.graph_attention import graph_attention
from fl_lightning.kernels.incidence import Incidence
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.kernels.node_facts import node_facts, spectrum
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.gin import FeatureMap
from fl_lightning.models.output import NetOutput

#: What an eigenvalue is multiplied with before its sines and cosines are taken.
SCALE = 100.0


class SineEncoding(nn.Module):
    """A linear map of [λ ‖ sin(100 λ 10⁴^(-j/D)) ‖ cos(…)], j = 0, 2 … D.

    Args:
        hidden_channels: D, even.
    """

    def __init__(self, hidden_channels: int) -> None:
        super().__init__()
        self.map = Linear(hidden_channels + 1, hidden_channels)

    def forward(self, value_N: Tensor) -> Tensor:
        """Encode eigenvalues, (N, D)."""
        width = self.map.out_features
        rate_J = torch.exp(torch.arange(0, width, 2, device=value_N.device) * (-math.log(10_000) / width)).to(value_N)
        angle_NJ = SCALE * value_N[:, None] * rate_J
        encoded: Tensor = self.map(torch.cat([value_N[:, None], angle_NJ.sin(), angle_NJ.cos()], dim=1))
        return encoded


class SpectralAttention(nn.Module):
    """A layer of a transformer over the eigenvalues of each graph, then H filters of each.

    The same number for all eigenvalues of a graph is a filter that nothing at an edge feels, so that the last layers
    have no bias; nor have keys.

    Args:
        hidden_channels: D.
        num_heads: H, of which D is a multiple.
    """

    def __init__(self, hidden_channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_channels) for _ in range(2))
        self.inputs = Linear(hidden_channels, 3 * hidden_channels, bias=False)
        self.output = Linear(hidden_channels, hidden_channels)
        self.layers = nn.ModuleList(Linear(hidden_channels, hidden_channels, bias=layer == 0) for layer in range(2))
        self.decoder = Linear(hidden_channels, num_heads, bias=False)

    def forward(self, code_ND: Tensor, batch: GraphBatch, probability: float) -> Tensor:
        """Filters of encoded eigenvalues, which the nodes of a graph hold, (N, H)."""
        query, key, value = self.inputs(self.norms[0](code_ND)).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        mixed_ND = graph_attention(query, key, value, batch.graph_sizes).flatten(1)
        code_ND = code_ND + dropout(self.output(mixed_ND), batch.key + 1, probability)
        wide_ND = self.layers[1](F.gelu(self.layers[0](self.norms[1](code_ND))))
        filter_NH: Tensor = self.decoder(code_ND + dropout(wide_ND, batch.key + 2, probability))
        return filter_NH


class FilterEncoder(nn.Module):
    """Two layers with normalization over the edges: from the filters at an edge to a weight of it for each channel.

    Args:
        num_heads: H.
        hidden_channels: D.
    """

    def __init__(self, num_heads: int, hidden_channels: int) -> None:
        super().__init__()
        widths = (num_heads, hidden_channels)
        self.layers = nn.ModuleList(Linear(width, hidden_channels, bias=False) for width in widths)
        self.norms = nn.ModuleList(BatchNorm(hidden_channels) for _ in range(2))

    def forward(self, basis_EH: Tensor, mask_E: Tensor) -> Tensor:
        """Encode, (E, D)."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            basis_EH = F.gelu(norm(layer(basis_EH), mask_E))
        return basis_EH


class SpectralConvolution(nn.Module):
    """x <- x + Σ_u w_uv GELU(W x_u), then x <- x + two layers with normalization over the nodes.

    Args:
        hidden_channels: D.
    """

    def __init__(self, hidden_channels: int) -> None:
        super().__init__()
        self.message = Linear(hidden_channels, hidden_channels)
        self.layers = nn.ModuleList(Linear(hidden_channels, hidden_channels, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(BatchNorm(hidden_channels) for _ in range(2))

    def forward(
        self, x_ND: Tensor, weight_ED: Tensor, total_ND: Tensor, batch: GraphBatch, key: Tensor, probability: float
    ) -> Tensor:
        """Convolve, with weights of edges for each channel that are divided by their sum at each node."""
        incidence = batch.edge_operator.derived(Incidence)
        sent_ED = incidence.sources(F.gelu(self.message(x_ND)), owner=batch.node_mask)
        sum_ND = incidence.totals(weight_ED * sent_ED, owner=batch.node_mask)
        y_ND = x_ND = x_ND + dropout(sum_ND / total_ND, key, probability)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y_ND = norm(layer(y_ND), batch.node_mask).relu()
        return x_ND + dropout(y_ND, key + 1, probability)


class SpectralGNN(nn.Module):
    """Encoders of eigenvalues and of filters, which FedSSP shares, between them attention; convolutions, a head.

    With U Λ Uᵀ the Laplacian D - A of a graph: ``eigenvalue_encoder``, ``attention`` and its decoder make H filters
    φ_h(Λ); the entries of U φ_h(Λ) Uᵀ at the edges go through ``filter_encoder`` and a softmax over the edges to each
    node, channel by channel, and are the weights of all ``convs``. Nodes are pooled to r, and the logits are
    ``head`` (r + c), with the ``preference`` c, which begins at 0.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of classes, labels or numbers.
        hidden_channels: Width of all layers, even, a multiple of ``num_heads``.
        num_layers: Convolutions.
        num_heads: Of the attention, and filters.
        dropout: Drop probability of all layers, in [0, 1).
        pooling: ``sum``, ``mean`` or ``max`` over the nodes of a graph.

    Shapes:
        logits ``(G, out_channels)``; embedding ``(G, hidden_channels)``: r.

    Raises:
        ValueError: A width or a number is below 1, or the width no such multiple.
    """

    #: Its outputs are of graphs, where these are the examples.
    pools = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        num_layers: int = 3,
        num_heads: int = 4,
        dropout: float = 0.1,
        pooling: Pooling = "mean",
    ) -> None:
        super().__init__()
        check_widths(hidden_channels=hidden_channels, num_layers=num_layers, num_heads=num_heads)
        if hidden_channels % 2 or hidden_channels % num_heads:
            raise ValueError(
                f"hidden_channels={hidden_channels} is impossible: set it to an even multiple of num_heads={num_heads}"
            )
        self.dropout, self.pooling = check_dropout(dropout), check_pooling(pooling)
        self.features = FeatureMap(in_channels, hidden_channels)
        self.eigenvalue_encoder = SineEncoding(hidden_channels)
        self.attention = SpectralAttention(hidden_channels, num_heads)
        self.filter_encoder = FilterEncoder(num_heads, hidden_channels)
        self.convs = nn.ModuleList(SpectralConvolution(hidden_channels) for _ in range(num_layers))
        self.preference = nn.Parameter(torch.zeros(hidden_channels))
        self.head = Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and representations of all examples of one client."""
        probability = self.dropout if self.training else 0.0
        x_ND = self.features(batch).relu()
        weight_ED = self.edge_weights(batch, probability)
        total_ND = batch.edge_operator.derived(Incidence).totals(weight_ED, owner=batch.node_mask)
        total_ND = torch.where(total_ND > 0, total_ND, 1.0)  # of a node without neighbors
        for layer, conv in enumerate(self.convs):
            x_ND = conv(x_ND, weight_ED, total_ND, batch, batch.key + 3 + 2 * layer, probability)
        r_GD = batch.pool(x_ND, self.pooling)
        return NetOutput(self.head(r_GD + self.preference), r_GD)

    def edge_weights(self, batch: GraphBatch, probability: float) -> Tensor:
        """Exponentials of the encoded filters at the edges, (E, D), whose shares at a node are the softmax."""
        facts_NS = node_facts(batch.edge_operator, spectrum, owner=batch.node_mask)
        value_N = facts_NS[:, 0].to(batch.dtype)
        filter_NH = self.attention(self.eigenvalue_encoder(value_N), batch, probability)
        basis_EH, mask_E = filters_at_edges(filter_NH, facts_NS, batch)
        encoded_ED = dropout(self.filter_encoder(basis_EH, mask_E), batch.key, probability)
        encoded_ED = encoded_ED.masked_fill(~mask_E[:, None], 0.0)  # padding may be anything, and its exponential inf
        return (encoded_ED - encoded_ED.detach().amax(dim=0)).exp()


def filters_at_edges(filter_NH: Tensor, facts_NS: Tensor, batch: GraphBatch) -> tuple[Tensor, Tensor]:
    """The entries of U φ_h(Λ) Uᵀ at the edges, (E, H), and which of them are no padding, (E,).

    Args:
        filter_NH: φ of the eigenvalues, which the nodes hold.
        facts_NS: What :func:`~fl_lightning.kernels.node_facts.spectrum` finds.
        batch: One client's graphs.
    """
    width = (facts_NS.shape[1] - 1) // 2
    vector_NW = facts_NS[:, 1 : 1 + width].to(filter_NH)
    holder_NW = facts_NS[:, 1 + width :].long() + torch.arange(len(facts_NS), device=facts_NS.device)[:, None]
    entries = []
    for filter_N in filter_NH.unbind(dim=1):
        filtered_NW = vector_NW * filter_N.index_select(0, holder_NW.flatten()).view_as(vector_NW)
        entries.append(edge_products(batch.edges, filtered_NW[None], vector_NW[None], owner=batch.node_mask)[0])
    sources_E1 = batch.edge_operator.derived(Incidence).sources(
        torch.ones_like(vector_NW[:, :1]), owner=batch.node_mask
    )
    mask_E = sources_E1.squeeze(1) > 0
    return torch.stack(entries, dim=1), mask_E
