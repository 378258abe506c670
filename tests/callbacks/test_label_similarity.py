"""How far a strategy's idea of who is alike follows the clients' labels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning.callbacks import LabelSimilarity
from fl_lightning.strategies import FedAux, FedAvg

#: Of four clients' labels: the first two are alike, the third is half like each, the fourth is alone.
LABELS = [[0, 0, 1, -1], [0, 0, 1, 1, 0, 0], [0, 2], [2]]


def trainer_of(labels: list[list[int]], matrices: dict[str, torch.Tensor], clients: list[int]) -> SimpleNamespace:
    graphs = [SimpleNamespace(y_N=torch.tensor(each)) for each in labels]
    strategy = SimpleNamespace(matrices=lambda: matrices)
    data = SimpleNamespace(clients=graphs, num_outputs=3)
    return SimpleNamespace(run=SimpleNamespace(datamodule=data, training_clients=clients, strategy=strategy))


def test_correlations_by_hand() -> None:
    clients = [0, 1, 3]
    likeness = np.zeros((3, 3))
    for i, a in enumerate(clients):
        for j, b in enumerate(clients):
            first, second = (np.bincount([y for y in LABELS[k] if y >= 0], minlength=3) for k in (a, b))
            likeness[i, j] = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    actual = torch.tensor([[9.0, 0.8, 0.1], [0.8, 9.0, 0.3], [0.1, 0.3, 9.0]])
    pairs = ~np.eye(3, dtype=bool)
    trainer, metrics = trainer_of(LABELS, {"my signature": actual, "flat": torch.ones(3, 3)}, clients), {}
    callback = LabelSimilarity()

    callback.on_fit_start(trainer)
    callback.on_round_end(trainer, metrics)

    expected = np.corrcoef(likeness[pairs], actual.numpy()[pairs])[0, 1]
    assert metrics == {"similarity/my_signature_labels": pytest.approx(expected)}
    np.testing.assert_allclose(callback.label_similarity_CC, likeness)


def test_it_is_measured_in_every_round(federation, make_model, make_trainer) -> None:
    for strategy, measured in (
        (FedAux(), {"similarity/projection_labels", "similarity/mixing_labels"}),
        (FedAvg(), set()),
    ):
        trainer = make_trainer(callbacks=[LabelSimilarity()])
        trainer.fit(make_model(type(strategy)), federation, strategy)
        for row in trainer.run.history:
            assert {name for name in row if name.startswith("similarity/")} == measured
            assert all(-1 <= row[name] <= 1 for name in measured)


def test_targets_that_are_numbers_are_refused() -> None:
    trainer = trainer_of(LABELS, {}, [0, 1])
    trainer.run.datamodule.clients[0].y_N = torch.tensor([0.5])

    with pytest.raises(ValueError, match="these data have numbers as targets: leave it out"):
        LabelSimilarity().on_fit_start(trainer)
