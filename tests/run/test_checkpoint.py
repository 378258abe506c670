import functools
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import Callback, FederatedDataModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.data import GlobalSplit
from fl_lightning.run import checkpoint
from fl_lightning.strategies import SCAFFOLD, FedAvg, FedPer, FedSheafHN

SheafHN = functools.partial(FedSheafHN, num_epochs=2, init_epochs=2, num_neighbors=2, refresh_every=2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "federation" / "version_0" / "checkpoints" / "last.ckpt"


@pytest.fixture
def saved(path, federation, make_model, make_trainer):
    """A run of FedAvg of two rounds and its checkpoint."""
    trainer = make_trainer(num_rounds=2)
    trainer.fit(make_model(), federation, FedAvg())
    trainer.save_checkpoint(path)
    return trainer


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read(tmp_path) -> None:
    content = {"format_version": checkpoint.FORMAT_VERSION, "x": [torch.arange(3), {"a": None, "b": "c", "d": 1.5}]}
    checkpoint.write(tmp_path / "new" / "a.ckpt", content)

    actual = checkpoint.read(tmp_path / "new" / "a.ckpt")

    assert torch.equal(actual["x"][0], torch.arange(3))
    assert actual["x"][1] == content["x"][1]
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("failing", ["torch.save", "os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_the_old_file(failing, tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint.write(path, {"format_version": checkpoint.FORMAT_VERSION, "x": 1})

    def fail(*args: Any) -> None:
        if failing == "torch.save":
            args[1].write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.write(path, {"format_version": checkpoint.FORMAT_VERSION, "x": 2})
    monkeypatch.undo()

    assert checkpoint.read(path)["x"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_state_of_a_run_loads_without_executing_anything(saved, path) -> None:
    content = torch.load(path, weights_only=True)

    assert content["round"] == 2
    assert content["clients"]["clients"] == [0, 1, 2, 3, 4]
    assert content["versions"].keys() >= {"fl-lightning", "torch"}
    assert content["clients"]["signals"]["optimizer/step/head.bias"].tolist() == [6.0] * 5


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(Evil.target),)


def test_code_in_a_file_is_not_executed(tmp_path) -> None:
    Evil.target = tmp_path / "made"
    torch.save({"format_version": checkpoint.FORMAT_VERSION, "x": Evil()}, tmp_path / "evil.ckpt")

    with pytest.raises(ValueError, match=r"(?s)evil\.ckpt cannot be read .* damaged or not a checkpoint"):
        checkpoint.read(tmp_path / "evil.ckpt")

    assert not Evil.target.exists()


def test_random_state_of_all_generators_is_restored() -> None:
    state = checkpoint.random_state()
    np.random.standard_normal()  # leaves half a pair behind
    drawn = [(torch.rand(1).item(), np.random.standard_normal(), np.random.rand(), random.random())]
    checkpoint.restore_random_state(state)
    np.random.standard_normal()
    drawn.append((torch.rand(1).item(), np.random.standard_normal(), np.random.rand(), random.random()))

    assert drawn[0] == drawn[1]


# ---------------------------------------------------------------- refusals


def test_files_that_cannot_be_read_are_refused(saved, path, federation, make_model, make_trainer) -> None:
    def resume(file) -> None:
        make_trainer().fit(make_model(), federation, FedAvg(), ckpt_path=str(file))

    whole = path.read_bytes()
    for name, damaged in {"cut": whole[: len(whole) // 2], "empty": b"", "text": b"rounds: 3"}.items():
        file = path.with_name(f"{name}.ckpt")
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}\.ckpt cannot be read .*it is damaged or not a checkpoint"):
            resume(file)
    with pytest.raises(ValueError, match=r"missing\.ckpt does not exist: give the path of a \.ckpt file"):
        resume(path.with_name("missing.ckpt"))
    content = torch.load(path, weights_only=True)
    for other in (1, 2, 99):
        torch.save({**content, "format_version": other}, path)
        with pytest.raises(
            ValueError, match=rf"has format version {other}, this version .* reads 3: .* start a new training"
        ):
            resume(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match=r"has format version None"):
        resume(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: content.update(round="x"), "round is 'x'"),
        (lambda content: content.update(round=-5), "round is '-5'"),
        (lambda content: content.pop("clients"), "clients is 'None'"),
        (lambda content: content.update(history={}), "history is '{}'"),
        (lambda content: content["clients"].pop("parameters"), "clients: KeyError"),
        (lambda content: content["random"].update(torch=torch.zeros(3, dtype=torch.uint8)), "random: RuntimeError"),
        (lambda content: content.update(selection={"better": 5}), "selection has 'better'"),
        (lambda content: content["random"]["numpy"].update(pos=10**12), "random: OverflowError"),
        (lambda content: content.update(unusual=5), "unusual: TypeError"),
        (lambda content: content.pop("best_server"), "selection: KeyError"),
    ],
)
def test_what_no_run_has_written_is_named(change, named, saved, path, federation, make_model, make_trainer) -> None:
    content = checkpoint.read(path)
    change(content)
    checkpoint.write(path, content)
    with pytest.raises(ValueError, match=rf"last\.ckpt was not written by a run of this package \({named}\)"):
        make_trainer().fit(make_model(), federation, FedAvg(), ckpt_path=str(path))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("split", r"data \(partition hash\): checkpoint '\w+', this run '\w+'"),
        ("strategy", "strategy: checkpoint 'FedAvg', this run 'FedPer'"),
        ("model", r"model: checkpoint 'convs\.0\.weight \(6, 8\).*this run 'convs\.0\.weight \(6, 9\)"),
        ("seed", "seed: checkpoint '0', this run '1'"),
        ("participation", r"training clients: checkpoint '\(0, 1, 2, 3, 4\)', this run '\(0, 1, 2, 3\)'"),
    ],
)
def test_checkpoints_of_another_run_are_refused(
    what, named, saved, path, federation, make_model, make_trainer, tmp_path
) -> None:
    settings = {"seed": {"seed": 1}, "participation": {"participation": Participation(held_out_fraction=0.2)}}
    model = make_model(hidden_channels=9) if what == "model" else make_model()
    strategy = FedPer() if what == "strategy" else FedAvg()
    data = federation
    if what == "split":
        cache = str(tmp_path / "cache")
        splitter = GlobalSplit(train=0.3, val=0.4)
        data = FederatedDataModule(federation.source, federation.partitioner, splitter, root=cache, cache_dir=cache)
    trainer = make_trainer(**settings.get(what, {}))

    with pytest.raises(ValueError, match=rf"belongs to another run; {named}.*Use the configuration it was made with"):
        trainer.fit(model, data, strategy, ckpt_path=str(path))


def test_all_that_differs_is_named(saved, path, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"strategy: .*; seed: "):
        make_trainer(seed=1).fit(make_model(), federation, FedPer(), ckpt_path=str(path))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_any_changed_byte_is_found(share, tmp_path) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint.write(
        path, {"format_version": checkpoint.FORMAT_VERSION, "x": torch.arange(1000), "y": {"z": [1.5, None]}}
    )
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"cannot be read .*it is damaged or not a checkpoint"):
        checkpoint.read(path)


def test_a_file_without_its_checksum_is_refused(tmp_path) -> None:
    torch.save({"format_version": checkpoint.FORMAT_VERSION}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="its checksum is missing"):
        checkpoint.read(tmp_path / "a.ckpt")


def spoil(path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:1000] + bytes([content[1000] ^ 255]) + content[1001:])


def test_a_damaged_last_gives_way_to_the_newest_sound_one(
    path, federation, make_model, make_trainer, assert_same
) -> None:
    def trainer():
        return make_trainer(num_rounds=4, callbacks=FederatedCheckpoint(every_seconds=0, every_n_rounds=1, keep=None))

    whole = trainer()
    expected = whole.fit(make_model(), federation, FedAvg())
    states = whole.state_dict()
    for name in ("last", "best", "round=000004"):
        spoil(path.with_name(f"{name}.ckpt"))
    resumed = trainer()

    with pytest.warns(
        UserWarning, match=r"last\.ckpt cannot be read .*; continuing from round=000003\.ckpt, after 3 rounds"
    ):
        result = resumed.fit(make_model(), federation, FedAvg(), ckpt_path="last")

    assert_same(result, expected)
    assert_same(resumed.state_dict()["clients"], states["clients"])
    spoil(path)
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read"):
        trainer().fit(make_model(), federation, FedAvg(), ckpt_path=str(path))  # asked for by name
    for other in path.parent.glob("*.ckpt"):
        other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read"):
        trainer().fit(make_model(), federation, FedAvg(), ckpt_path="last")


@pytest.mark.parametrize("error", [MemoryError(), PermissionError(13, "Permission denied")])
def test_a_last_that_the_machine_cannot_read_is_not_taken_for_damaged(tmp_path, monkeypatch, error) -> None:
    """An older checkpoint would be continued from."""
    for name in ("last", "round=000001"):
        checkpoint.write(tmp_path / f"{name}.ckpt", {"format_version": checkpoint.FORMAT_VERSION, "round": 1})

    def load(path, **_):
        raise error

    monkeypatch.setattr(checkpoint, "load_saved", load)
    with pytest.raises(type(error)):
        checkpoint.read_last(tmp_path / "last.ckpt")


# ---------------------------------------------------------------- finding and exchanging


def test_last_continues_the_newest_run_in_its_folder(saved, path, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=3)
    trainer.fit(make_model(), federation, FedAvg(), ckpt_path="last")

    assert trainer.run.folder == path.parent.parent
    assert [row["round"] for row in trainer.run.history] == [0, 1, 2]


def test_only_the_newest_run_must_be_readable(path, federation, make_model, make_trainer) -> None:
    for _ in range(2):
        make_trainer(num_rounds=1, callbacks=FederatedCheckpoint()).fit(make_model(), federation, FedAvg())
    newest = path.parents[2] / "version_1/checkpoints/last.ckpt"
    checkpoint.write(path, {**checkpoint.read(path), "format_version": 2})

    def resume(**settings: Any) -> Any:
        trainer = make_trainer(num_rounds=2, **settings)
        trainer.fit(make_model(), federation, FedAvg(num_epochs=2), ckpt_path="last", resume_with_changes=True)
        return trainer

    with pytest.warns(UserWarning, match="resumed with other settings"):
        assert resume().run.folder == newest.parent.parent
    with pytest.raises(ValueError, match=r": version_1 \(seed: .*\); version_0 \(.* has format version 2"):
        resume(seed=1)
    checkpoint.write(newest, {**checkpoint.read(newest), "format_version": 2})
    with pytest.raises(ValueError, match=r"^checkpoint .*version_1/checkpoints/last\.ckpt has format version 2"):
        resume()


@pytest.mark.filterwarnings("ignore:resumed with other settings")
def test_another_monitor_chooses_among_all_rounds(federation, make_model, make_trainer) -> None:
    whole = make_trainer(num_rounds=3, monitor="val/loss")
    expected = whole.fit(make_model(), federation, FedAvg())
    first = make_trainer(num_rounds=2, callbacks=FederatedCheckpoint())
    first.fit(make_model(), federation, FedAvg())
    resumed = make_trainer(num_rounds=3, monitor="val/loss", callbacks=FederatedCheckpoint())
    path = first.run.folder / "checkpoints/last.ckpt"
    with pytest.warns(UserWarning, match="chosen by val/acc; the best round is chosen anew by val/loss, .* from 2 on"):
        result = resumed.fit(make_model(), federation, FedAvg(), str(path), resume_with_changes=True)
    assert resumed.run.selection.best_value == whole.run.selection.best_value
    assert (result["best_round"], result["test/loss"]) == (expected["best_round"], expected["test/loss"])


@pytest.mark.filterwarnings("ignore:resumed with other settings")
def test_another_monitor_is_refused_where_its_server_was_not_kept(path, federation, make_model, make_trainer) -> None:
    participation = Participation(held_out_fraction=0.4)
    first = make_trainer(num_rounds=3, participation=participation)
    first.fit(make_model(), federation, FedAvg())
    first.save_checkpoint(path)
    content = checkpoint.read(path)
    best = content["selection"]["best_round"]
    for row in content["history"]:
        row["val/loss"] = float(row["round"] == best)  # the best by accuracy is the worst by loss
    checkpoint.write(path, content)
    trainer = make_trainer(num_rounds=4, participation=participation, monitor="val/loss")
    with pytest.raises(ValueError, match=rf"server of round {best} for unseen clients, the best by val/acc; by val/lo"):
        trainer.fit(make_model(), federation, FedAvg(), str(path), resume_with_changes=True)


def test_last_without_a_checkpoint_starts_anew_and_says_so(federation, make_model, make_trainer) -> None:
    trainer = make_trainer()
    with pytest.warns(UserWarning, match=r"no last\.ckpt in .*federation: starting from round 0"):
        trainer.fit(make_model(), federation, FedAvg(), ckpt_path="last")
    assert len(trainer.run.history) == 3
    with pytest.raises(ValueError, match=r"there is no best\.ckpt in .*: train with default_callbacks, or Federated"):
        make_trainer().fit(make_model(), federation, FedAvg(), ckpt_path="best")
    with pytest.raises(ValueError, match=r"there is no best\.ckpt in .*: train first, or give a path"):
        make_trainer(run_name="another").fit(make_model(), federation, FedAvg(), ckpt_path="best")


def test_validation_and_test_repeat_the_metrics_of_the_round(saved, path, federation, make_model, make_trainer) -> None:
    expected = saved.run.history[-1]
    for verb in ("validate", "test"):
        actual = getattr(make_trainer(), verb)(make_model(), federation, FedAvg(), str(path))
        assert len(actual) == 8  # of the mixed model; the trained ones have ended with their round
        assert actual == {name: expected[name] for name in actual}
        assert {f"trained/{name}" for name in actual} <= expected.keys()


def test_a_moved_checkpoint_is_evaluated_without_a_new_version(
    saved, path, federation, make_model, make_trainer, tmp_path
) -> None:
    moved = path.rename(tmp_path / "moved.ckpt")
    trainer = make_trainer()
    trainer.test(make_model(), federation, FedAvg(), str(moved))
    assert trainer.run.folder == tmp_path
    assert [folder.name for folder in path.parents[2].iterdir()] == ["version_0"]
    trainer.fit(make_model(), federation, FedAvg(), str(moved))
    assert trainer.run.folder == path.parents[2] / "version_1"


def test_a_finished_run_that_is_resumed_trains_no_more(saved, path, federation, make_model, make_trainer, assert_same):
    trainer = make_trainer(num_rounds=2)
    result = trainer.fit(make_model(), federation, FedAvg(), ckpt_path=str(path))
    assert_same(result, saved.run.selection.result)
    assert_same(trainer.state_dict()["clients"], saved.state_dict()["clients"])


@pytest.mark.parametrize("algorithm", [FedPer, SheafHN], ids=["FedPer", "FedSheafHN"])
def test_new_clients_join_a_server_that_was_chosen_before_the_resume(
    algorithm, path, federation, make_model, make_trainer, assert_same
) -> None:
    def trainer():
        participation = Participation(held_out_fraction=0.4)
        return make_trainer(
            num_rounds=4,
            participation=participation,
            monitor="val/loss",
            callbacks=SaveAt(3, path),
        )

    expected = trainer().fit(make_model(), federation, algorithm())
    assert expected["best_round"] < 3

    assert_same(trainer().fit(make_model(), federation, algorithm(), ckpt_path=str(path)), expected)


def test_models_after_new_clients_have_joined_are_those_of_the_last_round(federation, make_model, make_trainer) -> None:
    """They had the server of the best round with the heads of the last one."""
    trainer = make_trainer(num_rounds=6, participation=Participation(held_out_fraction=0.4), monitor="val/loss")
    result = trainer.fit(make_model(optimizer=functools.partial(torch.optim.SGD, lr=3.0)), federation, FedPer())
    assert result["best_round"] < 5
    with pytest.warns(UserWarning, match="models of the last round"):
        actual = trainer.validate()
    assert actual["val/loss"] == pytest.approx(trainer.run.history[-1]["val/loss"])


@pytest.mark.parametrize("algorithm", [FedPer, SheafHN], ids=["FedPer", "FedSheafHN"])
@pytest.mark.parametrize(
    ("writer", "reader"), [(StackedExecutor, SequentialExecutor), (SequentialExecutor, StackedExecutor)]
)
def test_executors_exchange_checkpoints(
    algorithm, writer, reader, path, federation, make_model, make_trainer, assert_same
) -> None:
    def trainer(executor, num_rounds):
        participation = Participation(num_clients=3, straggler_probability=0.5)
        return make_trainer(
            executor=executor(), num_rounds=num_rounds, precision="64-true", participation=participation
        )

    whole, first, second = trainer(reader, 4), trainer(writer, 2), trainer(reader, 4)
    expected = whole.fit(make_model(), federation, algorithm())
    first.callbacks = [SaveAt(2, path)]
    first.num_rounds = 4
    first.fit(make_model(), federation, algorithm())

    result = second.fit(make_model(), federation, algorithm(), ckpt_path=str(path))

    assert_same(second.state_dict()["clients"], whole.state_dict()["clients"], tolerance=1e-9)
    assert_same(second.run.strategy.state_dict(), whole.run.strategy.state_dict(), tolerance=1e-9)
    assert_same(result, expected, tolerance=1e-6)


class SaveAt(Callback):
    """Saves once, and counts the rounds that it has seen."""

    def __init__(self, round_idx: int, path) -> None:
        self.round_idx, self.path, self.rounds = round_idx, path, 0

    def on_round_end(self, trainer, metrics) -> None:
        self.rounds += 1
        metrics["rounds_seen"] = self.rounds

    def on_checkpoint_point(self, trainer) -> None:
        if trainer.run.round_idx == self.round_idx:
            trainer.save_checkpoint(self.path)

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state) -> None:
        self.rounds = state["rounds"]


def test_callbacks_and_history_continue(path, federation, make_model, make_trainer) -> None:
    make_trainer(callbacks=SaveAt(2, path)).fit(make_model(), federation, FedAvg())
    resumed = make_trainer(num_rounds=4, callbacks=SaveAt(99, path))

    resumed.fit(make_model(), federation, FedAvg(), ckpt_path=str(path))

    assert [row["rounds_seen"] for row in resumed.run.history] == [1, 2, 3, 4]
    assert [row["round"] for row in resumed.run.history] == [0, 1, 2, 3]


def test_an_interruption_while_a_checkpoint_is_written_is_an_interruption(tmp_path, monkeypatch) -> None:
    def interrupted(content: Any, file: Any) -> None:
        writer = torch._C.PyTorchFileWriter(file, True)
        monkeypatch.setattr(file, "file", Interrupted())
        writer.write_record("x", b"1" * 2**20, 2**20)
        writer.write_end_of_file()

    class Interrupted:
        def write(self, data: bytes) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(tmp_path / "a.ckpt", {"x": torch.zeros(3)})
    assert not list(tmp_path.glob("a.ckpt"))


def test_a_round_after_a_resume_in_which_nobody_trains_scores_the_same_models(
    federation, make_model, make_trainer, path, monkeypatch, assert_same
) -> None:
    monkeypatch.setattr(
        Participation, "draw", lambda self, clients, i, seed: ({}, clients) if i == 1 else ({0: 1.0}, ())
    )

    def trainer(rounds: int) -> Any:
        return make_trainer(num_rounds=rounds, participation=Participation(max_failed_rounds=3))

    whole = trainer(3)
    whole.fit(make_model(), federation, SCAFFOLD())
    first = trainer(1)
    first.fit(make_model(), federation, SCAFFOLD())
    first.save_checkpoint(path)
    resumed = trainer(3)
    resumed.fit(make_model(), federation, SCAFFOLD(), ckpt_path=str(path))
    rows = [[{**row, "seconds": 0} for row in run.run.history] for run in (resumed, whole)]
    assert "trained/val/acc" in rows[1][1]
    assert_same(*rows)
