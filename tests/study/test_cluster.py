"""A study over several jobs: they are killed at random, and the results are those of one process."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fl_lightning.extras import is_installed
from fl_lightning.study import command, runs
from fl_lightning.study.definition import Study
from fl_lightning.study.runner import Runner
from fl_lightning.study.store import Record, Store

PATIENCE = 300.0
#: Without an import, which closes every log handler of the process, pytest's among them.
NEEDS_SUBMITIT = pytest.mark.skipif(not is_installed("cluster"), reason="needs the extra cluster")
PROGRAM = [str(Path(sys.executable).with_name("fl-train")), "study", "run"]
#: What differs between two trainings of a run.
_TIMES = ("seconds", "cpu_seconds", "training_seconds", "resumed")


def results(folder: Path) -> tuple[dict[str, Record], dict[str, Any]]:
    store = Store(folder)
    records = store.records()
    assert store.runs.read_text().count("\n") == len(records)  # nothing twice
    assert not list((folder / "leases").glob("*.[0-9]*"))
    assert not list((folder / "partial").glob("*"))
    kept = {key: {name: each for name, each in one.items() if name not in _TIMES} for key, one in records.items()}
    return kept, store.history()


def test_what_cannot_be(make_study: Callable[..., Study], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_study().path)
    for words, summary in {
        ("--nodes", "2"): "--nodes needs --workers: give one of slurm, local, debug",
        ("--workers", "local", "--hours", "0"): "--hours 0.0 is no time limit: give a positive number",
        ("--workers", "local", "--hours", "inf"): "--hours inf is no time limit: give a positive number",
        ("--workers", "slurm", "--slurm", "gpu"): "'gpu' is not an option of sbatch: give NAME=VALUE",
        ("--workers", "cloud"): "invalid choice: 'cloud' (choose from",
    }.items():
        with pytest.raises(SystemExit):
            command.main(["run", path, *words])
        assert summary in capsys.readouterr().err


def _run(study: Study, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``fl-train study run`` in a process of its own."""
    return subprocess.run([*PROGRAM, str(study.path), *words], capture_output=True, text=True, check=False, **settings)


@pytest.mark.full
@NEEDS_SUBMITIT
def test_without_slurm(make_study: Callable[..., Study]) -> None:
    study = make_study(tuning=None, seeds=[0], cases={"plain": {}})
    ended = _run(study, "--workers", "slurm", env={**os.environ, "PATH": ""})
    assert ended.returncode == 2
    assert '--workers slurm: Could not detect "srun"' in ended.stderr


@pytest.mark.full
@NEEDS_SUBMITIT
def test_a_study_in_one_process(make_study: Callable[..., Study]) -> None:
    study = make_study(tuning=None, seeds=[0], cases={"plain": {}})
    ended = _run(study, "--workers", "debug", "--nodes", "2")
    assert "2 runs trained, 0 failed, 0 missing" in ended.stdout, ended.stderr
    assert len(Store(study.results).records()) == 2


@pytest.mark.full
@NEEDS_SUBMITIT
@pytest.mark.slow
def test_killed_jobs_of_two_drivers_lose_and_double_nothing(
    make_study: Callable[..., Study],
) -> None:
    """Two drivers with two jobs each; three of the four are killed, one in the middle of a long run."""
    settings = {**make_study().settings, "trainer.num_rounds": 200}
    study = make_study(settings=settings, tuning=None, cases={"plain": {}}, seeds=[0, 1, 2, 3])
    program = [*PROGRAM, str(study.path), "--state_seconds", "0"]
    subprocess.run([*program, "--results", "alone"], check=True, capture_output=True)
    cluster = [*program, "--results", "shared", "--workers", "local", "--nodes", "2"]
    drivers = [subprocess.Popen(cluster, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    draw = random.Random(0)
    killed: set[int] = set()
    for number in range(3):
        _wait(lambda done=2 * number: len(Store(Path("shared")).records()) > done)
        _wait(lambda: set(_jobs(drivers)) - killed)
        time.sleep(draw.uniform(0, 2))
        job = draw.choice(sorted(set(_jobs(drivers)) - killed))
        os.kill(job, signal.SIGKILL)
        killed.add(job)
    said = [driver.communicate(timeout=PATIENCE)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], said
    assert sum(text.count("ended early") for text in said) == 3
    assert results(Path("shared")) == results(Path("alone"))
    resumed = [record["key"] for record in Store(Path("shared")).records().values() if record.get("resumed")]
    assert resumed
    runs._content.cache_clear()
    study.results = Path("shared")
    assert not list(Runner(study, Store(study.results)).todo())


def _jobs(drivers: list[subprocess.Popen[str]]) -> list[int]:
    """The processes that work on the study, not those that start and watch them."""
    found = []
    for driver in drivers:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(driver.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "submitit.core._submit" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child.pid)
    return sorted(found)


def _wait(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
