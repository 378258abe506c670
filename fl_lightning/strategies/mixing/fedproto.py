"""FedProto: clients keep their models to themselves and exchange the mean embedding of each class.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022, Algorithm 1. With z_v the embedding of example v, d wide, y_v its class and C̄_k the server's prototype of class
k,

    client i minimizes f_i + λ R,  R = 1/|B| Σ_{v in B, y_v has a prototype} ‖z_v - C̄_{y_v}‖² / d,
    then sends C_{i,k} = mean of z over its training examples of class k, and their number n_{i,k};
    C̄_k <- Σ_i n_{i,k} C_{i,k} / Σ_i n_{i,k};    the prediction is argmin_k ‖z - C̄_k‖².

Clients may have different nets whose embeddings are of one width; those of a kind start alike. Departures: the weights
above sum to one, without the paper's further factor; prototypes are computed in eval mode after training (released
code: running, in training mode); a class keeps its prototype while no client that has it responds. As long as there
are no prototypes, the loss is f_i and the classifier predicts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Rows, Stage
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.client_outputs import means_by_class
from fl_lightning.strategies.local import Local


@dataclass(kw_only=True, eq=False)
class FedProto(Local):
    """Local training whose embeddings are pulled toward averaged prototypes of the classes.

    Args:
        prototype_weight: λ, at least 0; 0 is Local.
        weighting: Average a class's prototypes by training ``examples``, or equally over all ``clients`` that have it.
        predict: By the nearest of the ``prototypes``, or by the ``head``; the other is ``head/...`` or ``proto/...``.
        own_classes_only: Consider only the prototypes of the classes that the client trains on.
    """

    prototype_weight: float = 1.0
    weighting: Literal["examples", "clients"] = "examples"
    predict: Literal["prototypes", "head"] = "prototypes"
    own_classes_only: bool = False

    needs_classes = True
    server_state = ("prototypes_KD", "known_K", "held_CK")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "prototype_weight")

    def setup(self, federation: Federation) -> None:
        """Start without prototypes, and without knowing which clients have which classes."""
        super().setup(federation)
        self.prototypes_KD = torch.zeros(federation.num_outputs, 1, device=federation.device)
        self.known_K = torch.zeros(federation.num_outputs, dtype=torch.bool, device=federation.device)
        self.held_CK = self.known_K.repeat(federation.num_clients, 1)

    def training(self, round_idx: int) -> Stage:
        """Train with the pull; send prototypes and no parameters."""
        stage = dataclasses.replace(
            super().training(round_idx),
            client_outputs={"class": class_means},
            rows={"class/prototypes": Rows(of="class", counted_by="class/counts")},
        )
        return dataclasses.replace(stage, objective=self.pulled) if self.prototype_weight else stage

    def pulled(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The objective f + λ R."""
        output = client.output(parameters, batch)
        apart = distance(output.embedding, batch, context) if context.received else 0.0
        return client.loss(output, batch) + self.prototype_weight * apart

    def nearest(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
        """Logits -‖z - C̄_k‖², up to a constant over classes; classes without a prototype come last."""
        output, prototypes_KD = client.output(parameters, batch), context.received["prototypes"]
        known_1K, square_1K = (t[..., None, :] for t in (context.received["known"], prototypes_KD.square().sum(dim=-1)))
        logits_NK = 2 * output.embedding.to(prototypes_KD) @ prototypes_KD.mT - square_1K
        last_N1 = torch.where(known_1K, logits_NK, torch.inf).amin(dim=-1, keepdim=True)
        return NetOutput(torch.where(known_1K, logits_NK, last_N1 - 1), output.embedding)

    pulled.takes_stacks = nearest.takes_stacks = True  # type: ignore[attr-defined]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """The prototypes, and which classes have one."""
        return self._sent(clients) if self.known_K.any() else None

    def _sent(self, clients: Sequence[int]) -> Payload:
        prototypes_CKD, known_CK = (t.expand(len(clients), *t.shape) for t in (self.prototypes_KD, self.known_K))
        return Payload(clients=tuple(clients), extras={"prototypes": prototypes_CKD, "known": known_CK})

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Record which clients have which classes."""
        if upload.clients:
            self.held_CK[list(upload.clients)] = upload.extras["class/counts"] > 0

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average each class's prototypes; a class that no client sends keeps its prototype."""
        if not upload.clients:
            return
        self.onboard(stage, upload)
        sent_CKD, weight_CK = upload.extras["class/prototypes"], upload.extras["class/counts"]
        weight_CK = weight_CK if self.weighting == "examples" else weight_CK.clamp(max=1)
        total_K = weight_CK.sum(dim=0)
        new_KD = torch.einsum("ck,ckd->kd", weight_CK / total_K.clamp(min=1), sent_CKD)
        self.prototypes_KD = torch.where(total_K[:, None] > 0, new_KD, self.prototypes_KD)
        self.known_K = self.known_K | (total_K > 0)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The nearest prototype and the classifier: the one that predicts is the result."""
        payload = self.configure(self.training(0), clients)
        if payload is not None and self.own_classes_only:
            own_CK = self.held_CK[list(clients)] & self.known_K  # if a client is known to have any
            own_CK = torch.where(own_CK.any(dim=1, keepdim=True), own_CK, self.known_K)
            payload = dataclasses.replace(payload, extras={**payload.extras, "known": own_CK})
        nearest = Evaluation() if payload is None else Evaluation(payload=payload, output=self.nearest)
        kinds = ("", "proto/") if self.predict == "head" else ("head/", "")
        return dict(zip(kinds, (Evaluation(), nearest), strict=True))

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """By prototypes, once there are any."""
        return {
            "proto/" if self.predict == "head" else "": Evaluation(payload=self._sent(clients), output=self.nearest)
        }


def distance(z_ND: Tensor, batch: Batch, context: Context) -> Tensor:
    """R, of one client or of each of a stack; C̄ has no gradient."""
    target_ND = context.received["prototypes"].take_along_dim(batch.y[..., None], dim=-2)
    pulled_N = batch.train_mask & context.received["known"].take_along_dim(batch.y, dim=-1)
    square_N = (z_ND - target_ND).square().mean(dim=-1)
    return (square_N * pulled_N).sum(dim=-1) / batch.train_mask.sum(dim=-1).clamp(min=1)


def class_means(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
    """Each class's mean embedding, 0 where it has no training example, (K, D), and the number of these, (K,)."""
    output = client.output(parameters, batch)
    z_ND = output.embedding.to(server_dtype(output.embedding.dtype))
    prototypes_KD, counts_K = means_by_class(z_ND, batch, batch.train_mask, output.logits.shape[-1])
    return {"prototypes": prototypes_KD, "counts": counts_K}
