"""What the server knows of each client: X_0, and the collaboration graph built from it.

FedSheafHN (Liang et al., "Personalized Subgraph Federated Learning with Sheaf Collaboration", ECAI 2025), eqs. (3)
and (4).

Shape legend: C clients, M of them, D channels, E edges.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.hypernetwork.collaboration_graph import knn_graph
from fl_lightning.strategies.server_state import ServerState


class ClientEmbeddings(ServerState):
    """The clients' last embeddings.

    Args:
        federation: The federation of the clients.
        num_neighbors: K of the collaboration graph; None for the complete graph.

    Attributes:
        rows_CD: The last embedding of each client, initially zero.
        known_C: Which clients have sent one.

    Raises:
        ValueError: There are not enough clients for K, or the net has no convolution to embed with.
    """

    server_state = ("rows_CD", "known_C")

    def __init__(self, federation: Federation, *, num_neighbors: int | None) -> None:
        self.training, self.num_neighbors = federation.training_clients, num_neighbors
        others = len(self.training) - 1
        if num_neighbors is not None and not 1 <= num_neighbors <= others:
            raise ValueError(
                f"strategy.num_neighbors is {num_neighbors}, but each of the {others + 1} training clients has "
                f"{others} others: choose 1 to {others}, or null for the complete graph"
            )
        convs = [parameter for name, parameter in federation.parameters.items() if name.startswith("convs")]
        width = federation.embedding_channels or (convs[-1].shape[-1] if convs else None)
        if width is None:
            raise ValueError(
                "a client is embedded by the last of its net's convolutions, convs.*, but model.net has "
                f"{', '.join(federation.parameters)}: use fl_lightning.models.GCN, name them so, or let the net "
                "declare the width of its embedding (embedding_channels)"
            )
        count, device = federation.num_clients, federation.device
        dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.rows_CD = torch.zeros(count, width, device=device, dtype=dtype)
        self.known_C = torch.zeros(count, device=device, dtype=torch.bool)

    @property
    def num_channels(self) -> int:
        """D."""
        return self.rows_CD.shape[1]

    def ingest(self, upload: Payload) -> bool:
        """Keep the embeddings that clients sent; False if they sent none.

        One of zeros, that of a client with nothing to embed, never arrives.
        """
        if "embedding" not in upload.extras:
            return False
        embedding_CD = upload.extras["embedding"].to(self.rows_CD)
        there_C = embedding_CD.any(dim=1)
        rows = torch.tensor(upload.clients, device=self.rows_CD.device)[there_C]
        self.rows_CD[rows] = embedding_CD[there_C]
        self.known_C[rows] = True
        return True

    def members(self, clients: Sequence[int]) -> list[int]:
        """The training clients, then the unseen clients that are known or among ``clients``.

        Raises:
            ValueError: No client is known.
        """
        if not self.known_C.any():
            raise ValueError("no client has sent an embedding, so no model can be generated: see the clients' failures")
        unseen_clients = {*clients, *self.known_C.nonzero().flatten().tolist()} - set(self.training)
        return [*self.training, *sorted(unseen_clients)]

    def features(self, members: Sequence[int]) -> Tensor:
        """X_0 of members, training clients first, (M, D).

        A client whose embedding never arrived gets the mean of the others.
        """
        mean_D = self.rows_CD[self.known_C].mean(dim=0)
        return torch.where(self.known_C[:, None], self.rows_CD, mean_D)[list(members)]

    def graph(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """X_0 of members, as :meth:`features`, and edges (2, E) between them (eq. 4)."""
        x_MD = self.features(members)
        others = len(members) - 1
        neighbors = others if self.num_neighbors is None else min(self.num_neighbors, others)
        return x_MD, knn_graph(x_MD, neighbors)

    def spread(self) -> float:
        """Distance of the training clients' X_0 from their mean, as a share of their norm (root mean square)."""
        x_CD = self.features(self.training)
        square = (x_CD - x_CD.mean(dim=0)).square().sum() / x_CD.square().sum().clamp(min=torch.finfo(x_CD.dtype).tiny)
        return float(square.sqrt())

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of X_0 and the collaboration graph's adjacency, (C, C) of the training clients."""
        if not self.known_C.any():
            return {}
        x_CD, (source_E, target_E) = self.graph(self.training)
        adjacency_CC = x_CD.new_zeros(len(x_CD), len(x_CD))
        adjacency_CC[source_E, target_E] = 1.0
        return {"embedding": cosine_similarity(x_CD), "adjacency": adjacency_CC}
