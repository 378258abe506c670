"""FedSheafHN: sheaf diffusion on a client graph feeds a hypernetwork that generates each client's backbone.

Liang, Zhao, She, Li, Tay: "Personalized Subgraph Federated Learning with Sheaf Collaboration", arXiv:2405.13056v2.
Algorithm 1; eq. 3 graph-level embedding (``signals.py``), eq. 4 collaboration graph, eqs. 5-9 sheaf diffusion
(``sheaf.py``), eqs. 10-11 attention hypernetwork (``attention.py``), eqs. 12-15 server step (``base.py``, in the
descent direction: the paper's sign is a slip).

Departures: the last bias of the hypernetwork may start from the mean of the locally trained backbones
(``start_from_clients``), without which the first rounds throw the clients' initial training away.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from fl_lightning.federation import Federation
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Signal, Stage
from fl_lightning.strategies.hypernetwork.attention import AttentionHypernetwork
from fl_lightning.strategies.hypernetwork.base import Hypernetwork
from fl_lightning.strategies.hypernetwork.collaboration_graph import knn_graph
from fl_lightning.strategies.hypernetwork.sheaf import SheafDiffusion
from fl_lightning.strategies.signals import graph_embedding


@dataclass(kw_only=True, eq=False)
class FedSheafHN(Hypernetwork):
    """Personalised backbones from a sheaf over the clients; the heads stay at home.

    Args:
        init_epochs: Local epochs before round 0, after which the first embeddings are sent.
        num_neighbors: K of the collaboration graph; None for the complete graph.
        refresh_every: Rounds between refreshes of embeddings and graph (r_in); None keeps the first ones (static).
        embedding: Graph-level embeddings, or one-hot vectors (ablation "+ Hypernetwork" of Table 4).
        diffusion: Builds the model on the collaboration graph from the embeddings' width: ``SheafDiffusion``, or
            ``GCNDiffusion``, ``GATDiffusion``, ``NoDiffusion`` (Table 5).
        attention: ``qkv`` (eq. 10), ``matrix`` (the released code's) or ``none``.
        hidden_channels: Width of the hypernetwork's hidden layers.
        hypernetwork_dropout: Drop probability of these layers.
        diffusion_lr: Adam's learning rate for the diffusion model.
        diffusion_weight_decay: Adam's weight decay for the diffusion model.
        hypernetwork_lr: Adam's learning rate for the hypernetwork.
        start_from_clients: Start the hypernetwork's last bias from the mean of the initially trained backbones.
    """

    num_server_steps: int = field(default=1, init=False)  # no setting of this strategy
    init_epochs: int = 50
    num_neighbors: int | None = 5
    refresh_every: int | None = 5
    embedding: Literal["graph", "one_hot"] = "graph"
    diffusion: Callable[[int], nn.Module] = SheafDiffusion
    attention: Literal["qkv", "matrix", "none"] = "qkv"
    hidden_channels: int = 128
    hypernetwork_dropout: float = 0.3
    diffusion_lr: float = 0.001
    diffusion_weight_decay: float = 5e-4
    hypernetwork_lr: float = 0.01
    start_from_clients: bool = True

    needs_graphs = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "refresh_every", "hidden_channels")
        self.require_at_least(0, "init_epochs", "hypernetwork_lr", "diffusion_lr", "diffusion_weight_decay")
        if not 0 <= self.hypernetwork_dropout < 1:
            raise ValueError(f"strategy.hypernetwork_dropout must be in [0, 1), got {self.hypernetwork_dropout}")

    def setup(self, federation: Federation) -> None:
        """Check the collaboration graph against the federation, then create the server's modules."""
        others = len(federation.training_clients) - 1
        if self.num_neighbors is not None and not 1 <= self.num_neighbors <= others:
            raise ValueError(
                f"strategy.num_neighbors is {self.num_neighbors}, but each of the {others + 1} training clients has "
                f"{others} others: choose 1 to {others}, or null for the complete graph"
            )
        if self.embedding == "one_hot" and len(federation.training_clients) < federation.num_clients:
            raise ValueError("strategy.embedding one_hot has no vector for clients held out of training: use graph")
        convs = [p for name, p in federation.parameters.items() if name.startswith("convs")]
        if not convs:
            raise ValueError(
                "FedSheafHN embeds a client by the last of its net's convolutions, convs.*, but model.net has "
                f"{', '.join(federation.parameters)}: use fl_lightning.models.GCN, or name them so"
            )
        width = convs[-1].shape[-1]
        self.embedding_channels = federation.num_clients if self.embedding == "one_hot" else width
        super().setup(federation)
        shape = (federation.num_clients, self.embedding_channels)
        self.embeddings_CD = torch.zeros(shape, device=federation.device, dtype=self.dtype)
        self.known_C = torch.zeros(federation.num_clients, dtype=torch.bool, device=federation.device)
        if self.embedding == "one_hot":
            self.embeddings_CD.fill_diagonal_(1.0)
            self.known_C.fill_(True)

    def build_generator(self, num_outputs: int) -> nn.ModuleDict:
        """S(·; θ) and H(·; φ)."""
        self.diffusion_model = self.diffusion(self.embedding_channels)
        self.hypernetwork = AttentionHypernetwork(
            self.embedding_channels,
            num_outputs,
            hidden_channels=self.hidden_channels,
            dropout=self.hypernetwork_dropout,
            attention=self.attention,
            num_clients=len(self.federation.training_clients),
        )
        return nn.ModuleDict({"diffusion": self.diffusion_model, "hypernetwork": self.hypernetwork})

    def build_optimizer(self) -> Optimizer:
        """One Adam with a group for each of the two."""
        diffusion = {
            "params": list(self.diffusion_model.parameters()),
            "lr": self.diffusion_lr,
            "weight_decay": self.diffusion_weight_decay,
        }
        hypernetwork = {"params": list(self.hypernetwork.parameters()), "lr": self.hypernetwork_lr}
        return Adam([group for group in (diffusion, hypernetwork) if group["params"]], fused=True)

    def initial_stages(self) -> Sequence[Stage]:
        """Local training from the common start, then the first embeddings."""
        backbone = tuple(self.shapes) if self.start_from_clients else ()
        return [Stage(name="initial", num_epochs=self.init_epochs, upload=backbone, signals=self.signals(-1))]

    def signals(self, round_idx: int) -> Mapping[str, Signal]:
        """The graph-level embedding, in the rounds before a refresh only."""
        static = self.refresh_every is None and round_idx >= 0
        due = self.refresh_every is None or (round_idx + 1) % self.refresh_every == 0
        return {"embedding": graph_embedding} if self.embedding == "graph" and due and not static else {}

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """Nothing for the initial training, generated backbones after it."""
        return None if stage.name == "initial" else super().configure(stage, clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Server step, then the new embeddings."""
        if stage.name == "initial" and self.start_from_clients and upload.clients:
            self.hypernetwork.start_from(flatten({n: upload.parameters[n] for n in self.shapes}).mean(dim=0))
        if stage.name != "initial":
            super().aggregate(stage, upload)
        self.admit(stage, upload)

    def admit(self, stage: Stage, upload: Payload) -> None:
        """Place clients in the collaboration graph by the embeddings they sent."""
        if "embedding" in upload.signals:
            rows = torch.tensor(upload.clients, device=self.embeddings_CD.device)
            self.embeddings_CD[rows] = upload.signals["embedding"].to(self.embeddings_CD)
            self.known_C[rows] = True

    def generate(self, clients: Sequence[int]) -> Tensor:
        """H(S(X_0)) of all training clients and the newcomers after them; the rows asked for.

        A client whose embedding never arrived stands amid the others.
        """
        if not self.known_C.any():
            raise ValueError("no client has sent an embedding, so no model can be generated: see the clients' failures")
        training = self.federation.training_clients
        newcomers = {*clients, *self.known_C.nonzero().flatten().tolist()} - set(training)
        members = [*training, *sorted(newcomers)]
        row = {client: row for row, client in enumerate(members)}
        x_CD, edge_index_2E = self._collaboration_graph(members)
        x_CD = self.diffusion_model(x_CD, edge_index_2E)
        generated_CP: Tensor = self.hypernetwork(x_CD)
        if list(clients) == members:
            return generated_CP
        # index_select: the backward of advanced indexing adds in no fixed order
        return generated_CP.index_select(0, torch.tensor([row[client] for client in clients], device=x_CD.device))

    def _collaboration_graph(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features X_0 and edges between the given clients (eq. 4)."""
        mean_D = self.embeddings_CD[self.known_C].mean(dim=0)
        x_CD = torch.where(self.known_C[:, None], self.embeddings_CD, mean_D)[list(members)]
        others = len(members) - 1
        neighbors = others if self.num_neighbors is None else min(self.num_neighbors, others)
        return x_CD, knn_graph(x_CD, neighbors)

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of the graph-level embeddings, and the collaboration graph's adjacency."""
        if not self.known_C.any():
            return {}
        x_CD, (source_E, target_E) = self._collaboration_graph(self.federation.training_clients)
        adjacency_CC = x_CD.new_zeros(len(x_CD), len(x_CD))
        adjacency_CC[source_E, target_E] = 1.0
        return {"embedding": cosine_similarity(x_CD), "adjacency": adjacency_CC}

    def state_dict(self) -> dict[str, Any]:
        """Generator, optimiser and the clients' embeddings."""
        return super().state_dict() | {"embeddings": self.embeddings_CD, "known": self.known_C}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore generator, optimiser and the clients' embeddings."""
        super().load_state_dict(state)
        self.embeddings_CD = state["embeddings"].to(self.federation.device)
        self.known_C = state["known"].to(self.federation.device)
