"""AdaFGL: FedAvg, after which each client alone trains two modules on what the global model predicts for its nodes.

Li, Wu, Zhang, Sun, Li, Wang: "AdaFGL: A New Paradigm for Federated Node Classification with Topology Heterogeneity",
ICDE 2024. The net is ``models/adaptive_gcn.py``. For ``num_federated_rounds`` rounds its GCN is trained by FedAvg. Then
each client receives, once, the global model that its and the others' validation nodes chose, with predictions P̂, and

    R_uv = 1 if cos(P̂_u, P̂_v) > threshold;    Ã = normalized α A + (1 - α) R with loops;    X̃ = [X, ÃX, Ã²X, Ã³X]
    homophilous     l = MLP(X̃), loss CE(l) + MSE(l, P̂);     Y_ho = (softmax(l) + P̂) / 2
    heterophilous   l1 = MLP(X), l2 = MLP(X̃), E = MLP(X̃), Q = β R + (1 - β) cos(softmax E), Q' of both signs from Q,
                    l3 = (softmax(PReLU(Q') E) - softmax(PReLU(-Q') E) + E) / 2,
                    loss CE(l1) + CE(l2) + CE(l3);         Y_he = mean of the softmaxes of l1, l2, l3
    Y = h Y_ho + (1 - h) Y_he

with h the client's homophily: label propagation from half of its training nodes, scored on the other half.

Leaves the client: the GCN and two numbers (correct and all validation nodes of the model received), in the first phase
alone; afterward nothing.

Departures: the last average of the first phase is not judged, for nobody receives it, so it is not chosen (``keep:
last`` takes it). Released code sets ``double_softmax``, compares logits with probabilities in the MSE, turns the sign
of Q' below the mean, and switches hard at h >= 0.9; all but the last, which the paper does not have, are defaults. A
round's validation chooses the result among all rounds of both phases. With fewer than two training nodes h is 1. Time
and memory of the second phase are quadratic in a client's nodes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import random_places, subkey
from fl_lightning.models.adaptive_gcn import AdaptiveGCN, corrected_propagation, likeness
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Evaluation, Rows, Stage, StateSpec
from fl_lightning.strategies.label_propagation import propagate_labels, with_labels
from fl_lightning.strategies.mixing.base import one_model
from fl_lightning.strategies.mixing.fedavg import FedAvg

#: Parameters of the modules that never leave a client.
MODULES = ("homophilous.*", "heterophilous.*")


@dataclass(kw_only=True, eq=False)
class AdaFGL(FedAvg):
    """FedAvg, then personal modules for homophilous and heterophilous neighborhoods.

    Args:
        num_federated_rounds: Rounds of FedAvg, at least 1; in later rounds, clients train alone.
        keep: Build on the ``best`` global model by validation, or on the ``last``.
        num_join_epochs: Epochs for which an unseen client trains its modules, at least 0.
        threshold: Cosine of predictions above which nodes are related, in [-1, 1].
        edge_share: α, the share of the graph's own edges, in [0, 1].
        relation_share: β, in [0, 1].
        double_softmax: Apply another softmax to P̂ before its cosines and in Y_ho, as the released code does.
        consistency: Compare P̂ with the ``logits`` or with the ``probabilities`` of the homophilous module.
        below_mean: Q' below the mean μ is the ``ratio`` -Q / μ, or the ``distance`` (Q - μ) / μ.
        blend_modules: ``soft``, by h, or ``hard``: Y_ho where h is at least 0.9.
    """

    num_federated_rounds: int = 100
    keep: Literal["best", "last"] = "best"
    num_join_epochs: int = 200
    threshold: float = 0.999
    edge_share: float = 0.05
    relation_share: float = 0.2
    double_softmax: bool = True
    consistency: Literal["logits", "probabilities"] = "logits"
    below_mean: Literal["ratio", "distance"] = "ratio"
    blend_modules: Literal["soft", "hard"] = "soft"
    personal: Sequence[str] = field(default=MODULES, init=False)
    blend: bool = field(default=False, init=False)

    needs_graphs = needs_nodes = needs_classes = True
    takes_edge_weight = False
    needs_own_examples = True
    default_net = AdaptiveGCN
    own_net = True
    server_state = ("best_models", "kept_accuracy", "num_averages", "extracted_C")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_federated_rounds")
        self.require_at_least(0, "num_join_epochs")
        self.require_within(-1, 1, "threshold")
        self.require_within(0, 1, "edge_share", "relation_share")

    def setup(self, federation: Federation) -> None:
        """Start without a kept model and without predictions."""
        self.require_net(federation, "homophilous.*", "modules beside its GCN")
        super().setup(federation)
        self.best_models, self.kept_accuracy, self.num_averages = dict(self.models), -1.0, 0
        self.extracted_C = torch.zeros(federation.num_clients, dtype=torch.bool)

    def client_state(self) -> Mapping[str, StateSpec]:
        """P̂ and h; h is -1 before there is any."""
        row = torch.zeros(self.federation.num_outputs, dtype=next(iter(self.models.values())).dtype)
        return {
            "prediction": StateSpec(initial=row, per_example=True),
            "homophily": StateSpec(initial=row.new_tensor(-1.0)),
        }

    def predicts_trained(self) -> bool:
        """Whether this is the second phase, in which clients continue from what they received last."""
        return True

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """FedAvg; in the second phase clients compute P̂ from what they received last, and train alone."""
        if round_idx >= self.num_federated_rounds:
            return [self.extract(), self.refine(self.num_epochs)]
        scores = dict.fromkeys(self.client_outputs(), Rows(of="score"))
        return [dataclasses.replace(stage, trained=self.shared, rows=scores) for stage in super().stages(round_idx)]

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """How good the received model is, if the best one is kept."""
        return {"received": judged} if self.keep == "best" else {}

    def extract(self) -> Stage:
        """The client computes P̂ and h."""
        return Stage(name="extract", client_state={"prediction": predicted, "homophily": self.homophily})

    def refine(self, num_epochs: int) -> Stage:
        """The client trains its modules."""
        return dataclasses.replace(
            self.training(0), name="refine", num_epochs=num_epochs, trained=MODULES, objective=self.objective
        )

    def onboarding_stages(self) -> Sequence[Stage]:
        """An unseen client receives the kept model and trains its modules at once."""
        return [self.extract(), self.refine(self.num_join_epochs)]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The global model; the kept one for clients that compute P̂ for the first time."""
        if stage.name == "refine" or (stage.name == "extract" and self.extracted_C[list(clients)].all()):
            return Payload(clients=tuple(clients))
        return one_model(self.chosen() if stage.name == "extract" else self.models, clients)

    def chosen(self) -> Mapping[str, Tensor]:
        """The model that the second phase builds on."""
        return self.models if self.kept_accuracy < 0 or self.keep == "last" else self.best_models

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Score the model that was sent, then average; in the second phase, record which clients have it."""
        if stage.name == "extract":
            self.extracted_C[list(upload.clients)] = True
        elif stage.name == "train" and upload.clients:
            if self.keep == "best" and self.num_averages:  # not the initial model
                right, count = (float(upload.extras[f"received/{name}"].sum()) for name in ("right", "count"))
                if count and right / count > self.kept_accuracy:
                    self.best_models, self.kept_accuracy = dict(self.models), right / count
            super().aggregate(stage, upload)
            self.num_averages += 1

    def homophily(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The homophily h of one client, scalar: how well half of its training labels predict the other half."""
        assert isinstance(batch, GraphBatch)
        train_N, key = batch.train_mask, subkey(batch.key, "homophily", self.federation.seed)
        count = train_N.sum()
        seeds_N = train_N & (random_places(key, train_N) < (count + 1) // 2)
        even_NK = torch.full_like(context.client_state["prediction"], 1 / self.federation.num_outputs)
        known_NK = with_labels(even_NK, batch, seeds_N)
        score_NK = propagate_labels(known_NK, batch, seeds_N, num_steps=10, share=0.5)
        right_N = (score_NK.argmax(dim=1) == batch.y) & train_N & ~seeds_N
        share = right_N.sum() / (count // 2).clamp(min=1)
        return torch.where(count < 2, 1.0, share).to(even_NK)

    def modules(
        self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits of the homophilous module and the three of the heterophilous one, (N, K)."""
        assert isinstance(batch, GraphBatch)
        p_NK = context.client_state["prediction"]
        alike_NN = likeness(p_NK.softmax(dim=1) if self.double_softmax else p_NK, batch.example_mask, self.threshold)
        propagation_NN = corrected_propagation(batch, alike_NN, self.edge_share)
        own_NK = client.call_part("homophilous", parameters, batch, propagation_NN, "homophilous")
        given = (batch, propagation_NN, alike_NN, self.relation_share)
        return own_NK, client.call_part("heterophilous", parameters, *given, below_mean=self.below_mean)

    def objective(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The losses of both modules, which share nothing."""
        own_NK, others = self.modules(client, parameters, batch, context)
        near_NK = own_NK if self.consistency == "logits" else own_NK.softmax(dim=1)
        square_N = (near_NK - context.client_state["prediction"]).square().mean(dim=1)
        consistency = (square_N * batch.example_mask).sum() / batch.example_mask.sum()
        each = torch.stack([client.loss(NetOutput(logits_NK, logits_NK), batch) for logits_NK in (own_NK, *others)])
        return each.sum() + consistency

    def blended_modules(
        self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context
    ) -> NetOutput:
        """Logits ln Y; for a client that has no P̂ yet, those of its GCN."""
        p_NK, homophily = context.client_state["prediction"], context.client_state["homophily"]
        own_NK, others = self.modules(client, parameters, batch, context)
        homophilous_NK = (own_NK.softmax(dim=1) + (p_NK.softmax(dim=1) if self.double_softmax else p_NK)) / 2
        heterophilous_NK = torch.stack([each_NK.softmax(dim=1) for each_NK in others]).mean(dim=0)
        share = homophily if self.blend_modules == "soft" else (homophily >= 0.9).to(p_NK)
        blended_NK = share * homophilous_NK + (1 - share) * heterophilous_NK
        output = client.output(parameters, batch)
        logits_NK = torch.where(homophily < 0, output.logits.log_softmax(dim=1), blended_NK.clamp(min=1e-12).log())
        return NetOutput(logits_NK, output.embedding)

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """The global model in the first phase; None in the second, and for unseen clients."""
        first = not self.extracted_C.any() and set(clients) <= set(self.federation.training_clients)
        return super().model_for(clients) if first else None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The global model is the result, in the second phase the blended modules; ``global/...`` is the kept model.

        Of clients that have not taken part in the second phase it is the result, too.
        """
        kept, model = Evaluation(payload=one_model(self.chosen(), clients)), self.model_for(clients)
        if model is not None:
            return {"": Evaluation(payload=model), "global/": kept}
        waiting = set(self.federation.training_clients) - set(self.extracted_C.nonzero().flatten().tolist())
        others = {client: kept for client in clients if client in waiting}
        return {"": Evaluation(output=self.blended_modules, others=others), "global/": kept}

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The blended modules, in the second phase."""
        return {"": Evaluation(output=self.blended_modules)}

    def metrics(self) -> Mapping[str, float]:
        """Validation accuracy of the kept model, and how many clients build on it."""
        return {
            "server/kept_accuracy": max(self.kept_accuracy, 0.0),
            "server/adapting_clients": float(self.extracted_C.sum()),
        }


def predicted(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """P̂ of one client, (N, K)."""
    return client.output(parameters, batch).logits.softmax(dim=1)


def judged(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
    """How many validation nodes the received model classifies correctly, and the number of validation nodes."""
    logits_NK = client.output(context.anchor, batch).logits
    right_N = (logits_NK.argmax(dim=1) == batch.y) & batch.val_mask
    return {"right": right_N.sum().to(logits_NK.dtype), "count": batch.val_mask.sum().to(logits_NK.dtype)}
