"""Runs that are killed, and runs of two processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import federation_process
import pytest
import torch

from fl_lightning.round.payload import Payload
from fl_lightning.run import checkpoint, processes
from fl_lightning.run.processes import shard

SCRIPT = federation_process.__file__
#: What one process does in the rounds of two.
BUSY = {"num_clients": 2, "dropout_probability": 0.2, "straggler_probability": 0.5, "held_out_fraction": 0.2}


def in_processes(*runs: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "PYTHONWARNINGS")}
    return subprocess.run(
        [sys.executable, SCRIPT, json.dumps(runs)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def saved(root: Path, name: str = "last") -> dict[str, Any]:
    state = checkpoint.read(root / "federation" / "version_0" / "checkpoints" / f"{name}.ckpt")
    return {key: state[key] for key in ("round", "strategy", "clients", "history", "selection", "identity")}


# ---------------------------------------------------------------- killed and resumed


SETTINGS = {"strategy": "FedSheafHN", "executor": "StackedExecutor", "participation": BUSY, "num_rounds": 5}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> SimpleNamespace:
    """A whole run, a killed one that another process resumed, and one that was terminated."""
    root = tmp_path_factory.mktemp("ended")
    (root / "whole").mkdir()
    federation_process.train(str(root / "whole"), **SETTINGS)
    killed = in_processes({"root": str(root / "killed"), "signal_in_round": [2, "SIGKILL"], **SETTINGS})
    left = saved(root / "killed")
    others = in_processes(
        {"root": str(root / "killed"), "ckpt_path": "last", **SETTINGS},
        {"root": str(root / "terminated"), "signal_in_round": [2, "SIGTERM"], **SETTINGS},
    )
    return SimpleNamespace(root=root, killed=killed, left=left, others=others)


@pytest.mark.full
def test_a_killed_run_goes_on_as_if_nothing_had_happened(ended, assert_same) -> None:
    assert ended.killed.returncode == -signal.SIGKILL
    assert ended.left["round"] == 2
    assert ended.others.returncode == 0, ended.others.stderr
    assert len(saved(ended.root / "killed")["history"]) == 5
    for name in ("last", "best"):
        assert_same(saved(ended.root / "killed", name), saved(ended.root / "whole", name))


@pytest.mark.full
def test_a_terminated_run_finishes_its_round_saves_and_can_be_continued(ended, assert_same) -> None:
    left = saved(ended.root / "terminated")
    assert ended.others.returncode == 0, ended.others.stderr
    assert left["round"] == len(left["history"]) == 3

    federation_process.train(str(ended.root / "terminated"), ckpt_path="last", **SETTINGS)

    assert_same(saved(ended.root / "terminated"), saved(ended.root / "whole"))


# ---------------------------------------------------------------- two processes

#: Each run, and how far two processes may be from one: the sequential executor computes every client by itself, so its
#: results are equal to the last bit; the stacked one batches a process's clients, which changes the order of sums.
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "sequential": ({"strategy": "FedSheafHN", "executor": "SequentialExecutor", "participation": BUSY}, 0.0),
    "stacked": ({"strategy": "FedSheafHN", "executor": "StackedExecutor", "precision": "64-true"}, 1e-9),
    "lonely": ({"strategy": "FedPer", "participation": {"num_clients": 1}, "num_rounds": 2}, 0.0),
    "failing": ({"strategy": "FedAvg", "failing": True, "num_rounds": 2}, 0.0),
    "local": ({"strategy": "Local", "executor": "SequentialExecutor", "num_rounds": 2}, 0.0),
}


def go_back_to(round_idx: int, run: Path, root: Path) -> None:
    """Copy a run as it was after some rounds."""
    shutil.copytree(run / "federation", root / "federation")
    folder = root / "federation" / "version_0" / "checkpoints"
    (folder / f"round={round_idx:06d}.ckpt").replace(folder / "last.ckpt")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("one")
    for name, (settings, _) in RUNS.items():
        (root / name).mkdir()
        if settings.get("failing"):
            with pytest.warns(
                UserWarning, match="client-03 failed in stage 'train' round .*: RuntimeError: out of mem"
            ):
                federation_process.train(str(root / name), **settings)
        else:
            federation_process.train(str(root / name), **settings)
    return root


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, one_process) -> SimpleNamespace:
    """All runs by two processes, which are started once, and one resumed from the first process's third round."""
    root = tmp_path_factory.mktemp("two")
    runs = [{"root": str(root / name), "devices": 2, **settings} for name, (settings, _) in RUNS.items()]
    go_back_to(3, one_process / "sequential", root / "resumed")
    runs.append({**runs[0], "root": str(root / "resumed"), "ckpt_path": "last"})
    done = in_processes(*runs)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(root=root, stderr=done.stderr)


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_equal_one(name, one_process, two_processes, assert_same) -> None:
    tolerance = RUNS[name][1]
    one, two = saved(one_process / name), saved(two_processes.root / name)

    assert one["round"] == two["round"] == RUNS[name][0].get("num_rounds", 5)
    for part in ("strategy", "clients"):
        assert_same(two[part], one[part], tolerance=tolerance)
    scores = 1e-6 if tolerance else 0.0  # scores are float32
    assert_same(two["history"], one["history"], tolerance=scores)
    assert_same(two["selection"], one["selection"], tolerance=scores)


@pytest.mark.full
def test_one_process_hands_over_to_two(one_process, two_processes, assert_same) -> None:
    assert_same(saved(two_processes.root / "resumed"), saved(one_process / "sequential"))


@pytest.mark.full
def test_two_processes_hand_over_to_one(tmp_path, one_process, two_processes, assert_same) -> None:
    go_back_to(2, two_processes.root / "sequential", tmp_path)

    federation_process.train(str(tmp_path), ckpt_path="last", **RUNS["sequential"][0])

    assert_same(saved(tmp_path), saved(one_process / "sequential"))


def slurm(rank: int) -> dict[str, str]:
    """What ``srun`` tells the process on one of two machines."""
    reported = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "JOB_ID": 15_432, "PROCID": rank, "LOCALID": 0, "NODEID": rank}
    names = {"SLURM_JOB_NAME": "federation", "SLURM_NODELIST": "127.0.0.1"}
    return {f"SLURM_{name}": str(value) for name, value in reported.items()} | names


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "SLURM"])
def test_two_machines_equal_one(launcher, tmp_path, one_process, assert_same) -> None:
    run = {"root": str(tmp_path), "num_nodes": 2, **RUNS["sequential"][0]}
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    machines = []
    for rank in range(2):
        command, reported = [SCRIPT, json.dumps([run])], {}
        if launcher == "torchrun":
            settings = {"nnodes": 2, "node-rank": rank, "nproc-per-node": 1, "master-addr": "127.0.0.1"}
            options = [f"--{name}={value}" for name, value in (settings | {"master-port": port}).items()]
            command = ["-m", "torch.distributed.run", *options, *command]
        else:
            reported = slurm(rank) | {"MASTER_PORT": port}
        reported |= {"OMP_NUM_THREADS": "1"}
        machines.append(
            subprocess.Popen([sys.executable, *command], env=environment | reported, stderr=subprocess.PIPE, text=True)
        )
    try:
        for machine in machines:
            _, said = machine.communicate(timeout=240)
            assert machine.returncode == 0, said
    finally:
        for machine in machines:
            machine.kill()
    assert_same(saved(tmp_path), saved(one_process / "sequential"))


@pytest.mark.full
def test_failures_of_both_processes_are_reported_once(two_processes) -> None:
    lines = [line for line in two_processes.stderr.splitlines() if "client-03 failed in stage 'train' round" in line]
    assert len(lines) == 1  # that it fails alike in the second round is only counted


# ---------------------------------------------------------------- sharding and gathering


def test_shards_are_balanced_and_hold_every_client_once() -> None:
    costs = [30, 1, 17, 4, 4, 22, 9, 13, 2, 8]
    for num_processes in (1, 2, 3, 10):
        shards = shard(costs, num_processes)
        assert sorted(client for clients in shards for client in clients) == list(range(10))
        assert all(clients == tuple(sorted(clients)) and clients for clients in shards)
        loads = [sum(costs[client] for client in clients) for clients in shards]
        assert max(loads) <= max(max(costs), 4 / 3 * sum(costs) / num_processes)


def test_clients_without_work_are_spread_too() -> None:
    assert sorted(len(clients) for clients in shard([0] * 6, 3)) == [2, 2, 2]


def test_more_processes_than_clients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 processes for 2 clients: set trainer\.devices x num_nodes to at most 2"):
        shard([5, 5], 3)


@pytest.fixture
def gather_with(monkeypatch):
    """Gathers a payload with that of an imagined second process."""

    def gather(mine: Payload, other: Payload) -> Payload:
        def all_gather(everyone, packed) -> None:
            everyone[0].copy_(packed)
            everyone[1].zero_()
            start = 0
            for name, tensor in (mine.named() | other.named()).items():
                if tensor.dtype != packed.dtype:
                    continue
                stop = start + tensor[:1].numel()
                if name in other.named():
                    everyone[1][: len(other.clients), start:stop] = other.named()[name].reshape(len(other.clients), -1)
                start = stop

        monkeypatch.setattr(torch, "distributed", types.SimpleNamespace(all_gather=all_gather))
        monkeypatch.setattr(processes, "gather_objects", lambda fabric, item: [item, processes._describe(other)])
        return processes.gather(types.SimpleNamespace(world_size=2, device=torch.device("cpu")), mine)

    return gather


def test_gathering_unequal_shares_sorts_the_clients(gather_with) -> None:
    mine = Payload(clients=(1, 4), parameters={"w": torch.tensor([[1.0], [4.0]])}, num_examples=torch.tensor([10, 40]))
    other = Payload(clients=(2,), parameters={"w": torch.tensor([[2.0]])}, num_examples=torch.tensor([20]))

    both = gather_with(mine, other)

    assert both.clients == (1, 2, 4)
    assert both.parameters["w"].tolist() == [[1.0], [2.0], [4.0]]
    assert both.num_examples.tolist() == [10, 20, 40]


def test_a_process_without_clients_sends_nothing(gather_with) -> None:
    other = Payload(clients=(0, 3), parameters={"w": torch.ones(2, 2)}, num_examples=torch.tensor([1, 2]))
    assert gather_with(Payload(clients=()), other).clients == (0, 3)


def test_state_that_only_one_process_has_is_zero_in_the_other(gather_with) -> None:
    mine = Payload(clients=(0,), extras={"optimizer/started/w": torch.tensor([False])})
    slots = {"optimizer/started/w": torch.tensor([True]), "optimizer/step/w": torch.tensor([3.0])}

    both = gather_with(mine, Payload(clients=(1,), extras=slots))

    assert both.extras["optimizer/step/w"].tolist() == [0.0, 3.0]
    assert both.extras["optimizer/started/w"].tolist() == [False, True]


def test_unlike_shapes_in_two_processes_name_the_tensor(gather_with) -> None:
    mine = Payload(clients=(0,), extras={"embedding": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="processes sent 'embedding' in different forms"):
        gather_with(mine, Payload(clients=(1,), extras={"embedding": torch.ones(1, 4)}))


def test_objects_of_all_processes(monkeypatch) -> None:
    def all_gather_object(everyone, mine) -> None:
        everyone[:] = [mine, {3: "other"}]

    monkeypatch.setattr(torch, "distributed", types.SimpleNamespace(all_gather_object=all_gather_object))
    fabric = types.SimpleNamespace(world_size=2)
    assert processes.gather_objects(fabric, {0: "own"}) == [{0: "own"}, {3: "other"}]
    assert processes.gather_by_client(fabric, {0: "own"}) == {0: "own", 3: "other"}
    assert processes.gather_objects(types.SimpleNamespace(world_size=1), "alone") == ["alone"]
