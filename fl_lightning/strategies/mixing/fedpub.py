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

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import generator
from fl_lightning.models.masked_gcn import MaskedGCN
from fl_lightning.round.client import Penalty
from fl_lightning.round.stage import ClientOutput
from fl_lightning.strategies.client_outputs import FunctionalEmbedding, proxy_graph
from fl_lightning.strategies.mixing.similarity_mixing import SimilarityMixing
from fl_lightning.strategies.objectives import sparse_masks


@dataclass(kw_only=True, eq=False)
class FedPub(SimilarityMixing):
    """Mixing by functional similarity, with personal sparse masks.

    Args:
        personal: Shell-style patterns of parameters that are kept local: the masks.
        mask_sparsity_weight: λ1, of the L1 norm of the masks (paper: 1e-3, see above).
        proximal_weight: λ2, of the squared distance to the received parameters; no effect with one epoch per round.
        num_proxy_blocks: Number of blocks of the proxy graph.
        proxy_nodes_per_block: Nodes in each block.
        proxy_edge_probability: Probability of an edge between two nodes of a block; there are no edges between blocks.
    """

    personal: Sequence[str] = ("*mask*",)
    mask_sparsity_weight: float = 1e-5
    proximal_weight: float = 1e-3
    num_proxy_blocks: int = 5
    proxy_nodes_per_block: int = 100
    proxy_edge_probability: float = 0.1

    default_net = MaskedGCN
    own_net = True
    needs_graphs = needs_nodes = True
    signature = "functional_embedding"

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "mask_sparsity_weight", "proximal_weight")
        self.require_at_least(1, "num_proxy_blocks", "proxy_nodes_per_block")
        self.require_within(0, 1, "proxy_edge_probability")

    def setup(self, federation: Federation) -> None:
        """Draw the proxy graph."""
        super().setup(federation)
        self._penalty = sparse_masks(
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

    def signature_output(self) -> ClientOutput:
        """The functional embedding."""
        return self._signal

    def penalty(self) -> Penalty | None:
        """L1 norm of the masks and proximal term."""
        return self._penalty
