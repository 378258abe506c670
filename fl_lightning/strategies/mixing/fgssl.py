"""FGSSL: FedAvg whose clients stay close to the global model's view of the classes and the neighborhoods.

Huang, Wan, Ye, Du: "Federated Graph Semantic and Structural Learning", IJCAI 2023. In every step two views are drawn, a
weak and a strong one, without some edges and features. With a, b the embeddings and l the logits of the client's model
on the strong view and of the received one (no dropout, no gradient) on the weak view, T the training nodes, p =
softmax(l/τ) and r_u = cos(p_u, p_v) for u in the closed neighborhood N[v]:

    f + λ_s L_sem + λ_t L_str
    L_sem = -mean_{v in T} mean_{u in T, y_u = y_v} ln softmax_{u in T}(cos(a_v, b_u) / τ)
    L_str = Σ over the ``num_hubs`` nodes v of most neighbors, mean_u KL(softmax(r of the received) ‖ softmax(r))

Leaves the client: the model; the two losses after training, without augmentation.

Departures: this is what the paper says. Released code contrasts two views of the client's own model and never adds the
structural loss (weight 50, with which the loss f is not heard). The paper's weights are not known; the defaults are
those that FedGB publishes. A step has three passes, two of them on graphs that are normalized anew, and L_sem is
quadratic in a client's nodes: it costs several of FedAvg's.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.kernels.block_sparse import block_matmul
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Stage
from fl_lightning.strategies.base import RecordsMetrics
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FGSSL(FedAvg, RecordsMetrics):
    """FedAvg with semantic and structural terms.

    Args:
        semantic_weight: λ_s, at least 0.
        structural_weight: λ_t, at least 0; both 0 are FedAvg.
        temperature: τ of L_sem, positive.
        structural_temperature: τ of L_str, positive.
        num_hubs: Number of nodes whose neighborhoods are compared, at least 1.
        weak_edge_dropout: Probability that the weak view lacks an edge, in [0, 1].
        weak_feature_dropout: Probability that the weak view lacks a feature (of all nodes), in [0, 1].
        strong_edge_dropout: Probability that the strong view lacks an edge, in [0, 1].
        strong_feature_dropout: Probability that the strong view lacks a feature (of all nodes), in [0, 1].
    """

    semantic_weight: float = 3.0
    structural_weight: float = 0.1
    temperature: float = 0.2
    structural_temperature: float = 0.5
    num_hubs: int = 10
    weak_edge_dropout: float = 0.3
    weak_feature_dropout: float = 0.3
    strong_edge_dropout: float = 0.8
    strong_feature_dropout: float = 0.5

    needs_graphs = needs_nodes = needs_classes = True
    needs_whole_graphs = True  # for its views

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "semantic_weight", "structural_weight")
        self.require_at_least(1, "num_hubs")
        for name in ("temperature", "structural_temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"strategy.{name} must be positive, got {getattr(self, name)}")
        for name in (f"{view}_{what}_dropout" for view in ("weak", "strong") for what in ("edge", "feature")):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"strategy.{name} must be in [0, 1], got {getattr(self, name)}")

    def training(self, round_idx: int) -> Stage:
        """Train with both terms."""
        stage = super().training(round_idx)
        aligned = self.semantic_weight or self.structural_weight
        return dataclasses.replace(stage, objective=self.aligned) if aligned else stage

    def aligned(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The objective f + λ_s L_sem + λ_t L_str."""
        assert isinstance(batch, GraphBatch)
        strong = batch.augmented(1, edge_dropout=self.strong_edge_dropout, feature_dropout=self.strong_feature_dropout)
        weak = batch.augmented(2, edge_dropout=self.weak_edge_dropout, feature_dropout=self.weak_feature_dropout)
        losses = self.losses(client.output(parameters, strong), client.frozen_output(context.anchor, weak), batch)
        loss = client.loss(client.output(parameters, batch), batch)
        return loss + self.semantic_weight * losses["semantic"] + self.structural_weight * losses["structural"]

    def losses(self, local: NetOutput, received: NetOutput, batch: GraphBatch) -> dict[str, Tensor]:
        """L_sem and L_str of one client."""
        return {
            "semantic": self.semantic(local, received, batch),
            "structural": self.structural(local, received, batch),
        }

    def semantic(self, local: NetOutput, received: NetOutput, batch: GraphBatch) -> Tensor:
        """L_sem."""
        train_N = batch.train_mask
        cosine_NN = F.normalize(local.embedding, dim=1) @ F.normalize(received.embedding, dim=1).T
        score_NN = (cosine_NN / self.temperature).masked_fill(~train_N, -torch.inf)
        score_NN = torch.where(train_N.any(), score_NN, 0.0)  # or the gradient would not be a number
        alike_NN = (batch.y[:, None] == batch.y) & train_N
        likelihood_NN = torch.where(alike_NN, score_NN.log_softmax(dim=1), 0.0)
        mean_N = likelihood_NN.sum(dim=1) / alike_NN.sum(dim=1).clamp(min=1)
        return -(mean_N * train_N).sum() / train_N.sum().clamp(min=1)

    def structural(self, local: NetOutput, received: NetOutput, batch: GraphBatch) -> Tensor:
        """L_str."""
        num_nodes = len(batch.y)
        index_N = torch.arange(num_nodes, device=batch.y.device)
        rank_N = batch.degree * (1 << 31) - index_N  # of equal ones the first
        hub_M = rank_N.topk(min(self.num_hubs, num_nodes)).indices
        chosen_NM = (index_N[:, None] == hub_M).to(local.logits.dtype)
        near_NM = block_matmul(batch.adjacency, chosen_NM, transpose=True, owner=batch.example_mask) > 0

        def likeness(output: NetOutput) -> Tensor:
            unit_NK = F.normalize((output.logits / self.structural_temperature).softmax(dim=1), dim=1)
            cosine_NM = unit_NK @ unit_NK[hub_M].T
            found_NM: Tensor = torch.where(near_NM, cosine_NM, -1e4).log_softmax(dim=0)
            return found_NM

        own_NM, received_NM = likeness(local), likeness(received)
        apart_NM = torch.where(near_NM, received_NM.exp() * (received_NM - own_NM), 0.0)
        return (apart_NM.sum(dim=0) / near_NM.sum(dim=0).clamp(min=1)).sum()

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """The two losses."""
        return {"server": self.judge} if self.semantic_weight or self.structural_weight else {}

    def judge(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The two losses of the trained model against the received one."""
        assert isinstance(batch, GraphBatch)
        return self.losses(client.output(parameters, batch), client.frozen_output(context.anchor, batch), batch)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the models; record the means over the clients of the two losses."""
        super().aggregate(stage, upload)
        if upload.clients:
            self.recorded_metrics = {
                f"{name}_loss": float(loss.double().mean()) for name, loss in upload.extras.items()
            }
