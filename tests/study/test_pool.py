"""Worker processes: they stay alive, may be killed, and end with the process that started them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fl_lightning.study import runs
from fl_lightning.study.definition import Study
from fl_lightning.study.pool import Pool, _Worker
from fl_lightning.study.progress import Progress
from fl_lightning.study.runner import Runner
from fl_lightning.study.runs import make_run
from fl_lightning.study.store import Store

PATIENCE = 240.0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)


def test_a_killed_worker_costs_one_try(make_study: Callable[..., Study]) -> None:
    """Kill the worker in the middle of its second run: that run is trained once more, by another worker."""
    study = make_study(tuning=None, methods={"Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}}})
    said: list[str] = []
    workers: set[int] = set()

    def note(line: str) -> None:
        said.append(line)
        workers.update(child.pid for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline()))
        if len(said) == 1:
            (victim,) = workers
            os.kill(victim, signal.SIGSTOP)  # it cannot be done before it is killed
            os.kill(victim, signal.SIGKILL)

    with Pool(1) as pool:
        tally = Runner(study, Store(study.results), say=note).run(pool)
    assert (tally.trained, tally.failed, tally.missing) == (4, {}, 0)
    assert sum("was killed: trying once more" in line for line in said) == 1
    assert len(workers) == 2
    assert not any(psutil.pid_exists(worker) for worker in workers)
    assert not pool.scratch.exists()


def test_a_configuration_that_is_edited_meanwhile_changes_no_run(
    make_study: Callable[..., Study], tmp_path: Path
) -> None:
    study = make_study(tuning=None, methods={"Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}}})
    runs._content.cache_clear()
    run = make_run(study, "Local", "plain", 0, ("", {}), "report")
    (tmp_path / "quickstart.yaml").write_text("nothing: here\n")
    with Pool(1) as pool:
        [(_, result)] = pool.map([(run, "build", (run.arguments,))])
    assert result == {"error": ""}


@pytest.mark.full
def test_a_killed_study_leaves_no_worker_and_goes_on(
    make_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tuning=None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    program = [Path(sys.executable).with_name("fl-train"), "study", "run", str(study.path)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("[1/8] Local on plain, seed 0")
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("spawn_main" in " ".join(child.cmdline()) for child in children)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    assert not list((tmp_path / "scratch").glob("fl-study-*/*"))
    done = len(Store(study.results).records())
    assert 1 <= done < 8
    finished = subprocess.run(program, capture_output=True, text=True, check=True)
    assert f"{8 - done} runs trained, 0 failed, 0 missing" in finished.stdout
    progress = Progress(study, Store(study.results))
    runs = [
        run for method, case in progress.groups(study.methods, study.cases) for run in progress.report(method, case)
    ]
    assert [progress.state(run) for run in runs] == ["done"] * 8
    assert (study.results / "results.csv").read_text().count("\n") == 9


def test_what_is_ready_needs_no_wait() -> None:
    pool, (ours, theirs) = Pool(1), multiprocessing.Pipe()
    process, beat = SimpleNamespace(sentinel=theirs), SimpleNamespace(value=time.monotonic())
    pool._workers = [_Worker(process=process, connection=ours, beat=beat, task="run")]  # type: ignore[arg-type]
    with pool._folder, ours, theirs:
        assert list(pool.finished(0.0)) == []
        theirs.send({"error": ""})
        assert list(pool.finished(0.0)) == [("run", {"error": ""})]
        assert list(pool.finished(0.0)) == []


@pytest.mark.full
def test_a_stopped_worker_is_replaced(make_study: Callable[..., Study]) -> None:
    study = make_study(tuning=None, methods={"Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}}})
    said: list[str] = []

    def note(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            (victim,) = (c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline()))
            victim.suspend()

    with Pool(1, silence_seconds=20) as pool:
        tally = Runner(study, Store(study.results), say=note).run(pool)
    assert (tally.trained, tally.failed, tally.missing) == (4, {}, 0)
    assert sum("was killed: trying once more" in line for line in said) == 1
