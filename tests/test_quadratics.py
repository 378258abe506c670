"""The pencil-and-paper federation itself: Local, FedAvg and FedProx on it."""

import pytest
from both_executors import both_executors
from quadratics import fit_quadratics, parameters

from fl_lightning.strategies import FedAvg, FedProx, Local


@both_executors
def test_local(executor, tmp_path) -> None:
    trainer = fit_quadratics(Local(num_epochs=2), executor(), num_rounds=2, default_root_dir=str(tmp_path))
    assert parameters(trainer) == pytest.approx([0.5904, -0.3709875, 1.0317], rel=1e-9)


@both_executors
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (lambda: FedAvg(num_epochs=2), (0.1525, 0.2787572917)),
        (lambda: FedProx(num_epochs=2, proximal_weight=1.0), (0.1441666667, 0.2648461806)),
    ],
    ids=["FedAvg", "FedProx"],
)
def test_averages(strategy, expected, executor, tmp_path) -> None:
    for num_rounds, value in enumerate(expected, start=1):
        trainer = fit_quadratics(strategy(), executor(), num_rounds=num_rounds, default_root_dir=str(tmp_path))
        assert float(trainer.run.strategy.models["x"]) == pytest.approx(value, rel=1e-9)
