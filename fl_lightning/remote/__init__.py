"""Federations over a network: the server's executor, the sites, which hold the clients' data, and what leaves them."""

from fl_lightning.extras import is_installed, require

if not is_installed("remote"):
    require("remote", "fl_lightning.remote")

from fl_lightning.remote.channel import Channel, LoopbackChannel
from fl_lightning.remote.executor import RemoteExecutor
from fl_lightning.remote.federation import federate
from fl_lightning.remote.filters import GaussianNoise, Percentile, SiteFilter, TopK
from fl_lightning.remote.message import Message
from fl_lightning.remote.metrics import NoisyMetrics
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.site import Site

__all__ = [
    "Channel",
    "GaussianNoise",
    "LoopbackChannel",
    "Message",
    "NoisyMetrics",
    "Percentile",
    "Refused",
    "RemoteExecutor",
    "Site",
    "SiteFilter",
    "SitePolicy",
    "TopK",
    "federate",
]
