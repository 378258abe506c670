"""Federations over NVFlare: a server and three sites as processes of their own, over mutual TLS on 127.0.0.1.

What they share is started once; a test waits for jobs of real processes, which take some 20 seconds each. Where the
tests are shared out over several workers, each worker that gets some of these has a server and ports of its own.
"""

import json
import os
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("nvflare", reason="needs the extra flare")

import held_client
import psutil
from nvflare.fuel.flare_api.api_spec import AuthorizationError, InvalidJobDefinition
from task_data import graphs_of
from torch_geometric.data import Data

from fl_lightning.remote import LoopbackChannel, Message, federate
from fl_lightning.remote.job import SITE_FILE, Parts, open_site
from fl_lightning.remote.kits import free_port, provision
from fl_lightning.remote.submit import Outcome, Submission, follow, session_of
from fl_lightning.remote.trial import ADMIN, SERVER, Trial
from fl_lightning.run import checkpoint

pytestmark = [pytest.mark.full, pytest.mark.flare, pytest.mark.filterwarnings("default")]  # FLARE's own are not ours

STRATEGIES = {
    "FedAvg": {"num_epochs": 1},
    "FedSheafHN": {"num_epochs": 1, "init_epochs": 2, "num_neighbors": 2, "refresh_every": 2, "hidden_channels": 8},
    "FedProx": {"num_epochs": 1},
}
#: Of the sites: none of them is asked for anything else but in one test.
ALLOWED = ["FedAvg", "FedSheafHN"]
#: A class of their owners' own.
OWN = ["held_client.HeldClient"]
#: Far more than anything here needs on a busy machine.
PATIENCE = 600


def data_settings(folder: Path) -> dict[str, Any]:
    """The data, of which each site holds a client."""
    return {
        "source": {
            "class_path": "PlantedCommunities",
            "init_args": {"num_nodes": 90, "num_communities": 3, "num_classes": 3, "num_features": 6},
        },
        "partitioner": {"class_path": "GivenPartitioner"},
        "cache_dir": str(folder / "cache"),
    }


def configuration(folder: Path, strategy: str, client: str = "ClientModule", net: str = "GCN") -> str:
    """A configuration file in a folder."""
    path = folder / f"{strategy}.yaml"
    settings = {
        "seed_everything": 5,
        "strategy": {"class_path": strategy, "init_args": STRATEGIES[strategy]},
        "model": {
            "class_path": client,
            "init_args": {"net": {"class_path": f"fl_lightning.models.{net}", "init_args": {"hidden_channels": 8}}},
        },
        "data": data_settings(folder),
        "trainer": {
            "num_rounds": 3,
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
def held_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held") / "process"


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory, held_file: Path) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("federation")
    with Trial(folder, 3, seconds=PATIENCE) as trial, pytest.MonkeyPatch.context() as patch:
        trial.give(data_settings(folder), OWN, strategies=ALLOWED)
        own = str(Path(held_client.__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")])))
        patch.setenv(held_client.HELD_FILE, str(held_file))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))  # where FLARE leaves jobs that it refuses
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
    with session_of(trial.admin_kit, seconds=PATIENCE) as session:
        trial.wait(session)
        yield session


def site_file(trial: Trial, site: str) -> Path:
    return trial.kits / site / "local" / SITE_FILE


@contextmanager
def sites_with_own_graphs(trial: Trial, folder: Path) -> Iterator[None]:
    """Sites with graphs in a file, for a while: each with features and, the last, with more classes of its own."""
    for client, (site, graphs) in enumerate(zip(trial.sites, graphs_of(), strict=True)):
        path, width = folder / f"{site}.pt", 3 - client
        own = [
            Data(x=graph.x[:, :width], edge_index=graph.edge_index, y=graph.y + (client == 2 and index % 3 == 0))
            for index, graph in enumerate(graphs)
        ]
        torch.save(own, path)
        settings = {
            "own": ["features", "outputs"],
            "data": {
                "source": {"class_path": "GraphSetFile", "init_args": {"path": str(path)}},
                "partitioner": {"class_path": "RandomPartitioner", "init_args": {"num_clients": 1}},
                "splitter": {"class_path": "StratifiedSplit", "init_args": {"train": 0.5, "val": 0.25}},
                "batch_size": 4,
            },
            "policy": {"min_examples": 1},
        }
        site_file(trial, site).write_text(yaml.safe_dump(settings))
    try:
        yield
    finally:
        trial.give(data_settings(trial.folder), OWN, strategies=ALLOWED)


@contextmanager
def sites_with(trial: Trial, **policy: Any) -> Iterator[None]:
    """Sites that have a policy for a while."""
    trial.give(data_settings(trial.folder), OWN, **policy)
    try:
        yield
    finally:
        trial.give(data_settings(trial.folder), OWN, strategies=ALLOWED)


def run(
    trial: Trial,
    session: Any,
    config: str,
    name: str,
    folder: Path,
    *,
    watch: Callable[[], None] = lambda: None,
    warnings: list[str] | None = None,
    **settings: Any,
) -> Outcome:
    """A run over the network, which ends sooner or later."""
    deadline = time.monotonic() + PATIENCE

    def look() -> None:
        trial.processes.check()
        watch()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} was not done in {PATIENCE} seconds")

    whole = Parts(["--config", config]).trainer.config
    submission = Submission.of_config(whole, name=name, sites=trial.sites, timeout_seconds=PATIENCE, **settings)
    reported = [] if warnings is None else warnings
    return follow(session, submission, folder, attempts=1 if warnings is None else 3, watch=look, warn=reported.append)


def assert_same_run(remote: dict[str, Any], trainer: Any, assert_same) -> None:
    """A fetched run is that of a trainer of this process."""
    local = trainer.state_dict()
    for part in ("round", "strategy", "history", "selection"):
        assert_same(remote[part], local[part])


def assert_same_state(trial: Trial, name: str, remote: dict[str, Any], client: int, own: dict[str, Any]) -> None:
    """What a site keeps is the state of a client of this process."""
    digest = bytes(remote["clients"]["signals"]["digest"][client].tolist()).hex()
    folder = trial.kits / trial.sites[client] / "_federations" / name / "states"
    kept = Message.read((folder / f"{digest}.state").read_bytes())
    assert own.keys() == kept.tensors.keys()
    assert all(torch.equal(tensor, own[key]) for key, tensor in kept.tensors.items())


def assert_as_in_process(trial: Trial, config: str, folder: Path, name: str, assert_same, tmp_path: Path) -> None:
    """The fetched run, and what each site keeps, are those of a run in process."""
    parts = Parts(["--config", config, f"--trainer.default_root_dir={tmp_path / 'local'}"])
    parts.trainer.fit(parts.model, parts.datamodule, parts.strategy)
    remote = checkpoint.read(folder / "checkpoints" / "last.ckpt")
    assert_same_run(remote, parts.trainer, assert_same)
    whole = parts.trainer.run.executor.state()
    for client in range(len(trial.sites)):
        assert_same_state(trial, name, remote, client, whole.rows([client]).named())


def test_over_the_network_as_in_process(trial, session, assert_same, tmp_path) -> None:
    config = configuration(tmp_path, "FedAvg")

    outcome = run(trial, session, config, "average", tmp_path / "fetched", predict=True)

    assert (outcome.status, outcome.message) == ("finished", "")
    assert outcome.facts["bytes"]["up"] > 0
    assert_as_in_process(trial, config, outcome.folder, "average", assert_same, tmp_path)
    for site in trial.sites:
        written = (trial.kits / site / "_federations" / "average" / "predictions.csv").read_text().splitlines()
        header = "client,node,split,label,prediction,probability_0,probability_1,probability_2"
        assert (written[0], len(written)) == (header, 31)
    assert not list((trial.kits / SERVER).rglob("predictions*"))


def test_a_killed_worker_is_resubmitted_and_nothing_changes(trial, session, held_file, assert_same, tmp_path) -> None:
    """FedSheafHN, one of whose workers is killed while it trains in the second round."""
    config = configuration(tmp_path, "FedSheafHN", "held_client.HeldClient")
    killed: list[int] = []

    def kill_once() -> None:
        if held_file.exists() and not killed:
            killed.append(int(held_file.read_text()))
            psutil.Process(killed[0]).kill()

    warnings: list[str] = []
    outcome = run(trial, session, config, "killed", tmp_path / "fetched", watch=kill_once, warnings=warnings)

    assert killed
    assert len(warnings) == 1
    assert "submitted again, from its last checkpoint" in warnings[0]
    assert (outcome.status, outcome.message) == ("finished", "")
    assert_as_in_process(trial, config, outcome.folder, "killed", assert_same, tmp_path)


def test_secure_sums_of_filtered_updates_are_those_of_the_loopback(trial, session, assert_same, tmp_path) -> None:
    config = configuration(tmp_path, "FedAvg")
    policy = {
        "secure_only": True,
        "max_seconds": 300.0,
        "filters": [{"class_path": "TopK", "init_args": {"fraction": 0.5}}],
    }
    with sites_with(trial, **policy):
        outcome = run(trial, session, config, "secure", tmp_path / "fetched", secure=True)
        job = Submission.of_config(Path(config).read_text(), name="secure", sites=trial.sites, secure=True).job
        sites = [open_site(job, site_file(trial, site), tmp_path / site) for site in trial.sites]

    parts = Parts(["--config", config, f"--trainer.default_root_dir={tmp_path / 'local'}"])
    data = federate(parts.trainer, LoopbackChannel(sites, trial.sites), parts.strategy, secure=True)
    parts.trainer.fit(parts.model, data, parts.strategy)
    assert (outcome.status, outcome.message) == ("finished", "")
    remote = checkpoint.read(outcome.folder / "checkpoints" / "last.ckpt")
    assert_same_run(remote, parts.trainer, assert_same)
    for client, site in enumerate(sites):
        assert_same_state(trial, "secure", remote, client, site.member.executor.state().named())


def test_graphs_with_features_and_classes_of_their_own(trial, session, assert_same, tmp_path) -> None:
    """The layers for these stay at their sites; all else is what the same sites come to in one process."""
    config = configuration(tmp_path, "FedAvg", net="GIN")
    with sites_with_own_graphs(trial, tmp_path):
        outcome = run(trial, session, config, "own", tmp_path / "fetched", predict=True)
        job = Submission.of_config(Path(config).read_text(), name="own", sites=trial.sites).job
        sites = [open_site(job, site_file(trial, site), tmp_path / site, site) for site in trial.sites]

    assert (outcome.status, outcome.message) == ("finished", "")
    parts = Parts(["--config", config, f"--trainer.default_root_dir={tmp_path / 'local'}"])
    data = federate(parts.trainer, LoopbackChannel(sites, trial.sites), parts.strategy)
    with pytest.warns(UserWarning, match="features and outputs of their own, so that these parameters are kept local"):
        parts.trainer.fit(parts.model, data, parts.strategy)
    remote = checkpoint.read(outcome.folder / "checkpoints" / "last.ckpt")
    assert_same_run(remote, parts.trainer, assert_same)
    own = {"features.weight", "features.bias", "head.weight", "head.bias"}
    assert own == set(parts.model.own_layers)
    for client, site in enumerate(sites):
        state = site.member.executor.state().named()
        assert own <= {name.removeprefix("p/") for name in state}
        assert_same_state(trial, "own", remote, client, state)
        written = (trial.kits / trial.sites[client] / "_federations" / "own" / "predictions.csv").read_text()
        probabilities = ",".join(f"probability_{label}" for label in range(3))
        assert written.startswith(f"client,graph,split,label,prediction,{probabilities}")


def test_a_site_refuses_a_strategy_that_is_not_on_its_list_and_keeps_its_logs(trial, session, tmp_path) -> None:
    """Logs have the text of errors, which may hold data; FLARE sends them to the server where it may."""
    outcome = run(trial, session, configuration(tmp_path, "FedProx"), "refused", tmp_path)

    why = "this site runs only FedAvg, FedSheafHN, not FedProx"
    assert outcome.status == "refused"
    assert f"site-2: {why}" in outcome.message
    assert any(why in log.read_text() for log in (trial.kits / "site-2").glob("*/error_log.txt"))
    assert not list((trial.kits / SERVER).rglob("ERRORLOG*"))
    with pytest.raises(AuthorizationError):
        session.tail_target("site-2", file="log.txt")


def by_hand(
    trial: Trial,
    session: Any,
    folder: Path,
    change: Callable[[Path], None],
    watch: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """The id and the end of a job that was changed after it was written."""
    folder.mkdir(exist_ok=True)
    settings = Path(configuration(folder, "FedAvg")).read_text()
    job = Submission.of_config(settings, name="by-hand", sites=trial.sites).write_job(folder)
    change(job / "app")
    job_id, deadline = session.submit_job(str(job)), time.monotonic() + PATIENCE
    while not (status := session.get_job_status(job_id)).startswith("FINISHED") and time.monotonic() < deadline:
        watch()
        time.sleep(0.2)
    assert status.startswith("FINISHED"), f"job {job_id} is {status} after {PATIENCE} seconds"
    return job_id, status


def outcome_of(session: Any, job_id: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What the server says of a job, and the names of all files that come back."""
    result = Path(session.download_job_result(job_id, destination=str(folder / "result")))
    actual = next(result.rglob("outcome.json"))
    return json.loads(actual.read_text()), [path.name for path in result.rglob("*")]


def server_log(trial: Trial) -> str:
    return (trial.kits / SERVER / "process.log").read_text()


def test_neither_server_nor_site_takes_code(trial, session, tmp_path) -> None:
    """FLARE's own kits let who submits runs bring any."""

    def bring(app: Path) -> None:
        (app / "custom").mkdir()
        (app / "custom" / "brought.py").touch()

    with pytest.raises(InvalidJobDefinition, match="has 'byoc'"):
        by_hand(trial, session, tmp_path, bring)

    for kit in (trial.kits / name for name in (SERVER, *trial.sites)):
        rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]["lead"]
        assert isinstance(rights, dict)  # else it is a right to everything
        assert "byoc" not in rights


@pytest.mark.parametrize("job_id", ["_account", "account", "local", "startup", str(uuid.UUID(int=7, version=4))])
def test_a_job_does_not_choose_its_own_id(trial, session, tmp_path, job_id) -> None:
    """It is that of a folder of the server's kit and of each site's, which is emptied before the job is deployed."""

    def name_it(app: Path) -> None:
        meta = app.parent / "meta.json"
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "job_id": job_id}))

    with pytest.raises(InvalidJobDefinition, match="job_id"):
        by_hand(trial, session, tmp_path, name_it)
    for kit in (trial.kits / name for name in (SERVER, *trial.sites)):
        assert (kit / "startup" / "rootCA.pem").exists()
        assert (kit / "local" / "resources.json").exists()


def test_a_job_brings_no_configuration_that_reads_files_and_no_file_of_its_own(trial, session, tmp_path) -> None:
    """HOCON includes files, and modules of Python, in the main process of whoever reads it."""
    secret = tmp_path / "private.env"
    secret.write_text("password = in-a-file-of-the-server\n")

    def describe(app: Path) -> None:
        (app.parent / "meta.json").rename(app.parent / "meta.conf")
        with (app.parent / "meta.conf").open("a") as meta:
            meta.write(f'include file("{secret}")\n')

    with pytest.raises(InvalidJobDefinition, match="PYHOCON is not read here: write JSON"):
        by_hand(trial, session, tmp_path / "described", describe)

    job_id, status = by_hand(trial, session, tmp_path / "planted", lambda app: (app / "config" / "evil.py").touch())
    assert status == "FINISHED:FAILED_TO_RUN"
    assert f"({job_id}): RuntimeError: Failed to deploy app 'app': the job's app has 'config/evil.py'" in server_log(
        trial
    )
    assert not list(trial.kits.rglob("evil.py"))


def test_a_run_named_as_another_folder_brings_no_key_back(trial, session, tmp_path) -> None:
    """The server's folder startup has its private key, and _federations/../startup was that folder."""

    def rename(app: Path) -> None:
        reported = json.loads((app / "config" / "job.json").read_text())
        (app / "config" / "job.json").write_text(json.dumps({**reported, "name": "../startup"}))

    job_id, _ = by_hand(trial, session, tmp_path, rename)
    reported, files = outcome_of(session, job_id, tmp_path)

    assert reported["status"] == "refused"
    assert "the name of the run is '../startup'" in reported["message"]
    assert not {"server.key", "server.crt", "rootCA.pem"} & set(files)


def test_a_net_that_imports_what_it_is_reported_is_refused(trial, session, tmp_path) -> None:
    marker = tmp_path / "was-here"
    arguments = {"args": f"touch {marker}", "shell": True}
    net = {"class": "PyGNet", "settings": {"architecture": "subprocess.Popen", "arguments": arguments}}

    def name_it(app: Path) -> None:
        reported = json.loads((app / "config" / "job.json").read_text())
        reported["model"] = {"class": "ClientModule", "settings": {"net": net}}
        (app / "config" / "job.json").write_text(json.dumps(reported))

    job_id, _ = by_hand(trial, session, tmp_path, name_it)
    reported, _ = outcome_of(session, job_id, tmp_path)

    assert reported["status"] == "refused"
    assert "'PyGNet' is not a class that a job may name here" in reported["message"]
    assert not marker.exists()


def test_a_refused_job_ends_although_a_site_starts_later(trial, session, tmp_path) -> None:
    """The site's process would wait for that of the server, which is gone."""
    kit, worker = str(trial.kits / trial.sites[1]), "nvflare.private.fed.app.client.worker_process"

    def hold() -> Iterator[None]:
        """Suspend the site's process from its start until the server has refused."""
        process = None
        while process is None:
            yield
            processes = psutil.process_iter(["cmdline"])
            process = next((each for each in processes if {kit, worker} <= set(each.info["cmdline"] or ())), None)
        process.suspend()
        while not list((trial.kits / SERVER).glob("*/outcome.json")):
            yield
        time.sleep(3)  # in which the server's process would end
        process.resume()

    def rename(app: Path) -> None:
        reported = json.loads((app / "config" / "job.json").read_text())
        (app / "config" / "job.json").write_text(json.dumps({**reported, "name": "../elsewhere"}))

    started, steps = time.monotonic(), hold()
    job_id, _ = by_hand(trial, session, tmp_path, rename, watch=lambda: next(steps, None))
    reported, _ = outcome_of(session, job_id, tmp_path)

    assert reported["status"] == "refused"
    assert next(steps, "resumed") == "resumed"
    assert time.monotonic() - started < PATIENCE / 4


def test_a_job_uses_no_class_of_flare(trial, session, tmp_path) -> None:
    """Some of those on FLARE's own list read and write files that a job names."""
    path = "nvflare.app_common.np.np_model_persistor.NPModelPersistor"

    def add(app: Path) -> None:
        file = app / "config" / "config_fed_server.json"
        reported = json.loads(file.read_text())
        reported["components"] = [{"id": "persistor", "path": path, "args": {}}]
        file.write_text(json.dumps(reported))

    _, status = by_hand(trial, session, tmp_path, add)

    assert status != "FINISHED:COMPLETED"
    assert f"Component '{path}' at config path 'components.#1' is not in allow_list" in server_log(trial)


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
    with pytest.raises(ValueError, match="is not a submitter's kit"), session_of(tmp_path):
        pass
    kits = provision(
        tmp_path, name="alone", sites=["a"], server=SERVER, port=free_port(), admin=ADMIN, address="127.0.0.1"
    )
    with pytest.raises(ValueError, match="cannot be reached"), session_of(kits / ADMIN, seconds=2):
        pass
