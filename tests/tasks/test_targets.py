"""Losses, metrics and predictions of classes, labels and numbers, by hand and against scikit-learn."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torchmetrics.functional.classification import multilabel_average_precision

from fl_lightning.batches import ClientExamples
from fl_lightning.tasks import ExampleClassification, ExampleRegression, NodeClassification, task_of
from fl_lightning.tasks.base import kind_of_target
from fl_lightning.tasks.class_metrics import LABEL_METRICS, class_scores, label_scores
from fl_lightning.tasks.link_target import LINKS
from fl_lightning.tasks.number_metrics import NUMBER_METRICS, number_scores
from fl_lightning.tasks.targets import CLASSES, LABELS, NUMBERS

NAN = float("nan")


def batch_of(y: torch.Tensor, train: list[bool]) -> SimpleNamespace:
    mask = torch.tensor(train)
    return SimpleNamespace(y=y, train_mask=mask, val_mask=~mask, test_mask=torch.zeros_like(mask))


def test_numbers_with_gaps_by_hand() -> None:
    y = torch.tensor([[1.0, NAN], [2.0, 4.0], [0.0, 0.0]])
    logits = torch.tensor([[3.0, 100.0], [1.0, 4.0], [1.0, 2.0]], requires_grad=True)
    batch = batch_of(y, [True, True, False])
    # examples: (3-1)^2 = 4 of one number; (1 + 0) / 2 = 0.5; (1 + 4) / 2 = 2.5
    loss = NUMBERS.loss(logits, batch)
    assert loss.item() == pytest.approx((4 + 0.5) / 2)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.tolist() == [[2.0, 0.0], [-0.5, 0.0], [0.0, 0.0]]
    scores = NUMBERS.scores(logits.detach(), batch)
    assert [float(each) for each in scores["train/mse"]] == [4.5, 2.0]
    assert [float(each) for each in scores["val/mse"]] == [2.5, 1.0]
    assert NUMBERS.strata(torch.tensor([[NAN, NAN], [NAN, 1.0]])).tolist() == [-1, 0]


def test_examples_that_overflow_stay_in_their_split() -> None:
    y = torch.tensor([[1.0], [0.0], [0.0]])
    logits = torch.tensor([[3.0], [1e30], [2e30]], requires_grad=True)
    batch = batch_of(y, [True, False, False])
    batch.val_mask = torch.tensor([False, True, False])  # the last is in no split
    assert NUMBERS.loss(logits, batch).item() == 4.0
    (gradient,) = torch.autograd.grad(NUMBERS.loss(logits, batch), logits)
    assert gradient.tolist() == [[4.0], [0.0], [0.0]]
    scores = NUMBERS.scores(logits.detach(), batch)
    assert [float(scores[f"{split}/mse"][0]) for split in ("train", "val", "test")] == [4.0, math.inf, 0.0]


@pytest.mark.parametrize("target", [CLASSES, LABELS, NUMBERS], ids=lambda each: each.name)
def test_scores_of_outputs_in_half_precision_are_not_rounded(target) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3001, 3).bfloat16()
    y = torch.arange(3001) % 3 if target is CLASSES else (torch.rand(3001, 3) < 0.5).bfloat16()
    batch = batch_of(y, [False] * 3001)
    wide = target.scores(logits.float(), batch)
    for name, (total, count) in target.scores(logits, batch).items():
        assert float(total) == pytest.approx(float(wide[name][0]), rel=1e-6)
        assert float(count) == float(wide[name][1])


def test_labels_with_gaps_by_hand() -> None:
    y = torch.tensor([[1.0, NAN, 0.0], [0.0, 1.0, 1.0]])
    logits = torch.tensor([[0.0, 7.0, math.log(3)], [-math.log(3), 0.0, -1e4]], requires_grad=True)
    batch = batch_of(y, [True, False])
    # -log 1/2 and -log 1/4 of the two labels that are known of the first
    loss = LABELS.loss(logits, batch)
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0].tolist() == pytest.approx([-0.25, 0.0, 0.375])
    scores = LABELS.scores(logits.detach(), batch)
    assert [float(each) for each in scores["train/acc"]] == [0.0, 1.0]  # 0 is no more than one half
    assert [float(each) for each in scores["val/acc"]] == pytest.approx([1 / 3, 1.0])
    assert LABELS.predictions(logits.detach())[0].tolist() == pytest.approx([0.5, 0.99909, 0.75], abs=1e-5)


def test_predictions_are_blended_by_hand() -> None:
    share = torch.tensor(0.25)
    one, other = torch.tensor([[0.8, 0.2]]).log() + 5, torch.tensor([[0.4, 0.6]]).log() - 3
    assert CLASSES.predictions(CLASSES.blend(one, other, share))[0].tolist() == pytest.approx([0.7, 0.3])
    odds = torch.tensor([0.8, 0.2]).logit()[None], torch.tensor([0.4, 0.6]).logit()[None]
    assert LABELS.predictions(LABELS.blend(*odds, share))[0].tolist() == pytest.approx([0.7, 0.3])
    assert NUMBERS.blend(torch.tensor([[1.0]]), torch.tensor([[5.0]]), share).tolist() == [[2.0]]


@pytest.mark.parametrize("target", [CLASSES, LABELS, NUMBERS], ids=lambda target: target.name)
def test_a_blend_is_one_of_the_two_at_its_ends_and_each_client_has_a_share(target) -> None:
    one, other = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1)), torch.full((3, 4, 2), -200.0)
    one[0], other[1] = NAN, NAN  # what has no part in it does no harm
    blend = target.blend(one, other, torch.tensor([1.0, 0.0, 0.5]).view(3, 1, 1))
    assert torch.equal(blend[0], other[0])
    assert torch.equal(blend[1], one[1])
    assert blend[2].isfinite().all()


def test_areas_and_precisions_are_those_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 40, 3, generator=draw).mul(3).round() / 3  # with ties
    y = (torch.rand(2, 40, 3, generator=draw) < 0.4).float()
    y[torch.rand(y.shape, generator=draw) < 0.2] = NAN
    y[1, :, 2] = 0.0  # a label that nobody has does not count
    masks = torch.rand(2, 2, 40, generator=draw) < 0.7
    actual = label_scores(LABEL_METRICS, logits, y, masks)
    for name, measure in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
        total, count = actual[name]
        for split in range(2):
            for client in range(2):
                values = []
                for label in range(2 if client else 3):
                    known = masks[split, client] & ~y[client, :, label].isnan()
                    values.append(measure(y[client, known, label].numpy(), logits[client, known, label].numpy()))
                assert float(total[split, client] / count[split, client]) == pytest.approx(np.mean(values))
                assert count[split, client] == masks[split, client].sum()
    everyone = torch.ones(1, 40, dtype=torch.bool)
    whole = torch.where(y[0].isnan(), 0.0, y[0])
    total, count = label_scores(["average_precision"], logits[0], whole, everyone)["average_precision"]
    expected = multilabel_average_precision(logits[0].sigmoid(), whole.long(), num_labels=3)
    assert float(total / count) == pytest.approx(float(expected), abs=1e-5)
    mapped = torch.vmap(lambda z, t, m: label_scores(LABEL_METRICS, z, t, m), in_dims=(0, 0, 1))(logits, y, masks)
    for name in LABEL_METRICS:
        assert torch.equal(mapped[name][0].T, actual[name][0])


def test_a_label_of_one_kind_alone_has_no_value() -> None:
    total, count = label_scores(["auroc"], torch.zeros(3, 1), torch.ones(3, 1), torch.ones(1, 3, dtype=torch.bool))[
        "auroc"
    ]
    assert (float(total), float(count)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("target", "y", "metrics", "fewest"),
    [
        (CLASSES, torch.tensor([0, 0, 2, 2, 2, -1]), ("f1", "auroc", "balanced_accuracy"), 2),  # nobody is of class 1
        (LABELS, torch.tensor([[1.0, 1.0, NAN]] * 2 + [[0.0, 1.0, 1.0]] * 3 + [[0.0, 1.0, 0.0]] * 2), LABEL_METRICS, 2),
        (LINKS, torch.tensor([[1.0]] + [[0.0]] * 9), LABEL_METRICS, 1),
        (NUMBERS, torch.tensor([[1.0, NAN, NAN]] * 3 + [[1.0, 2.0, NAN]]), NUMBER_METRICS, 1),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_the_fewest_examples_of_a_part_of_a_metric_by_hand(target, y, metrics, fewest) -> None:
    assert target.fewest(y) == dict.fromkeys(metrics, fewest)
    assert target.fewest(y[:0]) == {}


def test_what_targets_are_is_seen() -> None:
    assert kind_of_target(torch.tensor([0, 1, 5])) == "classes"
    assert kind_of_target(torch.tensor([[0.0], [3.0], [NAN]])) == "classes"
    assert kind_of_target(torch.tensor([0.5, 1.0])) == "numbers"
    assert kind_of_target(torch.tensor([[0, 1], [1, 1]])) == "labels"
    assert kind_of_target(torch.tensor([[0.0, 1.0], [NAN, 1.5]])) == "numbers"
    assert kind_of_target(torch.tensor([1.0, 2.0]), given="numbers") == "numbers"


def test_tasks_are_reported_as_data() -> None:
    for task in (NodeClassification(multi_label=True), NodeClassification(), ExampleRegression()):
        assert task_of(task.plain) == task
    assert str(NodeClassification(multi_label=True)) == "NodeClassification (multi_label)"
    assert NodeClassification() != NodeClassification(multi_label=True)
    assert {t.monitor: t.directions[t.monitor.removeprefix("val/")] for t in (CLASSES, LABELS, NUMBERS)} == {
        "val/acc": "max",
        "val/auroc": "max",
        "val/mse": "min",
    }


def held(y: torch.Tensor, train: int, test: int) -> ClientExamples:
    index = torch.arange(len(y))
    return ClientExamples(
        name="a",
        x_NX=torch.zeros(len(y), 1),
        y_N=y,
        train_mask_N=index < train,
        val_mask_N=torch.zeros(len(y), dtype=torch.bool),
        test_mask_N=(index >= train) & (index < train + test),
    )


def test_the_trivial_reference_by_hand() -> None:
    classes = [held(torch.tensor([1, 1, 0, 1, 0, 0]), 3, 3), held(torch.tensor([0, 0, 0, 1]), 2, 2)]
    actual = ExampleClassification().reference(classes, 2)
    assert actual["test/acc"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    share = -(math.log(2 / 3) + 2 * math.log(1 / 3)) / 3
    assert actual["test/loss"] == pytest.approx((share + (-math.log(1e-9)) / 2) / 2)
    assert "val/acc" not in actual
    numbers = [held(torch.tensor([[1.0, NAN], [3.0, 4.0], [4.0, NAN]]), 2, 1)]
    assert ExampleRegression().reference(numbers, 2)["test/mse"] == pytest.approx(4.0)
    labels = [held(torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, NAN]]), 2, 1)]
    assert ExampleClassification(multi_label=True).reference(labels, 2)["test/acc"] == 1.0


def test_what_a_report_keeps_by_hand() -> None:
    y, said = torch.tensor([0, 1, 1, -1]), torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.5, 0.5]])
    assert CLASSES.tally(y, said).tolist() == [[1, 0], [1, 1]]
    y, said = torch.tensor([[1.0, NAN], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.9, 0.9], [0.8, 0.2], [0.1, 0.3]])
    assert LABELS.tally(y, said).tolist() == [[[0, 1], [1, 1]], [[1, 0], [1, 0]]]
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0], [NAN, 5.0]])
    said = torch.tensor([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
    assert NUMBERS.tally(y, said).tolist() == [[1.0, 5.0], [4.0, 8.0], [5.0, 10.0]]
    assert NUMBERS.tally(y[:0], said[:0]).shape == (0, 2)


def test_errors_of_numbers_are_those_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(1)
    y, predicted = (torch.randn(2, 40, 2, generator=draw) for _ in range(2))
    y[torch.rand(y.shape, generator=draw) < 0.2] = NAN
    y[1, :, 1] = 3.0  # numbers that do not differ have no R²
    masks = torch.rand(2, 2, 40, generator=draw) < 0.7
    masks[1, 0] = False
    actual = number_scores(NUMBER_METRICS, predicted, y, masks)
    for name, measure in (("mae", mean_absolute_error), ("rmse", root_mean_squared_error), ("r2", r2_score)):
        total, count = actual[name]
        assert (float(total[1, 0]), float(count[1, 0])) == (0.0, 0.0)
        for split, client in ((0, 0), (0, 1), (1, 1)):
            values = []
            for number in range(1 if client and name == "r2" else 2):
                known = masks[split, client] & ~y[client, :, number].isnan()
                values.append(measure(y[client, known, number].numpy(), predicted[client, known, number].numpy()))
            assert float(total[split, client] / count[split, client]) == pytest.approx(np.mean(values))
    assert NUMBERS.whole_scores(("mae",), predicted[0], y[0], masks[:, 0])["mae"][0].shape == (2,)


def test_outputs_that_are_no_numbers_count_as_much_as_others() -> None:
    """Left out, they would improve the mean over clients."""
    y = torch.tensor([[[1.0, 2.0], [3.0, torch.nan]], [[1.0, 1.0], [3.0, 1.0]], [[torch.nan] * 2] * 2])
    outputs = torch.zeros(3, 2, 2)
    outputs[0, 0, 0] = torch.nan
    masks = torch.ones(1, 3, 2, dtype=torch.bool)
    for name, (total, count) in number_scores(NUMBER_METRICS, outputs, y, masks).items():
        assert count.tolist() == [[2, 2, 0]], name
        assert total.isnan().tolist() == [[True, False, False]], name
    logits = torch.zeros(2, 2, 3)
    logits[0] = torch.nan
    total, count = class_scores(["ece"], logits, torch.zeros(2, 2, dtype=torch.int64), masks[:, :2])["ece"]
    assert count.tolist() == [[2, 2]]
    assert total.isnan().tolist() == [[True, False]]
