"""dFedU: multi-task learning on a graph, neighbors' models pulled together by the graph's Laplacian.

Dinh, Vu, Tran, Dao, Zhang: "A New Look and Convergence Rate of Federated Multi-Task Learning with Laplacian
Regularization", IEEE TNNLS 2022: θ_i <- θ_i - α (∇f_i(θ_i) + λ Σ_j a_ij (θ_i - θ_j)), a step on
Σ f_i + λ/2 Σ_edges a_ij ‖θ_i - θ_j‖². With more than one local step the pull is that of the models at their start.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.decentralized.base import Decentralized, warn_if_weak


@dataclass(kw_only=True, eq=False)
class DFedU(Decentralized):
    """Local steps and a step down the Laplacian.

    α is the clients' learning rate. Their optimizer should be SGD; another one changes the local steps alone.

    Args:
        regularization: λ; 0 is Local. (Sheaf-FMTL's comparison uses 0.001, which hardly couples the clients.)
        edge_weights: a_ij: ``one`` for all neighbors (as in Sheaf-FMTL's comparison), or ``relation`` for the weights
            of the data's client relation graph (as in FedU).
    """

    regularization: float = 0.1
    edge_weights: Literal["one", "relation"] = "one"

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "regularization")

    def setup(self, federation: Federation) -> None:
        """Weigh the edges, and check the step against the Laplacian's largest eigenvalue.

        Raises:
            ValueError: An edge has no weight.
        """
        super().setup(federation)
        self.weights_CC = self.adjacency_CC.double()
        if self.edge_weights == "relation":
            if federation.relation_CC is None:
                raise ValueError("strategy.edge_weights is 'relation', but the data have none: set data.relation_graph")
            self.weights_CC *= federation.relation_CC
            if unweighted := int((self.adjacency_CC & (self.weights_CC == 0)).sum()) // 2:
                raise ValueError(
                    f"strategy.edge_weights is 'relation', but {unweighted} edges of strategy.topology have no weight "
                    "in the data's relation graph: drop strategy.topology to take that graph, or use edge_weights 'one'"
                )
        self.pull = federation.learning_rate * self.regularization
        largest = torch.linalg.eigvalsh(laplacian(self.weights_CC).cpu())[-1].item()
        factors = (
            f"learning rate {federation.learning_rate:g} x strategy.regularization {self.regularization:g} x the "
            f"Laplacian's largest eigenvalue {largest:.3g}"
        )
        if self.pull * largest >= 2:
            warnings.warn(
                f"the pull of the neighbors diverges: {factors} is {self.pull * largest:.3g}, which must be below 2; "
                "lower either",
                stacklevel=2,
            )
        elif self.regularization:
            warn_if_weak(self.pull * largest, factors, self.exchange_every)

    def training(self, round_idx: int) -> Stage:
        """Local training; the pull has the clients' learning rate of the round."""
        self.pull = self.federation.learning_rate_in(round_idx) * self.regularization
        return super().training(round_idx)

    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """θ̃_i - α λ Σ_j a_ij (θ_i - θ_j), θ before and θ̃ after the local steps."""
        pull_CC = self.pull * laplacian(self.weights_CC[clients][:, clients])
        return trained_CP - pull_CC.to(trained_CP) @ self.models_CP[clients].to(trained_CP)

    def sent_numbers(self, clients: Tensor) -> Tensor:
        """Nothing is sent without regularization."""
        return super().sent_numbers(clients) * (self.regularization > 0)

    def metrics(self) -> Mapping[str, float]:
        """λ/2 Σ_edges a_ij ‖θ_i - θ_j‖² among the training clients: the objective without the local losses."""
        models_CP = self.models_CP[self.members].double()
        spread = models_CP * (laplacian(self.weights_CC[self.members][:, self.members]) @ models_CP)
        return {"server/coupling": 0.5 * self.regularization * float(spread.sum())}


def laplacian(weights_CC: Tensor) -> Tensor:
    """Degree matrix minus weights, (C, C)."""
    return torch.diag(weights_CC.sum(dim=1)) - weights_CC
