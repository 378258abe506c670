"""Personalised mixing by signatures: each client's model is mixed from those of the clients that are like it.

Legend: C clients, D width of a signature, T training clients.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.similarity import cosine_similarity, mixing_breadth, softmax_mixing
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Signal, Stage
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.base import Mixing

#: Mixing counts as uniform where a client's model is mixed from this share of all clients or more (see mixing_breadth).
UNIFORM_BREADTH = 0.99
#: Rounds of uniform mixing in a row after which the user is told.
UNIFORM_ROUNDS = 10


class SimilarityMixing(Mixing):
    """Base of strategies with W = softmax(τ cos(signature_i, signature_j)), row by row.

    The locally trained model, which the client would use, is the result; the mixed one is logged as ``mixed/...``.
    A client held out of training begins with the average model; once its signature is known, the others' models are
    mixed for it likewise.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
        personal: Shell-style patterns of parameters that never leave their client.
        similarity_temperature: τ, at least 0; 0 is plain averaging.
        aggregation: A robust rule in place of θ <- W θ, from ``strategies.mixing``; None for W θ itself.
    """

    personalised = True
    #: Name of the signal that is the signature.
    signature: str

    def __init__(
        self,
        *,
        num_epochs: int = 1,
        reset_optimizer: bool = False,
        personal: Sequence[str] = (),
        similarity_temperature: float = 10.0,
        aggregation: Aggregation | None = None,
    ) -> None:
        super().__init__(
            num_epochs=num_epochs, reset_optimizer=reset_optimizer, personal=personal, aggregation=aggregation
        )
        if similarity_temperature < 0:
            raise ValueError(f"strategy.similarity_temperature must not be negative, got {similarity_temperature}")
        self.similarity_temperature = similarity_temperature

    @abstractmethod
    def signature_signal(self) -> Signal:
        """What a client sends as its signature, (D,)."""

    def signals(self) -> Mapping[str, Signal]:
        """The signature."""
        return {self.signature: self.signature_signal()}

    def setup(self, federation: Federation) -> None:
        """Start every client from the common initial parameters, unknown to each other."""
        super().setup(federation)
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.signatures_CD = torch.zeros(federation.num_clients, 0, dtype=self.dtype, device=federation.device)
        self.known_C = torch.zeros(federation.num_clients, dtype=torch.bool, device=federation.device)
        self.num_uniform_rounds = 0

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """W over the clients of the upload, (C, C)."""
        similarity_CC = cosine_similarity(upload.signals[self.signature].to(self.dtype))
        return softmax_mixing(similarity_CC, self.similarity_temperature)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Remember the signatures, then mix."""
        if upload.clients:
            self.admit(stage, upload)
            super().aggregate(stage, upload)
            self._watch(upload)

    def admit(self, stage: Stage, upload: Payload) -> None:
        """Remember the signatures."""
        if not upload.clients:
            return
        signature_CD = upload.signals[self.signature].to(self.dtype)
        if not self.signatures_CD.shape[1]:
            self.signatures_CD = signature_CD.new_zeros(len(self.known_C), signature_CD.shape[1])
        rows = torch.tensor(upload.clients, device=self.known_C.device)
        self.signatures_CD[rows] = signature_CD
        self.known_C[rows] = True

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; newcomers' are mixed from those of the training clients."""
        payload = super().configure(stage, clients)
        training = set(self.federation.training_clients)
        newcomers = [client for client in clients if client not in training]
        if not newcomers or not self.personalised:
            return payload
        mixing = self._newcomers_mixing(newcomers)
        rows = torch.tensor([clients.index(client) for client in newcomers], device=mixing.device)
        for name, tensor in payload.parameters.items():
            models_TP = self.models[name][list(self.federation.training_clients)].flatten(1)
            tensor[rows] = (mixing.to(tensor) @ models_TP).view(len(rows), *tensor.shape[1:])
        return payload

    def _newcomers_mixing(self, newcomers: Sequence[int]) -> Tensor:
        """Rows of W over the training clients; uniform for a client whose signature nobody has seen."""
        training = list(self.federation.training_clients)
        unit_CD = F.normalize(self.signatures_CD, dim=1)
        similarity = unit_CD[list(newcomers)] @ unit_CD[training].T
        known = self.known_C[list(newcomers), None] & self.known_C[training]
        logits = torch.where(known, self.similarity_temperature * similarity, -torch.inf)
        return torch.where(known.any(dim=1, keepdim=True), logits, 0.0).softmax(dim=1)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The clients' own models, and the mixed ones."""
        mixed = super().evaluations(clients)[""]
        return {"": Evaluation(), "mixed/": mixed}

    def similarity(self) -> Tensor:
        """Cosines of the last known signatures of the training clients that have one, (C, C)."""
        training = torch.tensor(self.federation.training_clients, device=self.known_C.device)
        return cosine_similarity(self.signatures_CD[training[self.known_C[training]]])

    def metrics(self) -> Mapping[str, float]:
        """Spread of the similarities between different clients, and how broad the mixing is."""
        similarity_CC = self.similarity()
        count = len(similarity_CC)
        if count < 2:
            return {}
        others = similarity_CC[~torch.eye(count, dtype=torch.bool, device=similarity_CC.device)]
        figures = {"min": others.min(), "mean": others.mean(), "max": others.max()}
        breadth = mixing_breadth(softmax_mixing(similarity_CC, self.similarity_temperature))
        return {f"server/similarity_{name}": float(value) for name, value in figures.items()} | {
            "server/mixing_breadth": breadth
        }

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of the signatures, and W as it would be if all took part."""
        known_T = self.known_C[list(self.federation.training_clients)]
        both_TT = known_T[:, None] & known_T

        def whole(matrix_CC: Tensor) -> Tensor:
            return torch.full_like(both_TT, torch.nan, dtype=self.dtype).masked_scatter(both_TT, matrix_CC)

        similarity_CC = self.similarity()
        found = {self.signature.replace("_", " "): whole(similarity_CC)}
        if self.personalised:
            found["mixing"] = whole(softmax_mixing(similarity_CC, self.similarity_temperature))
        return found

    def _watch(self, upload: Payload) -> None:
        """Tell the user once when signatures have not parted after some rounds."""
        if not self.personalised or self.similarity_temperature == 0 or len(upload.clients) < 2:
            return
        uniform = mixing_breadth(self.mixing_matrix(upload)) > UNIFORM_BREADTH
        self.num_uniform_rounds = self.num_uniform_rounds + 1 if uniform else 0
        if self.num_uniform_rounds == UNIFORM_ROUNDS:
            similarity_CC = cosine_similarity(upload.signals[self.signature].to(self.dtype))
            warnings.warn(
                f"{type(self).__name__}: for {UNIFORM_ROUNDS} rounds mixing has been uniform, as in FedAvg: all "
                f"signatures are alike (the smallest cosine is {float(similarity_CC.min()):.4f}). Raise "
                f"strategy.similarity_temperature (now {self.similarity_temperature:g}), or let the signatures part",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """The mixed models and the signatures."""
        return super().state_dict() | {
            "signatures": self.signatures_CD,
            "known": self.known_C,
            "num_uniform_rounds": self.num_uniform_rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the mixed models and the signatures."""
        super().load_state_dict(state)
        self.signatures_CD = state["signatures"].to(self.federation.device)
        self.known_C = state["known"].to(self.federation.device)
        self.num_uniform_rounds = state["num_uniform_rounds"]
