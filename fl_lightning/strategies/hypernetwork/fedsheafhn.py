"""FedSheafHN: sheaf diffusion on a client graph feeds a hypernetwork that generates each client's backbone.

Liang, Zhao, She, Li, Tay: "Personalized Subgraph Federated Learning with Sheaf Collaboration", ECAI 2025,
arXiv:2405.13056v2. Algorithm 1:

    clients train T_c epochs and send their graph-level embeddings                    eq. 3, client_outputs.py
    each round:
        every r_in rounds: X_0, the embeddings; the K nearest make the client graph   eq. 4, client_embeddings.py
        X_t = S(X_0), diffusion along the sheaf of the client graph                   eqs. 5-9, sheaf.py
        ω_i = H(X_t)_i, attention among clients and an MLP: client i's backbone       eqs. 10-11, attention.py
        client i trains ω_i and its own head for T_c epochs; sends Δω_i = ω~_i - ω_i
        H and S each take a step along (∇ω)^T Δω                                      eqs. 12-15, base.py

Departures: eqs. 12 and 13 print the sign that moves away from what was trained, here it is approached; the steps are
Adam's, as in section 4.1; an encoder and a decoder stand around the diffusion, as in the released code, and the
residual of eq. 8 has a learned gain that begins at 1; the clients' heads begin alike; embeddings that are due in round
r are sent at the end of round r - 1.

As printed the generator collapses: every client comes to be generated the same backbone (``server/spread``).
:class:`~fl_lightning.strategies.SheafRidge` is this project's variant that does not.

Shape legend: C clients asked for, M clients in the client graph, D channels, P parameters of a backbone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from fl_lightning.federation import Federation
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Evaluation, Stage
from fl_lightning.strategies.client_outputs import graph_embedding
from fl_lightning.strategies.former_settings import former_settings
from fl_lightning.strategies.hypernetwork.attention import AttentionHypernetwork, QueryKeyAttention
from fl_lightning.strategies.hypernetwork.base import Hypernetwork
from fl_lightning.strategies.hypernetwork.client_embeddings import ClientEmbeddings
from fl_lightning.strategies.hypernetwork.sheaf import SheafDiffusion


@former_settings
@dataclass(kw_only=True, eq=False)
class FedSheafHN(Hypernetwork):
    """Personalized backbones from a sheaf over the clients; the heads are kept local.

    Args:
        init_epochs: Local epochs before round 0, after which the first embeddings are sent.
        num_neighbors: K of the client graph; None for the complete graph, as in the paper's first version.
        refresh_every: Rounds between updates of embeddings and graph (r_in); None keeps the first ones (static).
        diffusion: Builds S on the client graph from the embeddings' width: ``SheafDiffusion``, or ``GCNDiffusion``,
            ``GATDiffusion``, ``NoDiffusion`` (Table 5).
        attention: ``qkv`` (eq. 10), ``matrix`` (the released code's) or ``none``.
        hidden_channels: Width of the MLP's hidden layers.
        num_hidden_layers: Hidden layers of the MLP; the paper's "two-layer MLP" has one.
        hypernetwork_dropout: Drop probability of these; it also applies to the parameters that clients are sent.
        diffusion_lr: Adam's learning rate for S.
        diffusion_weight_decay: Adam's weight decay for S.
        hypernetwork_lr: Adam's learning rate for H.
    """

    init_epochs: int = 3
    num_neighbors: int | None = 5
    refresh_every: int | None = 5
    diffusion: Callable[[int], nn.Module] = SheafDiffusion
    attention: Literal["qkv", "matrix", "none"] = "qkv"
    hidden_channels: int = 128
    num_hidden_layers: int = 1
    hypernetwork_dropout: float = 0.3
    diffusion_lr: float = 0.001
    diffusion_weight_decay: float = 5e-4
    hypernetwork_lr: float = 0.001

    needs_graphs = True
    starts_from_net = False
    server_state = ("embeddings",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "refresh_every", "hidden_channels")
        self.require_at_least(0, "init_epochs", "hypernetwork_lr", "diffusion_lr", "diffusion_weight_decay")
        self.require_at_least(0, "num_hidden_layers")
        if not 0 <= self.hypernetwork_dropout < 1:
            raise ValueError(f"strategy.hypernetwork_dropout must be in [0, 1), got {self.hypernetwork_dropout}")

    # ------------------------------------------------------------------ the server's two networks

    def setup(self, federation: Federation) -> None:
        """Check the client graph against the federation, then create S and H."""
        self.embeddings = self.build_embeddings(federation)
        super().setup(federation)

    def build_embeddings(self, federation: Federation) -> ClientEmbeddings:
        """The store of X_0."""
        return ClientEmbeddings(federation, num_neighbors=self.num_neighbors)

    def build_generator(self, num_outputs: int) -> nn.ModuleDict:
        """S and H."""
        self.diffusion_model = self.diffusion(self.embeddings.num_channels)
        self.hypernetwork: nn.Module = AttentionHypernetwork(
            self.embeddings.num_channels,
            num_outputs,
            hidden_channels=self.hidden_channels,
            num_hidden_layers=self.num_hidden_layers,
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
        others = [part for name, part in self.generator.named_children() if name != "diffusion"]
        hypernetwork = {"params": [p for part in others for p in part.parameters()], "lr": self.hypernetwork_lr}
        return Adam([group for group in (diffusion, hypernetwork) if group["params"]], fused=True)

    # ------------------------------------------------------------------ Algorithm 1

    def initial_stages(self) -> Sequence[Stage]:
        """Local training from the common initial model, then the first embeddings."""
        return [Stage(name="initial", num_epochs=self.init_epochs, client_outputs=self.client_outputs(-1))]

    def client_outputs(self, round_idx: int) -> Mapping[str, ClientOutput]:
        """The graph-level embedding (eq. 3), in the rounds before a refresh only."""
        return {"embedding": graph_embedding} if self.is_due(round_idx) else {}

    def is_due(self, round_idx: int) -> bool:
        """Whether clients send embeddings at the end of a round; -1 is the initial training."""
        return round_idx < 0 or (self.refresh_every is not None and (round_idx + 1) % self.refresh_every == 0)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """Nothing for the initial training, generated backbones after it."""
        return None if stage.name == "initial" else super().configure(stage, clients)

    def generate(self, clients: Sequence[int]) -> Tensor:
        """The given clients' rows of ω = H(S(X_0)) (eqs. 5 to 11).

        It is computed for all training clients, and the unseen clients after them.
        """
        members = self.embeddings.members(clients)
        generated_MP: Tensor = self.hypernetwork(self.enriched(members))
        if list(clients) == members:
            return generated_MP
        # index_select: the backward of advanced indexing adds in no fixed order
        return generated_MP.index_select(0, torch.tensor(rows_of(clients, members), device=generated_MP.device))

    def enriched(self, members: Sequence[int]) -> Tensor:
        """X_t = S(X_0) of the given clients (eq. 9)."""
        enriched_MD: Tensor = self.diffusion_model(*self.embeddings.graph(members))
        return enriched_MD

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """The step of S and H (eqs. 12 to 15), then the new embeddings."""
        if stage.name != "initial":
            super().aggregate(stage, upload)
        self.update_graph(upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Place unseen clients in the client graph."""
        self.update_graph(upload)

    def update_graph(self, upload: Payload) -> None:
        """Place clients in the client graph (eq. 4) by the embeddings they sent."""
        if self.embeddings.ingest(upload):
            self._generated_for_evaluation = None

    # ------------------------------------------------------------------ evaluation and inspection

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """As :meth:`evaluations`: nothing can be generated before the clients have sent their embeddings."""
        return {"": Evaluation(), "gen/": Evaluation(payload=self.any_models(clients))}

    def inspection(self) -> Mapping[str, float]:
        """Metrics of the generator's last forward and of its input."""
        result = {**super().inspection(), "server/generator_input_spread": self.embeddings.spread()}
        if isinstance(attention := self.hypernetwork.attention, QueryKeyAttention):
            result["server/generator_attention_entropy"] = float(attention.entropy)
        return result

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of the graph-level embeddings, and the client graph's adjacency."""
        return self.embeddings.matrices()


def rows_of(clients: Sequence[int], members: Sequence[int]) -> list[int]:
    """Indices of clients among members."""
    row = {client: row for row, client in enumerate(members)}
    return [row[client] for client in clients]
