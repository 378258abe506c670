"""FedAux: auxiliary projection vectors (APV) as signatures of the clients, and mixing by their similarity.

Zhuo et al.: "Personalized Subgraph Federated Learning with Differentiable Auxiliary Projections". The client's model is
``models/projection_gcn.py`` (eqs. 1 to 6); the server mixes θ_i <- Σ_j W_ij θ_j with
W_ij = exp(τ cos(a_i, a_j)) / Σ_k exp(τ cos(a_i, a_k)) (eqs. 7 and 8), τ = 10.

The paper's text leaves open the optimizer, its rate and weight decay (here Adam with 0.01 and none), whether h is
read before or after the last ReLU, how deep the "simple MLP classifier" is (here one linear layer, as in the released
code, where it has a mask, too), and the weight of FED-PUB's penalty on the masks (here 0).

As printed, the APVs start alike, turn slowly and are averaged every round, so they stay aligned (cosines above 0.99)
and mixing is uniform. :class:`~fl_lightning.strategies.LocalAux` is this project's variant in which they do not.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.optim import Adam, Optimizer

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.models.projection_gcn import ProjectionGCN
from fl_lightning.round.client import ClientModule, NetFactory, OptimizerFactory, Penalty
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.lr_schedule import LRSchedulerFactory
from fl_lightning.round.payload import Payload
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.round.stage import ClientOutput
from fl_lightning.strategies.former_settings import former_settings
from fl_lightning.strategies.mixing.base import example_weights
from fl_lightning.strategies.mixing.similarity_mixing import SimilarityMixing
from fl_lightning.strategies.objectives import sparse_masks
from fl_lightning.tasks.class_metrics import ClassMetric
from fl_lightning.tasks.number_metrics import NumberMetric

#: The APV's name among the net's parameters.
PROJECTION = "projection"


class FedAuxClient(ClientModule):
    """A client with an auxiliary projection vector.

    Args:
        net: Builds the net from (number of features, number of classes); it has a parameter ``projection``.
        optimizer: Builds the client's optimizer from its parameters.
        projection_lr_multiplier: The APV's learning rate as a multiple of the optimizer's (paper: 1).
        projection_weight_decay: The APV's weight decay; None for the optimizer's.
        unit_norm_projection: Scale the APV to length one after every step, as in Theorem 3.1.
        gradient_clip_val: As in :class:`ClientModule`.
        running_statistics: As in :class:`ClientModule`.
        metrics: As in :class:`ClientModule`.
        privacy: As in :class:`ClientModule`.
        lr_scheduler: As in :class:`ClientModule`.
    """

    def __init__(
        self,
        net: list[NetFactory] | NetFactory | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        projection_lr_multiplier: float = 1.0,
        projection_weight_decay: float | None = None,
        unit_norm_projection: bool = False,
        gradient_clip_val: float | None = None,
        running_statistics: Literal["personal", "shared"] = "personal",
        metrics: list[ClassMetric | NumberMetric] | None = None,
        privacy: RecordPrivacy | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
    ) -> None:
        super().__init__(net, optimizer, gradient_clip_val, running_statistics, metrics, privacy, lr_scheduler)
        if projection_lr_multiplier <= 0:
            raise ValueError(f"model.projection_lr_multiplier must be positive, got {projection_lr_multiplier}")
        self.projection_lr_multiplier = projection_lr_multiplier
        self.projection_weight_decay = projection_weight_decay
        self.unit_norm_projection = unit_norm_projection

    def build_optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """The optimizer, with a group of its own for the APV."""
        named = list(named_parameters)
        others = [parameter for name, parameter in named if name != PROJECTION]
        projections = [parameter for name, parameter in named if name == PROJECTION]
        optimizer = self.optimizer_factory([{"params": others}, {"params": projections}])
        group = optimizer.param_groups[1]
        group["lr"] *= self.projection_lr_multiplier
        if self.projection_weight_decay is not None:
            group["weight_decay"] = self.projection_weight_decay
        return optimizer

    def constrain(self, parameters: Parameters, context: Context) -> Parameters:
        """The APV at unit length, if requested."""
        if not self.unit_norm_projection:
            return {}
        projection_D = parameters[PROJECTION]
        return {PROJECTION: projection_D / projection_D.norm()}


def send_projection(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The APV itself, (D,)."""
    return parameters[PROJECTION].clone()


@former_settings
@dataclass(kw_only=True, eq=False)
class FedAux(SimilarityMixing):
    """Mixing by the similarity of auxiliary projection vectors, which are mixed like all that is shared (eq. 8).

    Args:
        personal: Shell-style patterns of parameters that are kept local: the masks of a masked backbone.
        similarity_temperature: τ, at least 0 (paper: 10).
        personalized: Mix by similarity; else average by training examples (ablation FedAvg-mask).
        mask_sparsity_weight: FED-PUB's λ1, of the L1 norm of the masks; 0 for a backbone without masks.
        proximal_weight: FED-PUB's λ2, of the squared distance to the received parameters; no effect with one epoch per
            round.
    """

    personal: Sequence[str] = ("*mask*",)
    similarity_temperature: float = 10.0
    personalized: bool = True
    mask_sparsity_weight: float = 0.0
    proximal_weight: float = 0.0

    client_class: ClassVar[type[ClientModule]] = FedAuxClient
    default_optimizer = functools.partial(Adam, lr=0.01, fused=True)
    default_net = ProjectionGCN
    own_net = True
    needs_graphs = needs_nodes = True
    signature = PROJECTION

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "mask_sparsity_weight", "proximal_weight")

    def setup(self, federation: Federation) -> None:
        """Check that the clients have an APV."""
        if PROJECTION not in federation.parameters:
            raise ValueError(
                f"{type(self).__name__} needs a net with a parameter 'projection': set model.net to "
                "fl_lightning.models.ProjectionGCN"
            )
        super().setup(federation)
        self._penalty = sparse_masks(
            list(federation.parameters),
            self.shared,
            sparsity_weight=self.mask_sparsity_weight,
            proximal_weight=self.proximal_weight,
        )

    def signature_output(self) -> ClientOutput:
        """The APV."""
        return send_projection

    def penalty(self) -> Penalty | None:
        """FED-PUB's penalties, if they are on."""
        return self._penalty

    def mixing_matrix(self, upload: Payload) -> Tensor | Mapping[str, Tensor]:
        """W over the clients of the upload, (C, C), or the common row of training shares, (1, C)."""
        return super().mixing_matrix(upload) if self.personalized else example_weights(upload)[None]
