"""What ``fl-train site explain`` tells of a job before it runs."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("nvflare", reason="needs the extra flare")

from fl_lightning import command_line
from fl_lightning.remote.accounting import PrivacyAccountant
from fl_lightning.remote.flare import limit_memory
from fl_lightning.remote.job_schema import job_of
from fl_lightning.remote.ledger import SumLedger

pytestmark = pytest.mark.filterwarnings("default")  # jsonargparse's own


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Lift the bound on this process's memory that the verb sets."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture
def told(tmp_path, capsys):
    """Run the verb for a strategy's settings and a policy; returns the exit code and what is printed."""

    def run(
        strategy: Any,
        num_rounds: int = 4,
        as_job: bool = False,
        trainer: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        **policy: Any,
    ) -> tuple[int, str]:
        net = {"class_path": "fl_lightning.models.GCN", "init_args": {"hidden_channels": 8}}
        config = {
            "strategy": strategy,
            "model": {"class_path": "ClientModule", "init_args": {"net": net}},
            "trainer": {"num_rounds": num_rounds, "evaluate_every": 2, **(trainer or {})},
        }
        source = {"num_nodes": 120, "num_communities": 3, "num_classes": 3, "num_features": 6}
        data = {
            "source": {"class_path": "PlantedCommunities", "init_args": source},
            "partitioner": "GivenPartitioner",
            "cache_dir": str(tmp_path / "cache"),
        }
        file = tmp_path / ("job.json" if as_job else "run.yaml")
        job = job_of(config, **{"name": "wards", "sites": ["a", "b"], **(facts or {})})[0]
        file.write_text(job.write() if as_job else yaml.safe_dump(config))
        site_file = tmp_path / "a" / "local" / "fl_site.yaml"  # of a kit
        site_file.parent.mkdir(parents=True, exist_ok=True)
        site_file.write_text(yaml.safe_dump({"data": data, "policy": policy}))
        code = command_line.main(["site", "explain", "--job", str(file), "--site", str(site_file)])
        return code, capsys.readouterr().out

    return run


def test_parameters_with_sizes_evaluations_and_counts_in_a_round_and_in_all(told) -> None:
    code, said = told("FedPer", as_job=True)
    assert code == 0
    assert "the job wards: FedPer, 4 rounds, 2 sites, the server learns each response" in said
    assert "each round, stage train: all parameters but head.*; and the numbers of training examples" in said
    numbers = 6 * 8 + 8 + 8 * 8 + 8
    sizes = "convs.0.weight 6x8, convs.0.bias 8, convs.1.weight 8x8, convs.1.bias 8"
    assert f"parameters: {numbers} numbers per round, {4 * numbers} in total ({sizes})" in said
    assert "evaluations: 2 models per round, 4 in total: the result (received), trained (own)" in said
    assert f"{4 * numbers} parameter values in total; every response passes no filter" in said
    assert "refused" not in said


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ({}, "a sum and a count of each metric and split with at least 5 examples"),
        ({"metrics": "off"}, "their metrics stay here"),
        ({"metrics": "sums"}, "their metrics stay here"),
        ({"metric_noise": {"noise_multiplier": 2.0, "names": ["val/acc"]}}, "noisy values of val/acc"),
    ],
)
def test_what_evaluations_tell(told, policy, line) -> None:
    assert line in told("FedPer", as_job=True, **policy)[1]


def test_what_is_refused_and_why(told) -> None:
    widened = {"class_path": "FedPer", "init_args": {"personal": []}}
    code, said = told(widened, local=["head.*"])
    assert code == 1
    assert "stage train: all parameters" in said  # what would leave is told all the same
    assert "refused: head.weight, head.bias would leave, but policy.local keeps it here" in said
    code, said = told("FedAvg", strategies=["FedPer"])
    assert (code, said) == (1, "refused: this site runs only FedPer, not FedAvg\n")
    code, said = told({"class_path": "FedAvg", "init_args": {"num_epochs": 7}}, max_steps_per_round=6)
    assert code == 1
    assert "refused: stage train from round 0 on: 0 steps of round 0 were taken and 7 more are requested" in said
    code, said = told("FedAvg", evaluations=["own"])
    assert code == 1
    assert (
        "refused: evaluations: a model that is received is to be evaluated, but policy.evaluations allows only own"
        in said
    )
    net = {"class_path": "PyGNet", "init_args": {"architecture": "subprocess.Popen"}}
    code, said = told({"class_path": "FedAvg", "init_args": {"aggregation": net}})
    assert code == 1
    assert "refused: strategy.aggregation: 'PyGNet' is not a class that a job may name here" in said


NOISE = {"class_path": "GaussianNoise", "init_args": {"clip_norm": 1.0, "noise_multiplier": 1.0}}
THREE = {"secure": True, "sites": ["a", "b", "c"]}


def noise(**settings: Any) -> dict[str, Any]:
    return {**NOISE, "init_args": {**NOISE["init_args"], **settings}}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"filters": [noise(distributed=True)]},
            "stage train from round 0 on: GaussianNoise.distributed is for secure",
        ),
        (
            {"filters": [noise(max_epsilon=8)]},
            "stage train from round 2 on: the privacy budget is spent: ε would be 8.39",
        ),
        (
            {"metric_noise": {"noise_multiplier": 1.0, "names": ["val/acc"], "max_epsilon": 5}},
            "metrics from round 3 on: the privacy budget is spent",
        ),
        (
            {"filters": [noise(max_epsilon=8)], "facts": {"planned_rounds": 1000}},
            "the privacy budget does not pay for the 1000 rounds",
        ),
        ({"min_sum_clients": 5, "facts": THREE}, "this site needs at least 5 clients in a sum, this job has 3 sites"),
        ({"facts": {"secure": True}}, "this site needs at least 3 clients in a sum, this job has 2 sites"),
        ({"peers": ["b"], "facts": THREE}, "secure sums: not in policy.peers: c"),
        ({"max_messages": 7}, "policy.max_messages is 7, this job has at least 8 if it asks in each round"),
        ({"max_messages": 31, "facts": THREE}, "policy.max_messages is 31, this job has at least 32"),
        (
            {"trainer": {"precision": "16-mixed"}},
            "trainer.precision is '16-mixed': sites train in one of 32-true, bf16",
        ),
        ({"trainer": {"evaluate_every": 0}}, "trainer.evaluate_every must be an integer from 1 to 1000000, got 0"),
    ],
)
def test_what_a_site_refuses_later_is_told_before(told, settings, line) -> None:
    code, said = told("FedAvg", as_job=True, **settings)
    assert code == 1
    assert [each for each in said.splitlines() if each.startswith("refused: ")] == [
        next(each for each in said.splitlines() if each.startswith(f"refused: {line}"))
    ]


def test_what_is_allowed_is_not_refused(told) -> None:
    sums = {"min_sum_clients": 3, "peers": ["b", "c"], "max_messages": 32, "facts": THREE}
    assert told("FedAvg", as_job=True, filters=[noise(distributed=True)], **sums)[0] == 0
    assert told("FedAvg", as_job=True, filters=[noise(max_epsilon=20)], trainer={"precision": "64-true"})[0] == 0


@pytest.mark.parametrize("name", ["account", "_account"])
def test_the_account_of_the_kit_is_counted_and_not_changed(told, tmp_path, name: str) -> None:
    account = PrivacyAccountant(tmp_path / "a" / name, delta=1e-5)
    account.spend(1.0)
    SumLedger(tmp_path / "a" / name)
    kept = {path.name: path.read_bytes() for path in account.path.parent.iterdir()}
    said = told("FedAvg", as_job=True, filters=[noise(max_epsilon=8)])[1]
    assert "refused: stage train from round 1 on: the privacy budget is spent" in said
    assert {path.name: path.read_bytes() for path in account.path.parent.iterdir()} == kept
    account.path.unlink()
    code, said = told("FedAvg", as_job=True)
    assert (code, "refused: privacy.json is missing: restore it from a copy" in said) == (1, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is bounded on Linux")
@pytest.mark.parametrize("gib", [1e12, 1e300])
def test_more_memory_than_a_system_can_count_is_no_error(gib) -> None:
    import resource

    limit_memory(gib)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    assert soft >= 2**62 or soft == hard


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is bounded on Linux")
def test_a_job_that_needs_too_much_memory_ends_before_it_has_it(told, capsys) -> None:
    large = {"class_path": "PFedHN", "init_args": {"hidden_channels": 24000, "num_layers": 2}}
    with pytest.raises(SystemExit) as ended:
        told(large, as_job=True, max_memory_gib=0.5)
    assert ended.value.code == 1
    assert "memory" in capsys.readouterr().err


def test_outputs_with_what_they_tell_of(told) -> None:
    _, said = told("FedProto", min_examples=3)
    assert "output class: numbers of each class, 0 for a class with fewer than 3 examples" in said
    _, said = told({"class_path": "Kin", "init_args": {"validate_every": 2, "common_share": 0.5}}, min_examples=3)
    assert "once, stage embed: embedding: mean of the node embeddings of one graph" in said
    assert "a score of a model, 0 with fewer than 3 examples; counted as an evaluation" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--job", "run.yaml", "--site", "missing.yaml"], "--site missing.yaml does not exist"),
        (["--job", "run.yaml", "--site", "fl_site.yaml", "--num_sites", "0"], "--num_sites must be at least 1"),
        (["--job", "bad.json", "--site", "fl_site.yaml"], "the job is not valid JSON"),
        (["--job", "run.yaml", "--site", "fl_site.yaml"], "fl_site.yaml has no data"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_mistakes_end_in_one_line(words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fl_site.yaml").touch()
    Path("bad.json").write_text("{")
    Path("run.yaml").write_text("strategy: FedAvg")
    with pytest.raises(SystemExit) as ended:
        command_line.main(["site", "explain", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("fl-train: error: ") == 1
