"""A run has one holder at a time, who may die, be stopped and come back."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from study_pool import HerePool

from fl_lightning.run.version import digest_of_sources
from fl_lightning.study import leases
from fl_lightning.study.definition import Study
from fl_lightning.study.leases import Leases
from fl_lightning.study.runner import Runner
from fl_lightning.study.store import Store


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, this process seems to be one of another machine."""

    def move() -> None:
        here = leases._here()
        monkeypatch.setattr(leases, "_here", lambda: {**here, "host": "another"})

    return move


def look_until_dead(observer: Leases, progress: Path) -> int:
    end = time.monotonic() + 60
    while (deaths := observer.claim("run", progress)) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return deaths


def test_of_many_claims_one_succeeds(tmp_path: Path) -> None:
    many = [Leases(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda each: each.claim("run", tmp_path / "none"), many))
    assert sorted(claimed, key=str) == [0] + [None] * 7


def test_what_is_given_back_can_be_claimed(tmp_path: Path) -> None:
    with Leases(tmp_path) as first:
        assert first.claim("run", tmp_path / "none") == 0
        assert first.claim("other", tmp_path / "none") == 0
        first.release("run")
        assert Leases(tmp_path).claim("run", tmp_path / "none") == 0
        assert Leases(tmp_path).claim("other", tmp_path / "none") is None
    assert Leases(tmp_path).claim("other", tmp_path / "none") == 0  # given back at the end


def test_a_renewed_lease_is_respected(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    with Leases(tmp_path, silence_seconds=0.3) as first:
        assert first.claim("run", tmp_path / "none") == 0
        elsewhere()
        second, end = Leases(tmp_path, silence_seconds=0.3), time.monotonic() + 0.7
        while time.monotonic() < end:
            assert second.claim("run", tmp_path / "none") is None
            time.sleep(0.02)


def test_a_silent_holder_of_another_machine_loses_its_lease(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    stopped, second = Leases(tmp_path), Leases(tmp_path, silence_seconds=0.1)
    assert stopped.claim("run", tmp_path / "none") == 0
    elsewhere()
    assert look_until_dead(second, tmp_path / "none") == 1
    with stopped.held("run") as is_mine:
        assert not is_mine
    stopped.release("run")  # takes nothing away from the other
    with second.held("run") as is_mine:
        assert is_mine
    second.release("run")
    third = Leases(tmp_path)
    assert third.claim("run", tmp_path / "none") == 0  # by the number of the first
    with stopped.held("run") as is_mine:
        assert not is_mine


def test_a_machine_of_the_same_name_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have numbers of their own, of which this machine knows nothing."""
    here = leases._here()
    holder, observer = Leases(tmp_path), Leases(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "_here", lambda: {**here, "started": "another", "pid": 2**22 + 1})
        assert holder.claim("run", tmp_path / "none") == 0
    assert observer.claim("run", tmp_path / "none") is None


def test_deaths_without_progress_are_counted(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    deaths = []
    for number in range(5):
        holder = Leases(tmp_path)
        deaths.append(holder.claim("run", progress))
        path = holder._mine["run"][0]
        path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {_dead_process()}'))
        if number == 2:
            progress.touch()
    assert deaths == [0, 1, 2, 1, 2]


def _dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_two_runners_train_each_run_once(make_study: Callable[..., Study]) -> None:
    study = make_study()
    trained: list[str] = []
    digest_of_sources()  # once: Python's parser is not for several threads

    def work() -> tuple[int, int]:
        pool = HerePool()
        with pool:
            store = Store(study.results)
            tally = Runner(study, store, say=lambda line: None, look_seconds=0.01).run(pool)
        trained.extend(run.key for run in pool.trained)
        return tally.trained, tally.missing

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        counts = list(threads.map(lambda _: (barrier.wait(), work())[1], range(2)))
    assert sum(number for number, _ in counts) == 12
    assert [missing for _, missing in counts] == [0, 0]
    assert len(trained) == len(set(trained)) == 12
    assert Store(study.results).runs.read_text().count("\n") == 12


def test_the_result_of_a_lost_lease_is_not_recorded(make_study: Callable[..., Study]) -> None:
    """A process that was stopped for long comes back after another has trained its run."""
    study = make_study(tuning=None, seeds=[0], cases={"plain": {}})
    said: list[str] = []

    def work(pool: HerePool, say: Callable[[str], None]) -> int:
        with pool:
            return Runner(study, Store(study.results), methods=["Local"], say=say).run(pool).trained

    def take_over(run: object, number: int) -> bool:
        (lease,) = (study.results / "leases").glob("*.1")
        lease.unlink()
        assert work(HerePool(), lambda line: None) == 1
        return False

    assert work(HerePool(lose=take_over), said.append) == 0
    assert said == ["Local on plain, seed 0 was taken over by another process, since this one showed no sign of life"]
    assert Store(study.results).runs.read_text().count("\n") == 1


def test_a_run_that_kills_its_workers_has_failed(make_study: Callable[..., Study]) -> None:
    study = make_study(tuning=None, seeds=[0], cases={"plain": {}})
    runner = Runner(study, Store(study.results), methods=["Local"], say=lambda line: None)
    (run,) = runner.todo()
    lease = study.results / "leases" / f"{run.key}.1"
    lease.parent.mkdir(parents=True)
    lease.write_text(json.dumps({**leases._here(), "pid": _dead_process(), "deaths": 2, "reached": 0}))
    with HerePool() as pool:
        tally = runner.run(pool)
    assert tally.failed == {"Local on plain, seed 0": "its worker died 3 times (out of memory?)"}
    assert pool.trained == []
    with HerePool() as pool:  # tried again the next time
        assert Runner(study, Store(study.results), methods=["Local"], say=lambda line: None).run(pool).trained == 1
