"""Graph convolutions that embed the nodes of a graph, and a decoder that scores pairs of them.

Kipf, Welling: "Variational Graph Auto-Encoders", NeurIPS workshop 2016, section 2, whose decoder is the inner product
of the two embeddings. The other decoder applies a perceptron to their element-wise (Hadamard) product, as the baselines
of Hu et al., "Open Graph Benchmark", NeurIPS 2020, do. DistMult is of Yang, Yih, He, Gao, Deng, "Embedding Entities and
Relations for Learning and Inference in Knowledge Bases", ICLR 2015, eq. 3: nodes u and v are linked by relation r with
the score Σ_d z_ud r_d z_vd, which is the same for v and u.

Shape legend: P pairs, N nodes, D hidden channels, R relations.
"""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fl_lightning.batches.pairs import PairBatch
from fl_lightning.kernels.linear import Linear, check_widths
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.gat import GATConvolution, check_heads
from fl_lightning.models.gcn import ConvolutionStack, GraphConvolution, layer_widths
from fl_lightning.models.graph_sage import SAGEConvolution
from fl_lightning.models.output import NetOutput

Encoder = Literal["gcn", "sage", "gat"]
Decoder = Literal["hadamard", "dot", "distmult"]


class LinkGCN(ConvolutionStack):
    """Convolutions (``convs.*``) whose last output is the nodes' embeddings, and a decoder for pairs of nodes.

    Args:
        in_channels: Width of the node features.
        out_channels: Number of outputs for a pair, 1 for whether it is linked.
        encoder: The convolutions: ``gcn``, ``sage`` or ``gat``.
        decoder: ``hadamard``, a hidden layer (``mix.*``) and a linear ``head.*`` on the product of the embeddings;
            ``dot``, the sum of the product, without parameters; or ``distmult``, its sum with the weights of the pair's
            relation (``relations``, (R, D)), which begins as ``dot``.
        hidden_channels: Width of every convolution.
        num_layers: Number of convolutions.
        dropout: Drop probability after each layer but the embeddings, in [0, 1).
        batch_norm: Normalize the output of each convolution over the client's nodes.
        num_heads: Attention heads of a convolution of ``gat``.
        num_relations: R, for ``distmult``: kinds of links that the graph's ``edge_type`` tells apart.

    Attributes:
        head_names: The parameters of the last layer, which ``head.*`` stands for in patterns: those of the decoder that
            compute the score; of ``dot``, which has none, the last convolution's.

    Shapes:
        batch: Of P pairs. logits ``(P, out_channels)``; embedding ``(P, hidden_channels)``, of the pair.

    Raises:
        ValueError: A setting is out of range, or a decoder without a head is to have several outputs.
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
        num_heads: int = 4,
        num_relations: int = 1,
    ) -> None:
        for name, value, allowed in (("encoder", encoder, Encoder), ("decoder", decoder, Decoder)):
            if value not in get_args(allowed):
                raise ValueError(f"{name} must be {' or '.join(get_args(allowed))}, got {value!r}")
        if decoder != "hadamard" and out_channels != 1:
            raise ValueError(f"decoder {decoder!r} has one output for a pair, not {out_channels}: use 'hadamard'")
        check_widths(num_relations=num_relations, num_heads=num_heads)
        if decoder != "distmult" and num_relations > 1:
            raise ValueError(
                f"decoder {decoder!r} does not tell num_relations={num_relations} apart: use 'distmult', or leave "
                "num_relations out"
            )
        convolutions: dict[str, Callable[..., nn.Module]] = {
            "gcn": GraphConvolution,
            "sage": SAGEConvolution,
            "gat": functools.partial(GATConvolution, num_heads=num_heads),
        }
        if encoder == "gat":
            check_heads(hidden_channels, num_heads)
        widths = layer_widths(in_channels, hidden_channels, num_layers)
        norms = [BatchNorm(hidden_channels) for _ in widths] if batch_norm else []
        super().__init__((convolutions[encoder](*pair) for pair in widths), dropout=dropout, norms=norms)
        self.embedding_channels = hidden_channels
        self.decoder = decoder
        if decoder == "hadamard":
            self.mix = Linear(hidden_channels, hidden_channels)
            self.head = Linear(hidden_channels, out_channels)
        elif decoder == "distmult":
            self.num_relations = num_relations
            self.relations = nn.Parameter(torch.ones(num_relations, hidden_channels))
        last = {"hadamard": ("head.",), "distmult": ("relations",)}
        prefixes = last.get(decoder, (f"convs.{num_layers - 1}.", f"norms.{num_layers - 1}."))
        self.head_names = tuple(name for name, _ in self.named_parameters() if name.startswith(prefixes))

    def forward(self, batch: PairBatch) -> NetOutput:
        """Return logits and embeddings of all pairs of one client."""
        embedding_ND, _ = self.encode(batch)
        product_PD = batch.pool(embedding_ND)
        if self.decoder == "distmult":
            product_PD = product_PD * self._weights(batch)
        if self.decoder != "hadamard":
            return NetOutput(product_PD.sum(dim=-1, keepdim=True), product_PD)
        hidden_PD = self.mix(product_PD)
        return NetOutput(self.head(self.drop(hidden_PD.relu(), batch, len(self.convs))), hidden_PD)

    def _weights(self, batch: PairBatch) -> Tensor:
        """The weights of each pair's relation, (P, D), or (1, D) where all links are alike."""
        if batch.relation is None:
            return self.relations
        relations_RD = self.relations.expand(*batch.relation.shape[:-1], -1, -1)
        index_P1 = batch.relation.unsqueeze(-1)
        return relations_RD.gather(-2, index_P1.expand(*batch.relation.shape, relations_RD.shape[-1]))
