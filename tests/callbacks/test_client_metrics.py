import csv
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import Callback
from fl_lightning.callbacks import FederatedCheckpoint, PerClientMetrics, SignFlip
from fl_lightning.round.metrics import client_values
from fl_lightning.run.callback import WrongSetting
from fl_lightning.strategies import FedPer


class Dies(Callback):
    def on_round_start(self, trainer: Any) -> None:
        if trainer.run.round_idx == 3:
            raise KeyboardInterrupt


def test_file_holds_each_clients_values(make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path) -> None:
    trainer = make_trainer(callbacks=PerClientMetrics(metrics=["test/acc"]))
    trainer.fit(make_model(), federation, FedPer(num_epochs=1))
    with (tmp_path / "federation/version_0/clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["0"] * 5 + ["1"] * 5 + ["2"] * 5
    last = rows[-5:]
    assert [row["client"] for row in last] == [graph.name for graph in federation.clients]
    assert [int(row["num_examples"]) for row in last] == [int(g.test_mask_N.sum()) for g in federation.clients]
    values = client_values(trainer.run.scores[""], "test/acc").tolist()
    assert [float(row["value"]) for row in last] == pytest.approx(values, nan_ok=True)


def test_only_rounds_that_are_due(make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path) -> None:
    trainer = make_trainer(num_rounds=8, evaluate_every=2, callbacks=PerClientMetrics(every_n_rounds=4))
    trainer.fit(make_model(), federation, FedPer(num_epochs=1))
    with (tmp_path / "federation/version_0/clients.csv").open() as file:
        assert {row["round"] for row in csv.DictReader(file)} == {"3", "7"}


def test_a_killed_and_resumed_run_leaves_the_same_file(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    def run(run_name: str, *others: Callback, ckpt_path: str | None = None) -> str:
        callbacks = [PerClientMetrics(), FederatedCheckpoint(every_n_rounds=2), *others]
        trainer = make_trainer(num_rounds=5, run_name=run_name, callbacks=callbacks)
        trainer.fit(make_model(), federation, FedPer(num_epochs=1), ckpt_path=ckpt_path)
        return (trainer.run.folder / "clients.csv").read_text()

    with pytest.raises(KeyboardInterrupt):
        run("broken", Dies())
    torn = tmp_path / "broken/version_0/clients.csv"
    torn.write_text(torn.read_text() + "3,client-00,val")
    assert run("broken", ckpt_path="last") == run("whole")


@pytest.mark.parametrize("monitor", ["val/acc_worst", "benign/val/acc", "benign/val/acc_worst"])
def test_a_summary_that_chooses_the_round_is_of_each_clients_metric(
    monitor: str, make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    callbacks = [SignFlip(clients=[1]), PerClientMetrics()]
    trainer = make_trainer(num_rounds=1, monitor=monitor, callbacks=callbacks)
    trainer.fit(make_model(), federation, FedPer(num_epochs=1))
    with (tmp_path / "federation/version_0/clients.csv").open() as file:
        assert [row["metric"] for row in csv.DictReader(file)] == ["val/acc"] * 5 + ["test/acc"] * 5


def test_unknown_metric_is_refused_with_those_there_are(make_trainer: Any, make_model: Any, federation: Any) -> None:
    trainer = make_trainer(callbacks=PerClientMetrics(metrics=["test/f1"]))
    with pytest.raises(WrongSetting, match=r"\['test/f1'\] are not among test/acc, test/loss"):
        trainer.fit(make_model(), federation, FedPer(num_epochs=1))
    assert not trainer.started
    assert not trainer.run.history


@pytest.mark.parametrize("settings", [{"every_n_rounds": 0}, {"metrics": []}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PerClientMetrics(**settings)
