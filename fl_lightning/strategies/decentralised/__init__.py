"""The decentralised family: there is no server; neighbours exchange messages."""

from fl_lightning.strategies.decentralised.base import Decentralised
from fl_lightning.strategies.decentralised.dense_maps import DenseMaps
from fl_lightning.strategies.decentralised.implicit_maps import ImplicitMaps
from fl_lightning.strategies.decentralised.principal_maps import PrincipalMaps
from fl_lightning.strategies.decentralised.redrawn_maps import RedrawnMaps
from fl_lightning.strategies.decentralised.restriction_maps import RestrictionMaps

__all__ = ["Decentralised", "DenseMaps", "ImplicitMaps", "PrincipalMaps", "RedrawnMaps", "RestrictionMaps"]
