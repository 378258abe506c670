"""What the clients trained last, on its way into the closed-form last layer, as validation chose.

Shape legend: C clients that answered, P generated parameters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.kernels.moved_mixing import mix_only_moved
from fl_lightning.strategies.hypernetwork.last_layer import ClosedFormLayer
from fl_lightning.strategies.trials import Choice


class Intake:
    """Fills the last layer, and fills it otherwise while other choices are tried.

    Args:
        layer: The last layer.
        names: Of the layer's parameter tensors.
        personal: Those that stay with their clients where the choice says ``personal``.
        is_tried: Whether the last clients are kept, for choices that are tried later.
    """

    def __init__(self, layer: ClosedFormLayer, names: Sequence[str], personal: Sequence[str], is_tried: bool) -> None:
        self.layer, self.names, self.personal, self.is_tried = layer, list(names), set(personal), is_tried
        self._choice: Choice | None = None
        self._kept_T: list[bool | None] = [None] * len(self.names)
        self._last: tuple[Sequence[int], Tensor, Tensor, Tensor, Tensor | None] | None = None

    def take_in(
        self, rows: Sequence[int], generated_CP: Tensor, update_CP: Tensor, examples_C: Tensor, choice: Choice
    ) -> None:
        """Take in what clients trained.

        Args:
            rows: Their rows of the layer.
            generated_CP: What they were given.
            update_CP: How far they moved from it.
            examples_C: How much they count.
            choice: How it is taken in at first, see :meth:`fill`.
        """
        trained_CP = generated_CP + update_CP
        moved_mean_P = None
        if self.is_tried or choice["mix_only_moved"]:
            equal_1C = (examples_C.double().clamp(min=1e-6) / examples_C.sum().clamp(min=1))[None]
            moved_mean_P = mix_only_moved(equal_1C, trained_CP, generated_CP)[0]
        self._last = rows, examples_C, trained_CP, update_CP != 0, moved_mean_P
        self._choice, self._kept_T = None, [None] * len(self.names)
        self.fill(choice)
        if not self.is_tried:
            self._last = None  # as large as all models

    def fill(self, choice: Choice) -> bool:
        """Fill the layer as chosen; False if it was like that already.

        ``strength_factor``: up to 1 a factor on the strengths, from 1 to 2 the share of a client's model that it has
        trained itself. ``mix_only_moved``: a number that a client left alone counts with the mean of those that moved
        it.
        """
        if choice == self._choice:
            return False
        self._choice = dict(choice)
        factor, personal = choice["strength_factor"], self.personal if choice.get("personal") else set()
        self.layer.strength_factor = min(factor, 1.0)
        self.layer.own_T = [1.0 if name in personal else max(factor - 1.0, 0.0) for name in self.names]
        if self._last is not None:
            rows, examples_C, trained_CP, moved_CP, moved_mean_P = self._last
            is_kept_T = [not choice["mix_only_moved"] or own == 1 for own in self.layer.own_T]
            for columns, is_kept, was_kept in zip(self.layer.columns, is_kept_T, self._kept_T, strict=True):
                if is_kept == was_kept:
                    continue
                models_CQ = trained_CP[:, columns]
                if not is_kept:
                    assert moved_mean_P is not None
                    models_CQ = torch.where(moved_CP[:, columns], models_CQ, moved_mean_P[columns])
                self.layer.take_in(rows, models_CQ, examples_C, columns)
            self._kept_T = list(is_kept_T)
        return True
