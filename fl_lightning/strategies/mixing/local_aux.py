"""LocalAux: FedAux whose auxiliary projection vectors (APV) stay with their clients, so that they come to differ.

A method of this project, made of FedAux (``fedaux.py``), whose vectors stay aligned and whose mixing is therefore
uniform. Here the APV is kept local (``mix_projection``) and learns faster than the rest (``projection_lr_multiplier``);
it has no weight decay, which could only change its length, not its direction. Similarity may be |cos| instead of cos
(``sign_free``), and a share of W may go to the whole federation (``common_share``). ``configs/local_aux_cora.yaml``
has what validation chose in ``studies/fedaux_settings.yaml``; what each setting gives: docs/explanation/fedaux.md.

Shape legend: C, K clients, D channels.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.optim import Adam

from fl_lightning.federation import Federation
from fl_lightning.round.client import NetFactory, OptimizerFactory
from fl_lightning.round.lr_schedule import LRSchedulerFactory
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.strategies.mixing.fedaux import PROJECTION, FedAux, FedAuxClient
from fl_lightning.tasks.class_metrics import ClassMetric
from fl_lightning.tasks.number_metrics import NumberMetric


class LocalAuxClient(FedAuxClient):
    """A client whose projection vector learns faster than the rest and has no weight decay.

    Args:
        net: As in :class:`~fl_lightning.strategies.mixing.fedaux.FedAuxClient`.
        optimizer: As there.
        projection_lr_multiplier: As there.
        projection_weight_decay: As there.
        unit_norm_projection: As there.
        gradient_clip_val: As there.
        running_statistics: As there.
        metrics: As there.
        privacy: As there.
        lr_scheduler: As there.
    """

    def __init__(
        self,
        net: list[NetFactory] | NetFactory | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        projection_lr_multiplier: float = 30.0,
        projection_weight_decay: float | None = 0.0,
        unit_norm_projection: bool = False,
        gradient_clip_val: float | None = None,
        running_statistics: Literal["personal", "shared"] = "personal",
        metrics: list[ClassMetric | NumberMetric] | None = None,
        privacy: RecordPrivacy | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
    ) -> None:
        super().__init__(
            net,
            optimizer,
            projection_lr_multiplier=projection_lr_multiplier,
            projection_weight_decay=projection_weight_decay,
            unit_norm_projection=unit_norm_projection,
            gradient_clip_val=gradient_clip_val,
            running_statistics=running_statistics,
            metrics=metrics,
            privacy=privacy,
            lr_scheduler=lr_scheduler,
        )


@dataclass(kw_only=True, eq=False)
class LocalAux(FedAux):
    """Mixing by the similarity of projection vectors that every client keeps for itself.

    Args:
        similarity_temperature: τ, at least 0.
        sign_free: Similarity is the absolute value of the cosine: a and -a arrange the nodes in the same way, so an
            APV's sign carries no information.
        mix_projection: Mix the APVs with the other parameters, as FedAux does; else each client keeps its own.
        mask_sparsity_weight: FED-PUB's λ1, of the L1 norm of the masks; 0 for a backbone without masks.
    """

    similarity_temperature: float = 5.0
    sign_free: bool = False
    mix_projection: bool = False
    mask_sparsity_weight: float = 1e-5

    client_class = LocalAuxClient
    default_optimizer = functools.partial(Adam, lr=0.03, fused=True)

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """The APV is also kept local, unless it is mixed."""
        return self.personal if self.mix_projection else (*self.personal, PROJECTION)

    def similarity(self, signature_CD: Tensor, other_KD: Tensor) -> Tensor:
        """Cosines of the APVs, (C, K), without their sign if ``sign_free``."""
        cosine_CK = super().similarity(signature_CD, other_KD)
        return cosine_CK.abs() if self.sign_free else cosine_CK
