"""S2FGL: FedAvg whose clients stay close to the global model in node semantics and in graph frequencies.

Tan, Huang, Wan, Huang, Li, Ye: "S2FGL: Spatial Spectral Federated Graph Learning", ICML 2025. With A without loops, D
its degrees, t the indicator of a client's n nodes' training nodes T, a node is important by, once,

    Π = Σ_k (1 - α)^k (D^-1 A)^k,   score_v = max_u Π_vu t_u + α Σ_u Π_vu t_u;   I3, I5: the ⌊n/3⌋, ⌊n/5⌋ highest

Each client sends, for each class, the mean embedding of I3 ∩ T and its number of nodes. Each of ``num_slots`` rows of a
class in the codebook B is the mean, by these numbers, over a share of the clients that is drawn anew. With f a node's
embedding, f' by the model received (no dropout, no gradient) and p = softmax of its cosines with all rows of B

    CE + λ_s mean_v KL(p(f'_v) ‖ p(f_v)) + λ_f Σ_{low, high} mean (P Z - P' Z')²

from the round on in which there is a codebook. Z are the rows f of I5. P projects on the eigenvectors of the
``num_frequencies`` least (low) or greatest (high) eigenvalues of diag(S 1) - S, S the cosines of Z of each row with
itself and the 3 nearest, symmetrized; P' likewise of Z'. Neither P has a gradient.

Leaves the client: the model; each class's mean embedding over important training nodes, and how many they are; the two
terms after training.

Departures: released code takes the labels of all of I3 for the prototypes, those of validation and test nodes too, and
takes them from the last step in training mode; here they are of training nodes, in eval mode. It compares single
eigenvectors by their rank (``spectrum: pairs``), which where eigenvalues are equal depends on how they were computed:
the spaces that they span do not. S there is not symmetric, though its solver takes it for that. λ_s = 5 is its 0.05
times 100. The net there is of three channels, trained by SGD at 0.2; here it is the user's. Π is dense in a client's
nodes, once; a step takes an eigen-decomposition of I5, cubic in its size.

The semantic term helps clients that have labels of some classes only, also where their graphs differ in density
(tests). The paper's gain on real graphs was not found again: on Cora and CiteSeer it is level with FedAvg; so it is, or
below, on generated clients of which some have like and some unlike neighbors, with 5 and 20 local epochs, few and many
labels, λ_s 5 to 300 and λ_f up to 20.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Rows, Stage, StateSpec
from fl_lightning.strategies.base import RecordsMetrics, server_dtype
from fl_lightning.strategies.client_outputs import means_by_class
from fl_lightning.strategies.mixing.fedavg import FedAvg
from fl_lightning.strategies.mixing.node_spectra import importance, spectrum


@dataclass(kw_only=True, eq=False)
class S2FGL(FedAvg, RecordsMetrics):
    """FedAvg with alignment of semantics and of frequencies.

    Args:
        semantic_weight: λ_s, at least 0.
        frequency_weight: λ_f, at least 0; both 0 are FedAvg.
        restart: α, the restart probability of the random walk behind the importance of nodes, in (0, 1].
        num_slots: Rows of the codebook for each class, at least 1.
        share_of_clients: Share of the clients over which a row is averaged, in (0, 1].
        num_frequencies: Number of smallest and of largest eigenvalues, at least 1.
        spectrum: Align the ``spaces`` of the eigenvectors, or their ``pairs`` by rank.
    """

    semantic_weight: float = 5.0
    frequency_weight: float = 1.0
    restart: float = 0.85
    num_slots: int = 4
    share_of_clients: float = 0.7
    num_frequencies: int = 10
    spectrum: Literal["spaces", "pairs"] = "spaces"

    needs_graphs = needs_nodes = needs_classes = True
    takes_edge_weight = False
    server_state = ("prototypes_CKD", "counts_CK", "num_rounds")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "semantic_weight", "frequency_weight")
        self.require_at_least(1, "num_slots", "num_frequencies")
        for name in ("restart", "share_of_clients"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"strategy.{name} must be in (0, 1], got {getattr(self, name)}")

    @property
    def aligns(self) -> bool:
        """Whether it is more than FedAvg."""
        return bool(self.semantic_weight or self.frequency_weight)

    def setup(self, federation: Federation) -> None:
        """Start without prototypes."""
        super().setup(federation)
        self.prototypes_CKD = torch.zeros(federation.num_clients, federation.num_outputs, 0, device=federation.device)
        self.counts_CK = torch.zeros(federation.num_clients, federation.num_outputs, device=federation.device)
        self.num_rounds = 0

    def client_state(self) -> Mapping[str, StateSpec]:
        """The rank of each node by importance."""
        return {"place": StateSpec(initial=torch.tensor(0), per_example=True)}

    def initial_stages(self) -> Sequence[Stage]:
        """The clients rank their nodes."""
        return [Stage(name="score", client_state={"place": self.ranks})] if self.aligns else []

    def training(self, round_idx: int) -> Stage:
        """Train with the terms."""
        stage = super().training(round_idx)
        if not self.aligns:
            return stage
        by_class = {"class/prototypes": Rows(of="class", counted_by="class/counts")}
        return dataclasses.replace(stage, objective=self.aligned, rows=by_class)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The global model, and the codebook as soon as there is one."""
        if stage.name == "score":
            return Payload(clients=tuple(clients))
        payload = super().configure(stage, clients)
        if not self.num_rounds:
            return payload
        codebook = self.codebook()
        return dataclasses.replace(payload, extras={"codebook": codebook.expand(len(clients), *codebook.shape)})

    def codebook(self) -> Tensor:
        """B of the current round, (K S, D): each row is a mean over a share of the clients that sent prototypes."""
        known = [client for client in self.federation.training_clients if self.counts_CK[client].any()]
        number = max(1, round(self.share_of_clients * len(known)))
        rows = []
        for slot in range(self.num_slots):
            ticket_C = self.federation.keys(known, "codebook", self.num_rounds, slot)
            chosen = [known[index] for index in ticket_C.argsort()[:number].sort().values.tolist()]
            counts_CK = self.counts_CK[chosen]
            sum_KD = torch.einsum("ck,ckd->kd", counts_CK, self.prototypes_CKD[chosen])
            rows.append(sum_KD / counts_CK.sum(dim=0).clamp(min=1)[:, None])
        return torch.stack(rows, dim=1).flatten(0, 1)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the models; keep the prototypes, and record the means over the clients of the terms."""
        if stage.name == "score":
            return
        super().aggregate(stage, upload)
        if not (upload.clients and self.aligns):
            return
        sent_CKD = upload.extras["class/prototypes"]
        if not self.num_rounds:
            self.prototypes_CKD = sent_CKD.new_zeros(*self.prototypes_CKD.shape[:2], sent_CKD.shape[2])
            self.counts_CK = self.counts_CK.to(sent_CKD)
        self.prototypes_CKD[list(upload.clients)] = sent_CKD
        self.counts_CK[list(upload.clients)] = upload.extras["class/counts"].to(sent_CKD)
        self.recorded_metrics = {
            n: float(t.double().mean()) for n, t in upload.extras.items() if n.startswith("server/")
        }
        self.num_rounds += 1

    # ------------------------------------------------------------------ the clients

    def ranks(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The rank of each node by its score, the highest first, (N,); in a tie by index."""
        assert isinstance(batch, GraphBatch)
        score_N = torch.where(batch.example_mask, importance(batch, self.restart), -1.0)
        return (score_N * 1e9).round().sort(descending=True, stable=True).indices.argsort()

    def important(self, batch: Batch, context: Context, share: int) -> Tensor:
        """The ⌊n / share⌋ most important nodes, boolean (N,)."""
        return batch.example_mask & (context.client_state["place"] < batch.example_mask.sum() // share)

    def aligned(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The objective."""
        output = client.output(parameters, batch)
        loss = client.loss(output, batch)
        if "codebook" not in context.received:
            return loss
        terms = self.terms(output, client.frozen_output(context.anchor, batch), batch, context)
        return loss + self.semantic_weight * terms["semantic"] + self.frequency_weight * terms["frequency"]

    def terms(self, local: NetOutput, received: NetOutput, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Both terms of one client; one whose weight is 0 is not computed."""
        zero = local.embedding.new_zeros(())
        terms = {"semantic": zero, "frequency": zero}
        if self.semantic_weight and "codebook" in context.received:
            log_own, log_received = (
                assigned(each.embedding, context.received["codebook"]) for each in (local, received)
            )
            apart_N = (log_received.exp() * (log_received - log_own)).sum(dim=1)
            terms["semantic"] = (apart_N * batch.example_mask).sum() / batch.example_mask.sum()
        if self.frequency_weight:
            terms["frequency"] = self.frequency(local.embedding, received.embedding, batch, context)
        return terms

    def frequency(self, own_ND: Tensor, received_ND: Tensor, batch: Batch, context: Context) -> Tensor:
        """Mean squared differences of both models' embeddings of I5 at the lowest and the highest frequencies."""
        most = max(1, len(batch.y) // 5)
        node_M = context.client_state["place"].masked_fill(~batch.example_mask, len(batch.y)).argsort()[:most]
        chosen_M = self.important(batch, context, 5).index_select(0, node_M)
        parts = []
        for embedding_ND in (own_ND, received_ND):
            z_MD = embedding_ND.index_select(0, node_M) * chosen_M[:, None]
            vector_QM = spectrum(z_MD.detach(), chosen_M, self.num_frequencies).mT.to(z_MD)
            u_GQM = vector_QM.reshape(2 if self.spectrum == "spaces" else len(vector_QM), -1, most)
            parts.append(u_GQM.mT @ (u_GQM @ z_MD))
        size = chosen_M.sum().clamp(min=1) * own_ND.shape[1]
        return (parts[0] - parts[1]).square().sum() / size

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """The prototypes, and the two terms."""
        return {"class": self.prototypes, "server": self.judge} if self.aligns else {}

    def prototypes(
        self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context
    ) -> dict[str, Tensor]:
        """Each class's mean embedding over important training nodes, (K, D), 0 if it has none; how many, (K,)."""
        output = client.output(parameters, batch)
        z_ND = output.embedding.to(server_dtype(output.embedding.dtype))
        chosen_N = batch.train_mask & self.important(batch, context, 3)
        prototypes_KD, counts_K = means_by_class(z_ND, batch, chosen_N, output.logits.shape[1])
        return {"prototypes": prototypes_KD, "counts": counts_K}

    def judge(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The two terms of the trained model against the received one."""
        return self.terms(client.output(parameters, batch), client.frozen_output(context.anchor, batch), batch, context)


def assigned(embedding_ND: Tensor, codebook_QD: Tensor) -> Tensor:
    """Logarithm of the softmax of each node's cosines with the rows of a codebook, (N, Q)."""
    unit_QD = F.normalize(codebook_QD.to(embedding_ND), dim=1)
    return (F.normalize(embedding_ND, dim=1) @ unit_QD.T).log_softmax(dim=1)
