"""Oracle: a control that knows which clients belong together, as no real server does.

It mixes a share of each client's model inside the client's true group and the rest over all:
W = s W_group + (1 - s) 1 w^T. Its gain over FedAvg and FedPer is what can be gained by knowing the similar clients; a
method that infers the groups can be measured by its share of that gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.mixing.base import Mixing, example_weights


@dataclass(kw_only=True, eq=False)
class Oracle(Mixing):
    """Half of the mixing inside the true groups, half over all.

    Args:
        group_share: s in [0, 1]: 0 is FedAvg, 1 a FedAvg of each group.
        groups: Each client's group; None for those of the partition (clients that draw from one part of the graph).
    """

    group_share: float = 0.5
    groups: Sequence[int] | None = None

    personalized = True
    takes_unseen_clients = False  # whose group is not known

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_within(0, 1, "group_share")

    def setup(self, federation: Federation) -> None:
        """Determine the groups."""
        super().setup(federation)
        groups = federation.groups if self.groups is None else tuple(self.groups)
        if not groups:
            raise ValueError(
                "Oracle needs to know the groups, and these clients were not drawn from common parts: set "
                "strategy.groups, or data.partitioner to OverlappingMetisPartitioner"
            )
        if len(groups) != federation.num_clients:
            raise ValueError(f"strategy.groups has {len(groups)} entries for {federation.num_clients} clients")
        self.group_C = torch.tensor(groups)

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """W over the clients of the upload, (C, C)."""
        weights_C = example_weights(upload).cpu()
        group_C = self.group_C[list(upload.clients)]
        inside_CC = (group_C[:, None] == group_C) * weights_C.clamp(min=torch.finfo(torch.float64).tiny)
        inside_CC = inside_CC / inside_CC.sum(dim=1, keepdim=True)
        return self.group_share * inside_CC + (1 - self.group_share) * weights_C
