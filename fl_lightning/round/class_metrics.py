"""Metrics of a classification beside accuracy, each client's own: F1, AUROC and balanced accuracy.

They are no sums over examples, so they are computed from all of a client's logits of a split at once, and for all
clients of a stack at once; torchmetrics, with which they agree, would be called for each client, split and class.

Shape legend: S splits, C clients (or no such dimension), N examples, K classes.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

ClassMetric = Literal["f1", "auroc", "balanced_accuracy"]

#: The metrics by name.
CLASS_METRICS: tuple[str, ...] = get_args(ClassMetric)


def class_scores(
    metrics: Sequence[str], logits_CNK: Tensor, y_CN: Tensor, masks_SCN: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerator and denominator of metrics for every split and client.

    ``f1`` is the mean of the classes' F1, over the classes that occur among the labels or the predictions;
    ``balanced_accuracy`` the mean recall of the classes that occur among the labels; ``auroc`` the mean area under the
    curve of a class against the others, over the classes that some example of the split has and another has not (with
    two classes that of class 1).

    Args:
        metrics: Names of :data:`CLASS_METRICS`.
        logits_CNK: Logits, or log-probabilities.
        y_CN: Labels.
        masks_SCN: Examples of each split.

    Returns:
        By the metric's name the value times the number of examples, and that number, both (S, C): a mean weighted by
        the latter counts every example. Both are 0 where there is no value: without examples, and of ``auroc`` with
        examples of one class alone.
    """
    logits_CNK, weight_SCN = logits_CNK.double(), masks_SCN.double()
    count_SC = weight_SCN.sum(dim=-1)
    num_classes = logits_CNK.shape[-1]
    truth_CNK = F.one_hot(y_CN, num_classes)

    def counts_SCK(which_CNK: Tensor) -> Tensor:
        return (weight_SCN.unsqueeze(-2) @ which_CNK.double()).squeeze(-2)

    values: dict[str, Tensor] = {}
    if "f1" in metrics or "balanced_accuracy" in metrics:
        said_CNK = F.one_hot(logits_CNK.argmax(dim=-1), num_classes)
        hits_SCK, true_SCK = counts_SCK(truth_CNK * said_CNK), counts_SCK(truth_CNK)
        values["f1"] = _mean_over_classes(2 * hits_SCK, true_SCK + counts_SCK(said_CNK))
        values["balanced_accuracy"] = _mean_over_classes(hits_SCK, true_SCK)
    if "auroc" in metrics:
        if num_classes == 2:  # ordered by the difference, of which the softmax makes ties
            certainty_CNK, truth_CNK = logits_CNK[..., 1:] - logits_CNK[..., :1], truth_CNK[..., 1:]
        else:
            certainty_CNK = logits_CNK.softmax(dim=-1)
        areas = [_ordered_pairs(certainty_CNK.mT, truth_CNK.mT.bool(), mask_CN) for mask_CN in masks_SCN]
        values["auroc"] = torch.stack([_mean_over_classes(*area) for area in areas])
    return {
        name: (
            torch.where(values[name].isnan(), 0.0, values[name] * count_SC),
            torch.where(values[name].isnan(), 0.0, count_SC),
        )
        for name in metrics
    }


def _mean_over_classes(part_K: Tensor, whole_K: Tensor) -> Tensor:
    """Mean of the classes' shares (..., K), over those that have one; nan where none has."""
    occurs_K = whole_K > 0
    return torch.where(occurs_K, part_K / whole_K, 0.0).sum(dim=-1) / occurs_K.sum(dim=-1)


def _ordered_pairs(certainty_KN: Tensor, truth_KN: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of an example of the class and one of the others in the right order (a tie is half), and all pairs."""
    mask_1N = mask_N.unsqueeze(-2)
    inside_KN, outside_KN = truth_KN & mask_1N, ~truth_KN & mask_1N
    certainty_KN = torch.where(certainty_KN.isnan(), -torch.inf, certainty_KN).contiguous()  # as if it came last
    others_KN = torch.where(outside_KN, certainty_KN, torch.inf).sort(dim=-1).values.contiguous()
    beaten_KN = torch.searchsorted(others_KN, certainty_KN) + torch.searchsorted(others_KN, certainty_KN, right=True)
    right_K = torch.where(inside_KN, beaten_KN / 2, 0.0).sum(dim=-1, dtype=torch.float64)
    return right_K, (inside_KN.sum(dim=-1) * outside_KN.sum(dim=-1)).double()
