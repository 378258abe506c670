"""What a run leaves for programs to read."""

import json
import math
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import Callback, ClientModule, Participation, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.run import result
from fl_lightning.run.callback import WrongSetting, take_numbers
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedSheafHN, Local
from fl_lightning.strategies.mixing.aggregation import CoordinateMedian


def read(trainer: Any) -> dict[str, Any]:
    return json.loads((trainer.run.folder / "result.json").read_text())


class Fails(ClientModule):
    """The clients with few nodes fail at every training."""

    most = 12

    def loss(self, output: Any, batch: Any) -> Any:
        if len(batch.y) <= self.most and self.training:
            raise RuntimeError("out of memory")
        return super().loss(output, batch)


class FailsAlways(Fails):
    """All clients fail, but not all alike, so that the run goes on."""

    def loss(self, output: Any, batch: Any) -> Any:
        if len(batch.y) > self.most and self.training:
            raise ValueError("too many")
        return super().loss(output, batch)


def test_what_a_run_came_to(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=SequentialExecutor(), callbacks=CommunicationLedger(), seed=3)
    with pytest.warns(UserWarning, match=r"client-03 and 1 other failed"):
        chosen = trainer.fit(make_model(Fails), federation, FedAvg())
    actual = read(trainer)
    assert actual["result"] == chosen
    assert (actual["status"], actual["error"]) == ("finished", "")
    assert actual["failures"] == {"client-03": 3, "client-04": 3}
    assert (actual["num_rounds"], actual["num_failed_rounds"], actual["seed"], actual["monitor"]) == (
        3,
        0,
        3,
        "val/acc",
    )
    assert actual["seconds"] == pytest.approx(sum(row["seconds"] for row in trainer.run.history))
    assert actual["bytes"] == {
        way: sum(row[f"comm/bytes_{way}"] for row in trainer.run.history) for way in ("up", "down", "peer")
    }
    assert actual["partition_hash"] == federation.partition_hash
    assert actual["versions"].keys() >= {"fl-lightning", "torch"}
    assert not (trainer.run.folder / "run.lock").exists()


def test_nothing_is_made_up(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(make_model(), federation, FedAvg())
    trainer.run.selection.result["test/acc"] = math.nan
    actual = result.summary(trainer.run)
    assert actual["bytes"] == {}
    assert actual["result"]["test/acc"] is None


class Stops(Callback):
    def __init__(self, number: int | None) -> None:
        self.number = number

    def on_send(self, trainer, stage, payload) -> None:
        if trainer.run.round_idx == 1:
            if self.number is None:
                raise ZeroDivisionError("a bug")
            os.kill(os.getpid(), self.number)


def test_how_it_ended(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=Stops(signal.SIGTERM))
    trainer.fit(make_model(), federation, FedAvg())
    assert (read(trainer)["status"], read(trainer)["num_rounds"]) == ("interrupted", 2)
    trainer = make_trainer(callbacks=[Stops(signal.SIGINT), Stops(signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(make_model(), federation, FedAvg())
    assert (read(trainer)["status"], read(trainer)["num_rounds"]) == ("interrupted", 1)
    trainer = make_trainer(callbacks=Stops(None))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(make_model(), federation, FedAvg())
    assert (read(trainer)["status"], read(trainer)["error"]) == ("failed", "ZeroDivisionError: a bug")


class StopsReport(Callback):
    def on_fit_end(self, trainer: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_after_the_last_round_loses_no_result(federation, make_model, make_trainer) -> None:
    def ended(*_: Any) -> None:
        raise AssertionError("the run was not asked")

    before = signal.signal(signal.SIGTERM, ended)
    try:
        trainer = make_trainer(callbacks=StopsReport(), num_rounds=1)
        chosen = trainer.fit(make_model(), federation, FedAvg())
        assert signal.getsignal(signal.SIGTERM) is ended
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (read(trainer)["status"], read(trainer)["result"]) == ("finished", chosen)
    assert trainer.run.interruption.received == signal.SIGTERM  # the exit code of the command line


class Adds(Callback):
    def __init__(self, hook: str, value: Any) -> None:
        self.value = value
        setattr(self, hook, lambda trainer, metrics, *_: metrics.update(own=self.value))


@pytest.mark.parametrize("hook", ["on_evaluate", "on_round_end"])
def test_numbers_of_callbacks_are_pythons(hook, federation, make_model, make_trainer) -> None:
    for value in (torch.tensor([0.5]), np.float32(0.5), np.array(0.5)):
        trainer = make_trainer(callbacks=Adds(hook, value), num_rounds=1)
        trainer.fit(make_model(), federation, FedAvg())
        [row] = trainer.run.history
        assert (row["own"], type(row["own"])) == (0.5, float)
    assert read(trainer)["result"].get("own", 0.5) == 0.5


@pytest.mark.parametrize("value", [None, "0.5", torch.zeros(2)], ids=["none", "text", "two"])
def test_what_is_no_number_is_refused_in_the_first_round(value, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=Adds("on_round_end", value))
    with pytest.raises(WrongSetting, match=r"callback Adds has the metric 'own' with value "):
        trainer.fit(make_model(), federation, FedAvg())
    assert trainer.run.round_idx == 0
    with pytest.raises(WrongSetting, match=r"strategy Own has the metric 3 with value 1: give a name and a number"):
        take_numbers({"a": 1, 3: 1}, "strategy Own")


# ---------------------------------------------------------------- failed rounds


def test_a_federation_in_which_everybody_fails_is_no_success(federation, make_model, make_trainer) -> None:
    taken_in: list[Any] = []

    class Watched(FedAvg):
        def aggregate(self, stage, upload) -> None:
            taken_in.append(upload)

    participation = Participation(max_failed_rounds=2)
    trainer = make_trainer(executor=SequentialExecutor(), participation=participation, num_rounds=9)
    message = (
        r"the last 2 rounds failed .*: fewer than 1 clients responded .*; client-00 and 2 more: ValueError: too many"
    )
    with pytest.warns(UserWarning, match="failed in stage"), pytest.raises(TooFewUpdates, match=message):
        trainer.fit(make_model(FailsAlways), federation, Watched())
    assert not taken_in
    assert [row["failed_round"] for row in trainer.run.history] == [1, 1]
    assert (read(trainer)["status"], read(trainer)["num_failed_rounds"]) == ("failed", 2)
    assert read(trainer)["failures"] == {f"client-0{client}": 2 for client in range(5)}


def test_a_federation_that_never_begins_is_no_success(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=SequentialExecutor())
    with (
        pytest.warns(UserWarning, match="before round 0"),
        pytest.raises(TooFewUpdates, match="no round can begin, fewer than 1 clients responded"),
    ):
        trainer.fit(make_model(FailsAlways), federation, FedSheafHN(init_epochs=1, num_neighbors=2))
    assert (read(trainer)["status"], read(trainer)["num_rounds"]) == ("failed", 0)


@pytest.mark.parametrize(("min_clients", "failed"), [(3, 0), (4, 1)])
def test_a_round_with_fewer_updates_than_the_quorum_is_failed(
    min_clients, failed, federation, make_model, make_trainer
) -> None:
    participation = Participation(min_clients=min_clients)
    trainer = make_trainer(executor=SequentialExecutor(), participation=participation, num_rounds=2)
    ends = pytest.raises(TooFewUpdates, match="nothing was learned, all 2 rounds failed: fewer than 4 clients")
    with pytest.warns(UserWarning, match="failed in stage"), ends if failed else nullcontext():
        trainer.fit(make_model(Fails), federation, FedAvg())
    actual = read(trainer)
    assert (actual["status"], actual["result"] == {}) == (("failed", True) if failed else ("finished", False))
    assert [row["failed_round"] for row in trainer.run.history] == [failed] * 2
    start = trainer.run.architectures[0]
    moved = any((model != start[name]).any() for name, model in trainer.run.strategy.models.items())
    assert moved == (not failed)


def test_failed_rounds_are_counted_in_a_row_and_over_a_resume(
    federation, make_model, make_trainer, tmp_path: Path
) -> None:
    participation = Participation(num_clients=1, dropout_probability=0.5, max_failed_rounds=2)
    gone = [not participation.draw(range(5), round_idx, 0)[0] for round_idx in range(60)]
    end = next(i for i in range(1, 60) if gone[i] and gone[i - 1])
    path = tmp_path / "federation/version_0/checkpoints/last.ckpt"
    first = make_trainer(participation=participation, num_rounds=end)
    first.fit(make_model(), federation, Local())
    first.save_checkpoint(path)
    second = make_trainer(participation=participation, num_rounds=60)
    with pytest.raises(TooFewUpdates, match=r"client-0.: dropped out"):
        second.fit(make_model(), federation, Local(), ckpt_path=str(path))
    assert second.run.round_idx == end + 1
    assert second.run.num_failures == {}


def test_new_clients_need_no_quorum(federation, make_model, make_trainer) -> None:
    participation = Participation(held_out_fraction=0.2, min_clients=4)
    actual = make_trainer(participation=participation).fit(make_model(), federation, FedAvg())
    assert "unseen/test/acc" in actual


# ---------------------------------------------------------------- marks


class Overflows(Callback):
    """What two clients send has no finite numbers from round 1 on."""

    def on_upload(self, trainer, stage, payload):
        if trainer.run.round_idx:
            for tensor in payload.parameters.values():
                tensor[:2] = math.inf
        return payload


def test_overflow_is_told_once_counted_and_a_mark(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=Overflows(), num_rounds=4)
    with pytest.warns(UserWarning, match="failed in stage") as warned:
        trainer.fit(make_model(), federation, FedAvg())
    (message,) = (str(each.message) for each in warned if "failed in stage" in str(each.message))
    assert message.startswith("client-00 and 1 other failed in stage 'train' round 1: it sent numbers that are not fin")
    assert message.endswith("they are left out, and failures like it are only counted from now on")
    assert [row.get("num_overflows", 0) for row in trainer.run.history] == [0, 2, 2, 2]
    assert read(trainer)["marks"]["diverged"].endswith("6 updates lost to overflow")


class Lengthens(Callback):
    """Updates of another client in every round are far longer than the others'."""

    def on_upload(self, trainer, stage, payload):
        for tensor in payload.parameters.values():
            tensor[trainer.run.round_idx] *= 1e5
        return payload


def test_the_first_of_many_unusual_updates_is_told_and_all_are_counted(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=Lengthens())
    with pytest.warns(UserWarning, match="median of this exchange") as warned:
        trainer.fit(make_model(), federation, FedAvg(aggregation=CoordinateMedian()))
    (message,) = (str(each.message) for each in warned if "median of this" in str(each.message))
    assert message.startswith("client-00 in round 0: its update is ")
    assert message.endswith("and clients like it are only counted from now on")
    assert read(trainer)["num_unusual_clients"] == 3


def test_a_rising_run_says_so(federation, make_model, make_trainer) -> None:
    trainer = make_trainer()
    trainer.fit(make_model(), federation, FedAvg())
    values = [row["val/acc"] for row in trainer.run.history]
    is_late = values.index(max(values)) == 2
    assert read(trainer)["marks"] == ({"still_rising": "round 2 of 3 is the best"} if is_late else {})
    trainer.run.selection.best_round = 2
    assert result.marks(trainer.run) == {"still_rising": "round 2 of 3 is the best"}
