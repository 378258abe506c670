"""Nets of clients; none of them knows of federated learning."""

from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.cnn import CNN
from fl_lightning.models.gcn import GCN, NormalisedGCN
from fl_lightning.models.gru import GRUForecaster
from fl_lightning.models.masked_gcn import MaskedGCN
from fl_lightning.models.mlp import MLP, LinearModel
from fl_lightning.models.output import NetOutput
from fl_lightning.models.plain import PlainNet, PyGNet
from fl_lightning.models.projection_gcn import ProjectionGCN
from fl_lightning.models.twin import Twin

__all__ = [
    "CNN",
    "GCN",
    "MLP",
    "BatchNorm",
    "GRUForecaster",
    "LinearModel",
    "MaskedGCN",
    "NetOutput",
    "NormalisedGCN",
    "PlainNet",
    "ProjectionGCN",
    "PyGNet",
    "Twin",
]
