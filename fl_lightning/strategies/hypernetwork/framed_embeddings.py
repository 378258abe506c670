"""SheafRidge's X_0: the clients' embeddings centered at their mean, and two controls.

Shape legend: C clients, M of them, D channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import generator
from fl_lightning.strategies.hypernetwork.client_embeddings import ClientEmbeddings


class FramedEmbeddings(ClientEmbeddings):
    """Embeddings centered over the training clients and scaled to variance 1.

    What clients have in common is most of an embedding's norm, and does not distinguish them.

    Args:
        federation: The federation of the clients.
        num_neighbors: K of the collaboration graph; None for the complete graph.
        one_hot: Use unit vectors instead of embeddings that clients send.
        permute: Give every client the embedding of another client, always the same one.

    Raises:
        ValueError: As :class:`ClientEmbeddings`, or there is no unit vector for clients held out of training.
    """

    def __init__(self, federation: Federation, *, num_neighbors: int | None, one_hot: bool, permute: bool) -> None:
        super().__init__(federation, num_neighbors=num_neighbors)
        count = federation.num_clients
        if one_hot and len(self.training) < count:
            raise ValueError("strategy.embedding one_hot has no vector for clients held out of training: use graph")
        if one_hot:
            self.rows_CD, self.known_C = torch.eye(count).to(self.rows_CD), torch.ones_like(self.known_C)
        self.wearer_C = torch.arange(count)
        if permute:
            training = torch.tensor(self.training)
            order = training[torch.randperm(len(training), generator=generator(federation.seed, "permuted embeddings"))]
            self.wearer_C[order] = order.roll(1)  # one cycle: no client keeps its own

    def features(self, members: Sequence[int]) -> Tensor:
        """X_0 of members, training clients first, (M, D)."""
        x_MD = super().features(self.wearer_C[list(members)].tolist())
        about_mean_CD = x_MD[: len(self.training)]
        mean_D = about_mean_CD.mean(dim=0)
        variance = (about_mean_CD - mean_D).square().mean().clamp(min=torch.finfo(x_MD.dtype).tiny)
        return (x_MD - mean_D) / variance.sqrt()
