"""A client that hangs is left out of its round; the others train as if it were not there."""

import math
import signal
import threading
import time
import warnings
from typing import Any

import pytest
from torch import Tensor

from fl_lightning import ClientModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.executors.time_limit import within
from fl_lightning.models.output import NetOutput
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, Local


def test_what_ends_in_time_is_let_alone() -> None:
    with within(60), within(None):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_it_ends_what_waits_and_what_takes_every_exception_for_its_own() -> None:
    with pytest.raises(TimeoutError, match="it took longer than"), within(0.01):
        time.sleep(600)

    def obstinate() -> None:
        try:
            time.sleep(600)
        except BaseException:
            time.sleep(600)

    with pytest.raises(TimeoutError), within(0.01):
        obstinate()


def test_an_alarm_that_was_set_before_rings_afterward() -> None:
    rung: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 600)
        with pytest.raises(TimeoutError), within(0.01):
            time.sleep(600)
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with within(600):
            pass
        deadline = time.monotonic() + 60
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_an_alarm_that_rings_while_it_is_disarmed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = signal.setitimer

    def late(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return real(*arguments)

    monkeypatch.setattr(signal, "setitimer", late)
    with within(600):
        pass
    with pytest.raises(TimeoutError), within(600):
        signal.raise_signal(signal.SIGALRM)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


class Hangs(ClientModule):
    """Sleeps for the client of 18 nodes, and for all that are computed with it, while it trains."""

    def loss(self, output: NetOutput, batch: Any) -> Tensor:
        if self.training and batch.example_mask.shape[-1] == 18:
            time.sleep(600)
        return super().loss(output, batch)


@pytest.mark.parametrize("strategy", [FedAvg, Local], ids=lambda kind: kind.__name__)
def test_a_client_that_hangs_is_left_out(strategy, federation, make_model, make_trainer, assert_same) -> None:
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_clients_per_group=2)):
        trainer = make_trainer(
            num_rounds=1, executor=executor, precision="64-true", participation=Participation(time_limit_seconds=2)
        )
        with pytest.warns(
            UserWarning, match=r"client-02 failed in stage 'train' round 0: TimeoutError: it took longer"
        ):
            trainer.fit(make_model(Hangs, dropout=0.5), federation, strategy())
        assert trainer.run.history[-1]["num_failures"] == 1
        assert set(trainer.run.num_failures) == {"client-02"}
        states.append(dict(trainer.run.executor.state().parameters))
    assert_same(states[1], states[0], tolerance=1e-9)


def test_the_first_client_may_hang_when_its_code_is_tried(federation, make_model, make_trainer) -> None:
    class AlwaysHangs(ClientModule):
        def loss(self, output: NetOutput, batch: Any) -> Tensor:
            time.sleep(600)
            return super().loss(output, batch)

    trainer = make_trainer(num_rounds=1, participation=Participation(time_limit_seconds=0.2))
    with pytest.warns(UserWarning, match="TimeoutError"), pytest.raises(TooFewUpdates):
        trainer.fit(make_model(AlwaysHangs), federation, FedAvg())


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, 1e300])
def test_limits_are_checked(seconds: float) -> None:
    with pytest.raises(ValueError, match="time_limit_seconds must be"):
        Participation(time_limit_seconds=seconds)


def test_a_limit_that_nothing_could_keep_is_refused(federation, make_model, make_trainer) -> None:
    said = []

    def fit() -> None:
        try:
            trainer = make_trainer(participation=Participation(time_limit_seconds=60))
            trainer.fit(make_model(), federation, FedAvg())
        except ValueError as error:
            said.append(str(error))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()
    assert len(said) == 1
    assert "participation.time_limit_seconds needs the main thread" in said[0]
