"""Nets of clients, which are independent of federated learning."""

from fl_lightning.models.adaptive_gcn import AdaptiveGCN
from fl_lightning.models.augmented_gcn import AugmentedGCN
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.cnn import CNN
from fl_lightning.models.decoupled_gin import DecoupledGIN
from fl_lightning.models.disentangled_gcn import DisentangledGCN
from fl_lightning.models.expanded_gcn import ExpandedGCN
from fl_lightning.models.gat import GAT
from fl_lightning.models.gcn import GCN, NormalizedGCN
from fl_lightning.models.gin import GIN
from fl_lightning.models.gine import GINE
from fl_lightning.models.graph_sage import GraphSAGE
from fl_lightning.models.gru import GRUForecaster
from fl_lightning.models.link_gcn import LinkGCN
from fl_lightning.models.masked_gcn import MaskedGCN
from fl_lightning.models.mlp import MLP, LinearModel
from fl_lightning.models.output import NetOutput
from fl_lightning.models.plain import PlainNet, PyGNet
from fl_lightning.models.plain_examples import PlainExampleNet
from fl_lightning.models.pooled_gcn import PooledGCN
from fl_lightning.models.pretrained import Pretrained
from fl_lightning.models.projection_gcn import ProjectionGCN
from fl_lightning.models.spectral_gnn import SpectralGNN
from fl_lightning.models.structure_gcn import StructureGCN
from fl_lightning.models.structure_proxy import ProxySAGE
from fl_lightning.models.twin import Twin

__all__ = [
    "CNN",
    "GAT",
    "GCN",
    "GIN",
    "GINE",
    "MLP",
    "AdaptiveGCN",
    "AugmentedGCN",
    "BatchNorm",
    "DecoupledGIN",
    "DisentangledGCN",
    "ExpandedGCN",
    "GRUForecaster",
    "GraphSAGE",
    "LinearModel",
    "LinkGCN",
    "MaskedGCN",
    "NetOutput",
    "NormalizedGCN",
    "PlainExampleNet",
    "PlainNet",
    "PooledGCN",
    "Pretrained",
    "ProjectionGCN",
    "ProxySAGE",
    "PyGNet",
    "SpectralGNN",
    "StructureGCN",
    "Twin",
]
