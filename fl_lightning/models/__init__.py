"""Networks of clients and server; none of them knows of federated learning."""

from fl_lightning.models.cnn import CNN
from fl_lightning.models.diffusion import GATDiffusion, GCNDiffusion, NoDiffusion
from fl_lightning.models.gcn import GCN
from fl_lightning.models.gru import GRUForecaster
from fl_lightning.models.hypernetwork import AttentionHypernetwork
from fl_lightning.models.implicit_maps import ImplicitMaps
from fl_lightning.models.masked_gcn import MaskedGCN
from fl_lightning.models.mlp import MLP, LinearModel
from fl_lightning.models.output import NetOutput
from fl_lightning.models.projection_gcn import ProjectionGCN
from fl_lightning.models.restriction_maps import DenseMaps
from fl_lightning.models.sheaf import SheafDiffusion

__all__ = [
    "CNN",
    "GCN",
    "MLP",
    "AttentionHypernetwork",
    "DenseMaps",
    "GATDiffusion",
    "GCNDiffusion",
    "GRUForecaster",
    "ImplicitMaps",
    "LinearModel",
    "MaskedGCN",
    "NetOutput",
    "NoDiffusion",
    "ProjectionGCN",
    "SheafDiffusion",
]
