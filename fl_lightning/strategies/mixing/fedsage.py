"""FedSage: FedAvg of a GraphSAGE classifier.

Zhang, Yang, Li, Sun, Yiu: "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS 2021, without its
generators (:class:`~fl_lightning.strategies.FedSagePlus`). Leaves the client: the model.
"""

from dataclasses import dataclass

from fl_lightning.models.graph_sage import GraphSAGE
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedSage(FedAvg):
    """FedAvg whose clients' net is GraphSAGE, unless another is chosen."""

    default_net = GraphSAGE
    needs_graphs = needs_nodes = True
