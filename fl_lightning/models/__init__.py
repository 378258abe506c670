"""Networks of clients and server; none of them knows of federated learning."""

from fl_lightning.models.diffusion import GATDiffusion, GCNDiffusion, NoDiffusion
from fl_lightning.models.gcn import GCN
from fl_lightning.models.hypernetwork import AttentionHypernetwork
from fl_lightning.models.masked_gcn import MaskedGCN
from fl_lightning.models.output import NetOutput
from fl_lightning.models.projection_gcn import ProjectionGCN
from fl_lightning.models.sheaf import SheafDiffusion

__all__ = [
    "GCN",
    "AttentionHypernetwork",
    "GATDiffusion",
    "GCNDiffusion",
    "MaskedGCN",
    "NetOutput",
    "NoDiffusion",
    "ProjectionGCN",
    "SheafDiffusion",
]
