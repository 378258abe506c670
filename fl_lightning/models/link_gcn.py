"""Graph convolutions that embed the nodes of a graph, and a decoder that scores pairs of them.

Kipf, Welling: "Variational Graph Auto-Encoders", NeurIPS workshop 2016, section 2, whose decoder is the inner product
of the two embeddings. The other decoder applies a perceptron to their element-wise (Hadamard) product, as the baselines
of Hu et al., "Open Graph Benchmark", NeurIPS 2020, do.

Shape legend: P pairs, N nodes, D hidden channels.
"""

from typing import Literal, get_args

from torch import nn

from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.gcn import ConvolutionStack, GraphConvolution, layer_widths
from fl_lightning.models.graph_sage import SAGEConvolution
from fl_lightning.models.output import NetOutput

Encoder = Literal["gcn", "sage"]
Decoder = Literal["hadamard", "dot"]
#: The convolution of each encoder.
CONVOLUTIONS: dict[str, type[nn.Module]] = {"gcn": GraphConvolution, "sage": SAGEConvolution}


class LinkGCN(ConvolutionStack):
    """Convolutions (``convs.*``) whose last output is the nodes' embeddings, and a decoder for pairs of nodes.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of outputs for a pair, 1 for whether it is linked.
        encoder: The convolutions: ``gcn`` or ``sage``.
        decoder: ``hadamard``, a hidden layer (``mix.*``) and a linear ``head.*`` on the product of the embeddings; or
            ``dot``, the sum of the product, without parameters.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each layer but the embeddings, in [0, 1).
        batch_norm: Normalize the output of each convolution over the client's nodes.

    Shapes:
        batch: Of P pairs. logits ``(P, out_channels)``; embedding ``(P, hidden_channels)``, of the pair.

    Raises:
        ValueError: A setting is out of range, or ``dot`` is to have several outputs.
    """

    #: Its outputs are for pairs, not nodes: it reads what the batch makes of both ends.
    pools = True
    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        encoder: Encoder = "gcn",
        decoder: Decoder = "hadamard",
        hidden_channels: int = 64,
        num_layers: int = 2,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        for name, value, allowed in (("encoder", encoder, Encoder), ("decoder", decoder, Decoder)):
            if value not in get_args(allowed):
                raise ValueError(f"{name} must be {' or '.join(get_args(allowed))}, got {value!r}")
        if decoder == "dot" and out_channels != 1:
            raise ValueError(f"decoder 'dot' has one output for a pair, not {out_channels}: use 'hadamard'")
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        norms = [BatchNorm(hidden_channels) for _ in widths] if batch_norm else []
        super().__init__((CONVOLUTIONS[encoder](*pair) for pair in widths), dropout=dropout, norms=norms)
        self.embedding_channels = hidden_channels
        self.decoder = decoder
        if decoder == "hadamard":
            self.mix = Linear(hidden_channels, hidden_channels)
            self.head = Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all pairs of one client."""
        embedding_ND, _ = self.encode(batch)
        product_PD = batch.pool(embedding_ND)
        if self.decoder == "dot":
            return NetOutput(product_PD.sum(dim=-1, keepdim=True), product_PD)
        hidden_PD = self.mix(product_PD)
        return NetOutput(self.head(self.drop(hidden_PD.relu(), batch, len(self.convs))), hidden_PD)
