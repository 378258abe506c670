"""W = (1 - s) K + s w: the share s of a client's model that comes from all clients, set or estimated.

K are the weights of similar clients and w the shares of the training examples.

Shape legend: C, K clients, P numbers of a parameter tensor.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.relations.client_similarity import strength
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.base import shares
from fl_lightning.strategies.server_state import ServerState


def with_common_share(similar_CK: Tensor, examples_K: Tensor, common_share: float) -> Tensor:
    """(1 - s) times the weights of similar clients + s w, (C, K), with w the shares of the training examples."""
    if not common_share:
        return similar_CK
    return (1 - common_share) * similar_CK + common_share * shares(examples_K).to(similar_CK)


def keeping_own(mixing_CC: Tensor, patterns: Sequence[str]) -> dict[str, Tensor]:
    """W by shell-style patterns of parameters, where each client keeps its own parameters of the given patterns."""
    own_CC = torch.eye(len(mixing_CC), dtype=mixing_CC.dtype, device=mixing_CC.device)
    return {**dict.fromkeys(patterns, own_CC), "*": mixing_CC}


class EstimatedShares(ServerState):
    """s of each parameter tensor, estimated in every round from the clients' updates.

    1 - s is how well a client's update is predicted by those of similar clients (``relations/client_similarity.py``).

    Attributes:
        by_tensor: The last estimates, by tensor name.
    """

    server_state = ("by_tensor",)

    def __init__(self) -> None:
        self.by_tensor: dict[str, float] = {}

    @property
    def mean(self) -> float:
        """Mean of the last estimates; 1 (one model for all) before there are any."""
        return sum(self.by_tensor.values()) / len(self.by_tensor) if self.by_tensor else 1.0

    def mixing(
        self, upload: Payload, models: Mapping[str, Tensor], similar_CC: Tensor, examples_C: Tensor
    ) -> dict[str, Tensor]:
        """Estimate s, and return W of each tensor, (C, C).

        Args:
            upload: What the clients trained.
            models: What all clients had received.
            similar_CC: Weights of similar clients; rows sum to one.
            examples_C: Number of training examples.
        """
        dtype, clients = server_dtype(next(iter(upload.parameters.values())).dtype), list(upload.clients)

        def estimate(name: str, sent: Tensor) -> float:
            if len(clients) < 3:  # it takes a client, a similar one and another
                return self.by_tensor.get(name, 1.0)
            update_CP = sent.flatten(1).to(dtype) - models[name][clients].flatten(1).to(dtype)
            weight_C = shares(examples_C).to(update_CP)
            return 1 - float(strength(similar_CC.to(update_CP), weight_C, update_CP @ update_CP.T))

        self.by_tensor = {name: estimate(name, sent) for name, sent in upload.parameters.items()}
        return {name: with_common_share(similar_CC, examples_C, share) for name, share in self.by_tensor.items()}

    def metrics(self) -> dict[str, float]:
        """The last estimates."""
        return {f"server/common_share/{name}": share for name, share in self.by_tensor.items()}
