"""FGGP: several prototypes of each class, from clusters of clients, predict; two views make the embeddings general.

Wan, Huang, Ye: "Federated Graph Learning under Domain Shift with Generalizable Prototypes", AAAI 2024. A client has a
second view of its graph (``models/augmented_gcn.py``), from its edges and those that join every node with the
``num_proposed`` nearest by the received model's embeddings, refreshed every few rounds. With l, f the logits and
embeddings (after ReLU), c_v = max softmax(l_v), 1 on training nodes, and ŷ_v the predicted class, the label there:

    P_k = Σ_{ŷ_v = k} c_v f_v / Σ c_v  in each view;   loss = CE + CE of view 2 + L_pa + ω BCE(S, A₂)
    L_pa = mean_k -ln e^{P²_k·P¹_k/τ} / (Σ_m e^{P²_k·P¹_m/τ} + Σ_{m != k} e^{P²_k·P²_m/τ}),  of unit prototypes

The server averages the models, clusters the P¹ of each class by FINCH and keeps the clusters'
means in a queue. The ``num_votes`` entries nearest to f predict a node, each with the weight softmax(cos / 0.1).

Leaves the client: the model; the mean embedding of each class that it has or predicts, and of how many nodes.

Departures: the net is the GCN (paper: three layers with batch normalization); prototypes are keyed by class (released
code: by their place among those present), taken in eval mode after training; P² is of the labels and confidences that
view 2 itself predicts (paper: of those of view 1); the queue begins empty; the classifier is
averaged (the paper keeps it at the client, released code resets it every round to one that all have: embeddings trained
below classifiers of their own, ``personal: ["head.*"]``, drift apart, and others' prototypes no longer tell classes).
Dense in a client's nodes: time and memory are quadratic.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fl_lightning.batches import Batch
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import subkey
from fl_lightning.models.augmented_gcn import AugmentedGCN, SecondView
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.finch import finch
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Evaluation, Rows, Stage, StateSpec
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FGGP(FedAvg):
    """Generalized prototypes.

    Args:
        view_weight: Weight of the second view's cross entropy, at least 0.
        alignment_weight: Weight of L_pa, at least 0.
        edge_weight: ω, weight of the augmentor's loss, at least 0.
        num_proposed: Number of neighbors that are proposed for each node, at least 1.
        propose_every: Rounds between proposals, at least 1.
        temperature: τ, positive.
        num_votes: Number of entries of the queue that predict a node, at least 1.
        queue_length: Number of entries of the queue for each class, at least 1.
    """

    view_weight: float = 1.0
    alignment_weight: float = 1.0
    edge_weight: float = 1.0
    num_proposed: int = 3
    propose_every: int = 10
    temperature: float = 0.5
    num_votes: int = 20
    queue_length: int = 10

    server_state = ("queue", "num_rounds", "proposed_C")

    default_net = AugmentedGCN
    own_net = True
    needs_graphs = needs_nodes = needs_classes = True
    needs_undirected = True  # the second views are
    takes_edge_weight = False

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "view_weight", "alignment_weight", "edge_weight")
        self.require_at_least(1, "num_proposed", "propose_every", "num_votes", "queue_length")
        self.require_positive("temperature")

    def setup(self, federation: Federation) -> None:
        """Start with an empty queue."""
        self.require_net(federation, "augmentor.*", "an augmentor")
        super().setup(federation)
        self.num_rounds, self.proposed_C = 0, torch.zeros(federation.num_clients, dtype=torch.bool)
        head_KD, length = federation.parameters["head.weight"], self.queue_length * federation.num_outputs
        vectors_QD = torch.zeros(length, head_KD.shape[1], dtype=head_KD.dtype, device=federation.device)
        self.queue = {"vectors": vectors_QD, "classes": torch.full_like(vectors_QD[:, 0], -1, dtype=torch.int64)}

    def client_state(self) -> Mapping[str, StateSpec]:
        """The proposed neighbors, none at first."""
        return {"proposed": StateSpec(initial=torch.full((self.num_proposed,), -1), per_example=True)}

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """Train; every few rounds, and as long as some client may have none, propose neighbors first."""
        due = round_idx % self.propose_every == 0
        if not due and self.proposed_C[list(self.federation.training_clients)].all():
            return super().stages(round_idx)
        proposed = self.propose if due else self.propose_once
        return [Stage(name="propose", client_state={"proposed": proposed}), *super().stages(round_idx)]

    def training(self, round_idx: int) -> Stage:
        """Train with the second view."""
        by_class = {"class/prototypes": Rows(of="class", counted_by="class/counts")}
        return dataclasses.replace(super().training(round_idx), objective=self.both_views, rows=by_class)

    def propose(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The nodes nearest to each by cosine, (N, P); -1 where there are no more."""
        unit_ND = F.normalize(client.output(parameters, batch).embedding.relu(), dim=1)
        real_NN = batch.example_mask[:, None] & batch.example_mask
        itself_NN = torch.eye(len(batch.y), dtype=torch.bool, device=batch.y.device)
        cosine_NN = torch.where(real_NN & ~itself_NN, unit_ND @ unit_ND.T, -torch.inf)
        rank_NN = (cosine_NN * 1e6).round()  # of equal ones the first, however they were rounded
        best = rank_NN.sort(dim=1, descending=True, stable=True)
        index_NP = torch.where(best.values > -torch.inf, best.indices, -1)[:, : self.num_proposed]
        return F.pad(index_NP, (0, self.num_proposed - index_NP.shape[1]), value=-1)

    def propose_once(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The neighbors that a client has, or those that are proposed if it has none, (N, P)."""
        known_NP = context.client_state["proposed"]
        has_any = ((known_NP >= 0) & batch.example_mask[:, None]).any()
        return torch.where(has_any, known_NP, self.propose(client, parameters, batch, context))

    def both_views(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The loss of both views."""
        first = client.output(parameters, batch)
        loss = client.loss(first, batch)
        if not self.view_weight + self.alignment_weight + self.edge_weight:
            return loss
        arguments = (batch, context.client_state["proposed"], subkey(context.received["key"], "step", context.step))
        view: SecondView = functional_call(client.net, dict(parameters), arguments, tie_weights=False)
        aligned = alignment(prototypes(first, batch), prototypes(view.output, batch), self.temperature)
        loss = loss + self.view_weight * client.loss(view.output, batch) + self.alignment_weight * aligned
        return loss + self.edge_weight * edge_loss(view, batch)

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """The prototypes of the first view."""
        return {"class": prototypes_sent}

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The model, and a key for the second views."""
        keys = self.federation.keys(clients, "view", self.num_rounds)
        return dataclasses.replace(super().configure(stage, clients), extras={"key": keys})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the models, cluster the prototypes of each class, and queue the clusters' means."""
        if not upload.clients:
            return
        if stage.name == "propose":
            self.proposed_C[list(upload.clients)] = True
            return
        super().aggregate(stage, upload)
        self.num_rounds += 1
        sent_CKD, there_CK = upload.extras["class/prototypes"], upload.extras["class/counts"] > 0
        for number in range(sent_CKD.shape[1]):
            point_MD = sent_CKD[there_CK[:, number], number]
            if len(point_MD):
                members = F.one_hot(finch(point_MD)).to(point_MD).T
                mean_MD = F.normalize(members @ point_MD / members.sum(dim=1, keepdim=True), dim=1)
                new = {"vectors": mean_MD, "classes": torch.full_like(members[:, 0], number).long()}
                length = len(self.queue["classes"])
                self.queue = {n: torch.cat([t.to(self.queue[n]), self.queue[n]])[:length] for n, t in new.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the server; states of older versions do not tell who has neighbors."""
        super().load_state_dict({"proposed_C": self.proposed_C, **state})

    def vote(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
        """The logarithm of each class's votes as its logit."""
        output = client.output(parameters, batch)
        vector_QD, class_Q = context.received["vectors"], context.received["classes"]
        cosine_NQ = F.normalize(output.embedding.relu(), dim=1).to(vector_QD) @ vector_QD.T
        best = torch.where(class_Q >= 0, cosine_NQ, -1e4).topk(min(self.num_votes, len(class_Q)), dim=1)
        weight_NV = (best.values / 0.1).softmax(dim=1)
        of_NVK = class_Q[best.indices][..., None] == torch.arange(output.logits.shape[1], device=class_Q.device)
        return NetOutput((weight_NV[..., None] * of_NVK).sum(dim=1).clamp(min=1e-12).log(), output.embedding)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The queue's vote is the result; ``classifier/...`` is the classifier, ``trained/...`` before averaging."""
        model = self.mixed_models(clients)
        plain = {"classifier/": Evaluation(payload=model), "trained/": Evaluation(payload=model, prefer_trained=True)}
        plain |= self.blended(clients)
        if not (self.queue["classes"] >= 0).any():
            return {"": Evaluation(payload=model), **plain}
        return {**self.later_evaluations(clients), **plain}

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The vote, once there are prototypes."""
        model = self.mixed_models(clients)
        extras = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in self.queue.items()}
        payload = dataclasses.replace(model, extras=extras)
        return {"": Evaluation(payload=payload, output=self.vote)}

    def metrics(self) -> Mapping[str, float]:
        """Entries of the queue, and classes that have one."""
        classes = self.queue["classes"][self.queue["classes"] >= 0]
        return {"server/prototypes": len(classes), "server/classes": len(set(classes.tolist()))}


def prototypes_sent(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
    """Each class's mean embedding weighted by confidence, and the number of nodes behind it."""
    return prototypes(client.output(parameters, batch), batch)


def prototypes(output: NetOutput, batch: Batch) -> dict[str, Tensor]:
    """P, (K, D), each class's mean embedding weighted by confidence, and the number of nodes behind it, (K,)."""
    share_NK = output.logits.detach().softmax(dim=1)
    confidence_N = torch.where(batch.train_mask, 1.0, share_NK.amax(dim=1)) * batch.example_mask
    class_N = torch.where(batch.train_mask, batch.y, share_NK.argmax(dim=1))
    member_NK = class_N[:, None] == torch.arange(share_NK.shape[1], device=class_N.device)
    weight_NK = member_NK * confidence_N[:, None].to(share_NK)
    mean_KD = weight_NK.T @ output.embedding.relu() / (weight_NK.sum(dim=0)[:, None] + 1e-6)
    return {"prototypes": mean_KD, "counts": (member_NK & batch.example_mask[:, None]).sum(dim=0)}


def alignment(first: Mapping[str, Tensor], second: Mapping[str, Tensor], temperature: float) -> Tensor:
    """L_pa over the classes that are present in both views; 0 if there is none."""
    there_K = (first["counts"] > 0) & (second["counts"] > 0)
    unit, other = (F.normalize(view["prototypes"], dim=1) for view in (first, second))
    across_KK, within_KK = other @ unit.T / temperature, other @ other.T / temperature
    itself_KK = torch.eye(len(there_K), dtype=torch.bool, device=there_K.device)
    across_KK, within_KK = (t.masked_fill(~there_K, -1e4) for t in (across_KK, within_KK))
    both_KK = torch.cat([across_KK, within_KK.masked_fill(itself_KK, -1e4)], dim=1)
    loss_K = both_KK.logsumexp(dim=1) - across_KK.diagonal()
    return torch.where(there_K, loss_K, 0.0).sum() / there_K.sum().clamp(min=1)


def edge_loss(view: SecondView, batch: Batch) -> Tensor:
    """Ω BCE(S, A₂), of logits, with as much weight on the edges as on the other pairs."""
    real_NN = (batch.example_mask[:, None] & batch.example_mask).to(view.score)
    pairs, edges = real_NN.sum(), view.edges.sum()
    others = (pairs - edges).clamp(min=1)
    found_NN = others / edges * view.edges * F.softplus(-view.score) + (1 - view.edges) * F.softplus(view.score)
    return pairs / (2 * others) * (found_NN * real_NN).sum() / pairs
