"""The hypernetwork family: a server network generates each client's parameters."""

from fl_lightning.strategies.hypernetwork.attention import AttentionHypernetwork
from fl_lightning.strategies.hypernetwork.base import Hypernetwork
from fl_lightning.strategies.hypernetwork.diffusion import GATDiffusion, GCNDiffusion, NoDiffusion
from fl_lightning.strategies.hypernetwork.heads import ChunkedHead, FactoredHead, FullHead, GeneratorHead
from fl_lightning.strategies.hypernetwork.sheaf import SheafDiffusion

__all__ = [
    "AttentionHypernetwork",
    "ChunkedHead",
    "FactoredHead",
    "FullHead",
    "GATDiffusion",
    "GCNDiffusion",
    "GeneratorHead",
    "Hypernetwork",
    "NoDiffusion",
    "SheafDiffusion",
]
