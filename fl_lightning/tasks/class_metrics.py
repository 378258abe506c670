"""Classification metrics that are not means over examples, for each client: F1, AUROC, calibration, ...

They are computed from all of a client's logits of a split at once, and for all clients of a stack at once;
torchmetrics, with which they agree, would be called for each client, split and class.

Shape legend: S splits, C clients (or no such dimension), N examples, K classes, or L labels that an example has or not,
B bins.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.tasks.score_order import ScoreOrder

#: What ``model.metrics`` may ask for of classes.
ClassMetric = Literal["f1", "auroc", "balanced_accuracy", "ece", "recall_per_class", "acc_per_degree"]

#: The metrics that have one value.
CLASS_METRICS = ("f1", "auroc", "balanced_accuracy", "ece")
#: Metrics that have a value for each class: ``recall_class_0``, ``recall_class_1``, ...
PER_CLASS = ("recall_per_class",)
#: Metrics that have a value for nodes of each range of degrees: ``acc_degree_0``, ..., ``acc_degree_16+``.
PER_DEGREE = ("acc_per_degree",)
#: The least degree of each range.
DEGREES = (0, 1, 2, 4, 8, 16)
#: Bins of the calibration error.
BINS = 15
#: The metrics for labels, of which an example may have several.
LABEL_METRICS = ("auroc", "average_precision")


def class_scores(
    metrics: Sequence[str], logits_CNK: Tensor, y_CN: Tensor, masks_SCN: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerator and denominator of metrics for every split and client.

    ``f1`` is the mean of the classes' F1, over the classes that occur among the labels or the predictions;
    ``balanced_accuracy`` the mean recall of the classes that occur among the labels; ``auroc`` the mean area under the
    curve of a class against the others, over the classes that some example of the split has and another has not (with
    two classes that of class 1). ``ece`` is the expected calibration error (:func:`calibration_error`), and
    ``recall_per_class`` stands for the recall of each class, ``recall_class_0`` and so on, over its own examples.

    Args:
        metrics: Names of :data:`CLASS_METRICS` and :data:`PER_CLASS`.
        logits_CNK: Logits, or log-probabilities.
        y_CN: Labels.
        masks_SCN: Examples of each split.

    Returns:
        By the metric's name the value times the number of examples, and that number, both (S, C): a mean weighted by
        the latter counts every example. Both are 0 where there is no value: without examples (of the class), and of
        ``auroc`` with examples of one class alone.
    """
    logits_CNK, weight_SCN = logits_CNK.double(), masks_SCN.double()
    count_SC = weight_SCN.sum(dim=-1)
    num_classes = logits_CNK.shape[-1]
    truth_CNK = F.one_hot(y_CN, num_classes)

    def counts_SCK(which_CNK: Tensor) -> Tensor:
        return (weight_SCN.unsqueeze(-2) @ which_CNK.double()).squeeze(-2)

    values: dict[str, Tensor] = {}
    result: dict[str, tuple[Tensor, Tensor]] = {}
    if "f1" in metrics or "balanced_accuracy" in metrics or "recall_per_class" in metrics:
        said_CNK = F.one_hot(logits_CNK.argmax(dim=-1), num_classes)
        hits_SCK, true_SCK = counts_SCK(truth_CNK * said_CNK), counts_SCK(truth_CNK)
        values["f1"] = _mean_over_classes(2 * hits_SCK, true_SCK + counts_SCK(said_CNK))
        values["balanced_accuracy"] = _mean_over_classes(hits_SCK, true_SCK)
        if "recall_per_class" in metrics:
            parts = zip(hits_SCK.unbind(dim=-1), true_SCK.unbind(dim=-1), strict=True)
            result = {f"recall_class_{k}": part for k, part in enumerate(parts)}
    if "ece" in metrics:
        values["ece"] = calibration_error(logits_CNK, y_CN, masks_SCN)
    if "auroc" in metrics:
        if num_classes == 2:  # ordered by the difference, of which the softmax makes ties
            certainty_CNK, truth_CNK = logits_CNK[..., 1:] - logits_CNK[..., :1], truth_CNK[..., 1:]
        else:
            certainty_CNK = logits_CNK.softmax(dim=-1)
        order, truth_CKN = ScoreOrder(certainty_CNK.mT), truth_CNK.mT.bool()
        areas = [_ordered_pairs(order, truth_CKN, mask_CN[..., None, :]) for mask_CN in masks_SCN]
        values["auroc"] = torch.stack([_mean_over_classes(*area) for area in areas])
    has_value = dict.fromkeys(values, count_SC > 0)  # not by nan, which outputs may be as well
    if "auroc" in values:
        has_value["auroc"] = ~values["auroc"].isnan()  # a ratio of counts
    return {**{name: weighted(values[name], count_SC, has_value[name]) for name in metrics if name in values}, **result}


def calibration_error(logits_CNK: Tensor, y_CN: Tensor, masks_SCN: Tensor) -> Tensor:
    """Expected calibration error: Σ over bins of the share of their examples times |accuracy - mean confidence|.

    The confidence is the probability of the predicted class; the bins are :data:`BINS` equal parts of (0, 1].

    Returns:
        (S, C); nan without examples.

    Source: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3.

    Example:
        >>> logits, y = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 0])
        >>> float(calibration_error(logits, y, torch.ones(1, 2, dtype=torch.bool)))  # sure by half, always right
        0.5
    """
    confidence_CN, said_CN = logits_CNK.double().softmax(dim=-1).max(dim=-1)
    bin_CN = (confidence_CN * BINS).ceil().long().clamp(1, BINS) - 1
    gap_SCN = torch.where(masks_SCN, (said_CN == y_CN).double() - confidence_CN, 0.0)
    gap_SCB = gap_SCN.new_zeros((*masks_SCN.shape[:-1], BINS)).scatter_add(-1, bin_CN.expand_as(gap_SCN), gap_SCN)
    return gap_SCB.abs().sum(dim=-1) / masks_SCN.sum(dim=-1)


def degree_scores(
    logits_CNK: Tensor, y_CN: Tensor, masks_SCN: Tensor, degree_CN: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Right predictions and nodes of each range of degrees (:data:`DEGREES`), both (S, C), by ``acc_degree_2-3`` etc.

    Args:
        logits_CNK: Logits, or log-probabilities.
        y_CN: Classes.
        masks_SCN: Nodes of each split.
        degree_CN: Number of neighbors of each node in its client's graph.
    """
    right_CN = logits_CNK.argmax(dim=-1) == y_CN
    result = {}
    for least, above in zip(DEGREES, (*DEGREES[1:], None), strict=True):
        inside_CN = degree_CN >= least if above is None else (degree_CN >= least) & (degree_CN < above)
        name = f"{least}+" if above is None else f"{least}" if above == least + 1 else f"{least}-{above - 1}"
        chosen_SCN = masks_SCN & inside_CN
        parts = ((chosen_SCN & right_CN).sum(dim=-1).double(), chosen_SCN.sum(dim=-1).double())
        result[f"acc_degree_{name}"] = parts
    return result


def label_scores(
    metrics: Sequence[str], logits_CNL: Tensor, y_CNL: Tensor, masks_SCN: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """The same as :func:`class_scores` for labels, each of which an example has or lacks.

    ``auroc`` is the mean area under the curve, ``average_precision`` the mean over a label's examples of the precision
    among all that are scored at least as high; both over the labels that some example of the split has and another has
    not, as Hu et al., "Open Graph Benchmark", NeurIPS 2020, average them.

    Args:
        metrics: Names of :data:`LABEL_METRICS`.
        logits_CNL: Logits of the labels.
        y_CNL: 1 or 0; nan if unknown, which leaves the example out for this label.
        masks_SCN: Examples of each split.

    Example:
        >>> logits, y = torch.tensor([[2.0], [1.0], [0.0]]), torch.tensor([[1.0], [0.0], [1.0]])
        >>> scores = label_scores(LABEL_METRICS, logits, y, torch.ones(1, 3, dtype=torch.bool))
        >>> {name: (total / count).tolist() for name, (total, count) in scores.items()}
        {'auroc': [0.5], 'average_precision': [0.8333333333333334]}
    """
    measures = {"auroc": _ordered_pairs, "average_precision": _precisions}
    order, truth_CLN, known_CLN = ScoreOrder(logits_CNL.double().mT), (y_CNL > 0.5).mT, ~y_CNL.isnan().mT
    count_SC = masks_SCN.double().sum(dim=-1)
    result: dict[str, tuple[Tensor, Tensor]] = {}
    for name in metrics:
        parts = [measures[name](order, truth_CLN, mask_CN[..., None, :] & known_CLN) for mask_CN in masks_SCN]
        value_SC = torch.stack([_mean_over_classes(*part) for part in parts])
        result[name] = weighted(value_SC, count_SC, ~value_SC.isnan())  # a ratio of counts
    return result


def weighted(value_SC: Tensor, count_SC: Tensor, has_value_SC: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators and denominators of values, both 0 where there is none; a value of nan stays."""
    return torch.where(has_value_SC, value_SC * count_SC, 0.0), torch.where(has_value_SC, count_SC, 0.0)


def _mean_over_classes(part_K: Tensor, whole_K: Tensor) -> Tensor:
    """Mean of the classes' shares (..., K), over those that have one; nan if none has."""
    occurs_K = whole_K > 0
    return torch.where(occurs_K, part_K / whole_K, 0.0).sum(dim=-1) / occurs_K.sum(dim=-1)


def _ordered_pairs(order: ScoreOrder, truth_KN: Tensor, mask_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of an example of the class and one of the others in the right order (a tie is half), and all pairs."""
    inside_KN, outside_KN = truth_KN & mask_KN, ~truth_KN & mask_KN
    beaten_KN = order.below(outside_KN) + order.up_to(outside_KN)
    right_K = torch.where(inside_KN, beaten_KN / 2, 0.0).sum(dim=-1, dtype=torch.float64)
    return right_K, (inside_KN.sum(dim=-1) * outside_KN.sum(dim=-1)).double()


def _precisions(order: ScoreOrder, truth_KN: Tensor, mask_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the class's examples of the precision down to each, and their number; 0 if there are no others."""
    inside_KN, outside_KN = truth_KN & mask_KN, ~truth_KN & mask_KN

    def at_least(chosen_KN: Tensor) -> Tensor:
        """How many of the chosen ones are scored as high as each."""
        return (chosen_KN.sum(dim=-1, keepdim=True) - order.below(chosen_KN)).double()

    precision_KN = at_least(inside_KN) / at_least(inside_KN | outside_KN).clamp(min=1)
    number_K = torch.where(outside_KN.any(dim=-1), inside_KN.sum(dim=-1), 0).double()
    return torch.where(inside_KN, precision_KN, 0.0).sum(dim=-1), number_K
