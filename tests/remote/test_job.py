"""A site's own file, and the verbs up to where they need a network."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch_geometric.data import Data

from fl_lightning import command_line
from fl_lightning.remote import Message, TopK
from fl_lightning.remote.explain import _start as start_of
from fl_lightning.remote.job import open_server, open_site
from fl_lightning.remote.job_schema import Job, NotAJob, job_of
from fl_lightning.remote.policy import Refused

pytestmark = pytest.mark.filterwarnings("default")  # jsonargparse's own

RUN = {
    "strategy": "FedAvg",
    "model": {"class_path": "ClientModule", "init_args": {"net": "fl_lightning.models.GCN"}},
    "trainer": {"num_rounds": 1, "accelerator": "cpu", "logger": False},
}


@pytest.fixture
def job() -> Job:
    return job_of(RUN, name="wards", sites=["site-1", "site-2", "site-3"])[0]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    return {
        "source": {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 90, "num_communities": 3}},
        "partitioner": "GivenPartitioner",
        "cache_dir": str(tmp_path / "cache"),
    }


def written(path: Path, content: object) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_site_without_data_of_its_own_takes_part_in_nothing(job, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"missing\.yaml has no data: add a section data with what the site holds"):
        open_site(job, tmp_path / "missing.yaml", tmp_path / "site", "site-1")
    assert not (tmp_path / "site").exists()


def test_a_site_builds_its_own_data_and_the_jobs_strategy_alone(job, data, tmp_path) -> None:
    own = {"data": data, "client": 1, "named_as": "data"}
    site = open_site(job, Path(written(tmp_path / "site.yaml", own)), tmp_path / "site", "site-1")
    assert site.client_data.name == "client-01"
    built = yaml.safe_load((tmp_path / "site" / "settings.yaml").read_text())
    assert set(built) == {"seed_everything", "strategy", "model", "data", "trainer"}
    assert built["trainer"] == {"accelerator": "cpu", "callbacks": [], "logger": False}
    assert site.policy.min_examples == 5
    assert site.guard.num_rounds == 1
    assert (tmp_path / "site").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("name", "own"), [("five", ["features", "outputs"]), ("again", ["outputs"])])
def test_a_site_says_which_features_and_outputs_are_its_own(job, name, own, tmp_path) -> None:
    """By its file, or by its data where these are of several clients."""
    for width, graphs in ((3, "three"), (5, "five"), (3, "again")):
        edge_index = torch.tensor([[0, 1], [1, 2]])
        rings = [Data(x=torch.ones(3, width), edge_index=edge_index, y=torch.tensor([k % 2])) for k in range(8)]
        torch.save(rings, tmp_path / f"{graphs}.pt")
    paths = [str(tmp_path / f"{graphs}.pt") for graphs in ("three", name)]
    sources = [{"class_path": "GraphSetFile", "init_args": {"path": path}} for path in paths]
    source = {"class_path": "ManyGraphSets", "init_args": {"sources": sources, "own_outputs": True}}
    held = {"data": {"source": source, "cache_dir": str(tmp_path / "c")}}
    assert open_site(job, Path(written(tmp_path / "site.yaml", held)), tmp_path / "site").own == own
    one = {"class_path": "RandomPartitioner", "init_args": {"num_clients": 1}}
    alone = {"own": own, "data": {"source": sources[0], "partitioner": one, "cache_dir": str(tmp_path / "c")}}
    site = open_site(job, Path(written(tmp_path / "alone.yaml", alone)), tmp_path / "alone")
    assert (site.own, site.client_data.num_outputs) == (own, 2)


def test_a_job_is_refused_before_anything_is_built(data, tmp_path, monkeypatch) -> None:
    """Also before the parser of configurations sees it, which imports what a class path names."""
    from fl_lightning.remote import job as module

    def parse(*arguments: Any) -> None:
        raise AssertionError("the parser was asked")

    monkeypatch.setattr(module, "Parts", parse)
    monkeypatch.setattr(module, "_built", parse)
    site_file = Path(written(tmp_path / "site.yaml", {"data": data, "policy": {"strategies": ["FedPer"]}}))
    net = {"class_path": "PyGNet", "init_args": {"architecture": "subprocess.Popen", "arguments": {"shell": True}}}
    evil, _ = job_of({**RUN, "model": {"class_path": "ClientModule", "init_args": {"net": net}}}, name="w", sites=["a"])
    with pytest.raises(NotAJob, match="'PyGNet' is not a class that a job may name here"):
        open_site(evil, site_file, tmp_path / "site")
    with pytest.raises(NotAJob, match="'PyGNet' is not a class that a job may name here"):
        open_server(evil, tmp_path / "server.yaml", tmp_path / "runs", tmp_path / "work")
    fine, _ = job_of(RUN, name="w", sites=["a"])
    with pytest.raises(Refused, match="this site runs only FedPer, not FedAvg"):
        open_site(fine, site_file, tmp_path / "site")
    with pytest.raises(Refused, match=r"100000000 outputs are asked for, policy\.max_outputs is 100000 here"):
        open_server(
            dataclasses.replace(fine, num_outputs=10**8), tmp_path / "s.yaml", tmp_path / "runs", tmp_path / "work"
        )
    for name in ("../startup", str(tmp_path / "elsewhere")):
        elsewhere = dataclasses.replace(fine, name=name)
        with pytest.raises(NotAJob, match="the name of the run is"):
            open_site(elsewhere, site_file, tmp_path / "site")
        with pytest.raises(NotAJob, match="the name of the run is"):
            open_server(elsewhere, tmp_path / "server.yaml", tmp_path / "runs", tmp_path / "work")
    assert {path.name for path in tmp_path.iterdir()} == {"site.yaml"}


def test_a_site_that_updates_under_secure_aggregation_alone_builds_nothing_else(job, data, tmp_path) -> None:
    site_file = Path(written(tmp_path / "site.yaml", {"data": data, "policy": {"secure_only": True}}))
    with pytest.raises(Refused, match="this site responds only under secure aggregation"):
        open_site(job, site_file, tmp_path / "site")
    assert open_site(dataclasses.replace(job, secure=True), site_file, tmp_path / "site").policy.secure_only


def test_the_server_builds_no_data_and_nothing_of_the_submitters_machine(job, tmp_path) -> None:
    graph = {"class": "Ring", "settings": {}}
    asked = dataclasses.replace(job, relation_graph=graph, trainer={**job.trainer, "callbacks": []})
    policy = {"strategies": ["FedAvg"], "max_outputs": 7}
    server_file = Path(written(tmp_path / "server.yaml", {"accelerator": "cpu", "policy": policy}))
    parts = open_server(asked, server_file, tmp_path / "runs", tmp_path / "work")
    assert parts.max_outputs == 7
    assert parts.datamodule is None
    assert type(parts.relation_graph).__name__ == "Ring"
    assert parts.trainer.root == tmp_path / "runs" / "wards"
    with pytest.raises(ValueError, match="has data: a server's file has policy, accelerator"):
        open_server(asked, Path(written(tmp_path / "s.yaml", {"data": {}})), tmp_path / "runs", tmp_path / "work")


def test_what_settings_say_wrong_together_is_one_error_of_the_job(job, tmp_path) -> None:
    both = {"class": "Participation", "settings": {"fraction": 0.5, "num_clients": 2}}
    wrong = dataclasses.replace(job, trainer={"num_rounds": 1, "participation": both})
    with pytest.raises(ValueError, match="fraction"):
        open_server(wrong, tmp_path / "server.yaml", tmp_path / "runs", tmp_path / "work")


def test_a_sites_file_names_its_data_and_what_it_refuses(job, tmp_path) -> None:
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(12, (2, 30), generator=draw)
    texts = {"class_names": ["x", "y", "z"], "node_names": [f"bed {n}" for n in range(12)]}
    graph = Data(x=torch.rand(12, 4, generator=draw), edge_index=edges, y=torch.arange(12) % 3, **texts)
    torch.save(graph, tmp_path / "graph.pt")
    own = {
        "data": {
            "source": {"class_path": "FileSource", "init_args": {"path": str(tmp_path / "graph.pt")}},
            "partitioner": {"class_path": "RandomPartitioner", "init_args": {"num_clients": 1}},
            "splitter": "ClientSplit",
            "cache_dir": str(tmp_path / "cache"),
        },
        "policy": {"min_examples": 2, "filters": [{"class_path": "TopK", "init_args": {"fraction": 0.5}}]},
    }

    site = open_site(job, Path(written(tmp_path / "site.yaml", own)), tmp_path / "site", "berlin")

    assert site.client_data.num_nodes == 12
    assert site.client_data.name == "berlin"  # at every such site it is client-00 of one
    assert site.names.class_names == ("x", "y", "z")
    assert site.names.names == tuple(texts["node_names"])
    assert site.names.number_N.tolist() == list(range(12))
    assert site.policy.min_examples == 2
    assert isinstance(site.policy.filters[0], TopK)


def test_what_a_sites_file_may_not_say(job, data, tmp_path) -> None:
    def opened(own: object) -> None:
        open_site(job, Path(written(tmp_path / "site.yaml", own)), tmp_path / "site")

    with pytest.raises(
        ValueError, match="has polcy: a site's file has client, named_as, data, own, policy, accelerator"
    ):
        opened({"polcy": {}})
    with pytest.raises(ValueError, match="client is 3, but the data have 3 clients"):
        opened({"client": 3, "data": data})
    with pytest.raises(ValueError, match="named_as is 'me': write site, or data"):
        opened({"named_as": "me"})
    for client in (True, 1.5, "ward", -1):
        with pytest.raises(ValueError, match=r"site\.yaml: client must be "):
            opened({"client": client})
    with pytest.raises(ValueError, match=r"site\.yaml holds \['client'\]: write the settings"):
        opened(["client"])
    for key in ("data", "policy"):
        with pytest.raises(ValueError, match=rf"site\.yaml: {key} is False: write its settings below it"):
            opened({key: False})
    with pytest.raises(ValueError, match=r"site\.yaml: .*policy.*min_examples.*Got value: few"):
        opened({"policy": {"min_examples": "few"}})
    with pytest.raises(ValueError, match=r"site\.yaml: site\.min_examples must be at least 1, got 0"):
        opened({"policy": {"min_examples": 0}})
    (tmp_path / "site.yaml").write_text("client: [")
    with pytest.raises(ValueError, match=r"site\.yaml is not YAML: .*line 1"):
        open_site(job, tmp_path / "site.yaml", tmp_path / "site")
    with pytest.raises(Refused, match="this site runs only FedPer, not FedAvg"):
        opened({"policy": {"strategies": ["FedPer"]}})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["provision", "nothing.yaml"], "nothing.yaml cannot be read"),
        (["provision", "given.yaml"], "must have name, server, sites, admin"),
        (["provision", "given.yaml", "--port", "1"], "has no option --port"),
        (["submit", "--config", "given.yaml"], "--kit"),
        (["submit", "--kit", "."], "--kit . is not a submitter's kit"),
        (["submit", "--kit", ".", "--config", "given.yaml", "--write_job", "given.yaml"], "would replace what is read"),
        (["sites", "--num_sites", "0"], "--num_sites must be at least 1, got 0"),
        (["sites", "--num_outputs", "0"], "--num_outputs must be at least 1, got 0"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_mistakes_end_in_one_line(words, message, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "given.yaml", {"name": "wards"})
    with pytest.raises(SystemExit) as ended:
        command_line.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fl-train: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"port": "http"}, "port must be a whole number, got 'http'"),
        ({"port": 70_000}, "port must be at most 65535, got 70000"),
        ({"sites": ["de", False]}, "sites must be a text such as 'berlin', got False"),  # what YAML takes "no" for
        ({"name": None}, "name must be a text such as 'wards', got None"),
        ({"name": "our/wards"}, "name is 'our/wards': give one of at most 64 letters"),
        ({"name": "../wards"}, "name is '../wards': give one"),
        (
            {"server": "a" * 65},
            "server is 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': give one",
        ),
        ({"server": "fl example.org"}, "server is 'fl example.org': give one of at most 64"),
        ({"server": "fl_1.example.org"}, "server is 'fl_1.example.org': give one of at most 64"),
        ({"sites": ["ward 7"]}, "sites is 'ward 7': give one of at most 64"),
        ({"sites": ["ward.7"]}, "sites is 'ward.7': give one of at most 64"),
        ({"sites": ["w" * 300]}, f"sites is '{'w' * 59}... (300 characters): give one of at most 64"),
        ({"sites": ["Berlin", "berlin"]}, "'berlin' is the name of two participants"),
        ({"sites": ["server"]}, "'server' is the name of two participants, or FLARE's own"),
        ({"admin": "lead"}, "admin is 'lead': give one of at most 64 characters, like lead@example.org"),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_a_federation_that_cannot_be(changed, message, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    settings = {"name": "wards", "server": "fl.example.org", "sites": ["berlin"], "admin": "lead@example.org"} | changed
    with pytest.raises(SystemExit):
        command_line.main(["provision", written(tmp_path / "federation.yaml", settings)])
    assert f"{tmp_path / 'federation.yaml'}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "kits").exists()


def test_a_folder_that_nvflare_would_split_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    settings = {"name": "wards", "server": "fl.example.org", "sites": ["berlin"], "admin": "lead@example.org"}
    file = written(tmp_path / "federation.yaml", settings)
    for words in (
        ["provision", file, "--folder", "my kits"],
        ["sites", "--folder", "my kits", "--config", "run.yaml"],
        ["sites", "--folder", "kits'1", "--config", "run.yaml"],
    ):
        with pytest.raises(SystemExit):
            command_line.main(words)
        assert "NVFlare splits the command of a job there; give a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["federation.yaml"]


def test_keys_are_their_owners_alone_from_the_moment_they_are_made(tmp_path, monkeypatch, capsys) -> None:
    """Also the authority's private key, which is told on the screen with what to do with it."""
    pytest.importorskip("nvflare", reason="needs the extra flare")
    from nvflare.lighter.impl import cert

    monkeypatch.chdir(tmp_path)
    before, seen = os.umask(0o022), []
    persist = cert._CertState.persist

    def look(state: Any) -> None:
        persist(state)
        seen.append(Path(state.state_dir, "cert.json").stat().st_mode & 0o777)

    monkeypatch.setattr(cert._CertState, "persist", look)
    settings = {"name": "wards", "server": "fl.example.org", "sites": ["berlin"], "admin": "lead@example.org"}
    try:
        command_line.main(["provision", written(tmp_path / "federation.yaml", settings)])
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    said = capsys.readouterr().out
    kits = tmp_path / "kits"
    assert set(seen) == {0o600}
    assert f"the authority's private key is in {kits / 'wards' / 'state' / 'cert.json'}" in said
    assert "make a kit for anybody" in said
    assert "PRIVATE KEY" in (kits / "wards" / "state" / "cert.json").read_text()
    for path in (kits, *kits.rglob("*")):
        mode = path.stat().st_mode & 0o777
        if path.is_dir():
            assert mode == 0o700, path
        elif path.suffix != ".sh":  # which hold nothing of their own
            assert mode == 0o600, path


def test_kits_have_certificates_and_leave_what_is_allowed_to_their_owners(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    content = {"name": "wards", "server": "fl.example.org", "sites": ["berlin", "rome"], "admin": "lead@example.org"}
    assert command_line.main(["provision", written(tmp_path / "federation.yaml", content)]) == 0
    kits = tmp_path / "kits" / "wards" / "prod_00"
    assert str(kits.name) in capsys.readouterr().out
    assert {path.name for path in kits.iterdir() if path.is_dir()} == {
        "fl.example.org",
        "berlin",
        "rome",
        "lead@example.org",
    }
    assert (kits / "rome" / "startup" / "client.key").is_file()
    for name, allowed in {"rome": "SiteExecutor", "fl.example.org": "FederationController"}.items():
        settings = yaml.safe_load((kits / name / "local" / "resources.json").read_text())
        assert settings["class_allow_list"] == [f"fl_lightning.remote.flare.{allowed}"]
        assert {"id": "job_guard", "path": "fl_lightning.kit_guard.JobGuard", "args": {}} in settings["components"]
        checks = {"rome": settings["components"][-1], "fl.example.org": settings.get("app_validator")}[name]
        assert checks["path"] in ("fl_lightning.kit_guard.JobDeployer", "fl_lightning.kit_guard.AppFiles")
        script = (kits / name / "startup" / "sub_start.sh").read_text()
        assert "export PYTHONSAFEPATH=1\n" in script
        assert "export PYTHONPATH" not in script  # whose empty entry would be the current folder
        rights = yaml.safe_load((kits / name / "local" / "authorization.json").read_text())["permissions"]["lead"]
        assert set(rights) == {"submit_job", "manage_job", "download_job", "view"}
    started = yaml.safe_load((kits / "rome" / "startup" / "fed_client.json").read_text())
    assert started["require_signed_jobs"] is True
    assert yaml.safe_load((kits / "fl.example.org" / "local" / "fl_server.yaml").read_text()) is None
    assert yaml.safe_load((kits / "rome" / "local" / "fl_site.yaml").read_text()) is None  # an example, commented out


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"secure": False}, "secure"),
        ({"secure_share": 0.5}, "secure_share"),
        ({"seed": 1}, "seed"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"precision": "64-true", "dtype": "float64"}, "precision"),
        ({"names": ["a", "b", "c"], "training_clients": [0, 1, 2]}, "names"),
    ],
)
def test_a_server_keeps_to_the_job_that_was_signed(job, data, tmp_path, change, differs) -> None:
    """Otherwise it would turn off secure aggregation, or have too few sites in a sum."""
    secure = dataclasses.replace(job, secure=True, secure_share=0.9, sites=["a", "b", "c", "d"])
    site = open_site(secure, Path(written(tmp_path / "site.yaml", {"data": data})), tmp_path / "site", "a")
    start = start_of(secure, site)
    about = {**start.about, "federation": "0" * 64}
    as_agreed = Message.read(site.respond(Message(kind="start", about=about, tensors=start.tensors).wire))
    assert as_agreed.kind == "response", as_agreed.about
    changed = Message(kind="start", about={**about, **change}, tensors=start.tensors)
    response = Message.read(site.respond(changed.wire))
    assert (response.kind, response.about["why"]) == (
        "failure",
        f"the server's message 'start' does not keep to the job: its {differs} differ",
    )


def test_settings_of_a_policy_that_are_left_empty_are_the_defaults(job, data, tmp_path) -> None:
    empty = dict.fromkeys(["min_examples", "local", "filters", "max_messages", "kinds", "evaluations"])
    policies = [
        open_site(
            job, Path(written(tmp_path / f"{name}.yaml", {"data": data, "policy": policy})), tmp_path / name
        ).policy
        for name, policy in {"empty": empty, "none": {}}.items()
    ]
    assert policies[0] == policies[1]
    assert policies[0].min_examples == 5


def test_a_federation_whose_authoritys_key_was_put_away_gets_no_second_authority(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    content = {"name": "wards", "server": "fl.example.org", "sites": ["berlin"], "admin": "lead@example.org"}
    file = written(tmp_path / "federation.yaml", content)
    assert command_line.main(["provision", file]) == 0
    authority = (tmp_path / "kits" / "wards" / "prod_00" / "berlin" / "startup" / "rootCA.pem").read_bytes()
    (tmp_path / "kits" / "wards" / "state").rename(tmp_path / "put-away")
    file = written(tmp_path / "federation.yaml", {**content, "sites": ["berlin", "rome"]})

    with pytest.raises(SystemExit):
        command_line.main(["provision", file])

    said = capsys.readouterr().err
    assert f"{Path('kits/wards/prod_00')} has kits, but {Path('kits/wards/state/cert.json')}" in said
    assert "bring the folder state back" in said
    assert sorted(path.name for path in (tmp_path / "kits" / "wards").iterdir()) == ["prod_00"]
    (tmp_path / "put-away").rename(tmp_path / "kits" / "wards" / "state")
    assert command_line.main(["provision", file]) == 0
    assert (tmp_path / "kits" / "wards" / "prod_01" / "rome" / "startup" / "rootCA.pem").read_bytes() == authority
