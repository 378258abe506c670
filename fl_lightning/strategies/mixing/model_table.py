"""Strategies that mix each client's model by how its parameters compare with the others'.

The server keeps what every client sent last, so that unseen clients can be compared with clients that no longer take
part.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.kernels.layout import rows_of
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies.mixing.base import Mixing


@dataclass(kw_only=True, eq=False)
class ModelTable(Mixing):
    """Base class of strategies whose W is computed from the clients' models.

    W is over the clients that respond; the others keep their mixed models. The model as the client trained it is the
    result; the mixed one is logged as ``mixed/...``. An unseen client starts from the mean of the mixed models; once it
    has trained, its row of W, over all training clients and itself, mixes what these sent last.
    """

    personalized = True
    server_state: ClassVar[tuple[str, ...]] = ("last", "examples_C", "known_C", "mixing_CC")

    @abstractmethod
    def weights(self, models: Mapping[str, Tensor], examples_C: Tensor) -> Tensor:
        """W of some clients, (C, C), rows sum to one.

        Args:
            models: Their trained models, (C, *shape) by name.
            examples_C: Their numbers of labeled training examples.
        """

    def setup(self, federation: Federation) -> None:
        """Start every client from the common initial parameters, with an empty table."""
        super().setup(federation)
        num_clients, device = federation.num_clients, federation.device
        self.last = {name: model.clone() for name, model in self.models.items()}
        self.examples_C = torch.zeros(num_clients, dtype=torch.int64, device=device)
        self.known_C = torch.zeros(num_clients, dtype=torch.bool, device=device)
        self.mixing_CC = torch.full((num_clients, num_clients), torch.nan, dtype=torch.float64, device=device)

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """W over the clients of the upload, (C, C)."""
        assert upload.num_examples is not None
        return self.weights(upload.parameters, upload.num_examples)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Mix, and remember the models."""
        if upload.clients:
            rows = torch.tensor(upload.clients, device=self.federation.device)
            self.mixing_CC[rows] = 0
            self.mixing_CC[rows[:, None], rows] = self.mixing_matrix(upload).to(self.mixing_CC)
        super().aggregate(stage, upload)
        self.onboard(stage, upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Remember the models."""
        if not upload.clients:
            return
        assert upload.num_examples is not None
        rows = rows_of(upload.clients, self.federation.device)
        for name, tensor in upload.parameters.items():
            self.last[name][rows] = tensor
        self.examples_C[rows], self.known_C[rows] = upload.num_examples.to(self.examples_C), True

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; for an unseen client the mean, or a mixture of its own once it has trained."""
        payload = super().mixed_models(clients)
        training = list(self.federation.training_clients)
        for row, client in enumerate(clients):
            if client in training:
                continue
            heard = [other for other in (*training, client) if self.known_C[other]]
            for name, tensor in payload.parameters.items():
                if heard[-1:] != [client]:
                    tensor[row] = self.models[name][training].mean(dim=0)
            if heard[-1:] == [client]:
                models = {name: table[heard] for name, table in self.last.items()}
                weight_C = self.weights(models, self.examples_C[heard])[-1]
                for name, tensor in payload.parameters.items():
                    tensor[row] = torch.tensordot(weight_C.to(tensor), models[name], dims=1)
        return payload

    def predicts_trained(self) -> bool:
        """They are."""
        return True

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """None: the models as the clients trained them."""
        return None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The clients' own models are the result; ``mixed/...`` is after mixing."""
        mixed = Evaluation(payload=self.mixed_models(clients))
        return {"": Evaluation(), "mixed/": mixed, **self.blended(clients)}

    def metrics(self) -> Mapping[str, float]:
        """How much of its own model a client keeps, on average over those that have been mixed."""
        own_C = self.mixing_CC.diagonal()
        selected = {"server/self_weight": float(own_C[own_C.isfinite()].mean())} if own_C.isfinite().any() else {}
        return {**super().metrics(), **selected}

    def matrices(self) -> Mapping[str, Tensor]:
        """The last row of W of each training client."""
        members = list(self.federation.training_clients)
        return {"mixing": self.mixing_CC[members][:, members]}
