"""FedPer: the backbone is averaged, the classifier is kept local.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", arXiv:1912.00818,
Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedPer(FedAvg):
    """FedAvg of everything but the personal layers.

    Args:
        personal: Shell-style patterns of the personal layers' parameters.
    """

    personal: Sequence[str] = ("head.*",)
