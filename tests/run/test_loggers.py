import contextlib
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning import Callback
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.round.selection import Selection
from fl_lightning.run import checkpoint
from fl_lightning.run.loggers import CSVLogger, RoundTable, TensorBoardLogger, WandbLogger
from fl_lightning.strategies import FedAvg


class Dies(Callback):
    def on_round_start(self, trainer: Any) -> None:
        if trainer.run.round_idx == 3:
            raise KeyboardInterrupt


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_takes_new_columns_and_drops_what_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    table = RoundTable(path)
    table.append([{"round": 0, "a": 0.1}])
    table.append([{"round": 1, "a": 1 / 3, "b": 'with "quotes", and commas'}])
    table.append([{"round": 2, "b": "x"}])
    assert path.read_text().splitlines()[0] == "round,a,b"
    assert [row["a"] for row in read(path)] == ["0.1", repr(1 / 3), ""]
    path.write_text(path.read_text() + "3,0.")  # killed while writing
    again = RoundTable(path)
    again.keep_before(2)
    again.append([{"round": 2, "b": "y"}])
    assert [(row["round"], row["b"]) for row in read(path)] == [
        ("0", ""),
        ("1", 'with "quotes", and commas'),
        ("2", "y"),
    ]
    again.keep_before(0)
    assert not path.exists()


def test_rows_are_on_disk_when_a_run_dies_and_no_round_is_twice_after_it(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    def run(run_name: str, *others: Callback, ckpt_path: str | None = None) -> None:
        callbacks = [FederatedCheckpoint(every_n_rounds=2), *others]
        trainer = make_trainer(num_rounds=6, evaluate_every=2, run_name=run_name, callbacks=callbacks, logger=True)
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1), ckpt_path=ckpt_path)

    def metrics(run_name: str) -> list[dict[str, str]]:
        rows = read(tmp_path / run_name / "version_0/metrics.csv")
        return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]

    with pytest.raises(KeyboardInterrupt):
        run("broken", Dies())
    assert [row["round"] for row in metrics("broken")] == ["0", "1", "2"]
    assert metrics("broken")[0]["val/acc"] == ""  # its column came with the first evaluation
    run("broken", ckpt_path="last")
    run("whole")
    assert metrics("broken") == metrics("whole")
    events = EventAccumulator(str(tmp_path / "broken/version_0"))
    events.Reload()
    assert sorted(event.step for event in events.Scalars("val/acc")) == [1, 3, 5]  # files of one second in any order


def test_wandb_run_goes_on_after_a_resume(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path, wandb_mode: Callable[[str], None]
) -> None:
    wandb_mode("offline")
    ids = []
    for num_rounds, ckpt_path in ((2, None), (4, "last"), (4, None)):
        logger = WandbLogger(save_dir=str(tmp_path / "logs"), group="tests", tags=["tiny"])
        trainer = make_trainer(num_rounds=num_rounds, logger=logger, callbacks=FederatedCheckpoint())
        time.sleep(1 if ckpt_path else 0)  # W&B's folders are named to the second
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1), ckpt_path=ckpt_path)
        ids.append(checkpoint.read(trainer.run.folder / "checkpoints/last.ckpt")["wandb_id"])
    assert ids[0] == ids[1] != ids[2]
    assert len(list((tmp_path / "logs/wandb").glob(f"offline-run-*-{ids[0]}"))) == 2
    logger._experiment = type("Run", (), {"id": "begun"})()
    with pytest.raises(ValueError, match="run begun has begun, so other cannot be continued"):
        logger.continue_run("other")


@pytest.mark.full
def test_loggers_hold_the_chosen_round_and_the_table_is_written_beside_them(
    make_trainer: Any,
    make_model: Any,
    federation: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb_mode: Callable[[str], None],
) -> None:
    wandb_mode("offline")
    summary: dict[str, Any] = {}
    finalize = WandbLogger.finalize

    def look(logger: WandbLogger, status: str) -> None:
        if logger._experiment is not None:
            summary.update(dict(logger.experiment.summary))
        finalize(logger, status)

    monkeypatch.setattr(WandbLogger, "finalize", look)
    monkeypatch.setattr(Selection, "_is_better", lambda selection, value, best: best is None)  # the first round
    board = TensorBoardLogger(str(tmp_path / "board"))
    trainer = make_trainer(logger=[WandbLogger(save_dir=str(tmp_path / "logs")), board])
    result = trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    first, *_, last = read(trainer.run.folder / "metrics.csv")

    assert result["best_round"] == summary["best_round"] == 0
    assert float(first["val/loss"]) != float(last["val/loss"])
    assert summary["val/loss"] == result["val/loss"] == float(first["val/loss"])
    events = EventAccumulator(str(tmp_path / "board/federation/version_0")).Reload()
    assert events.Scalars("best/val/loss")[0].value == pytest.approx(result["val/loss"])
    assert "hparams" in events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name


@pytest.mark.parametrize("root_dir", ["logs", "."], ids=["another folder", "that of all runs"])
def test_each_run_keeps_its_own_rows_in_another_folder(
    make_trainer: Any,
    make_model: Any,
    federation: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    root_dir: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(num_rounds: int, **settings: Any) -> None:
        loggers = [CSVLogger(root_dir), TensorBoardLogger(root_dir)]
        trainer = make_trainer(num_rounds=num_rounds, logger=loggers, callbacks=FederatedCheckpoint())
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1), **settings)

    run(3)
    run(1)
    run(2, ckpt_path="last")
    for version, expected in ((0, ["0", "1", "2"]), (1, ["0", "1"])):
        rows = [read(folder / f"federation/version_{version}/metrics.csv") for folder in (Path(root_dir), tmp_path)]
        assert rows[0] == rows[1]
        assert [row["round"] for row in rows[0]] == expected
        events = EventAccumulator(f"{root_dir}/federation/version_{version}").Reload().Scalars("val/acc")
        events.sort(key=lambda event: event.wall_time)  # two files of one second are read by name, the tenth first
        assert [str(event.step) for event in events] == expected


def test_rows_of_another_run_are_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "logs/federation/version_0/metrics.csv"
    RoundTable(path).append([{"round": 0}])
    with pytest.raises(ValueError, match=r"root_dir is '.*logs', where .*metrics\.csv is of another run: give another"):
        CSVLogger(str(tmp_path / "logs")).begin(tmp_path / "others/federation/version_0", [])
    assert read(path) == [{"round": "0"}]


class Offline(TensorBoardLogger):
    """A logger that fails when it is closed."""

    def finalize(self, status: str) -> None:
        raise ConnectionError("no network")


class Noted(TensorBoardLogger):
    """A logger that notes how it is closed."""

    status = ""

    def finalize(self, status: str) -> None:
        self.status = status


@pytest.mark.parametrize("dies", [False, True])
def test_a_logger_that_cannot_be_closed_costs_neither_result_nor_error_nor_other_loggers(
    make_trainer: Any, make_model: Any, federation: Any, dies: bool
) -> None:
    other = Noted()
    trainer = make_trainer(num_rounds=4, logger=[Offline(), other], callbacks=[Dies()] if dies else None)
    ends = pytest.raises(KeyboardInterrupt) if dies else contextlib.nullcontext()
    with ends, pytest.warns(UserWarning, match=r"Offline could not be closed \(ConnectionError: no network\)"):
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    actual = json.loads((trainer.run.folder / "result.json").read_text())
    assert (actual["status"], actual["num_rounds"]) == (("interrupted", 3) if dies else ("finished", 4))
    assert other.status == ("failed" if dies else "success")


def test_csv_logger_of_fabric(make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path) -> None:
    trainer = make_trainer(logger=FabricCSVLogger(tmp_path / "fabric"))
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert next((tmp_path / "fabric").rglob("metrics.csv")).read_text().count("\n") > 1
