"""What is predicted for an example, whatever it is: its class, its labels, or numbers.

Shape legend: N examples, with a leading C where it is a stack of clients; K outputs: classes, labels or numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.direction import KNOWN, Direction
from fl_lightning.tasks.class_metrics import CLASS_METRICS, LABEL_METRICS, PER_CLASS, class_scores, label_scores
from fl_lightning.tasks.number_metrics import NUMBER_METRICS, number_scores

#: The roles of examples.
SPLITS = ("train", "val", "test")

#: With fewer classes PyTorch's softmax over the last dimension is not vectorized on a CPU, and ten times slower.
_VECTOR = 16


class Target(ABC):
    """Loss, metrics and predictions. It has no state."""

    #: The kind of target in words.
    name: ClassVar[str]
    #: The validation metric that chooses the best round.
    monitor: ClassVar[str]
    #: Whether ``max`` or ``min`` of each metric is best.
    directions: ClassVar[Mapping[str, Direction]]
    #: Metrics that are computed from all of a client's outputs at once: always, and on demand.
    always: ClassVar[tuple[str, ...]] = ()
    on_demand: ClassVar[tuple[str, ...]] = ()
    #: Whether each example is of one class.
    has_classes: ClassVar[bool] = False
    #: Whether :meth:`tally` has a row for each example, of which a report keeps a sample.
    tally_is_of_examples: ClassVar[bool] = False
    #: Whether targets are numbers.
    is_numeric: ClassVar[bool] = False
    #: Whether it computes on a stack of clients without ``vmap``, if the net does, too.
    takes_stacks: ClassVar[bool] = True
    #: The field of a report's record (``report/record.py``, ``Chosen``) for the result of :meth:`tally`.
    tallied_as: ClassVar[str]

    @abstractmethod
    def values(self, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Each example's contribution to the metrics that are means over examples, including ``loss``, (N,) by name."""

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean loss over the training examples, scalar (or one for each client of a stack)."""
        value_N = self.example_loss(logits, batch.y)
        total = torch.where(batch.train_mask, value_N, 0.0).sum(dim=-1)  # a product with 0 would keep nan and infinity
        return total / batch.train_mask.to(value_N.dtype).sum(dim=-1).clamp(min=1)

    @abstractmethod
    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of every example, (N,)."""

    def scores(self, logits: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerator and denominator of each metric that is a mean over examples, by ``val/name`` and so on.

        Outputs of less than single precision are scored in that: a sum of theirs would have three digits.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return split_scores(batch, self.values(logits, batch.y))

    def whole_scores(
        self, metrics: Sequence[str], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerators and denominators (splits, ...) of metrics that are computed from all outputs at once.

        Args:
            metrics: Names among those in ``always`` and ``on_demand``.
            logits: (..., N, K).
            y: The targets.
            masks: Examples of each split, (splits, ..., N).
        """
        raise NotImplementedError(f"{type(self).__name__} has no such metrics")

    def fewest(self, y_N: Tensor) -> dict[str, int]:
        """How many examples the smallest part of a metric is of, by the name of each metric that is a mean over parts.

        The parts are classes, labels or numbers, of which each counts as much as the others, however few examples it
        has; where a part compares examples with others, the fewer of the two count. Other metrics are of all examples.

        Args:
            y_N: The targets of a split.
        """
        return {}

    @abstractmethod
    def predictions(self, logits: Tensor) -> Tensor:
        """The predictions for the user, (N, K)."""

    def blend(self, logits: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """Logits of the weighted mean of two predictions, (..., N, K).

        Args:
            logits: Of one prediction, (..., N, K).
            other: Of the other, (..., N, K).
            share: Weight of the other, in [0, 1], broadcast to both; at 0 and 1 the result equals one of the two.
        """
        mean = self._blend(logits, other, share)
        return torch.where(share == 0, logits, torch.where(share == 1, other, mean))

    def _blend(self, logits: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """The blend for 0 < share < 1. Here the logits themselves are the predictions and are averaged."""
        return logits.lerp(other, share)

    @abstractmethod
    def strata(self, y_N: Tensor) -> Tensor:
        """Each example's class if it has one, else 0 if any of its target is known and -1 if none is, int64 (N,)."""

    @abstractmethod
    def num_outputs(self, targets: Sequence[Tensor], num_names: int = 0) -> int:
        """Number of a net's outputs for these clients' targets, and for at least as many classes as there are names."""

    @abstractmethod
    def constant(self, y_N: Tensor, num_outputs: int) -> Tensor:
        """The best output that is the same for all examples, by some of their targets: a trivial reference, (K,)."""

    # ------------------------------------------------------------------ the file of predictions

    @abstractmethod
    def columns(self, names: Sequence[str]) -> list[str]:
        """The columns of a table of targets and predictions, for outputs with these names."""

    @abstractmethod
    def row(self, label: int | Sequence[float], outputs: Sequence[float], names: Sequence[str]) -> list[str]:
        """The entries of these columns for one example: its target and predictions."""

    # ------------------------------------------------------------------ the report

    @abstractmethod
    def tally(self, y_N: Tensor, predicted_NK: Tensor) -> Tensor:
        """What a report stores about the test examples.

        Returns:
            For classes, the confusion matrix, int64 (K, K); for labels, one confusion matrix each, int64 (K, 2, 2); for
            numbers, one target of each example with its prediction, (N, 2); for links likewise.
        """


class Classes(Target):
    """Each example has one class: cross entropy and accuracy."""

    name = "classes"
    monitor = "val/acc"
    directions = {name: KNOWN[name] for name in ("acc", "loss", "recall", *CLASS_METRICS)}  # noqa: RUF012
    on_demand = (*CLASS_METRICS, *PER_CLASS)
    has_classes = True
    tallied_as = "confusion"

    def values(self, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Whether the class is right, and the cross entropy."""
        return {"acc": logits.argmax(dim=-1) == y, "loss": self.example_loss(logits, y)}

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross entropy, (N,)."""
        if logits.shape[-1] < _VECTOR and logits.device.type == "cpu":  # classes first: examples fill the vectors
            if logits.dim() == 2:
                return F.cross_entropy(logits.t()[None], y[None], reduction="none")[0]
            return F.cross_entropy(logits.mT, y, reduction="none")
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view_as(y)

    def whole_scores(  # noqa: D102
        self, metrics: Sequence[str], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        return class_scores(metrics, logits, y, masks)

    def fewest(self, y_N: Tensor) -> dict[str, int]:
        """Of the smallest class."""
        return _smallest(torch.bincount(y_N[y_N >= 0]), ("f1", "auroc", "balanced_accuracy"))

    def predictions(self, logits: Tensor) -> Tensor:
        """Probabilities of the classes."""
        return logits.softmax(dim=-1)

    def _blend(self, logits: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """Logarithms of the mean probabilities."""
        log_p, log_q = (each.mT.log_softmax(dim=-2).mT for each in (logits, other))  # classes first, as in the loss
        return _log_mean(log_p, log_q, share)

    def strata(self, y_N: Tensor) -> Tensor:
        """The classes."""
        return y_N

    def num_outputs(self, targets: Sequence[Tensor], num_names: int = 0) -> int:
        """The largest class plus one, or the number of names."""
        return max(*(int(y_N.max()) + 1 for y_N in targets), num_names)

    def constant(self, y_N: Tensor, num_outputs: int) -> Tensor:
        """Logarithms of the classes' shares: the largest class, and the entropy as the loss."""
        count_K = torch.bincount(y_N[y_N >= 0], minlength=num_outputs).double()
        return (count_K / count_K.sum().clamp(min=1)).clamp(min=1e-9).log()

    def columns(self, names: Sequence[str]) -> list[str]:
        """The label, the prediction, and the probability of each class."""
        return ["label", "prediction", *(f"probability_{name}" for name in names)]

    def row(self, label: int | Sequence[float], outputs: Sequence[float], names: Sequence[str]) -> list[str]:
        """Both classes by their names."""
        assert isinstance(label, int)
        best = max(range(len(outputs)), key=lambda index: outputs[index])
        return [names[label] if label >= 0 else "", names[best], *(f"{value:.6g}" for value in outputs)]

    def tally(self, y_N: Tensor, predicted_NK: Tensor) -> Tensor:
        """The confusion matrix: rows are the true classes."""
        count, known_N = predicted_NK.shape[1], y_N >= 0
        index_N = y_N[known_N] * count + predicted_NK.argmax(dim=1)[known_N]
        return torch.bincount(index_N, minlength=count * count).view(count, count)


class Labels(Target):
    """Each example has or lacks each of several labels: binary cross entropy, AUROC and average precision over labels.

    If it is unknown whether an example has a label, its target is nan, and it does not count for this label.
    """

    name = "labels"
    monitor = "val/auroc"
    directions = {name: KNOWN[name] for name in ("acc", "loss", *LABEL_METRICS)}  # noqa: RUF012
    always: ClassVar[tuple[str, ...]] = LABEL_METRICS
    tallied_as = "label_counts"

    def values(self, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The share of the known labels that are predicted correctly, and the loss."""
        right = ((logits > 0) == (y > 0.5)).to(logits.dtype)
        return {"acc": mean_of_known(right, ~y.isnan()), "loss": self.example_loss(logits, y)}

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean binary cross entropy over an example's known labels, (N,)."""
        known = ~y.isnan()
        value = F.binary_cross_entropy_with_logits(logits, torch.where(known, y, 0.0), reduction="none")
        return mean_of_known(value, known)

    def whole_scores(  # noqa: D102
        self, metrics: Sequence[str], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        return label_scores(metrics, logits, y, masks)

    def fewest(self, y_N: Tensor) -> dict[str, int]:
        """Of the label that the fewest examples have, or lack."""
        return _smallest(torch.minimum((y_N > 0.5).sum(dim=0), (y_N <= 0.5).sum(dim=0)), LABEL_METRICS)

    def predictions(self, logits: Tensor) -> Tensor:
        """The probability of each label."""
        return logits.sigmoid()

    def _blend(self, logits: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """Log-odds of the mean probabilities."""
        has, lacks = (_log_mean(F.logsigmoid(sign * logits), F.logsigmoid(sign * other), share) for sign in (1, -1))
        return has - lacks

    def strata(self, y_N: Tensor) -> Tensor:
        """0 if any label is known, else -1."""
        return (~y_N.isnan()).any(dim=1).long() - 1

    def num_outputs(self, targets: Sequence[Tensor], num_names: int = 0) -> int:
        """The labels."""
        return targets[0].shape[1]

    def constant(self, y_N: Tensor, num_outputs: int) -> Tensor:
        """The logits of the labels' shares."""
        share_K = torch.nanmean(y_N.double(), dim=0).nan_to_num(0.5)
        return torch.logit(share_K, eps=1e-9)

    def columns(self, names: Sequence[str]) -> list[str]:
        """For each label, whether the example has it, and its probability."""
        return [f"{kind}_{name}" for name in names for kind in ("label", "probability")]

    def row(self, label: int | Sequence[float], outputs: Sequence[float], names: Sequence[str]) -> list[str]:
        """Labels and probabilities; empty if a label is unknown."""
        return _pairs(label, outputs)

    def tally(self, y_N: Tensor, predicted_NK: Tensor) -> Tensor:
        """A confusion matrix for each label."""
        true_NK, said_NK, known_NK = y_N > 0.5, predicted_NK > 0.5, ~y_N.isnan()
        cells = [((true_NK == t) & (said_NK == s) & known_NK).sum(dim=0) for t in (0, 1) for s in (0, 1)]
        return torch.stack(cells, dim=1).view(-1, 2, 2)


class Numbers(Target):
    """Each example has one or several numbers, some of which may be missing (nan): mean squared error."""

    name = "numbers"
    monitor = "val/mse"
    directions = {name: KNOWN[name] for name in ("mse", "loss", *NUMBER_METRICS)}  # noqa: RUF012
    on_demand = NUMBER_METRICS
    is_numeric = tally_is_of_examples = True
    takes_stacks = False  # keeps the last digits of published results, which are those of sums under vmap
    tallied_as = "predicted"

    def values(self, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The squared error, under both names."""
        error_N = self.example_loss(logits, y)
        return {"mse": error_N, "loss": error_N}

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean squared error over an example's known numbers, (N,)."""
        missing = y.isnan()
        error_N = (logits - torch.where(missing, logits.detach(), y)).square().mean(dim=-1)  # 0 for missing numbers
        return error_N * (y.shape[-1] / (~missing).sum(dim=-1).clamp(min=1))  # a factor of 1 if nothing is missing

    def whole_scores(  # noqa: D102
        self, metrics: Sequence[str], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        return number_scores(metrics, logits, y, masks)

    def fewest(self, y_N: Tensor) -> dict[str, int]:
        """Of the number that is known for the fewest."""
        return _smallest((~y_N.isnan()).sum(dim=0), NUMBER_METRICS)

    def predictions(self, logits: Tensor) -> Tensor:
        """The predicted numbers."""
        return logits

    def strata(self, y_N: Tensor) -> Tensor:
        """0 if any number is known, else -1."""
        return (~y_N.isnan()).any(dim=1).long() - 1

    def num_outputs(self, targets: Sequence[Tensor], num_names: int = 0) -> int:
        """The numbers of a target."""
        return targets[0].shape[1]

    def constant(self, y_N: Tensor, num_outputs: int) -> Tensor:
        """The means of the known numbers."""
        return torch.nanmean(y_N.double(), dim=0).nan_to_num(0.0)

    def columns(self, names: Sequence[str]) -> list[str]:
        """Each number and its prediction."""
        return [f"{kind}_{index}" for index in range(len(names)) for kind in ("target", "prediction")]

    def row(self, label: int | Sequence[float], outputs: Sequence[float], names: Sequence[str]) -> list[str]:
        """Targets and predictions; empty if a number is missing."""
        return _pairs(label, outputs)

    def tally(self, y_N: Tensor, predicted_NK: Tensor) -> Tensor:
        """One known number of each example, in turn, with its prediction."""
        count = y_N.shape[1]
        order_NK = (torch.arange(len(y_N))[:, None] + torch.arange(count)) % count
        first_N1 = (~y_N.isnan()).gather(1, order_NK).int().argmax(dim=1, keepdim=True)
        index_N1 = order_NK.gather(1, first_N1)
        return torch.cat([each.gather(1, index_N1) for each in (y_N, predicted_NK)], dim=1)


#: One instance of each, as they have no state.
CLASSES, LABELS, NUMBERS = Classes(), Labels(), Numbers()


def mean_of_known(value_NK: Tensor, known_NK: Tensor) -> Tensor:
    """The mean of an example's known values, (N,); 0 if it has none."""
    return torch.where(known_NK, value_NK, 0.0).sum(dim=-1) / known_NK.sum(dim=-1).clamp(min=1)


def _smallest(count_K: Tensor, metrics: Sequence[str]) -> dict[str, int]:
    """The smallest of the parts that occur, for metrics that are means over these."""
    occurs_K = count_K[count_K > 0]
    return dict.fromkeys(metrics, int(occurs_K.min())) if len(occurs_K) else {}


def _log_mean(log_p: Tensor, log_q: Tensor, share: Tensor) -> Tensor:
    """log((1 - s) p + s q)."""
    return torch.logaddexp(log_p + torch.log1p(-share), log_q + share.log())


def split_scores(batch: Batch, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum and count of each value over the training, validation and test examples.

    Args:
        batch: The batch of one client, or of a stack.
        values: One number (or boolean) for every example, (..., N), by the metric's name.

    Returns:
        Numerators and denominators by ``train/name``, ``val/name``, ``test/name``.
    """
    mask_SN = torch.stack([batch.train_mask, batch.val_mask, batch.test_mask])
    counts = mask_SN.sum(dim=-1).unbind()
    totals = {name: torch.where(mask_SN, value_N, 0).sum(dim=-1).unbind() for name, value_N in values.items()}
    return {
        f"{split}/{name}": (totals[name][index], counts[index]) for index, split in enumerate(SPLITS) for name in values
    }


def _pairs(label: int | Sequence[float], outputs: Sequence[float]) -> list[str]:
    """Targets and predictions, alternating."""
    assert not isinstance(label, int)
    pairs = zip(label, outputs, strict=True)
    return [text for target, output in pairs for text in ("" if target != target else f"{target:.6g}", f"{output:.6g}")]
