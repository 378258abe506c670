"""What is predicted for a pair of nodes: whether it is linked."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.direction import KNOWN
from fl_lightning.tasks.class_metrics import LABEL_METRICS, label_scores
from fl_lightning.tasks.ranking import RANKINGS, ranking_scores
from fl_lightning.tasks.targets import Labels


class Links(Labels):
    """Each pair is linked or not: binary cross entropy, AUROC, average precision, Hits@k and MRR.

    Accuracy and loss are over links and pairs without a link alike, and the others compare their scores.
    """

    name = "links"
    directions = {name: KNOWN[name] for name in ("acc", "loss", *LABEL_METRICS, *RANKINGS)}  # noqa: RUF012
    always: ClassVar[tuple[str, ...]] = (*LABEL_METRICS, *RANKINGS)
    tallied_as = "scored"
    tally_is_of_examples = True

    def whole_scores(  # noqa: D102
        self, metrics: Sequence[str], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        over_labels = [name for name in metrics if name in LABEL_METRICS]
        rankings = [name for name in metrics if name in RANKINGS]
        ranked = ranking_scores(rankings, logits[..., 0], y[..., 0] > 0.5, masks)
        return {**label_scores(over_labels, logits, y, masks), **ranked}

    def columns(self, names: Sequence[str]) -> list[str]:
        """Whether the pair is linked, and its score, the probability of a link."""
        return ["linked", "score"]

    def row(self, label: Any, outputs: Sequence[float], names: Sequence[str]) -> list[str]:
        """Both for one pair; whether it is linked is empty if unknown."""
        return ["" if math.isnan(label[0]) else f"{label[0]:.0f}", f"{outputs[0]:.6g}"]

    def tally(self, y_N: Tensor, predicted_NK: Tensor) -> Tensor:
        """Whether each pair is linked, with its score, (N, 2)."""
        return torch.cat([y_N.to(predicted_NK), predicted_NK], dim=1)


#: It has no state.
LINKS = Links()
