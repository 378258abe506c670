"""FedGTA: averages models of clients with similar distributions of propagated predictions, weighted by confidence.

Li, Wu, Zhang, Zhu, Li, Wang: "FedGTA: Topology-aware Averaging for Federated Graph Learning", PVLDB 17(1), 2023. After
training, in eval mode, with P the predictions, T the training nodes, K classes, d_v the neighbors of node v:

    Y = onehot(y) on T, P elsewhere;  Z = Y;   k times: Z <- α Â Z + (1 - α) Y, then Z_T <- Z_T + Y_T
    L = softmax(Z), S = softmax(Z / temperature), both onehot(y) on T
    moments     a_k = mean_v L_v^k,  b_k = mean_v (L_v - a_1)^k,  k = 1..num_moments
    confidence  H = Σ_v d_v (K / e + Σ_c S_vc ln S_vc)
    θ_i <- Σ_{j in A_i} H_j θ_j / Σ_{j in A_i} H_j,   A_i = {j: cos(moments_i, moments_j) > ε} and i itself

Leaves the client: the model; the moments, of which the first is nearly the class histogram; the confidence, nearly the
training nodes' number of edges.

Departures: A_i has i in it whatever ε is, and nodes without a role are predicted (released code gives them their true
labels). Adding Y_T again in every step is in released code, not in the paper; the scores then exceed 1 and a softmax of
them is nearly flat: ``normalize: rows`` divides by their sum instead, which distinguishes clients better. An unseen
client has the mean of the training clients' models until it sends moments, and then the mixture of those similar to
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Stage
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.label_propagation import propagate_labels, with_labels
from fl_lightning.strategies.mixing.base import Mixing


@dataclass(kw_only=True, eq=False)
class FedGTA(Mixing):
    """Averaging among clients with similar moments, weighted by confidence.

    Args:
        threshold: ε, the cosine above which another client's model is used, in [-1, 1]; 1 is Local.
        num_moments: Number of orders of moments, at least 1.
        moments: The ``raw`` ones, the ``central`` ones or both (``hybrid``).
        weighting: By ``confidence``, by training ``examples``, or ``equal`` weights.
        num_propagations: k, steps of label propagation, at least 0.
        propagation_share: α, the share of the neighbors in a step, in [0, 1].
        temperature: Temperature of the confidences, positive.
        normalize: Turn scores into distributions by ``softmax``, or divide ``rows`` by their sum.
    """

    threshold: float = 0.5
    num_moments: int = 10
    moments: Literal["hybrid", "raw", "central"] = "hybrid"
    weighting: Literal["confidence", "examples", "equal"] = "confidence"
    num_propagations: int = 5
    propagation_share: float = 0.5
    temperature: float = 20.0
    normalize: Literal["softmax", "rows"] = "softmax"

    personalized = True
    needs_graphs = needs_nodes = needs_classes = True
    server_state = ("sent",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_moments")
        self.require_at_least(0, "num_propagations")
        self.require_within(-1, 1, "threshold")
        self.require_within(0, 1, "propagation_share")
        self.require_positive("temperature")

    def setup(self, federation: Federation) -> None:
        """Start without moments."""
        super().setup(federation)
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        width = federation.num_outputs * self.num_moments * (2 if self.moments == "hybrid" else 1)
        moments_CD = torch.zeros(federation.num_clients, width, dtype=self.dtype, device=federation.device)
        weight_C = torch.zeros_like(moments_CD[:, 0])
        self.sent = {"moments": moments_CD, "weight": weight_C, "known": weight_C.bool()}

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """Moments and confidence."""
        return {"topology": self.describe}

    def describe(
        self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context
    ) -> dict[str, Tensor]:
        """Moments (D,) and confidence, scalar, of one client's propagated predictions."""
        assert isinstance(batch, GraphBatch)
        predicted_NK = client.output(parameters, batch).logits.softmax(dim=1)
        predicted_NK = predicted_NK.to(server_dtype(predicted_NK.dtype))
        known_NK = with_labels(predicted_NK, batch, batch.train_mask)
        score_NK = propagate_labels(
            known_NK, batch, batch.train_mask, num_steps=self.num_propagations, share=self.propagation_share
        )
        soft_NK = score_NK.softmax(dim=1) if self.normalize == "softmax" else F.normalize(score_NK, p=1, dim=1)
        sure_NK = with_labels((score_NK / self.temperature).softmax(dim=1), batch, batch.train_mask)
        certainty_N = sure_NK.shape[1] / torch.e + (sure_NK * (sure_NK + 1e-8).log()).sum(dim=1)
        moments_D = self._moments(with_labels(soft_NK, batch, batch.train_mask), batch.example_mask)
        return {"moments": moments_D, "confidence": (batch.degree * certainty_N).sum()}

    def _moments(self, soft_NK: Tensor, real_N: Tensor) -> Tensor:
        """Raw and central moments of the real nodes' rows, order by order, (D,)."""
        weight_N = real_N.to(soft_NK) / real_N.sum()
        values = {"raw": soft_NK, "central": soft_NK - weight_N @ soft_NK}
        wanted = [value_NK for kind, value_NK in values.items() if self.moments in (kind, "hybrid")]
        return torch.cat([weight_N @ value_NK**k for value_NK in wanted for k in range(1, self.num_moments + 1)])

    def accepted_weights(self, clients: Sequence[int], others: Sequence[int]) -> Tensor:
        """The weights of the others' models for each client, (C, K); of all models if it accepts none."""
        local, theirs = ({n: t[list(group)] for n, t in self.sent.items()} for group in (clients, others))
        itself_CK = torch.tensor(clients)[:, None] == torch.tensor(others)
        accepted_CK = cosine_similarity(local["moments"], theirs["moments"]) > self.threshold
        accepted_CK = (accepted_CK | itself_CK.to(accepted_CK.device)) & local["known"][:, None] & theirs["known"]
        accepted_CK = torch.where(accepted_CK.any(dim=1, keepdim=True), accepted_CK, True)
        weight_CK = accepted_CK * theirs["weight"]
        weight_CK = torch.where(weight_CK.sum(dim=1, keepdim=True) > 0, weight_CK, accepted_CK.to(weight_CK))
        return F.normalize(weight_CK, p=1, dim=1)

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """W over the clients of the upload, (C, C)."""
        return self.accepted_weights(upload.clients, upload.clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Remember the moments, then mix."""
        self.onboard(stage, upload)
        super().aggregate(stage, upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Remember moments and weights."""
        if not upload.clients:
            return
        assert upload.num_examples is not None
        confidence_C = upload.extras["topology/confidence"]
        of = {"confidence": confidence_C, "examples": upload.num_examples, "equal": torch.ones_like(confidence_C)}
        rows = list(upload.clients)
        self.sent["moments"][rows] = upload.extras["topology/moments"].to(self.dtype)
        self.sent["weight"][rows] = of[self.weighting].to(self.dtype)
        self.sent["known"][rows] = True

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; unseen clients' are mixed from those of the training clients."""
        payload, training = super().mixed_models(clients), self.federation.training_clients
        unseen_clients = [client for client in clients if client not in training]
        return self.with_unseen_clients(payload, unseen_clients, self.accepted_weights(unseen_clients, training))

    def metrics(self) -> Mapping[str, float]:
        """How many others a client accepts, and how unequal the confidences are."""
        known = [client for client in self.federation.training_clients if self.sent["known"][client]]
        if not known:
            return super().metrics()
        accepted = (self.accepted_weights(known, known) > 0).sum(dim=1) - 1
        weight_C = self.sent["weight"][known]
        values = {
            "server/accepted_clients": float(accepted.double().mean()),
            "server/confidence_spread": float(weight_C.std(correction=0) / weight_C.mean().clamp(min=1e-12)),
        }
        return {**super().metrics(), **values}
