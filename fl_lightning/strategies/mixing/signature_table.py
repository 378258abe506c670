"""What the server stores to compare clients: the signature of each client, and its number of training examples.

Shape legend: C, K clients, N unseen clients, T training clients, D width of a signature.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.server_state import ServerState

#: Similarity of clients from their signatures, (C, D) and (K, D) -> (C, K).
Similarity = Callable[[Tensor, Tensor], Tensor]
#: W from similarities and training examples, (C, K) and (K,) -> (C, K).
MixingRule = Callable[[Tensor, Tensor], Tensor]


class SignatureTable(ServerState):
    """The clients' last signatures.

    Args:
        federation: The federation of the clients.
        name: Name of the client output that is the signature.

    Attributes:
        rows_CD: The last signature of each client; of width 0 before any has arrived.
        known_C: Which clients have sent a signature.
        examples_C: Number of training examples; 1 for a client that has not sent it.
    """

    server_state = ("rows_CD", "known_C", "examples_C")

    def __init__(self, federation: Federation, name: str) -> None:
        count, device = federation.num_clients, federation.device
        self.training, self.name = list(federation.training_clients), name
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.rows_CD = torch.zeros(count, 0, dtype=self.dtype, device=device)
        self.known_C = torch.zeros(count, dtype=torch.bool, device=device)
        self.examples_C = torch.ones(count, dtype=torch.float64, device=device)
        self._unseen_clients: Payload | None = None

    def remember(self, upload: Payload) -> None:
        """Keep the numbers of training examples, and the signatures that clients sent, if there are any.

        A signature of zeros, that of a client with nothing to compute it from, is none.
        """
        if not upload.clients:
            return
        rows = torch.tensor(upload.clients, device=self.known_C.device)
        if upload.num_examples is not None:
            self.examples_C[rows] = upload.num_examples.to(self.examples_C)
        if self.name not in upload.extras:
            return
        signature_CD = upload.extras[self.name].to(self.dtype)
        if not self.rows_CD.shape[1]:
            self.rows_CD = signature_CD.new_zeros(len(self.known_C), signature_CD.shape[1])
        there_C = signature_CD.any(dim=1)
        self.rows_CD[rows[there_C]] = signature_CD[there_C]
        self.known_C[rows[there_C]] = True

    def onboard(self, upload: Payload) -> None:
        """Keep unseen clients' signatures, and what they trained, if they did."""
        if upload.clients and upload.parameters:
            self._unseen_clients = upload
        self.remember(upload)

    def give_back_(self, payload: Payload, names: Sequence[str]) -> None:
        """Put parameters that unseen clients have trained into the models that are meant for them."""
        if (local := self._unseen_clients) is None:
            return
        rows = [payload.clients.index(client) for client in local.clients if client in payload.clients]
        sent = [row for row, client in enumerate(local.clients) if client in payload.clients]
        for name in names:
            payload.parameters[name][rows] = local.parameters[name][sent]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the table; unseen clients have to be onboarded again."""
        super().load_state_dict(state)
        self._unseen_clients = None

    def of_known(self) -> Tensor:
        """Signatures of the training clients that have one, (C, D)."""
        return self.rows_CD[self._known_clients()]

    def metrics(self, similarity: Similarity) -> dict[str, float]:
        """Smallest, mean and largest similarity of different training clients; empty with fewer than two."""
        known_CD = self.of_known()
        if len(known_CD) < 2:
            return {}
        is_other = ~torch.eye(len(known_CD), dtype=torch.bool, device=known_CD.device)
        others = similarity(known_CD, known_CD)[is_other]
        result = {"min": others.min(), "mean": others.mean(), "max": others.max()}
        return {f"server/similarity_{name}": float(value) for name, value in result.items()}

    def matrices(self, similarity: Similarity, rule: MixingRule | None) -> Mapping[str, Tensor]:
        """Similarities and, with a rule, W of all training clients, (T, T); nan where a signature is not known."""
        known_T = self.known_C[self.training]
        both_TT = known_T[:, None] & known_T

        def whole(matrix_CC: Tensor) -> Tensor:
            return torch.full_like(both_TT, torch.nan, dtype=self.dtype).masked_scatter(both_TT, matrix_CC)

        similarity_CC = similarity(self.of_known(), self.of_known())
        result = {self.name.replace("_", " "): whole(similarity_CC)}
        if rule is not None:
            result["mixing"] = whole(rule(similarity_CC, self.examples_C[self._known_clients()]))
        return result

    def mixing_of_unseen(self, unseen_clients: Sequence[int], similarity: Similarity, rule: MixingRule) -> Tensor:
        """Rows of W over the training clients, (N, T); uniform for an unseen client whose signature is not known."""
        new, training = list(unseen_clients), self.training
        new_N, known_T = self.known_C[new], self.known_C[training]
        mixing_NT = torch.full_like(new_N[:, None] & known_T, 1 / len(training), dtype=self.dtype)
        if known_T.any():
            similarity_NT = similarity(self.rows_CD[new][new_N], self.rows_CD[training][known_T])
            weights_NT = rule(similarity_NT, self.examples_C[training][known_T])
            mixing_NT[new_N] = torch.zeros_like(mixing_NT[new_N]).masked_scatter(known_T, weights_NT)
        return mixing_NT

    def _known_clients(self) -> Tensor:
        """Indices of the training clients that have a signature, (C,)."""
        training = torch.tensor(self.training, device=self.known_C.device)
        return training[self.known_C[training]]
