import math
from typing import Any

import pytest

from fl_lightning import Callback
from fl_lightning.callbacks import EarlyStopping, FederatedCheckpoint
from fl_lightning.run.callback import WrongSetting
from fl_lightning.strategies import FedAvg


class Scripted(Callback):
    """Replaces the validation accuracy by given values."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if "val/acc" in metrics:
            metrics["val/acc"] = self.values[trainer.run.round_idx]


@pytest.mark.parametrize(
    ("values", "settings", "num_rounds"),
    [
        ([0.1, 0.3, 0.3, 0.2, 0.9], {"patience": 2}, 4),
        ([0.1, 0.2, 0.3, 0.4, 0.5], {"patience": 1}, 5),
        ([0.1, 0.2, 0.3, 0.4, 0.5], {"patience": 2, "min_delta": 0.15}, 5),
        ([0.1, 0.2, 0.3, 0.4, 0.5], {"patience": 1, "min_delta": 0.15}, 2),
        ([0.5, 0.4, 0.3, 0.6, 0.5], {"patience": 2, "mode": "min"}, 5),
        ([0.5, 0.6, 0.6, 0.1, 0.5], {"patience": 2, "mode": "min"}, 3),
        ([math.nan, math.nan, 0.3, 0.4, 0.5], {"patience": 2}, 2),
        ([math.nan, 0.3, math.nan, 0.4, 0.5], {"patience": 2}, 5),
    ],
)
def test_stops_after_patience(
    make_trainer: Any, make_model: Any, federation: Any, values: list[float], settings: dict[str, Any], num_rounds: int
) -> None:
    trainer = make_trainer(num_rounds=5, callbacks=[Scripted(values), EarlyStopping(**settings)])
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert len(trainer.run.history) == num_rounds


def test_patience_counts_evaluations(make_trainer: Any, make_model: Any, federation: Any) -> None:
    callbacks = [Scripted([0.5] * 8), EarlyStopping(patience=2)]
    trainer = make_trainer(num_rounds=8, evaluate_every=2, callbacks=callbacks)
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert len(trainer.run.history) == 6


def test_patience_survives_a_resume(make_trainer: Any, make_model: Any, federation: Any) -> None:
    def run(num_rounds: int, ckpt_path: str | None) -> int:
        callbacks = [Scripted([0.5, 0.4, 0.4, 0.4, 0.4, 0.4]), EarlyStopping(patience=3), FederatedCheckpoint()]
        trainer = make_trainer(num_rounds=num_rounds, callbacks=callbacks)
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1), ckpt_path=ckpt_path)
        return len(trainer.run.history)

    assert run(3, None) == 3
    assert run(6, "last") == 4
    assert run(6, "last") == 4  # it was stopped, so it stays stopped


def test_a_new_fit_begins_anew(make_trainer: Any, make_model: Any, federation: Any) -> None:
    callback = EarlyStopping(patience=1)
    for _ in range(2):
        trainer = make_trainer(num_rounds=4, callbacks=[Scripted([0.5, 0.6, 0.4, 0.7]), callback])
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
        assert len(trainer.run.history) == 3


def test_unknown_metric_is_refused_with_those_there_are(make_trainer: Any, make_model: Any, federation: Any) -> None:
    trainer = make_trainer(callbacks=EarlyStopping("val/accuracy"))
    with pytest.raises(WrongSetting, match=r"'val/accuracy', and it is unknown .*known: acc, .*mode to max or min"):
        trainer.fit(make_model(), federation, FedAvg())
    trainer = make_trainer(callbacks=EarlyStopping("val/accuracy", mode="max"))
    with pytest.raises(ValueError, match=r"'val/accuracy', which is not among .*val/acc, "):
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1))


@pytest.mark.parametrize("settings", [{"patience": 0}, {"min_delta": -0.1}, {"mode": "largest"}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        EarlyStopping(**settings)


def test_rounds_before_the_callback_was_added_count(make_trainer: Any, make_model: Any, federation: Any) -> None:
    script = Scripted([0.5, 0.4, 0.4, 0.4, 0.4, 0.4])
    first = make_trainer(num_rounds=2, callbacks=[script, FederatedCheckpoint()])
    first.fit(make_model(), federation, FedAvg(num_epochs=1))
    second = make_trainer(num_rounds=6, callbacks=[script, EarlyStopping(patience=3), FederatedCheckpoint()])
    second.fit(make_model(), federation, FedAvg(num_epochs=1), ckpt_path="last")
    assert len(second.run.history) == 4
