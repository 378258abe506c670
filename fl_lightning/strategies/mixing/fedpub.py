"""FED-PUB: models mixed by their functional similarity on a proxy graph, and personal sparse masks on their weights.

Baek, Jeong, Jin, Yoon, Hwang: "Personalized Subgraph Federated Learning", ICML 2023. Every client runs the same random
graph through its model; the mean output of the last graph convolution is its functional embedding, and
W_ij = exp(τ cos(h_i, h_j)) / Σ_k exp(τ cos(h_i, h_k)) (section 4.1). Clients train θ and masks μ on
f_i(θ ∘ μ) + λ1 ‖μ‖_1 + λ2 ‖θ - θ_received‖² (section 4.2; ``models/masked_gcn.py``).

Departures: the paper's λ1 = λ2 = 1e-3 go with released code that builds both penalties from a state_dict, whose tensors
are detached: they have no gradient there. With one, λ1 = 1e-3 pulls harder than the data and the masks collapse (Cora,
10 clients: 75 % against 81 %), so the default is 1e-5. The proximal term has no gradient in a round's first epoch, when
θ is what was received: it acts with two epochs or more. The functional embedding is computed by the client, which alone
knows its masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, single
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import generator
from fl_lightning.models.masked_gcn import MaskedGCN
from fl_lightning.round.client import ClientModule, NetFactory, OptimizerFactory, Penalty, default_optimizer
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.stage import Signal
from fl_lightning.strategies.base import select_names
from fl_lightning.strategies.hypernetwork.fedsheafhn import graph_embedding
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.similarity_mixing import SimilarityMixing


@dataclass(frozen=True, kw_only=True)
class SparseProximal:
    """λ1 Σ |mask| + λ2 ‖θ - θ_received‖².

    Attributes:
        masks: Names of the masks.
        received: Names of the parameters that came from the server.
        sparsity_weight: λ1.
        proximal_weight: λ2.
    """

    masks: tuple[str, ...]
    received: tuple[str, ...]
    sparsity_weight: float
    proximal_weight: float

    def __call__(self, parameters: Parameters, context: Context) -> Tensor:
        """The weighted sum of both terms."""
        sizes = [self.sparsity_weight * parameters[name].abs().sum() for name in self.masks]
        moves = [self.proximal_weight * (parameters[n] - context.anchor[n]).square().sum() for n in self.received]
        return torch.stack([*sizes, *moves]).sum()


def sparse_proximal(
    names: Sequence[str], received: Sequence[str], *, sparsity_weight: float, proximal_weight: float
) -> Penalty | None:
    """FED-PUB's penalties over the named parameters, those called ``mask`` and those received; None if both are off.

    Raises:
        ValueError: A weight is negative, or the model has no masks to make sparse.
    """
    for name, weight in {"mask_sparsity_weight": sparsity_weight, "proximal_weight": proximal_weight}.items():
        if weight < 0:
            raise ValueError(f"strategy.{name} must not be negative, got {weight}")
    if not sparsity_weight and not proximal_weight:
        return None
    return SparseProximal(
        masks=select_names(names, ["*mask*"]) if sparsity_weight else (),
        received=tuple(name for name in received if "mask" not in name) if proximal_weight else (),
        sparsity_weight=sparsity_weight,
        proximal_weight=proximal_weight,
    )


def proxy_graph(
    num_features: int | tuple[int, ...],
    draw: torch.Generator,
    *,
    num_blocks: int = 5,
    nodes_per_block: int = 100,
    intra_edge_probability: float = 0.1,
    inter_edge_probability: float = 0.0,
) -> ClientGraph:
    """A random partition graph with standard normal features and without labels.

    Args:
        num_features: Width of the features.
        draw: Source of randomness.
        num_blocks: Blocks.
        nodes_per_block: Nodes of each.
        intra_edge_probability: Of two nodes of one block.
        inter_edge_probability: Of two nodes of different blocks.

    Raises:
        ValueError: The clients' inputs are no vectors, so they are not those of nodes.
    """
    if isinstance(num_features, tuple):
        raise ValueError(f"a proxy graph needs clients that hold graphs; these hold examples of shape {num_features}")
    num_nodes = num_blocks * nodes_per_block
    block_N = torch.arange(num_nodes) // nodes_per_block
    same_NN = block_N[:, None] == block_N
    drawn_NN = torch.rand(num_nodes, num_nodes, generator=draw)
    linked_NN = (drawn_NN < torch.where(same_NN, intra_edge_probability, inter_edge_probability)).triu(1)
    nobody_N = torch.zeros(num_nodes, dtype=torch.bool)
    return ClientGraph(
        name="proxy",
        x_NF=torch.randn(num_nodes, num_features, generator=draw),
        edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
        y_N=torch.full((num_nodes,), -1),
        train_mask_N=nobody_N,
        val_mask_N=nobody_N,
        test_mask_N=nobody_N,
        node_idx_N=torch.arange(num_nodes),
    )


@dataclass(frozen=True)
class FunctionalEmbedding:
    """What a client's model makes of the proxy graph, on average; its own graph plays no part."""

    proxy: GraphBatch

    def __call__(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """Mean output of the last graph convolution, (D,)."""
        return graph_embedding(client, parameters, self.proxy, context)

    @classmethod
    def on(cls, graph: ClientGraph, parameter: Tensor) -> "FunctionalEmbedding":
        """On a proxy graph, with the device and the type of a client's parameters."""
        return cls(single(GraphCollator([graph], device=parameter.device, dtype=parameter.dtype)([0])))


class FedPubClient(ClientModule):
    """A client with a masked GCN.

    Args:
        net: Builds the net from (number of features, number of classes).
        optimizer: Builds the client's optimiser from its parameters.
        gradient_clip_val: As in :class:`ClientModule`.
    """

    def __init__(
        self,
        net: NetFactory = MaskedGCN,
        optimizer: OptimizerFactory = default_optimizer,
        gradient_clip_val: float | None = None,
    ) -> None:
        super().__init__(net, optimizer, gradient_clip_val)


class FedPub(SimilarityMixing):
    """Mixing by functional similarity, with personal sparse masks.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        personal: Shell-style patterns of parameters that never leave their client: the masks.
        similarity_temperature: τ (paper: 3 to 10).
        mask_sparsity_weight: λ1, of the L1 norm of the masks (paper: 1e-3, see above).
        proximal_weight: λ2, of the squared distance to the received parameters; idle with one epoch a round.
        num_proxy_blocks: Blocks of the proxy graph.
        proxy_nodes_per_block: Nodes of each block.
        proxy_edge_probability: Of two nodes of one block; there are no edges between blocks.
        aggregation: A robust rule in place of θ <- W θ, from ``strategies.mixing``; None for W θ itself.
    """

    client_class = FedPubClient
    needs_graphs = True
    signature = "functional_embedding"

    def __init__(
        self,
        *,
        num_epochs: int = 1,
        reset_optimizer: bool = False,
        personal: Sequence[str] = ("*mask*",),
        similarity_temperature: float = 10.0,
        mask_sparsity_weight: float = 1e-5,
        proximal_weight: float = 1e-3,
        num_proxy_blocks: int = 5,
        proxy_nodes_per_block: int = 100,
        proxy_edge_probability: float = 0.1,
        aggregation: Aggregation | None = None,
    ) -> None:
        super().__init__(
            num_epochs=num_epochs,
            reset_optimizer=reset_optimizer,
            personal=personal,
            similarity_temperature=similarity_temperature,
            aggregation=aggregation,
        )
        if min(num_proxy_blocks, proxy_nodes_per_block) < 1 or not 0 <= proxy_edge_probability <= 1:
            raise ValueError(
                f"strategy: no proxy graph has num_proxy_blocks={num_proxy_blocks}, proxy_nodes_per_block="
                f"{proxy_nodes_per_block}, proxy_edge_probability={proxy_edge_probability}"
            )
        self.mask_sparsity_weight = mask_sparsity_weight
        self.proximal_weight = proximal_weight
        self.num_proxy_blocks = num_proxy_blocks
        self.proxy_nodes_per_block = proxy_nodes_per_block
        self.proxy_edge_probability = proxy_edge_probability

    def setup(self, federation: Federation) -> None:
        """Draw the proxy graph."""
        super().setup(federation)
        self._penalty = sparse_proximal(
            list(federation.parameters),
            self.shared,
            sparsity_weight=self.mask_sparsity_weight,
            proximal_weight=self.proximal_weight,
        )
        graph = proxy_graph(
            federation.num_features,
            generator(federation.seed, "proxy graph"),
            num_blocks=self.num_proxy_blocks,
            nodes_per_block=self.proxy_nodes_per_block,
            intra_edge_probability=self.proxy_edge_probability,
        )
        self._signal = FunctionalEmbedding.on(graph, next(iter(federation.parameters.values())))

    def signature_signal(self) -> Signal:
        """The functional embedding."""
        return self._signal

    def penalty(self) -> Penalty | None:
        """L1 norm of the masks and proximal term."""
        return self._penalty
