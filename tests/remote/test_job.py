"""A site's own file, and the verbs up to where they need a network."""

from pathlib import Path

import pytest
import torch
import yaml
from torch_geometric.data import Data

from fl_lightning import command_line
from fl_lightning.remote import TopK
from fl_lightning.remote.job import Parts, open_site
from fl_lightning.remote.policy import Refused

pytestmark = pytest.mark.filterwarnings("default")  # jsonargparse's own

RUN = {
    "strategy": "FedAvg",
    "model": {"class_path": "ClientModule", "init_args": {"net": "fl_lightning.models.GCN"}},
    "trainer": {"num_rounds": 1, "accelerator": "cpu", "logger": False},
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    data = {
        "source": {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 90, "num_communities": 3}},
        "partitioner": "GivenPartitioner",
        "cache_dir": str(tmp_path / "cache"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(Parts(["--config", written(tmp_path / "given.yaml", {**RUN, "data": data})]).trainer.config)
    return path


def written(path: Path, content: object) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_site_without_a_file_holds_the_first_client_of_the_runs_data(run_file, tmp_path) -> None:
    site = open_site(run_file, tmp_path / "missing.yaml", tmp_path / "site", "site-1")
    assert site.holds.name == "client-00"
    assert (
        "trainer:\n  accelerator: cpu\n  callbacks: []\n  logger: false\n"
        in (tmp_path / "site" / "settings.yaml").read_text()
    )
    assert site.policy.min_examples == 5


def test_a_sites_file_names_its_data_and_what_it_refuses(run_file, tmp_path) -> None:
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

    site = open_site(run_file, Path(written(tmp_path / "site.yaml", own)), tmp_path / "site", "berlin")

    assert site.holds.num_nodes == 12
    assert site.holds.name == "berlin"  # at every such site it is client-00 of one
    assert site.own.class_names == ("x", "y", "z")
    assert site.own.names == tuple(texts["node_names"])
    assert site.own.number_N.tolist() == list(range(12))
    assert site.policy.min_examples == 2
    assert isinstance(site.policy.filters[0], TopK)


def test_what_a_sites_file_may_not_say(run_file, tmp_path) -> None:
    def opened(own: object) -> None:
        open_site(run_file, Path(written(tmp_path / "site.yaml", own)), tmp_path / "site")

    with pytest.raises(ValueError, match="has polcy: a site's file has client, data, policy, accelerator"):
        opened({"polcy": {}})
    with pytest.raises(ValueError, match="client is 3, but the data have 3 clients"):
        opened({"client": 3})
    for client in (True, 1.5, "ward", -1):
        with pytest.raises(ValueError, match=r"site\.yaml: client must be "):
            opened({"client": client})
    with pytest.raises(ValueError, match=r"site\.yaml holds \['client'\]: write settings"):
        opened(["client"])
    for key in ("data", "policy"):
        with pytest.raises(ValueError, match=rf"site\.yaml: {key} is False: write its settings below it"):
            opened({key: False})
    with pytest.raises(ValueError, match=r"site\.yaml: .*policy.*min_examples.*Got value: few"):
        opened({"policy": {"min_examples": "few"}})
    with pytest.raises(ValueError, match=r"site\.yaml: site\.min_examples must be at least 1, got 0"):
        opened({"policy": {"min_examples": 0}})
    (tmp_path / "site.yaml").write_text("client: [")
    with pytest.raises(ValueError, match=r"site\.yaml is no YAML: .*line 1"):
        open_site(run_file, tmp_path / "site.yaml", tmp_path / "site")
    with pytest.raises(Refused, match="this site runs FedPer alone, not FedAvg"):
        opened({"policy": {"strategies": ["FedPer"]}})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["provision", "nothing.yaml"], "nothing.yaml cannot be read"),
        (["provision", "given.yaml"], "must have name, server, sites, admin"),
        (["provision", "given.yaml", "--port", "1"], "has no option --port"),
        (["submit", "--config", "given.yaml"], "--kit"),
        (["submit", "--kit", "."], "--kit . is no kit of who submits runs"),
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
        ({"name": "our/wards"}, "name is 'our/wards', give one that a folder can have"),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_a_federation_that_cannot_be(changed, message, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    told = {"name": "wards", "server": "fl.example.org", "sites": ["berlin"], "admin": "lead@example.org"} | changed
    with pytest.raises(SystemExit):
        command_line.main(["provision", written(tmp_path / "federation.yaml", told)])
    assert f"{tmp_path / 'federation.yaml'}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "kits").exists()


def test_kits_have_certificates_and_leave_what_is_allowed_to_their_owners(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("nvflare", reason="needs the extra flare")
    monkeypatch.chdir(tmp_path)
    told = {"name": "wards", "server": "fl.example.org", "sites": ["berlin", "rome"], "admin": "lead@example.org"}
    assert command_line.main(["provision", written(tmp_path / "federation.yaml", told)]) == 0
    kits = tmp_path / "kits" / "wards" / "prod_00"
    assert str(kits.name) in capsys.readouterr().out
    assert {path.name for path in kits.iterdir() if path.is_dir()} == {
        "fl.example.org",
        "berlin",
        "rome",
        "lead@example.org",
    }
    assert (kits / "rome" / "startup" / "client.key").is_file()
    settings = yaml.safe_load((kits / "rome" / "local" / "resources.json").read_text())
    assert "fl_lightning.remote.flare.SiteExecutor" in settings["class_allow_list"]
    assert yaml.safe_load((kits / "rome" / "local" / "fl_site.yaml").read_text()) is None  # an example, commented out
