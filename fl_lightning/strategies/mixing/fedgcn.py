"""FedGCN: one exchange of sums of neighbors' features before training, then FedAvg of a GCN.

Yao, Jin, Ravi, Joe-Wong: "FedGCN: Convergence-Communication Tradeoffs in Federated Training of Graph Convolutional
Networks", NeurIPS 2023, Algorithm 1. With Ã = A + I over the whole graph and d its degrees without loops, a first
convolution needs of node v only Σ_u Ã_vu x_u / √((d_v + 1)(d_u + 1)). Client k sends

    s_kv = Σ_{u of client k, Ã_vu = 1} x_u / √(d_u + 1)      for its nodes v and their neighbors at other clients,

and receives Σ_k s_kv: of its own nodes (``num_hops`` 1), or of these neighbors, too (2), with their degrees. Before
training it divides by √(d_v + 1). So its first layer is that of the whole graph; with 2, a net of two layers is that of
the whole graph in all of its own nodes. 0 is FedAvg, whose clients know nothing of each other.

Leaves the client: once, the ids and degrees of its nodes, the ids of their neighbors at other clients, and for each of
these nodes a sum of features, which is a single node's features divided by √(d + 1) where the client has no other node
there; in every round the model. The server learns all sums, and who has nodes in common neighborhoods.

Departures: the paper encrypts the sums homomorphically, so that the server learns none; here it computes on them in the
clear. Later layers with 1 hop use the edges within a client, which the paper leaves open as far as it could be read
here, with the degrees of the whole graph. Released code hands the clients the features of the nodes themselves, and
averages models equally; here they are weighted by training examples (``weighting``). Its settings for Cora: a GCN of
two layers and 16 channels, SGD with 0.5 and weight decay 5e-4, 3 steps a round, 100 rounds.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.batches import ClientGraph, GraphBatch
from fl_lightning.models.gcn import GCN, ConvolutionStack, GraphConvolution
from fl_lightning.strategies.mixing.fedavg import FedAvg
from fl_lightning.strategies.mixing.neighbor_sums import NeighborSums


@dataclass(kw_only=True, eq=False)
class FedGCN(NeighborSums, FedAvg):
    """FedAvg of a GCN that receives sums over all neighbors of its nodes once.

    Args:
        num_hops: 0, 1 or 2: nothing, the sums of a client's own nodes, or those of their neighbors, too.
    """

    num_hops: int = 2

    default_net = GCN
    own_net = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_within(0, 2, "num_hops")
        self.returns_others = self.num_hops == 2

    @property
    def num_exchanges(self) -> int:
        """One, if any."""
        return min(self.num_hops, 1)

    def check_net(self, net: nn.Module) -> None:
        """Refuse nets that do not begin with a graph convolution, which would not see what is exchanged."""
        super().check_net(net)
        sees = isinstance(net, ConvolutionStack) and isinstance(net.convs[0], GraphConvolution)
        if self.num_exchanges and not sees:
            raise ValueError(
                f"FedGCN exchanges the input of a graph convolution, with which {type(net).__name__} does not begin: "
                "set model.net to fl_lightning.models.GCN, or strategy.num_hops to 0"
            )

    def messages(self, batch: GraphBatch, number: int) -> Tensor:
        """x_u / √(d_u + 1), (N, F)."""
        every_N = torch.arange(batch.node_mask.shape[-1], device=batch.node_mask.device)
        x_NF = batch.features_of(every_N)
        return x_NF * (batch.degree + 1).to(x_NF).rsqrt().unsqueeze(-1)

    def ingest(self, graph: ClientGraph, degree_N: Tensor, sum_NW: Tensor, number: int) -> ClientGraph:
        """The sums divided by √(d_v + 1), as the input of the first layer."""
        propagated_NF = sum_NW * (degree_N + 1).to(sum_NW).rsqrt().unsqueeze(-1)
        return dataclasses.replace(graph, num_neighbors_N=degree_N, propagated_NF=propagated_NF)
