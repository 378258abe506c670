"""Runs that share a folder, as processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.run import folder, lock
from fl_lightning.run.lock import RunLock
from fl_lightning.strategies import FedAvg

#: Load one file of the package alone, which is quick, and make something with it.
BEGIN = "import runpy, sys; from pathlib import Path; own = runpy.run_path(sys.argv[1]); given = Path(sys.argv[2]); "


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_runs_that_begin_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "version_6").mkdir()
    code = "print('ready', flush=True); input(); print(own['new_run_folder'](given).name)"
    others = [python(code, folder.__file__, tmp_path) for _ in range(6)]
    for other in others:
        assert other.stdout.readline() == "ready\n"
    for other in others:
        other.stdin.write("go\n")
        other.stdin.flush()
    names = [other.communicate(timeout=60)[0].strip() for other in others]
    assert sorted(names) == [f"version_{number}" for number in (10, 11, 12, 7, 8, 9)]
    assert all((tmp_path / name).is_dir() for name in names)


@pytest.fixture
def holder() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that hold locks, by what ``set_client_data`` starts."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(path: Path) -> subprocess.Popen[str]:
    code = "held = own['RunLock'](given); held.acquire(); print('held', flush=True); input()"
    process = python(code, lock.__file__, path)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_that_is_written_is_refused_until_its_process_is_gone(tmp_path: Path, holder) -> None:
    holder.append(hold(tmp_path))
    with pytest.raises(
        ValueError, match=rf"is being written by process {holder[0].pid} on .*: wait until it has ended"
    ):
        RunLock(tmp_path).acquire()
    holder[0].kill()
    holder[0].wait()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == holder[0].pid  # left behind

    own = RunLock(tmp_path)
    own.acquire()

    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    with pytest.raises(ValueError, match=f"is being written by process {os.getpid()}"):
        RunLock(tmp_path).acquire()
    own.release()
    assert not (tmp_path / "run.lock").exists()


def test_a_lock_of_another_machine_is_refused_with_what_to_do(tmp_path: Path) -> None:
    record = {"host": "elsewhere", "pid": 7, "since": "2026-01-01 00:00:00 +0000"}
    (tmp_path / "run.lock").write_text(json.dumps(record))
    with pytest.raises(
        ValueError, match=r"by process 7 on elsewhere .* if it is no longer running, delete .*run\.lock"
    ):
        RunLock(tmp_path).acquire()
    (tmp_path / "run.lock").unlink()
    own = RunLock(tmp_path)
    own.acquire()
    own.release()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    """The file to which one led was overwritten."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=r"run\.lock is a link, which is not followed: delete it"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_second_resume_is_refused_and_changes_nothing(
    federation, make_model, make_trainer, tmp_path: Path, holder
) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(make_model(), federation, FedAvg())
    path = trainer.run.folder / "checkpoints/last.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    holder.append(hold(trainer.run.folder))
    with pytest.raises(ValueError, match="is being written by process"):
        make_trainer(num_rounds=2).fit(make_model(), federation, FedAvg(), ckpt_path="last")
    assert path.read_bytes() == before
    holder[0].kill()
    holder[0].wait()
    again = make_trainer(num_rounds=2)
    again.fit(make_model(), federation, FedAvg(), ckpt_path="last")
    assert len(again.run.history) == 2
    assert not (trainer.run.folder / "run.lock").exists()


def test_a_mistake_leaves_no_folder(federation, make_model, make_trainer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.monitor"):
        make_trainer(monitor="val/f1").fit(make_model(), federation, FedAvg())
    assert not list(tmp_path.glob("federation/*"))


def test_a_folder_of_ones_own(make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = make_trainer(default_root_dir="~/runs", callbacks=FederatedCheckpoint())
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    place = trainer.run.folder.relative_to(tmp_path)
    assert place.parts[0] == "runs"
    trainer.test(make_model(), federation, FedAvg(num_epochs=1), f"~/{place}/checkpoints/last.ckpt")
