"""F1, AUROC and balanced accuracy against scikit-learn and torchmetrics, and as metrics of a run."""

import io
import math
from typing import Any, get_args

import pytest
import torch
from rich.console import Console
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_auroc,
    multiclass_calibration_error,
    multiclass_f1_score,
)

from fl_lightning import ClientModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.callbacks import RoundProgressBar, RunReport
from fl_lightning.round.client import LOGITS
from fl_lightning.strategies import FedAvg
from fl_lightning.tasks import ExampleClassification, GraphClassification, NodeClassification, NodeRegression
from fl_lightning.tasks.class_metrics import (
    CLASS_METRICS,
    PER_CLASS,
    PER_DEGREE,
    ClassMetric,
    calibration_error,
    class_scores,
    degree_scores,
)


def drawn(num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with ties, labels and the masks of three splits of four clients of 200 examples."""
    generator = torch.Generator().manual_seed(num_classes)
    y = torch.randint(num_classes, (4, 200), generator=generator)
    logits = torch.randn(4, 200, num_classes, generator=generator) + torch.nn.functional.one_hot(y, num_classes)
    logits[:, :80] = logits[:, :80].round()
    split = torch.randint(4, (4, 200), generator=generator)
    return logits, y, torch.stack([split == index for index in range(3)])


@pytest.mark.parametrize("num_classes", [2, 5])
def test_values_are_those_of_scikit_learn_and_torchmetrics(num_classes: int) -> None:
    logits, y, masks = drawn(num_classes)
    actual = class_scores(CLASS_METRICS, logits, y, masks)
    for split in range(3):
        for client in range(4):
            inside = masks[split, client]
            z, labels = logits[client, inside].double(), y[client, inside]
            share = z.softmax(dim=-1)
            said = z.argmax(dim=-1)
            if num_classes == 2:
                auroc = roc_auc_score(labels, z[:, 1] - z[:, 0])
                assert auroc == pytest.approx(float(binary_auroc(share[:, 1], labels)), abs=1e-6)
            else:
                assert len(labels.unique()) == num_classes
                auroc = roc_auc_score(labels, share, multi_class="ovr")
                assert auroc == pytest.approx(float(multiclass_auroc(share, labels, num_classes)), abs=1e-6)
            f1 = f1_score(labels, said, average="macro")
            assert f1 == pytest.approx(float(multiclass_f1_score(said, labels, num_classes, average="macro")))
            expected = {"f1": f1, "auroc": auroc, "balanced_accuracy": balanced_accuracy_score(labels, said)}
            expected["ece"] = float(multiclass_calibration_error(z, labels, num_classes, n_bins=15))
            for name, value in expected.items():
                total, count = (pair[split, client] for pair in actual[name])
                assert count == inside.sum()
                assert float(total / count) == pytest.approx(value, abs=1e-6 if name == "ece" else 1e-12), name


def test_classes_that_do_not_occur_are_left_out_and_one_class_alone_has_no_auroc() -> None:
    logits = torch.tensor(
        [[[3.0, 0, 0], [0, 3, 0], [0, 3, 0], [3, 0, 0]], [[3.0, 0, 0], [0, 3, 0], [0, 3, 0], [0, 0, 3]]]
    )
    y = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])
    masks = torch.tensor([[[True] * 4, [True] * 4], [[False] * 4, [True, False, False, False]]])
    actual = {name: (total / count) for name, (total, count) in class_scores(CLASS_METRICS, logits, y, masks).items()}

    assert actual["balanced_accuracy"][0].tolist() == pytest.approx([(2 / 3 + 1) / 2, 1 / 4])
    assert actual["f1"][0].tolist() == pytest.approx([(4 / 5 + 2 / 3) / 2, 2 / 5 / 3])
    assert actual["auroc"][0, 0] == pytest.approx(5 / 6)  # class 0 and class 1 alike
    assert actual["auroc"][:, 1].isnan().all()
    assert all(value[1, 0].isnan() for value in actual.values())  # no examples at all
    assert actual["f1"][1, 1] == 1.0


def test_both_executors_choose_a_round_by_f1_and_agree(make_trainer: Any, federation: Any) -> None:
    histories = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        model = ClientModule(metrics=list(get_args(ClassMetric)))
        trainer = make_trainer(executor=executor, monitor="val/f1", run_name=type(executor).__name__)
        result = trainer.fit(model, federation, FedAvg(num_epochs=1))
        assert result["val/f1"] == max(row["val/f1"] for row in trainer.run.history)
        histories.append(trainer.run.history)
    one, other = (
        {name: value for row in rows for name, value in row.items() if name.split("/")[0] in ("train", "val", "test")}
        for rows in histories
    )
    assert {f"{split}/{name}" for split in ("train", "val", "test") for name in ("acc", *CLASS_METRICS)} <= set(one)
    groups = {"recall_class_0", "recall_class_1", "acc_degree_1", "acc_degree_2-3", "acc_degree_16+"}
    assert {f"test/{name}" for name in groups} <= set(one)
    assert one == pytest.approx(other, abs=1e-5, nan_ok=True)
    assert not math.isnan(one["val/auroc"])
    assert 0 < one["val/f1_worst"] <= one["val/f1"] <= 1


def test_a_batch_in_parts_scores_as_a_whole() -> None:
    logits, y, masks = drawn(3)
    names = dict(zip(("train_mask", "val_mask", "test_mask"), masks, strict=True))
    whole = ExampleBatch(x=logits, y=y, example_mask=torch.ones_like(y, dtype=torch.bool), key=torch.zeros(4), **names)
    parts = [
        whole.replace({name: t[:, rows] for name, t in whole.tensors().items() if name != "key"})
        for rows in (slice(0, 17), slice(17, 200))
    ]
    client = ClientModule(metrics=["f1", "auroc"])
    tables = [{**{"val/acc": torch.ones(4, 2)}, LOGITS: part.x} for part in parts]
    actual = client.scores_of_parts(parts, tables)

    assert actual["val/acc"].tolist() == [[2.0, 2.0]] * 4
    together = class_scores(client.metrics, logits, y, masks)
    for name in ("f1", "auroc"):
        for index, split in enumerate(("train", "val", "test")):
            expected = torch.stack([value[index] for value in together[name]], dim=-1)
            assert torch.equal(actual[f"{split}/{name}"], expected.float())


def test_recall_of_each_class_and_accuracy_of_each_range_of_degrees() -> None:
    logits, y, masks = drawn(5)
    degree = torch.arange(4 * 200).view(4, 200) % 20
    by_class, by_degree = class_scores(PER_CLASS, logits, y, masks), degree_scores(logits, y, masks, degree)
    assert list(by_class) == [f"recall_class_{k}" for k in range(5)]
    assert list(by_degree) == [f"acc_degree_{name}" for name in ("0", "1", "2-3", "4-7", "8-15", "16+")]
    right = logits.argmax(dim=-1) == y
    for split in range(3):
        for client in range(4):
            inside = masks[split, client]
            for k in range(5):
                total, count = (pair[split, client] for pair in by_class[f"recall_class_{k}"])
                assert (total, count) == (
                    (inside & right[client] & (y[client] == k)).sum(),
                    (inside & (y[client] == k)).sum(),
                )
            eight = inside & (degree[client] >= 8) & (degree[client] < 16)
            total, count = (pair[split, client] for pair in by_degree["acc_degree_8-15"])
            assert (total, count) == ((eight & right[client]).sum(), eight.sum())
    counted = sum(count for _, count in by_degree.values())
    assert torch.equal(counted, masks.sum(dim=-1).double())  # each node is in one range


def test_overconfidence_is_the_calibration_error_and_no_examples_have_none() -> None:
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0], [0.0, 9.0]], dtype=torch.float64)
    y, masks = torch.tensor([0, 1, 1, 0]), torch.tensor([[True] * 4, [False] * 4])
    sure = float(torch.sigmoid(torch.tensor(9.0, dtype=torch.float64)))
    error = calibration_error(logits, y, masks)
    assert float(error[0]) == pytest.approx(sure - 0.5)
    assert error[1].isnan()
    total, count = class_scores(["ece"], logits, y, masks)["ece"]
    assert (float(total[0]), count.tolist()) == (pytest.approx(4 * (sure - 0.5)), [4, 0])


def test_the_tables_at_the_end_have_models_on_data_classes_and_degrees(make_trainer: Any, federation: Any) -> None:
    bar, console = RoundProgressBar(), Console(record=True, width=120, file=io.StringIO())
    bar.console = console
    trainer = make_trainer(num_rounds=1, evaluate_union=True, callbacks=[bar, RunReport()])
    metrics: Any = ["ece", "recall_per_class", "acc_per_degree"]
    result = trainer.fit(ClientModule(metrics=metrics), federation, FedAvg(num_epochs=1))
    text = console.export_text()
    assert "test/acc of models on data, mean ± std over clients" in text
    assert "global model" in text
    assert "test/recall by class" in text
    assert "test/acc by degree" in text
    shown = f"{result['union/trained/test/acc']:.4f}"
    (line,) = (line for line in text.splitlines() if "local model" in line)
    assert shown in line
    page = (trainer.run.folder / "report.html").read_text()
    assert "Models on local and on global data" in page
    assert "test/recall by class" in page
    assert result["test/recall_class_0_worst"] <= result["test/recall_class_0"]
    assert result["test/ece_worst"] >= result["test/ece"]  # less is better


def test_degrees_are_for_nodes_of_one_class() -> None:
    assert "acc_per_degree" in NodeClassification().on_demand
    for task in (NodeClassification(multi_label=True), GraphClassification(), ExampleClassification()):
        with pytest.raises(ValueError, match=r"has 'acc_per_degree', which .* does not measure"):
            ClientModule(metrics=list(PER_DEGREE)).take_task(task)  # type: ignore[arg-type]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.metrics has 'recall', .* give some of f1, auroc, balanced_accuracy"):
        ClientModule(metrics=["recall"])  # type: ignore[list-item]
    with pytest.raises(
        ValueError, match=r"has 'f1', which NodeRegression does not measure: give some of mae, rmse, r2"
    ):
        ClientModule(metrics=["f1"]).take_task(NodeRegression())
