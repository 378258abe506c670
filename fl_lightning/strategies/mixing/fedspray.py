"""FedSpray: a common model of features and of proxies for neighbors teaches each client's own GNN.

Fu, Chen, Zhang, Chen, Li: "Federated Graph Learning with Structure Proxy Alignment", KDD 2024. A node whose neighbors
are of other classes misleads a GNN. So clients share a model that sees no edges (``models/structure_proxy.py``): e an
encoder of features, heads h and h', and S_k, the proxy of class k; each of a client's training nodes T has a proxy q_v
of its own. With g the client's GNN, which it keeps to itself, p = softmax(h(e + q)) and o = softmax(h'(e)), each round

    q_v = Σ_k o_vk S_k  outside T;     Rel = T and where max_k o_vk > ``confidence``
    g         minimizes  CE_T(g) + λ mean_Rel KL(p ‖ softmax(g)),                    p as received
    e, h, h'  minimize   CE_T(h'(e)) + mean_T KL(softmax(g) ‖ p),                    g as just trained
    and so does q on T, by an Adam of its own
    S_k <- Σ_i r_ik S_ik / Σ_i r_ik,   S_ik = mean of q_v over T, y_v = k;   r_ik = their share of client i's T

and e, h, h' are averaged. A class that no responding client has keeps its proxy.

Leaves the client: the model of features; the mean proxy of each class and the number of its training nodes; two metrics
on the teacher. The GNN never does.

Departures: released code resets h' to h in every round and runs g with dropout when it teaches. Here h' is its
own average, and teachers run without dropout. There is no robust rule: wrong proxies would still mislead all.

A round trains two models, which on Cora takes a stack of 20 clients two to three times FedAvg's time on the same GNN.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.batches import Batch
from fl_lightning.federation import Federation
from fl_lightning.models.output import NetOutput
from fl_lightning.models.structure_proxy import ProxySAGE
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import Evaluation, Rows, Stage, StateSpec
from fl_lightning.strategies.base import RecordsMetrics
from fl_lightning.strategies.client_outputs import means_by_class
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.fedavg import FedAvg

#: Adam on the proxies: decay of both moments, and the offset that keeps the second from zero.
DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8


@dataclass(kw_only=True, eq=False)
class FedSpray(FedAvg, RecordsMetrics):
    """Personal GNNs that learn from a federated model of features and structure proxies.

    Args:
        num_epochs: Local epochs on the GNN.
        num_proxy_epochs: Local epochs on the model of features and on the proxies, at least 0.
        alignment_weight: λ, at least 0; 0 is Local.
        confidence: Probability above which a node without a label is relied on, in [0, 1].
        proxy_lr: Learning rate of the proxies, at least 0.
        proxy_weighting: r: ``shares`` of a client's training nodes, or their number (``examples``).
    """

    num_epochs: int = 5
    num_proxy_epochs: int = 5
    alignment_weight: float = 1.0
    confidence: float = 0.7
    proxy_lr: float = 0.02
    proxy_weighting: Literal["shares", "examples"] = "shares"
    personal: Sequence[str] = field(default=(), init=False)
    blend: bool = field(default=False, init=False)
    aggregation: Aggregation | None = field(default=None, init=False)

    server_state = ("proxies_KP",)

    default_net = ProxySAGE
    own_net = True
    needs_graphs = needs_nodes = needs_classes = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "num_proxy_epochs", "alignment_weight", "proxy_lr")
        self.require_within(0, 1, "confidence")

    def setup(self, federation: Federation) -> None:
        """Create the model of features, and proxies that distinguish the classes."""
        self.require_net(federation, "features.*", "a model of features")
        super().setup(federation)
        like_P = self.models["features.bias"][0]
        self.proxies_KP = 0.01 * torch.arange(federation.num_outputs).to(like_P)[:, None].expand(-1, len(like_P))

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """The GNN: all but the model of features."""
        return tuple(name for name in federation.parameters if not name.startswith("features."))

    def client_state(self) -> Mapping[str, StateSpec]:
        """The GNN's logits; each training node's proxy q, and Adam's moments of it and number of steps."""
        zero_KP = torch.zeros_like(self.proxies_KP, device="cpu")
        zero_P = zero_KP[0]
        return {
            "gnn": StateSpec(initial=zero_KP[:, 0], per_example=True),
            "proxy/value": StateSpec(initial=zero_P + 0.1, per_example=True),
            "proxy/mean": StateSpec(initial=zero_P, per_example=True),
            "proxy/square": StateSpec(initial=zero_P, per_example=True),
            "proxy/steps": StateSpec(initial=zero_P[0]),
        }

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The GNN's turn, then that of the model of features, which alone is sent."""
        (whole,) = super().stages(round_idx)
        features = dataclasses.replace(
            whole,
            name="features",
            num_epochs=self.num_proxy_epochs,
            trained=self.shared,
            objective=self.feature_loss,
            program=LocalProgram(step=self.step_proxies),
            client_outputs={"class": self.class_proxies},
            rows={"class/proxies": Rows(of="class", counted_by="class/counts")},
        )
        return [self.gnn_stage(), features]

    def gnn_stage(self) -> Stage:
        """The GNN's turn."""
        return dataclasses.replace(
            self.training(0),
            trained=tuple(self.kept_patterns(self.federation)),
            objective=self.taught_loss if self.alignment_weight else None,
            client_outputs={"server": self.judge},
            client_state={"gnn": logits_of_gnn},
        )

    def onboarding_stages(self) -> Sequence[Stage]:
        """An unseen client trains a GNN of its own."""
        return [self.gnn_stage()]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:  # type: ignore[override]
        """The model of features and the proxies, as a round begins."""
        if stage.name == "features":
            return None
        proxies = self.proxies_KP.expand(len(clients), *self.proxies_KP.shape)
        return dataclasses.replace(self.mixed_models(clients), extras={"proxies": proxies})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the models of features and the proxies of each class; record the metrics on the teachers first."""
        if not upload.clients:
            return
        if stage.name != "features":
            self.recorded_metrics = {name: float(each.double().mean()) for name, each in upload.extras.items()}
            return
        super().aggregate(stage, upload)
        assert upload.num_examples is not None
        weight_CK = upload.extras["class/counts"].to(self.proxies_KP)
        if self.proxy_weighting == "shares":
            weight_CK = weight_CK / upload.num_examples.clamp(min=1)[:, None]
        total_K1 = weight_CK.sum(dim=0)[:, None]
        sum_KP = torch.einsum("ck,ckp->kp", weight_CK, upload.extras["class/proxies"].to(weight_CK))
        new_KP = torch.where(total_K1 > 0, sum_KP / total_K1, self.proxies_KP)
        drift = float((new_KP - self.proxies_KP).norm(dim=1).mean())
        self.recorded_metrics = {**self.recorded_metrics, "server/proxy_drift": drift}
        self.proxies_KP = new_KP

    # ------------------------------------------------------------------ the clients

    def teacher(self, client: ClientModule, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """Logits of the received model of features, (N, K), and Rel, boolean (N,)."""
        e_NP, logits_NK = features_of(client, context.anchor, batch)
        o_NK = logits_NK.softmax(dim=1)
        q_NP = torch.where(
            batch.train_mask[:, None], context.client_state["proxy/value"], o_NK @ context.received["proxies"]
        )
        reliable_N = batch.train_mask | (batch.example_mask & (o_NK.amax(dim=1) > self.confidence))
        return client.call_part("features.head", context.anchor, e_NP + q_NP), reliable_N

    def alignment(self, output: NetOutput, client: ClientModule, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The GNN's divergence from its teacher, and the share of nodes for which the teacher is relied on."""
        with torch.no_grad():
            teacher_NK, reliable_N = self.teacher(client, batch, context)
        apart = mean_divergence(teacher_NK, output.logits, reliable_N)
        return {"alignment": apart, "reliable": reliable_N.sum() / batch.example_mask.sum()}

    def taught_loss(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The objective of the GNN."""
        output = client.output(parameters, batch)
        alignment = self.alignment(output, client, batch, context)["alignment"]
        return client.loss(output, batch) + self.alignment_weight * alignment

    def judge(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The divergence from the teacher after training, and the share of nodes for which it is relied on."""
        return self.alignment(client.output(parameters, batch), client, batch, context)

    def feature_loss(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The objective of the model of features."""
        e_NP, logits_NK = features_of(client, parameters, batch)
        own_NK = client.call_part("features.head", parameters, e_NP + context.client_state["proxy/value"])
        apart = mean_divergence(context.client_state["gnn"], own_NK, batch.train_mask)
        return client.loss(NetOutput(logits_NK, e_NP), batch) + apart

    def step_proxies(
        self, client: ClientModule, parameters: Parameters, gradients: Parameters, batch: Batch | None, context: Context
    ) -> Change:
        """A step of Adam on the proxies of the training nodes, with the gradient of :meth:`feature_loss` in them."""
        assert batch is not None, "its stages are not private"
        q_NP, train_N = context.client_state["proxy/value"], batch.train_mask
        e_NP, _ = features_of(client, parameters, batch)
        own_NK = client.call_part("features.head", parameters, e_NP + q_NP)
        apart_NK = own_NK.softmax(dim=1) - context.client_state["gnn"].softmax(dim=1)
        share_N1 = train_N[:, None] / train_N.sum().clamp(min=1)
        gradient_NP = (share_N1 * apart_NK) @ parameters["features.head.weight"]
        steps = context.client_state["proxy/steps"] + 1
        mean_NP = DECAY * context.client_state["proxy/mean"] + (1 - DECAY) * gradient_NP
        square_NP = SQUARE_DECAY * context.client_state["proxy/square"] + (1 - SQUARE_DECAY) * gradient_NP.square()
        size_NP = (square_NP / (1 - SQUARE_DECAY**steps)).sqrt() + EPSILON
        moved_NP = q_NP - self.proxy_lr * mean_NP / (1 - DECAY**steps) / size_NP
        new = {"value": moved_NP, "mean": mean_NP, "square": square_NP, "steps": steps}
        return Change(client_state={f"proxy/{name}": value for name, value in new.items()})

    def class_proxies(
        self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context
    ) -> dict[str, Tensor]:
        """Each class's mean proxy, 0 where it has no training node, (K, P), and the number of these, (K,)."""
        q_NP = context.client_state["proxy/value"]
        means_KP, counts_K = means_by_class(q_NP, batch, batch.train_mask, len(self.proxies_KP))
        return {"proxies": means_KP, "counts": counts_K}

    def without_edges(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
        """The output of the model of features for nodes without a proxy, h(e + Σ_k o_k S_k)."""
        e_NP, logits_NK = features_of(client, parameters, batch)
        q_NP = logits_NK.softmax(dim=1) @ context.received["proxies"]
        return NetOutput(client.call_part("features.head", parameters, e_NP + q_NP), e_NP)

    # ------------------------------------------------------------------ evaluation, state

    def model_for(self, clients: Sequence[int]) -> None:
        """Nothing: the clients' GNNs are their own."""
        return

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The GNNs are the result; ``features/...`` is the common model that sees no edges."""
        payload = self.configure(self.gnn_stage(), clients)
        return {"": Evaluation(), "features/": Evaluation(payload=payload, output=self.without_edges)}


def logits_of_gnn(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Logits of the trained GNN, (N, K)."""
    return client.output(parameters, batch).logits


def features_of(client: ClientModule, parameters: Parameters, batch: Batch) -> tuple[Tensor, Tensor]:
    """The encoded features e, (N, P), and the logits h'(e), (N, K)."""
    e_NP = client.call_part("features", parameters, batch)
    return e_NP, client.call_part("features.first_head", parameters, e_NP)


def mean_divergence(target_NK: Tensor, own_NK: Tensor, chosen_N: Tensor) -> Tensor:
    """KL(softmax(target) ‖ softmax(own)), the mean over the chosen nodes, scalar; 0 if there is none."""
    log_NK = target_NK.log_softmax(dim=1)
    apart_N = (log_NK.exp() * (log_NK - own_NK.log_softmax(dim=1))).sum(dim=1)
    return torch.where(chosen_N, apart_N, 0.0).sum() / chosen_N.sum().clamp(min=1)
