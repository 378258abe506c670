import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import Callback
from fl_lightning.callbacks import CommunicationLedger, FederatedCheckpoint
from fl_lightning.run import checkpoint
from fl_lightning.strategies import FedAvg, FedSheafHN


class Interrupt(Callback):
    """A client output arrives in a round, or the process dies in it."""

    def __init__(self, round_idx: int, *, dies: bool = False) -> None:
        self.round_idx = round_idx
        self.dies = dies

    def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.run.round_idx == self.round_idx:
            if self.dies:
                raise KeyboardInterrupt
            trainer.run.interruption.received = signal.SIGTERM


class Watch(Callback):
    """Notes the files there are, and a copy of the state, after each round."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.models: list[dict[str, torch.Tensor]] = []

    def on_checkpoint_point(self, trainer: Any) -> None:
        self.names.append(sorted(path.name for path in (trainer.run.folder / "checkpoints").glob("*")))
        self.models.append({name: tensor.clone() for name, tensor in trainer.run.strategy.models.items()})


def files(tmp_path: Path, version: int = 0) -> dict[str, Path]:
    return {path.name: path for path in (tmp_path / f"federation/version_{version}/checkpoints").iterdir()}


def test_short_run_writes_once_at_the_end(make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path) -> None:
    watch = Watch()
    make_trainer(callbacks=[FederatedCheckpoint(), watch]).fit(make_model(), federation, FedAvg())
    assert watch.names == [[], [], ["best.ckpt", "last.ckpt"]]


def test_zero_seconds_writes_after_every_round(make_trainer: Any, make_model: Any, federation: Any) -> None:
    watch = Watch()
    make_trainer(callbacks=[FederatedCheckpoint(every_seconds=0), watch]).fit(make_model(), federation, FedAvg())
    assert watch.names == [["best.ckpt", "last.ckpt"]] * 3


def test_the_newest_periodic_files_are_kept(make_trainer: Any, make_model: Any, federation: Any) -> None:
    watch = Watch()
    callback = FederatedCheckpoint(every_n_rounds=2, keep=2, save_last=False, save_best=False)
    make_trainer(num_rounds=7, callbacks=[callback, watch]).fit(make_model(), federation, FedAvg())
    names = [f"round={number:06d}.ckpt" for number in (2, 4, 6)]
    assert watch.names == [[], names[:1], names[:1], names[:2], names[:2], names[1:], names[1:]]


def test_files_that_take_long_are_written_less_often(
    make_trainer: Any, make_model: Any, federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(Callback):
        def __init__(self) -> None:
            self.now = 0.0
            self.writes = 0
            self.writes_by_round: list[int] = []

        def on_round_start(self, trainer: Any) -> None:
            self.now += 10.0
            self.writes_by_round.append(self.writes)

        def write(self, path: Path, content: Any) -> None:
            self.now += 0.5
            self.writes += 1

    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    monkeypatch.setattr(checkpoint, "write", clock.write)
    callback = FederatedCheckpoint(every_seconds=10, save_best=False)  # then 40 times 0.5 s
    make_trainer(num_rounds=7, callbacks=[clock, callback]).fit(make_model(), federation, FedAvg())
    assert [*clock.writes_by_round, clock.writes] == [0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(
    "best_rounds",
    [(0, 0, 0, 0), (0, 0, 2, 2), (0, 1, 2, 2), (0, 1, 1, 3)],
    ids=["held", "held again", "held after a write", "written at once"],
)
def test_best_is_the_state_of_its_round(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path, best_rounds: tuple[int, ...]
) -> None:
    class Choose(Callback):
        def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
            trainer.run.selection.best_round = best_rounds[trainer.run.round_idx]

    watch = Watch()
    callbacks = [Choose(), FederatedCheckpoint(every_n_rounds=2), watch]
    make_trainer(num_rounds=4, callbacks=callbacks).fit(make_model(), federation, FedAvg())
    best = best_rounds[-1]
    saved = checkpoint.read(files(tmp_path)["best.ckpt"])
    assert saved["round"] == len(saved["history"]) == best + 1
    for name, tensor in saved["strategy"]["models"].items():
        assert torch.equal(tensor, watch.models[best][name])


@pytest.mark.parametrize("dies", [False, True])
def test_interrupted_and_resumed_equals_uninterrupted(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path, assert_same: Any, dies: bool
) -> None:
    def run(*others: Callback, ckpt_path: str | None = None, run_name: str) -> None:
        callbacks = [CommunicationLedger(), *others, FederatedCheckpoint(every_n_rounds=2)]
        trainer = make_trainer(num_rounds=6, callbacks=callbacks, run_name=run_name)
        trainer.fit(make_model(), federation, FedSheafHN(init_epochs=2, num_neighbors=2), ckpt_path=ckpt_path)

    run(run_name="whole")
    if dies:
        with pytest.raises(KeyboardInterrupt):
            run(Interrupt(3, dies=True), run_name="broken")
    else:
        run(Interrupt(2), run_name="broken")
    broken = tmp_path / "broken/version_0/checkpoints"
    assert checkpoint.read(broken / "last.ckpt")["round"] == (2 if dies else 3)
    run(ckpt_path="last", run_name="broken")
    whole = tmp_path / "whole/version_0/checkpoints"
    assert {path.name for path in broken.iterdir()} == {path.name for path in whole.iterdir()}
    for path in whole.iterdir():
        state, expected = checkpoint.read(broken / path.name), checkpoint.read(path)
        for one in (state, expected):
            one["callbacks"].pop("Interrupt", None)
        assert_same(state, expected)


def test_missing_best_file_is_said(make_trainer: Any, make_model: Any, federation: Any) -> None:
    first = make_trainer(num_rounds=1, callbacks=FederatedCheckpoint(save_best=False))
    first.fit(make_model(), federation, FedAvg())
    second = make_trainer(num_rounds=1, callbacks=FederatedCheckpoint())
    with pytest.warns(UserWarning, match=r"round 0 was the best so far, but there is no .*best.ckpt"):
        second.fit(make_model(), federation, FedAvg(), ckpt_path="last")


@pytest.mark.parametrize("settings", [{"every_n_rounds": 0}, {"keep": 0}, {"every_seconds": -1.0}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        FederatedCheckpoint(**settings)


def test_misspelled_hook_is_refused(make_trainer: Any, make_model: Any, federation: Any) -> None:
    class Misspelled(Callback):
        def on_round_ended(self) -> None: ...

    with pytest.raises(ValueError, match="on_round_ended, which is no hook: did you mean on_round_end"):
        make_trainer(callbacks=Misspelled()).fit(make_model(), federation, FedAvg())
