"""Two processes in one folder: each has its run to itself, and nobody writes into a run that is being written."""

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign.command import ERROR
from campaign.configuration import small, write
from campaign.record import Record
from campaign.worker import Worker

ROOT = Path("runs", "small")


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with Worker() as first, Worker() as second:
        yield [first, second]


def command(folder: Path, seed: int, num_rounds: int) -> list[str]:
    config = {**small("FedAvg", num_rounds=num_rounds, logger=True), "seed_everything": seed}
    return ["fit", f"--config={write(config, folder / f'{seed}.yaml')}"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.parametrize("trial", range(3))
def test_runs_that_begin_at_once(workers, tmp_path, trial: int, record: Record) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    together.mkdir()
    for seed, worker in enumerate(workers):
        worker.start(command(together, seed, 6), together)
    assert [worker.wait()["code"] for worker in workers] == [0, 0], (together / "said.txt").read_text()
    alone.mkdir()
    for seed, worker in enumerate(workers):
        assert worker.run(command(alone, seed, 6), alone)["code"] == 0

    folders = [{path.name: path for path in (root / ROOT).iterdir()} for root in (together, alone)]
    assert all(set(actual) == {"version_0", "version_1"} for actual in folders)
    metrics, expected = ([rows(path / "metrics.csv") for path in actual.values()] for actual in folders)
    survived = sorted(metrics, key=str) == sorted(expected, key=str)
    record.count("two runs begun at once", survived=survived)
    assert survived
    assert all([row["round"] for row in table] == list("012345") for table in metrics)


def test_a_run_that_is_being_written_is_not_resumed(workers, tmp_path, record: Record) -> None:
    first, second = workers
    words = command(tmp_path, 0, 10**6)
    words += ["--trainer.callbacks+=FederatedCheckpoint", "--trainer.callbacks.every_seconds=0"]
    first.start(words, tmp_path, kill_after=60)
    last = tmp_path / ROOT / "version_0" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 50
    while not last.exists():
        assert time.monotonic() < deadline, (tmp_path / "said.txt").read_text()
        time.sleep(0.05)
    (tmp_path / "other").mkdir()
    words += [f"--trainer.default_root_dir={tmp_path / 'runs'}", "--ckpt_path=last"]
    response = second.run(words, tmp_path / "other")
    said = (tmp_path / "other" / "said.txt").read_text()
    survived = response["code"] == 2 and said.count(ERROR) == 1 and "is being written by process" in said
    record.count("resumes of a run that is being written", survived=survived)
    assert survived, said
    assert "Traceback" not in said
