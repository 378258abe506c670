"""A metric says itself whether more or less of it is better, and every choice goes by that."""

import functools
import json

import pytest
import torch

from fl_lightning import ClientModule, Participation, SequentialExecutor
from fl_lightning.callbacks import EarlyStopping
from fl_lightning.direction import metric_of
from fl_lightning.models import GCN
from fl_lightning.report.folder import read
from fl_lightning.round.metrics import client_values, summarize
from fl_lightning.round.payload import Payload
from fl_lightning.run.callback import WrongSetting
from fl_lightning.strategies import FedAvg, Kin, SheafRidge
from fl_lightning.study.store import metric_reported
from fl_lightning.tasks.targets import split_scores


class Doubt(ClientModule):
    """Scores the share of probability that is not the label's: less is better, and nothing in the name says so."""

    monitor = "val/doubt"

    def scores(self, output, batch):
        label_N = output.logits.softmax(dim=-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        return super().scores(output, batch) | split_scores(batch, {"doubt": 1 - label_N})


class SaysSo(Doubt):
    metric_directions = {"doubt": "min"}  # noqa: RUF012


def test_a_class_says_it_of_what_it_adds_and_inherits_the_rest() -> None:
    assert SaysSo.directions() == {**ClientModule.directions(), "doubt": "min"}
    assert SaysSo.directions()["mse"] == "min"

    class Wrong(ClientModule):
        metric_directions = {"doubt": "less"}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"Wrong\.metric_directions has 'less' for 'doubt': give max or min"):
        Wrong.directions()


@pytest.mark.parametrize(("kind", "mode"), [(SaysSo, None), (Doubt, "min")])
def test_rounds_worst_clients_and_records_go_by_it(kind, mode, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(monitor_mode=mode, num_rounds=4)
    result = trainer.fit(make_model(kind), federation, FedAvg(num_epochs=3))
    course = [row["val/doubt"] for row in trainer.run.history]
    assert course[0] > min(course)
    assert result["best_round"] == course.index(min(course))
    assert result["test/min_over_rounds"] == min(row["test/doubt"] for row in trainer.run.history)
    assert trainer.run.history[-1]["val/doubt_worst"] == pytest.approx(
        float(client_values(trainer.run.scores[""], "val/doubt").max())
    )
    assert json.loads((trainer.run.folder / "result.json").read_text())["mode"] == "min"
    assert read(trainer.run.folder).less_is_better


def test_nothing_is_guessed(federation, make_model, make_trainer) -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"monitor is 'val/doubt', and it is unknown .* set trainer\.monitor_mode to"):
        trainer.fit(make_model(Doubt), federation, FedAvg())
    assert not trainer.started
    beside = make_trainer(monitor="val/acc")
    beside.fit(make_model(Doubt), federation, FedAvg())
    assert "val/doubt_std" in beside.run.history[0]
    assert "val/doubt_worst" not in beside.run.history[0]
    scores = Payload(clients=(0, 1), extras={"val/mae": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert summarize(scores, "gen/", {"mae": "min"})["gen/val/mae_worst"] == 0.75


@pytest.mark.parametrize(
    "strategy", [functools.partial(Kin, common_share=0.5), functools.partial(SheafRidge, num_neighbors=2)]
)
def test_trials_refuse_a_metric_that_they_cannot_choose_by(strategy, federation, make_trainer) -> None:
    kind = type(strategy())
    model = type("Own", (kind.client_class,), {"monitor": "val/doubt"})(kind.default_net or GCN)
    make_trainer(monitor="val/acc").fit(model, federation, strategy(validate_every=None))
    with pytest.raises(ValueError, match=r"validate_every is 2, but it is unknown .* metric_directions of Own"):
        make_trainer(monitor="val/acc").fit(model, federation, strategy(validate_every=2))


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("nonsense/val/acc", r"monitor is 'nonsense/val/acc', but there are trained/val/acc, .*val/acc, val/loss"),
        ("val/accuracy", "monitor is 'val/accuracy', but the model is scored by"),
    ],
)
def test_an_unknown_monitor_is_refused_before_the_first_round(
    monitor, message, federation, make_model, make_trainer
) -> None:
    trainer = make_trainer(monitor=monitor)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make_model(), federation, FedAvg())
    assert trainer.run.history == []


def test_the_metric_of_another_model_can_be_monitored(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(monitor="trained/val/loss")
    result = trainer.fit(make_model(), federation, FedAvg())
    course = [row["trained/val/loss"] for row in trainer.run.history]
    assert result["best_round"] == course.index(min(course))


def test_early_stopping_asks_where_nothing_is_said(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=EarlyStopping("server/drift"))
    with pytest.raises(
        WrongSetting, match=r"EarlyStopping\.monitor is 'server/drift', and it is unknown .*mode to max"
    ):
        trainer.fit(make_model(), federation, FedAvg())
    trainer = make_trainer(callbacks=EarlyStopping("val/doubt", patience=1), monitor="val/acc", num_rounds=4)
    trainer.fit(make_model(SaysSo), federation, FedAvg(num_epochs=3))
    assert len(trainer.run.history) > 2  # it falls, which is better


def test_participants_failures_and_dropouts_are_counted_apart(federation, make_model, make_trainer) -> None:
    participation = Participation(dropout_probability=0.5)
    trainer = make_trainer(participation=participation, num_rounds=4, seed=3, executor=SequentialExecutor())
    trainer.fit(make_model(), federation, FedAvg())
    for row in trainer.run.history:
        assert row["num_participants"] + row["num_dropouts"] == 5
        assert row["num_failures"] == 0
    assert any(row["num_dropouts"] for row in trainer.run.history)


def test_a_summary_names_its_metric() -> None:
    known = {"val/acc", "val/f1_weighted", "gen/val/acc"}
    assert metric_of("val/acc_worst", known) == "val/acc"
    assert metric_of("gen/val/acc_weighted", known) == "gen/val/acc"
    assert metric_of("val/f1_weighted", known) == "val/f1_weighted"
    record = {"monitor": "val/acc_worst", "result": {"val/acc": 0.5, "val/acc_worst": 0.1}}
    assert metric_reported(record) == "acc"
    assert metric_reported({"monitor": "val/acc", "result": {"val/acc": 0.5}}) == "acc"
