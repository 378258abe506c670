"""The decentralized family: there is no server; neighbors exchange messages."""

from fl_lightning.strategies.decentralized.base import Decentralized
from fl_lightning.strategies.decentralized.dense_maps import DenseMaps
from fl_lightning.strategies.decentralized.implicit_maps import ImplicitMaps
from fl_lightning.strategies.decentralized.principal_maps import PrincipalMaps
from fl_lightning.strategies.decentralized.redrawn_maps import RedrawnMaps
from fl_lightning.strategies.decentralized.restriction_maps import RestrictionMaps

__all__ = ["Decentralized", "DenseMaps", "ImplicitMaps", "PrincipalMaps", "RedrawnMaps", "RestrictionMaps"]
