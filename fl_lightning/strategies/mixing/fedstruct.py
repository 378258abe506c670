"""FedStruct: structure features are gathered along all edges before training, then FedAvg of a decoupled GCN.

Aliakbari, Östman, Graell i Amat: "Decoupled Subgraph Federated Learning", ICLR 2025 (arXiv 2402.19163). Clients know
the edges between them, but no features of other clients' nodes go along these: only features s_v of the structure
around node v do, here its degree d_v, one-hot. With Ã = A + I over the whole graph, D̃ its degrees and Â = D̃^-1 Ã,

    t_v = [s_v, (Â s)_v, ..., (Â^L s)_v],     logits = (D̃_i^-1 Ã_i)^L' MLP(x) + W t,

where i is the client's own graph (``models/structure_gcn.py``). Each hop takes an exchange of sums over neighbors.

Leaves the client: once, the ids and degrees of its nodes, the ids of their neighbors at other clients; for each of the
L hops, for each of these nodes, a sum of structure features; in every round the model. With ids and degrees of all
clients the server knows who has edges to whom, as the paper's server does, which computes Â^L itself.

Departures: only the beginning of the paper could be read here, so the rest follows its public code. There t = Â^L f(s)
with a perceptron f; as s is one-hot, f(s) is a table, W is that table, and each hop has one of its own. The structure
features are degrees: neither graphlet counts and node2vec, which need the whole graph in one place, nor Hop2Vec, which
learns s of every node by gradients that clients send for each other's nodes, and with which the paper's best results
are. Layer normalization is left out. Code averages gradients of all clients in every step; here clients take steps of
their own (``num_epochs: 1`` with SGD is that). Its settings: 10 clients at random, hidden layers of 256, L 3, L' 1,
Adam with 0.002 and weight decay 5e-4, dropout 0.8, 150 steps.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Adam

from fl_lightning.batches import ClientGraph, GraphBatch
from fl_lightning.federation import ClientRegistry, Federation
from fl_lightning.models.structure_gcn import StructureGCN
from fl_lightning.round.client import ClientModule, NetFactory
from fl_lightning.round.context import Context, Parameters
from fl_lightning.strategies.mixing.fedavg import FedAvg
from fl_lightning.strategies.mixing.neighbor_sums import NeighborSums, degree_of, with_neighbors


@dataclass(kw_only=True, eq=False)
class FedStruct(NeighborSums, FedAvg):
    """FedAvg of a decoupled GCN beside structure features of the whole graph.

    Args:
        num_hops: L, at least 1.
        num_degrees: Degrees that are told apart, at least 2: the last stands for all that are greater.
    """

    num_hops: int = 3
    num_degrees: int = 32

    default_net = StructureGCN
    own_net = True
    #: Its gradients are small, as its logits are means of a perceptron's: at 0.01 it is slow on Cora.
    default_optimizer = functools.partial(Adam, lr=0.05, fused=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_hops")
        self.require_at_least(2, "num_degrees")

    @property
    def num_exchanges(self) -> int:
        """One for each hop."""
        return self.num_hops

    @property
    def structure_channels(self) -> int:
        """Width of t."""
        return (self.num_hops + 1) * self.num_degrees

    def net_for(self, registry: ClientRegistry, client: ClientModule) -> NetFactory:
        """The net for structure features of this width."""
        return functools.partial(StructureGCN, structure_channels=self.structure_channels)

    def setup(self, federation: Federation) -> None:
        """Begin without sums.

        Raises:
            ValueError: The net does not read structure features of this width.
        """
        self.require_net(federation, "structure.*", "a map of structure features")
        width = federation.parameters["structure.weight"].shape[1]
        if width != self.structure_channels:
            raise ValueError(
                f"the net has structure_channels={width}, but num_hops={self.num_hops} and num_degrees="
                f"{self.num_degrees} make {self.structure_channels}: set model.net.init_args.structure_channels to that"
            )
        super().setup(federation)

    def join(self, client: ClientModule, parameters: Parameters, graph: ClientGraph, context: Context) -> ClientGraph:
        """The graph with the nodes of other clients, and with the degrees of its own nodes."""
        graph = with_neighbors(graph)
        degree_NW = F.one_hot(degree_of(graph).clamp(max=self.num_degrees - 1), self.num_degrees).float()
        later = self.structure_channels - self.num_degrees
        return dataclasses.replace(graph, structure_NS=F.pad(_own(graph, degree_NW), (0, later)))

    def messages(self, batch: GraphBatch, number: int) -> Tensor:
        """What the hop before has gathered, Â^(l-1) s, (N, W)."""
        assert batch.structure is not None, "since the clients have joined"
        return batch.structure[..., number * self.num_degrees : (number + 1) * self.num_degrees]

    def ingest(self, graph: ClientGraph, degree_N: Tensor, sum_NW: Tensor, number: int) -> ClientGraph:
        """The sums divided by d_v + 1, beside what was gathered before."""
        assert graph.structure_NS is not None, "since it has joined"
        mean_NW = sum_NW / (degree_N + 1).to(sum_NW).unsqueeze(-1)
        structure_NS = graph.structure_NS.clone()
        start = (number + 1) * self.num_degrees
        structure_NS[:, start : start + self.num_degrees] = _own(graph, mean_NW)
        return dataclasses.replace(graph, structure_NS=structure_NS)


def _own(graph: ClientGraph, value_NW: Tensor) -> Tensor:
    """The values of the client's own nodes, 0 for others."""
    return torch.where((graph.node_idx_N >= 0).unsqueeze(-1), value_NW, 0.0)
