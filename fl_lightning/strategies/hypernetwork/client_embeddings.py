"""What the server knows of each client: X_0, and the collaboration graph made of it.

FedSheafHN (Liang et al., "FedSheafHN: Personalized Federated Learning on Graph-structured Data", 2024), eqs. (3), (4).

Shape legend: C clients, M of them, D channels, E edges.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import generator
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.hypernetwork.collaboration_graph import knn_graph
from fl_lightning.strategies.server_state import ServerState


class ClientEmbeddings(ServerState):
    """The clients' embeddings, as they arrive.

    Args:
        federation: Whose clients.
        one_hot: Unit vectors in place of embeddings that clients send.
        num_neighbors: K of the collaboration graph; None for the complete graph.
        normalize: Centre X_0 over the training clients and scale it to variance 1.
        permute: Give every client the embedding of another, the same one all along.

    Attributes:
        rows_CD: What each client has sent last, zeros at first.
        known_C: Who has sent one.

    Raises:
        ValueError: There are not as many neighbours, no vector for held-out clients, or no convolution to embed with.
    """

    server_state = ("rows_CD", "known_C")

    def __init__(
        self, federation: Federation, *, one_hot: bool, num_neighbors: int | None, normalize: bool, permute: bool
    ) -> None:
        self.training, self.num_neighbors, self.normalize = federation.training_clients, num_neighbors, normalize
        others = len(self.training) - 1
        if num_neighbors is not None and not 1 <= num_neighbors <= others:
            raise ValueError(
                f"strategy.num_neighbors is {num_neighbors}, but each of the {others + 1} training clients has "
                f"{others} others: choose 1 to {others}, or null for the complete graph"
            )
        if one_hot and len(self.training) < federation.num_clients:
            raise ValueError("strategy.embedding one_hot has no vector for clients held out of training: use graph")
        convs = [parameter for name, parameter in federation.parameters.items() if name.startswith("convs")]
        width = federation.embedding_channels or (convs[-1].shape[-1] if convs else None)
        if width is None:
            raise ValueError(
                "FedSheafHN embeds a client by the last of its net's convolutions, convs.*, but model.net has "
                f"{', '.join(federation.parameters)}: use fl_lightning.models.GCN, name them so, or let the net "
                "say how wide its embedding is (embedding_channels)"
            )
        count, device = federation.num_clients, federation.device
        dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        start_CD = torch.eye(count) if one_hot else torch.zeros(count, width)
        self.rows_CD = start_CD.to(device, dtype)
        self.known_C = torch.full((count,), one_hot, device=device)
        self.wearer_C = torch.arange(count, device=device)
        if permute:
            training = torch.tensor(self.training)
            order = training[torch.randperm(len(training), generator=generator(federation.seed, "permuted embeddings"))]
            self.wearer_C[order] = order.roll(1).to(device)  # one cycle: nobody keeps its own

    @property
    def num_channels(self) -> int:
        """D."""
        return self.rows_CD.shape[1]

    def take_in(self, upload: Payload) -> bool:
        """Keep the embeddings that clients sent; False if they sent none."""
        if "embedding" not in upload.signals:
            return False
        rows = torch.tensor(upload.clients, device=self.rows_CD.device)
        self.rows_CD[rows] = upload.signals["embedding"].to(self.rows_CD)
        self.known_C[rows] = True
        return True

    def members(self, clients: Sequence[int]) -> list[int]:
        """The training clients, then the newcomers that are known or among ``clients``.

        Raises:
            ValueError: Nobody is known.
        """
        if not self.known_C.any():
            raise ValueError("no client has sent an embedding, so no model can be generated: see the clients' failures")
        newcomers = {*clients, *self.known_C.nonzero().flatten().tolist()} - set(self.training)
        return [*self.training, *sorted(newcomers)]

    def features(self, members: Sequence[int]) -> Tensor:
        """X_0 of members, of whom the training clients come first, (M, D).

        A client whose embedding never arrived stands amid the others.
        """
        mean_D = self.rows_CD[self.known_C].mean(dim=0)
        x_MD = torch.where(self.known_C[:, None], self.rows_CD, mean_D)[self.wearer_C[list(members)]]
        if self.normalize:
            about_mean_CD = x_MD[: len(self.training)]
            mean_D = about_mean_CD.mean(dim=0)
            variance = (about_mean_CD - mean_D).square().mean().clamp(min=torch.finfo(x_MD.dtype).tiny)
            x_MD = (x_MD - mean_D) / variance.sqrt()
        return x_MD

    def graph(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """X_0 of members, as :meth:`features`, and edges (2, E) between them (eq. 4)."""
        x_MD = self.features(members)
        others = len(members) - 1
        neighbors = others if self.num_neighbors is None else min(self.num_neighbors, others)
        return x_MD, knn_graph(x_MD, neighbors)

    def spread(self) -> float:
        """How far the training clients' X_0 lie from their mean, as a share of their length (root mean square)."""
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
