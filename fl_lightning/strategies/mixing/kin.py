"""Kin: each client's model is mixed half from similar clients and half from all.

A method of this project. Before round 0 every client sends one graph-level embedding, computed with the initial
parameters that all clients have in common: embeddings of models that were trained apart live in different bases and
hide what such a common frame shows. (Of an untrained net it is a random projection of the mean of Â²X, which tells the
server something of a client's features.) Of unit length, so that none outweighs the others, and centered over the
clients, their cosines S give

    W = (1 - s) softmax_j(τ S_ij + log n_j) + s w,

with n_j the training examples and w their shares. s may be set; be chosen during training, together with
``masked_averaging``, on the clients' validation examples (``strategies/trials.py``); or be estimated for each parameter
tensor in every round: 1 - s is how well the clients' updates are predicted by those of similar clients, leaving one out
(``relations/client_similarity.py``), which overestimates similar clients with common training examples. Among unrelated
clients an estimate of s is 1, and Kin is FedAvg (or FedPer, with the head in ``personal``).

Shape legend: C, K clients, D width of the embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Stage
from fl_lightning.strategies.client_outputs import graph_embedding
from fl_lightning.strategies.mixing.base import shares
from fl_lightning.strategies.mixing.similarity_mixing import SimilarityMixing


@dataclass(kw_only=True, eq=False)
class Kin(SimilarityMixing):
    """Mixing by embeddings in the common initial frame.

    Args:
        common_share: s in [0, 1], the share that goes to all clients; 1 is FedAvg. None to estimate it.
    """

    num_epochs: int = 3
    common_share: float | None = None
    predict: Literal["trained", "mixed"] = "mixed"

    needs_graphs = True
    signature = "embedding"

    def signature_output(self) -> ClientOutput:
        """The graph-level embedding."""
        return graph_embedding

    def initial_stages(self) -> Sequence[Stage]:
        """All clients send embeddings, computed with the common initial parameters."""
        return [Stage(name="embed", client_outputs={self.signature: self.signature_output()})]

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """None: the embeddings are already known."""
        return {}

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The common initial parameters to embed with, mixed models afterward."""
        if stage.name != "embed":
            return super().configure(stage, clients)
        start = self.federation.parameters
        parameters = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in start.items()}
        return Payload(clients=tuple(clients), parameters=parameters)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Keep the embeddings before round 0; mix in later rounds."""
        if stage.name == "embed":
            self.signatures.remember(upload)
        else:
            super().aggregate(stage, upload)

    def similarity(self, signature_CD: Tensor, other_KD: Tensor) -> Tensor:
        """Cosines of the normalized embeddings after centering by the training clients' mean, (C, K)."""
        mean_D = normalize(self.signatures.of_known()).mean(dim=0)
        return cosine_similarity(normalize(signature_CD) - mean_D, normalize(other_KD) - mean_D)

    def similarity_weights(self, similarity_CK: Tensor, examples_K: Tensor) -> Tensor:
        """softmax_j(τ S_ij + log n_j), (C, K)."""
        share_K = shares(examples_K).to(similarity_CK)
        return (self.temperature() * similarity_CK + share_K.clamp(min=1e-12).log()).softmax(dim=1)

    def similarity_of(self, upload: Payload) -> Tensor:
        """Similarities of the embeddings; a client whose embedding never arrived is similar to none."""
        rows = list(upload.clients)
        known_C, signature_CD = self.signatures.known_C[rows], self.signatures.rows_CD[rows]
        similarity_CC = self.similarity(signature_CD, signature_CD)
        return torch.where(known_C[:, None] & known_C, similarity_CC, 0.0)
