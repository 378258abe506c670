"""SheafRidge's last layer in closed form during a round: what it ingests from the clients, and what it learns.

Shape legend: C clients that responded, P generated parameters, H width of the features.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fl_lightning.kernels.masked_averaging import masked_average
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.hypernetwork.last_layer import ClosedFormLayer
from fl_lightning.strategies.trials import Choice


class ClosedForm:
    """Fills the last layer by the choice of validation, or by another choice while that is tried.

    Args:
        layer: The last layer.
        names: Names of the layer's parameter tensors.
        training_clients: The clients whose models it has, in order.
        personal: The tensors that are kept local if the choice is ``personal``.
        is_tried: Whether the last updates are kept for choices that are tried later.
    """

    def __init__(
        self,
        layer: ClosedFormLayer,
        names: Sequence[str],
        training_clients: Sequence[int],
        *,
        personal: Sequence[str],
        is_tried: bool,
    ) -> None:
        self.layer, self.names, self.personal, self.is_tried = layer, list(names), set(personal), is_tried
        self.index = {client: row for row, client in enumerate(training_clients)}
        self.forget()

    def forget(self) -> None:
        """Reset everything but the layer."""
        self.unseen_clients: dict[int, Tensor] = {}  # what each of them trained, (P,)
        self._choice: Choice | None = None
        self._kept_T: list[bool | None] = [None] * len(self.names)
        self._last: tuple[Sequence[int], Tensor, Tensor, Tensor, Tensor | None] | None = None

    def generate(self, feature_MH: Tensor, clients: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Models of clients by their rows of the features, training clients first, (len, P)."""
        generated_CP: Tensor = self.layer(feature_MH, rows)
        for index, client in enumerate(clients):
            if client in self.unseen_clients:
                self.layer.keep_own_(generated_CP[index], self.unseen_clients[client])
        return generated_CP

    def onboard(self, clients: Sequence[int], trained_CP: Tensor) -> None:
        """Store what unseen clients trained: they keep the same share of it as the others do of theirs."""
        self.unseen_clients |= dict(zip(clients, trained_CP.unbind(), strict=True))

    def ingest(self, upload: Payload, generated_CP: Tensor, update_CP: Tensor, choice: Choice) -> None:
        """Ingest what clients trained.

        Args:
            upload: The upload, for the clients and their weights.
            generated_CP: The models that were generated for them.
            update_CP: Their updates.
            choice: The choice by which the layer is filled first, see :meth:`fill`.
        """
        examples_C = upload.num_examples
        assert examples_C is not None
        trained_CP = generated_CP + update_CP
        moved_mean_P = None
        if self.is_tried or choice["masked_averaging"]:
            equal_1C = (examples_C.double().clamp(min=1e-6) / examples_C.sum().clamp(min=1))[None]
            moved_mean_P = masked_average(equal_1C, trained_CP, generated_CP)[0]
        self._last = self._rows(upload.clients), examples_C, trained_CP, update_CP != 0, moved_mean_P
        self._choice, self._kept_T = None, [None] * len(self.names)
        self.fill(choice)
        if not self.is_tried:
            self._last = None  # as large as all models

    def fill(self, choice: Choice) -> bool:
        """Fill the layer as chosen; False if it was like that already.

        ``strength_factor``: up to 1 a factor on the strengths, from 1 to 2 the share of a client's model that it has
        trained itself. ``masked_averaging``: a coordinate that a client did not update counts with the mean of the
        clients that did.
        """
        if choice == self._choice:
            return False
        self._choice = dict(choice)
        factor, personal = choice["strength_factor"], self.personal if choice.get("personal") else set()
        self.layer.strength_factor = min(factor, 1.0)
        self.layer.own_T = [1.0 if name in personal else max(factor - 1.0, 0.0) for name in self.names]
        if self._last is not None:
            rows, examples_C, trained_CP, moved_CP, moved_mean_P = self._last
            is_kept_T = [not choice["masked_averaging"] or share == 1 for share in self.layer.own_T]
            for columns, is_kept, was_kept in zip(self.layer.columns, is_kept_T, self._kept_T, strict=True):
                if is_kept == was_kept:
                    continue
                models_CQ = trained_CP[:, columns]
                if not is_kept:
                    assert moved_mean_P is not None
                    models_CQ = torch.where(moved_CP[:, columns], models_CQ, moved_mean_P[columns])
                self.layer.ingest(rows, models_CQ, examples_C, columns)
            self._kept_T = list(is_kept_T)
        return True

    def losses(
        self, clients: Sequence[int], update_CP: Tensor, features: Callable[[], Tensor], num_steps: int
    ) -> Iterator[Tensor]:
        """The losses of what precedes the layer, one for each step; after the last, the strengths are estimated.

        There are none with fewer than three clients (a client, a similar one and another).

        Args:
            clients: The clients that responded.
            update_CP: Their updates.
            features: Returns all training clients' features, with a gradient.
            num_steps: Number of steps.
        """
        if len(clients) < 3:
            return
        responded = self._rows(clients)
        weight_C = self.layer.weight_C[responded] / self.layer.weight_C[responded].sum()
        gram_TCC = self.layer.gram(update_CP)
        is_member = torch.ones(len(responded), dtype=torch.bool, device=update_CP.device)
        for _ in range(num_steps):
            smoother_CC = self.layer.smoother(features()[responded], is_member, weight_C)
            yield self.layer.loss(smoother_CC, weight_C, gram_TCC)
        smoother_CC = self.layer.smoother(features()[responded], is_member, weight_C)
        self.layer.set_strengths(smoother_CC.detach(), weight_C, gram_TCC)

    def metrics(self) -> dict[str, float]:
        """λ, and the strength of each tensor."""
        strengths = zip(self.names, self.layer.strength_T.tolist(), strict=True)
        ridge = {"server/generator_ridge": float(self.layer.log_ridge.exp())}
        return ridge | {f"server/strength/{name}": strength for name, strength in strengths}

    def _rows(self, clients: Sequence[int]) -> list[int]:
        return [self.index[client] for client in clients]
