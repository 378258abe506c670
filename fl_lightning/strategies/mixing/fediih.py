"""FedIIH: clients are compared factor by factor, and each factor's parameters are mixed among those alike in it.

Yu, Chen, Tong, Gu, Gong: "Modeling Inter-Intra Heterogeneity for Graph Federated Learning", AAAI 2025. The net is
``models/disentangled_gcn.py``, with K factors of width D. After training, in eval mode, a client sends for each factor
the mean m over its nodes of the factor's latents, which is also its log-variance s (the paper's two encoders have no
parameters and are one map). With M the normal distribution of mean (m_i + m_j) / 2 and variance (e^s_i + e^s_j) / 2,

    JS_ij = (KL(i ‖ M) + KL(j ‖ M)) / 2,    W_k = softmax over j of τ (1 - JS_ij / ln 2)

mixes the parameters of factor k: its part of the first layer and of the read-out; the read-out's bias is averaged.
(JS is a sum over D and is not bounded by ln 2.)

Leaves the client: the model; K mean latents of width D, which say where its nodes lie on average.

Departures: means are taken without dropout (released code: from the last training pass, so that s differs from m by
noise). The variational terms of the paper are left out: in released code their optimizer holds only numbers that are
used nowhere else, so that they change neither the model nor the mixing. Time and memory of the routing are linear in
the edges (released code: quadratic in the nodes). An unseen client trains the mean of all models, and has then its row
of W over the training clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.models.disentangled_gcn import DisentangledGCN
from fl_lightning.relations.similarity import softmax_mixing
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Evaluation, Stage
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.base import Mixing


@dataclass(kw_only=True, eq=False)
class FedIIH(Mixing):
    """Mixing of each factor among clients whose latents are alike in it.

    Args:
        similarity_temperature: τ, at least 0; 0 is plain averaging.
    """

    num_epochs: int = 1
    similarity_temperature: float = 10.0
    aggregation: Aggregation | None = field(default=None, init=False)

    personalized = True
    needs_graphs = needs_nodes = True
    default_net = DisentangledGCN
    own_net = True
    server_state = ("latents_CKD", "known_C")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "similarity_temperature")

    def setup(self, federation: Federation) -> None:
        """Start without latents.

        Raises:
            ValueError: The net has no factors.
        """
        factors = [name for name in federation.parameters if name.startswith("factors.") and name.endswith(".bias")]
        if not factors:
            raise ValueError("FedIIH needs a net of factors: set model.net to fl_lightning.models.DisentangledGCN")
        super().setup(federation)
        first = federation.parameters[factors[0]]
        size, device = (federation.num_clients, len(factors), len(first)), federation.device
        self.latents_CKD = torch.zeros(size, dtype=server_dtype(first.dtype), device=device)
        self.known_C = torch.zeros(federation.num_clients, dtype=torch.bool, device=device)

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """Mean latents."""
        return {"latents": mean_latents}

    def mixing_between(self, clients: Sequence[int], others: Sequence[int]) -> Mapping[str, Tensor]:
        """Each factor's W, (C, J), for its parameters; equal shares for the rest and for clients without latents."""
        own_CKD, others_JKD = self.latents_CKD[list(clients)], self.latents_CKD[list(others)]
        heard_CJ = self.known_C[list(clients)][:, None] & self.known_C[list(others)]
        result: dict[str, Tensor] = {}
        for factor in range(own_CKD.shape[1]):
            own_C1D, other_JD = own_CKD[:, None, factor], others_JKD[:, factor]
            apart_CJ = divergence(own_C1D, own_C1D, other_JD, other_JD)
            alike_CJ = torch.where(heard_CJ, 1 - apart_CJ / math.log(2), 0.0)
            weight_CJ = softmax_mixing(alike_CJ, self.similarity_temperature)
            result |= {f"factors.{factor}.*": weight_CJ, f"heads.{factor}": weight_CJ}
        return {**result, "*": torch.full_like(alike_CJ, 1 / len(others))}

    def mixing_matrix(self, upload: Payload) -> Mapping[str, Tensor]:
        """Each factor's W over the clients of the upload, (C, C)."""
        return self.mixing_between(upload.clients, upload.clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Remember the latents, then mix."""
        self.onboard(stage, upload)
        super().aggregate(stage, upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Remember the latents."""
        if upload.clients:
            self.latents_CKD[list(upload.clients)] = upload.extras["latents"].to(self.latents_CKD)
            self.known_C[list(upload.clients)] = True

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; unseen clients' are mixed from those of the training clients."""
        training = self.federation.training_clients
        unseen_clients = [client for client in clients if client not in training]
        return self.with_unseen_clients(
            super().mixed_models(clients), unseen_clients, self.mixing_between(unseen_clients, training)
        )

    def predicts_trained(self) -> bool:
        """They are."""
        return True

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """None: the models as the clients trained them."""
        return None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The clients' own models are the result; ``mixed/...`` is after mixing."""
        mixed = {"mixed/": Evaluation(payload=self.mixed_models(clients))}
        return {"": Evaluation(), **mixed, **self.blended(clients)}

    def matrices(self) -> Mapping[str, Tensor]:
        """Each factor's W over the training clients, from what they sent last."""
        training = self.federation.training_clients
        mixing = self.mixing_between(training, training)
        return {f"mixing of factor {k}": mixing[f"heads.{k}"] for k in range(self.latents_CKD.shape[1])}

    def metrics(self) -> Mapping[str, float]:
        """How broad the mixing is, and how much of a client's weight differs from the first factor's."""
        first, *others = self.matrices().values()
        apart = max([float((other - first).abs().sum(dim=1).mean() / 2) for other in others], default=0.0)
        return {**super().metrics(), "server/factors_apart": apart}


def divergence(mean: Tensor, log_variance: Tensor, other_mean: Tensor, other_log_variance: Tensor) -> Tensor:
    """JS of normal distributions with independent coordinates, by their averaged moments; over the last dimension.

    Where variances of a client that diverged are 0 or infinite in floating point, it is computed from their logarithms:
    it is finite for all finite arguments, at most 10^30.
    """
    middle = (mean + other_mean) / 2
    variance = (log_variance.exp() + other_log_variance.exp()) / 2

    def to_middle(m: Tensor, s: Tensor) -> Tensor:
        return ((variance.log() - s + (s.exp() + (m - middle).square()) / variance - 1) / 2).sum(dim=-1)

    result = (to_middle(mean, log_variance) + to_middle(other_mean, other_log_variance)) / 2
    if bool(result.isfinite().all()):
        return result
    log_variance_of_middle = torch.logaddexp(log_variance, other_log_variance) - math.log(2)

    def to_middle_by_logarithms(m: Tensor, s: Tensor) -> Tensor:
        broader = log_variance_of_middle - s
        apart = (2 * (m - middle).abs().log() - log_variance_of_middle).exp()  # 0 where they are the same
        return ((broader + (-broader).exp() + apart - 1) / 2).sum(dim=-1)

    stable = (to_middle_by_logarithms(mean, log_variance) + to_middle_by_logarithms(other_mean, other_log_variance)) / 2
    return torch.where(result.isfinite(), result, stable.clamp(max=1e30))


def mean_latents(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Mean over the nodes of one client of each factor's latents, (K, D)."""
    assert isinstance(batch, GraphBatch)
    assert isinstance(client.net, DisentangledGCN)
    latents_KND = client.net.latents(client.output(parameters, batch).embedding, batch)
    weight_N = batch.example_mask.to(latents_KND) / batch.example_mask.sum()
    return (latents_KND * weight_N[:, None]).sum(dim=1)
