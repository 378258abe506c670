"""Runs killed at a random moment and continued end as the ones that nobody killed, bit for bit."""

import csv
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from campaign.configuration import NAMES, small, write
from campaign.record import Record
from campaign.worker import Worker

from fl_lightning.run import checkpoint

NUM_ROUNDS = 12
NUM_KILLS = 60
EXECUTORS = ("StackedExecutor", "SequentialExecutor")
ROOT = Path("runs", "small")


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Two processes that runs are forked from."""
    with Worker() as first, Worker() as second:
        yield [first, second]


def command(name: str, executor: str, folder: Path) -> list[str]:
    """A run that writes a checkpoint after every round."""
    participation = {"num_clients": 3, "dropout_probability": 0.2, "straggler_probability": 0.5}
    config = small(
        name,
        num_rounds=NUM_ROUNDS,
        executor={"class_path": executor},
        participation={"class_path": "Participation", "init_args": participation},
        callbacks=[{"class_path": "FederatedCheckpoint", "init_args": {"every_seconds": 0}}],
        logger=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return ["fit", f"--config={write(config, folder / 'config.yaml')}"]


def outcome(folder: Path) -> dict[str, Any]:
    """What the newest run in a folder came to."""
    path = max((folder / ROOT).glob("version_*/checkpoints/last.ckpt"))
    state = checkpoint.read(path)
    with (path.parents[1] / "metrics.csv").open() as file:
        rows = [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]
    kept = ("round", "strategy", "clients", "history", "selection", "num_failures", "random")
    return {**{name: state[name] for name in kept}, "rows": rows}


def kill_and_resume(
    worker: Worker, name: str, executor: str, draw: random.Random, folder: Path, assert_same: Callable[..., None]
) -> str:
    """Kill a run, continue it, compare it with one that was let alone; what is wrong, empty if nothing is."""
    alone, killed = folder / f"{name}-{executor}", folder / f"{name}-{executor}-{draw.random()}"
    if not alone.exists():
        response = worker.run(command(name, executor, alone), alone)
        assert response["code"] == 0, (alone / "said.txt").read_text()
        (alone / "seconds").write_text(str(response["seconds"]))
    moment = draw.uniform(0, float((alone / "seconds").read_text()))
    words = command(name, executor, killed)
    first = worker.run(words, killed, kill_after=moment)
    second = worker.run([*words, "--ckpt_path=last"], killed)
    said = f"{name}, {executor}, killed after {moment:.3f} s ({first}): "
    if second["code"]:
        return said + (killed / "said.txt").read_text()
    try:
        assert_same(outcome(killed), outcome(alone))
    except AssertionError as error:
        return f"{said}{error}"
    return ""


def campaign(
    workers: list[Worker],
    trials: Sequence[int],
    seed: int,
    folder: Path,
    record: Record,
    assert_same: Callable[..., None],
) -> list[str]:
    """Kill some of NUM_KILLS runs, of every strategy in turn, one in each worker at a time; what is wrong."""
    cases = list(itertools.islice(itertools.cycle(itertools.product(NAMES, EXECUTORS)), NUM_KILLS))
    random.Random(seed).shuffle(cases)

    def share(first: int) -> list[str]:
        faults = []
        for trial in trials[first :: len(workers)]:
            name, executor = cases[trial]
            draw = random.Random(f"{seed} {trial}")
            fault = kill_and_resume(workers[first], name, executor, draw, folder / str(first), assert_same)
            record.count("kills", survived=not fault)
            faults += [f"seed {seed}, trial {trial}: {fault}"] if fault else []
        return faults

    with ThreadPoolExecutor(len(workers)) as pool:
        return [fault for faults in pool.map(share, range(len(workers))) for fault in faults]


def test_a_killed_run_goes_on(workers, seed, tmp_path, record: Record, assert_same) -> None:
    assert not campaign(workers, range(2), seed, tmp_path, record, assert_same)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_KILLS, 10))
def test_runs_killed_at_any_moment_go_on(workers, seed, tmp_path, record: Record, assert_same, first: int) -> None:
    assert not campaign(workers, range(first, first + 10), seed + 1, tmp_path, record, assert_same)
