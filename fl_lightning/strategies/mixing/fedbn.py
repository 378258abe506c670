"""FedBN: FedAvg in which every client normalizes in its own way.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1: all parameters but those of normalization layers are averaged; scales, shifts and running statistics stay.
The layers are known by their classes, not by their names. An unseen client starts with the initial ones.

Leaves the client: its model without the normalization layers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.federation import ClientRegistry, Federation
from fl_lightning.models import MLP, LinkGCN, NormalizedGCN, PooledGCN
from fl_lightning.models.batch_norm import norm_parameters
from fl_lightning.models.plain import name_of
from fl_lightning.round.client import ClientModule, NetFactory
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedBN(FedAvg):
    """FedAvg with personal normalization layers.

    Args:
        personal: Shell-style patterns of further parameters that are kept local.
    """

    default_net = NormalizedGCN

    def net_for(self, registry: ClientRegistry, client: ClientModule) -> NetFactory:
        """The default net, with normalization layers in an MLP and in a net that pools, too."""
        net = super().net_for(registry, client)
        return functools.partial(net, batch_norm=True) if net in (MLP, PooledGCN, LinkGCN) else net

    def setup(self, federation: Federation) -> None:
        """Find the normalization layers.

        Raises:
            ValueError: The net has none.
        """
        net = None if federation.client is None else federation.client.net
        result = () if net is None else norm_parameters(net)
        if not result:
            raise ValueError(
                f"FedBN keeps normalization layers local, but {'model.net' if net is None else name_of(net)} has "
                "none: give model.net some (batch_norm: true), or choose FedAvg"
            )
        super().setup(federation)

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """The normalization layers are also kept local."""
        result = () if federation.client is None else norm_parameters(federation.client.net)
        return [*self.personal, *(name for name in result if name in federation.parameters)]
