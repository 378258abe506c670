import contextlib
import signal
import warnings
from collections.abc import Sequence
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


class Choose(Callback):
    """Decides which round is the best after each round."""

    def __init__(self, best_rounds: Sequence[int]) -> None:
        self.best_rounds = best_rounds

    def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        trainer.run.selection.best_round = self.best_rounds[trainer.run.round_idx]


@pytest.mark.parametrize(
    "best_rounds",
    [(0, 0, 0, 0), (0, 0, 2, 2), (0, 1, 2, 2), (0, 1, 1, 3)],
    ids=["held", "held again", "held after a write", "written at once"],
)
def test_best_is_the_state_of_its_round(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path, best_rounds: tuple[int, ...]
) -> None:
    watch = Watch()
    callbacks = [Choose(best_rounds), FederatedCheckpoint(every_n_rounds=2), watch]
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
    first = make_trainer(num_rounds=2, callbacks=[Choose([0, 0]), FederatedCheckpoint(save_best=False)])
    first.fit(make_model(), federation, FedAvg())
    second = make_trainer(num_rounds=2, callbacks=FederatedCheckpoint())
    with pytest.warns(UserWarning, match=r"round 0 was the best so far, but there is no .*best.ckpt"):
        second.fit(make_model(), federation, FedAvg(), ckpt_path="last")


@pytest.mark.parametrize(
    ("best_rounds", "resumed_from"),
    [((0, 1, 1, 3), 2), ((-1, -1, 2, 2), 2), ((0, 1, 1, 1), 2), ((0, 1, 1, 1), 4)],
    ids=["another was written", "none yet", "not abandoned", "continued"],
)
def test_best_is_of_the_rounds_that_a_run_goes_back_to(
    make_trainer: Any,
    make_model: Any,
    federation: Any,
    tmp_path: Path,
    best_rounds: tuple[int, ...],
    resumed_from: int,
) -> None:
    def fit(num_rounds: int, best_rounds: Sequence[int], ckpt_path: str | None = None) -> None:
        callbacks = [Choose(best_rounds), FederatedCheckpoint(every_n_rounds=1, keep=None)]
        trainer = make_trainer(num_rounds=num_rounds, callbacks=callbacks)
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1), ckpt_path=ckpt_path)

    fit(4, best_rounds)
    before = {name: path.read_bytes() for name, path in files(tmp_path).items()}
    best = best_rounds[resumed_from - 1]
    is_abandoned = best != best_rounds[-1]
    warns = pytest.warns(UserWarning, match=r"best\.ckpt is of rounds that the resumed run has not: it is now")
    with warns if is_abandoned else contextlib.nullcontext():
        fit(5, [best] * 5, ckpt_path=str(files(tmp_path)[f"round={resumed_from:06d}.ckpt"]))
    after = {name: path.read_bytes() for name, path in files(tmp_path).items()}
    assert after.get("best.ckpt.abandoned") == (before["best.ckpt"] if is_abandoned else None)
    assert after.get("best.ckpt") == before.get(f"round={best + 1:06d}.ckpt")


def test_best_of_a_killed_run_may_be_newer_than_last(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    for ckpt_path in (None, "round=000002.ckpt"):
        callbacks = [Choose([0, 1, 1, 3]), FederatedCheckpoint(every_n_rounds=1, keep=None)]
        origin = None if ckpt_path is None else str(files(tmp_path)[ckpt_path])
        trainer = make_trainer(num_rounds=4, callbacks=callbacks)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*best.ckpt")
            trainer.fit(make_model(), federation, FedAvg(num_epochs=1), ckpt_path=origin)
        assert checkpoint.read(files(tmp_path)["best.ckpt"])["round"] == 4
    assert "best.ckpt.abandoned" not in files(tmp_path)


@pytest.mark.filterwarnings("ignore:resumed with other settings")
@pytest.mark.filterwarnings("ignore:round 2 was the best so far")
def test_best_of_the_same_round_with_other_settings_is_set_aside(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    def fit(num_rounds: int, num_epochs: int, ckpt_path: str | None = None) -> None:
        callbacks = [Choose([0, 1, 2, 2, 2]), FederatedCheckpoint(every_n_rounds=1, keep=None)]
        strategy = FedAvg(num_epochs=num_epochs)
        trainer = make_trainer(num_rounds=num_rounds, callbacks=callbacks)
        trainer.fit(make_model(), federation, strategy, ckpt_path=ckpt_path, resume_with_changes=True)

    fit(4, num_epochs=1)
    for num_rounds, num_epochs, origin in ((3, 2, "round=000002.ckpt"), (5, 1, "round=000004.ckpt")):
        assert checkpoint.read(files(tmp_path)["best.ckpt"])["round"] == 3
        with pytest.warns(UserWarning, match="rounds that the resumed run has not"):
            fit(num_rounds, num_epochs, str(files(tmp_path)[origin]))
    assert "best.ckpt" not in files(tmp_path)


def test_nothing_is_resumed_from_what_was_set_aside(tmp_path: Path) -> None:
    for name in ("round=000001.ckpt", "best.ckpt.abandoned"):
        content = {"format_version": checkpoint.FORMAT_VERSION, "round": len(name)}
        checkpoint.write(tmp_path / name, content)
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"continuing from round=000001\.ckpt"):
        assert checkpoint.read_last(tmp_path / "last.ckpt")[0].name == "round=000001.ckpt"


@pytest.mark.parametrize("settings", [{"every_n_rounds": 0}, {"keep": 0}, {"every_seconds": -1.0}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        FederatedCheckpoint(**settings)


def test_misspelled_hook_is_refused(make_trainer: Any, make_model: Any, federation: Any) -> None:
    class Misspelled(Callback):
        def on_round_ended(self) -> None: ...

    with pytest.raises(ValueError, match="on_round_ended, which is no hook: did you mean on_round_end"):
        make_trainer(callbacks=Misspelled()).fit(make_model(), federation, FedAvg())
