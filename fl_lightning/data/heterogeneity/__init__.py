"""Simulated heterogeneity: clients whose features, edges or labels are worse than those of others."""

from fl_lightning.data.heterogeneity.base import Heterogeneity, with_heterogeneity
from fl_lightning.data.heterogeneity.edges import EdgeInsertion, EdgeRemoval
from fl_lightning.data.heterogeneity.features import FeatureNoise, MissingFeatures
from fl_lightning.data.heterogeneity.labels import LabelNoise, LabelScarcity, UnlabeledClients

__all__ = [
    "EdgeInsertion",
    "EdgeRemoval",
    "FeatureNoise",
    "Heterogeneity",
    "LabelNoise",
    "LabelScarcity",
    "MissingFeatures",
    "UnlabeledClients",
    "with_heterogeneity",
]
