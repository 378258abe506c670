"""Federations over NVFlare: a server and three sites as processes of their own, over mutual TLS on 127.0.0.1.

What they share is started once; a test waits for jobs of real processes, which takes seconds each.
"""

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("nvflare", reason="needs the extra flare")

import psutil

from fl_lightning.remote.job import SITE_FILE, Parts
from fl_lightning.remote.kits import free_port, provision
from fl_lightning.remote.message import Message
from fl_lightning.remote.submit import Submission, follow, session_of
from fl_lightning.remote.trial import ADMIN, SERVER, Trial
from fl_lightning.run import checkpoint

pytestmark = [pytest.mark.flare, pytest.mark.filterwarnings("default")]  # FLARE's own are not ours

STRATEGIES = {
    "FedAvg": {"num_epochs": 1},
    "FedSheafHN": {"num_epochs": 1, "init_epochs": 2, "num_neighbors": 2, "refresh_every": 2, "hidden_channels": 8},
}


def configuration(folder: Path, strategy: str, num_rounds: int = 3) -> str:
    """A configuration file in a folder."""
    path = folder / f"{strategy}-{num_rounds}.yaml"
    settings = {
        "seed_everything": 5,
        "strategy": {"class_path": strategy, "init_args": STRATEGIES[strategy]},
        "model": {
            "class_path": "ClientModule",
            "init_args": {"net": {"class_path": "fl_lightning.models.GCN", "init_args": {"hidden_channels": 8}}},
        },
        "data": {
            "source": {
                "class_path": "PlantedCommunities",
                "init_args": {"num_nodes": 90, "num_communities": 3, "num_classes": 3, "num_features": 6},
            },
            "partitioner": {"class_path": "GivenPartitioner"},
            "cache_dir": str(folder / "cache"),
        },
        "trainer": {
            "num_rounds": num_rounds,
            "accelerator": "cpu",
            "logger": False,
            "executor": {"class_path": "SequentialExecutor"},
            "default_root_dir": str(folder / "runs"),
            "run_name": strategy,
            "callbacks": [{"class_path": "FederatedCheckpoint", "init_args": {"every_seconds": 0}}],
        },
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("federation")
    with Trial(folder, 3) as trial:
        trial.start()
        yield trial
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]
    assert not left


@pytest.fixture(scope="module")
def session(trial):
    with session_of(trial.admin_kit) as session:
        trial.wait(session)
        yield session


def submission_of(trial: Trial, config: str, name: str) -> Submission:
    return Submission(name=name, config=Parts(["--config", config]).trainer.config, sites=trial.sites)


def assert_as_in_process(config: str, folder: Path, trial: Trial, name: str, assert_same, tmp_path: Path) -> None:
    """The fetched run, and what each site keeps, are those of a run in process."""
    parts = Parts(["--config", config, f"--trainer.default_root_dir={tmp_path / 'local'}"])
    parts.trainer.fit(parts.model, parts.datamodule, parts.strategy)
    local, remote = parts.trainer.state_dict(), checkpoint.read(folder / "checkpoints" / "last.ckpt")
    for part in ("round", "strategy", "history", "selection"):
        assert_same(remote[part], local[part])
    whole = parts.trainer.run.executor.state()
    for client, site in enumerate(trial.sites):
        digest = bytes(remote["clients"]["signals"]["digest"][client].tolist()).hex()
        kept = Message.read((trial.kits / site / "federations" / name / "states" / f"{digest}.state").read_bytes())
        own = whole.rows([client]).named()
        assert own.keys() == kept.tensors.keys()
        assert all(torch.equal(tensor, own[name]) for name, tensor in kept.tensors.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_over_the_network_as_in_process(strategy, trial, session, assert_same, tmp_path) -> None:
    config = configuration(tmp_path, strategy)

    outcome = follow(session, submission_of(trial, config, strategy), tmp_path / "fetched", attempts=1)

    assert (outcome.status, outcome.message) == ("finished", "")
    assert outcome.facts["bytes"]["up"] > 0
    assert_as_in_process(config, outcome.folder, trial, strategy, assert_same, tmp_path)


def test_a_killed_worker_is_resubmitted_and_nothing_changes(trial, session, assert_same, tmp_path) -> None:
    config = configuration(tmp_path, "FedAvg", 20)
    written = trial.kits / SERVER / "federations" / "killed" / "version_0" / "checkpoints" / "last.ckpt"
    killed: list[int] = []

    def kill_once() -> None:
        trial.processes.check()
        if written.exists() and not killed:
            workers = trial.processes.of_job("site-2")
            killed.extend(process.pid for process in workers)
            for process in workers:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    warnings: list[str] = []
    submission = submission_of(trial, config, "killed")
    outcome = follow(session, submission, tmp_path / "fetched", attempts=3, watch=kill_once, warn=warnings.append)

    assert killed
    assert len(warnings) == 1
    assert "submitted again, from its last checkpoint" in warnings[0]
    assert (outcome.status, outcome.message) == ("finished", "")
    assert_as_in_process(config, outcome.folder, trial, "killed", assert_same, tmp_path)


def test_a_site_refuses_a_strategy_that_is_not_on_its_list(trial, session, tmp_path) -> None:
    file = trial.kits / "site-2" / "local" / SITE_FILE
    before = file.read_text()
    file.write_text(yaml.safe_dump({"client": 1, "policy": {"min_examples": 1, "strategies": ["FedAvg"]}}))
    try:
        submission = submission_of(trial, configuration(tmp_path, "FedSheafHN"), "refused")
        outcome = follow(session, submission, tmp_path, attempts=1)
    finally:
        file.write_text(before)

    assert outcome.status == "refused"
    assert "site-2: this site runs FedAvg alone, not FedSheafHN" in outcome.message


def test_certificates_of_another_federation_are_refused(trial, session, tmp_path) -> None:
    port = int(yaml.safe_load((trial.admin_kit / "startup" / "fed_admin.json").read_text())["admin"]["port"])
    foreign = provision(
        tmp_path, name="trial", sites=["site-1"], server=SERVER, port=port, admin=ADMIN, address="127.0.0.1"
    )

    def say_hello(kit: Path | None) -> bytes:
        """What the server says to a client with the certificate of a kit, or without one, that takes any server's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if kit is not None:
            context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
        with (
            suppress(ssl.SSLError, ConnectionError),
            socket.create_connection(("127.0.0.1", port), timeout=30) as line,
            context.wrap_socket(line) as secure,
        ):
            secure.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return secure.recv(8)
        return b""

    assert say_hello(trial.kits / "site-1").startswith(b"HTTP")
    assert say_hello(foreign / "site-1") == b""  # the line is cut after the handshake
    assert say_hello(None) == b""
    with pytest.raises(ValueError, match="cannot be reached, or refuses it"), session_of(foreign / ADMIN, seconds=5):
        pass


def test_a_site_that_does_not_come_and_kits_that_are_none(tmp_path) -> None:
    with pytest.raises(ValueError, match="is no kit of who submits runs"), session_of(tmp_path):
        pass
    kits = provision(
        tmp_path, name="alone", sites=["a"], server=SERVER, port=free_port(), admin=ADMIN, address="127.0.0.1"
    )
    with pytest.raises(ValueError, match="cannot be reached"), session_of(kits / ADMIN, seconds=2):
        pass
