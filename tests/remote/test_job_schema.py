"""A job is data: what it may not say is refused before anything is built or imported."""

import dataclasses
import inspect
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning import strategies
from fl_lightning.arguments import settings_in
from fl_lightning.remote.job_schema import MAX_BYTES, TRAINER_SETTINGS, Job, NotAJob, job_of
from fl_lightning.remote.registry import Registry, settings_of, wanted
from fl_lightning.trainer import FederatedTrainer

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("papers/*.yaml")])
#: Configurations whose callbacks read the clients' data, which no job does.
WITH_DATA = {"fedgnn_cora.yaml", "similarity_study.yaml"}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def spec(name: str, **settings: Any) -> dict[str, Any]:
    return {"class": name, "settings": settings}


def a_job(**changed: Any) -> Job:
    facts = {"name": "wards", "sites": ["berlin"], "strategy": spec("FedAvg"), "model": spec("ClientModule")}
    return Job(**{**facts, **changed})


def with_net(name: Any, **settings: Any) -> Job:
    return a_job(model=spec("ClientModule", net=spec(name, **settings)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_is_a_job(path, registry) -> None:
    config = settings_in(str(path))
    if "strategy" not in config:
        pytest.skip("no run")
    job, own = job_of(config, name="wards", sites=["berlin"])
    assert not own
    if path.name in WITH_DATA:
        with pytest.raises(NotAJob, match="is not a class that a job may name here"):
            job.check(registry)
        return
    if path.name == "pooled_cora.yaml":
        with pytest.raises(NotAJob, match="which sites do not give away"):
            job.check(registry)
        return
    again = Job.read(job.write())
    again.check(registry)
    assert again == job
    assert "data" not in json.loads(job.write())


def test_every_setting_of_every_class_can_be_said_or_is_left_out_by_name(registry) -> None:
    """A setting whose annotation no job can fill would be lost without a word."""
    left_out = set()
    for name, actual in registry.named.items():
        first = next(iter(settings_of(actual)), "")
        skip = 2 if first.startswith("in_") or "features" in first else 0  # which the user of a net gives
        for setting, annotation in settings_of(actual, skip).items():
            for kind in _kinds(annotation):
                if kind not in (bool, int, float, str, type(None)) and not registry.fitting(kind):
                    left_out.add(f"{name}.{setting}")
    strategies_without = {each for each in left_out if hasattr(strategies, each.partition(".")[0])}
    assert strategies_without == set()
    assert not [each for each in left_out if each.startswith(("ClientModule", "FedAuxClient"))]


def test_what_stands_where_nothing_is_said_can_be_said(registry) -> None:
    """A whole configuration, such as the saved one of a run, names the defaults."""
    for name, actual in list(registry.named.items()):
        for setting, parameter in inspect.signature(actual).parameters.items():
            default = parameter.default
            if default is not parameter.empty and (inspect.isclass(default) or inspect.isfunction(default)):
                assert registry.named[default.__name__] is default, f"{name}.{setting}"


def _kinds(annotation: Any) -> list[Any]:
    if wanted(annotation)[0] is not None:
        return [annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return []
    inside = [each for each in typing.get_args(annotation) if each is not ...]
    return [kind for each in inside for kind in _kinds(each)] if inside else [annotation]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (with_net("PyGNet", architecture="subprocess.Popen", arguments={"shell": True}), "'PyGNet' is not a class"),
        (with_net("subprocess.Popen"), "'subprocess.Popen' is not a class"),
        (with_net("fl_lightning.models.GCN"), "'fl_lightning.models.GCN' is not a class"),
        (a_job(model=spec("ClientModule", net="subprocess.Popen")), "the name of a class here"),
        (a_job(model="/etc/passwd"), "model is '/etc/passwd': a job gives the name of a class"),
        (a_job(model={"config": "/etc/passwd"}), "the name of a class here"),
        (a_job(strategy={"class": "FedAvg", "settings": {}, "config": "/etc/passwd"}), "the name of a class here"),
        (a_job(strategy=spec("FedAvg", config="/etc/passwd")), "FedAvg has no setting 'config'"),
        (a_job(strategy=spec("PyGSource", dataset="os.system")), "'PyGSource' is not a class"),
        (a_job(strategy=spec("FedPer", personal=["../head"])), r"personal\[0\] is '../head': a job gives a text"),
        (a_job(strategy=spec("FedPer", personal=["/etc/passwd"])), "a text of at most 64"),
        (a_job(strategy=spec("FedPer", personal=["h" * 65])), "a text of at most 64"),
        (a_job(strategy=spec("FedPer", personal=["head.*"] * 1001)), "a list of at most 1000"),
        (a_job(strategy=spec("FedAvg", num_epochs=10**7)), "num_epochs is 10000000: a job gives an integer"),
        (a_job(strategy=spec("FedAvg", num_epochs=True)), "num_epochs is True"),
        (a_job(strategy=spec("FedProx", proximal_weight="1")), "proximal_weight"),
        (a_job(strategy=spec("FedAvg", weighting="votes")), "give one of examples, equal"),
        (a_job(relation_graph=spec("EdgeListFile", path="/etc/passwd")), "'EdgeListFile' is not a class"),
        (a_job(trainer={"callbacks": [spec("RunReport", against="../other")]}), "names a file, which no job does"),
        (a_job(trainer={"callbacks": [spec("SimilarityLogger")]}), "'SimilarityLogger' is not a class"),
        (a_job(trainer={"default_root_dir": "/"}), "has no setting 'default_root_dir'"),
        (a_job(trainer={"executor": spec("StackedExecutor", storage_folder="/")}), "has no setting 'executor'"),
        (a_job(trainer={"logger": [spec("CSVLogger")]}), "logger"),
        (a_job(sites=[]), "sites must be a list"),
        (a_job(sites=["a", "a"]), "sites names the same site twice"),
        (a_job(sites=["../a"]), "the name of a site"),
        (a_job(seed=-1), "seed must be an integer"),
        (a_job(num_outputs=0), "num_outputs must be an integer"),
        *[(a_job(trainer={"num_rounds": n}), "trainer.num_rounds must be an integer from 1 to") for n in (0, -3)],
        *[(a_job(trainer={"evaluate_every": n}), "trainer.evaluate_every must be an integer from 1") for n in (0, -1)],
        *[
            (a_job(trainer={"precision": each}), f"trainer.precision is '{each}': sites train in one of 32-true")
            for each in ("16-mixed", "transformer-engine", "abc")
        ],
        (a_job(secure=1), "secure must be true or false"),
        (a_job(secure_share=True), "secure_share must be a number"),
        (a_job(secure_share=0.4), r"secure_share must be in \[0.5, 1\]"),
        (
            a_job(secure=True, trainer={"participation": spec("Participation", straggler_probability=0.3)}),
            r"participation\.straggler_probability is 0\.3, but under secure aggregation",
        ),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else "",
)
def test_what_a_job_may_not_say(job, message, registry) -> None:
    with pytest.raises(NotAJob, match=message):
        Job.read(job.write()).check(registry)


@pytest.mark.parametrize("name", ["../startup", "/etc", "a/b", "..", ".hidden", "", "a" * 65, "a b", "a\n", 7, None])
def test_the_name_of_a_run_is_one_folder(name, registry) -> None:
    with pytest.raises(NotAJob, match="the name of the run is"):
        a_job(name=name).check(registry)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is not of format 1"),
        ('{"format": 2}', "is not of format 1"),
        ('{"format": 1, "format": 1}', "has a key twice"),
        ('{"format": 1, "seed": NaN}', "has NaN, which is not a number"),
        ('{"format": 1, "data": {}}', "has 'data', which no job has"),
        ('{"format": 1}', "has no name"),
        ("1" * 5000, "is not valid JSON"),
        (" " * (MAX_BYTES + 1), "bytes, at most"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_job_at_all(text, message) -> None:
    with pytest.raises(NotAJob, match=message):
        Job.read(text)


def test_nesting_ends(registry) -> None:
    deep: Any = "head.*"
    for _ in range(50):
        deep = [deep]
    with pytest.raises(NotAJob):
        a_job(strategy=spec("FedPer", personal=deep)).check(registry)


def test_classes_of_the_owner_are_names_like_others(tmp_path, monkeypatch) -> None:
    code = "from fl_lightning.strategies import FedAvg\nclass WardAvg(FedAvg): pass\nclass GCN(FedAvg): pass\n"
    (tmp_path / "ward_strategies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    job, own = job_of(
        {"strategy": {"class_path": "ward_strategies.WardAvg", "init_args": {"num_epochs": 2}}},
        name="wards",
        sites=["berlin"],
    )
    assert own == ["ward_strategies.WardAvg"]
    with pytest.raises(NotAJob, match="'WardAvg' is not a class that a job may name here"):
        job.check(Registry())
    registry = Registry(own)
    job.check(registry)
    assert job.configuration(registry)["strategy"] == {
        "class_path": "ward_strategies.WardAvg",
        "init_args": {"num_epochs": 2},
    }
    with pytest.raises(ValueError, match="has the name of another class that jobs may name"):
        Registry(["ward_strategies.GCN"])
    for path in ("subprocess.Popen", "nowhere.Class", "Popen", 7):
        with pytest.raises(ValueError, match=r"policy\.classes"):
            Registry([path])


def test_what_a_configuration_asks_that_no_job_can() -> None:
    for trainer, message in [
        ({"devices": 2}, "trainer.devices is 2"),
        ({"logger": [{"class_path": "WandbLogger"}]}, "trainer.logger names loggers"),
    ]:
        with pytest.raises(ValueError, match=message):
            job_of({"strategy": "FedAvg", "trainer": trainer}, name="wards", sites=["berlin"])


def test_the_configuration_of_a_job_is_what_it_was_made_of(registry) -> None:
    config = yaml.safe_load(
        """
        seed_everything: 3
        strategy: {class_path: FedOpt, init_args: {server_optimizer: adam, aggregation: {class_path: Krum}}}
        model:
          class_path: ClientModule
          init_args:
            net: [{class_path: fl_lightning.models.GCN, init_args: {num_layers: 3}}, fl_lightning.models.GraphSAGE]
            optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
            lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 5}}
        trainer: {num_rounds: 7, monitor: val/acc, participation: {num_clients: 2}}
        """
    )
    job, _ = job_of(config, name="wards", sites=["berlin"])
    job.check(registry)
    made = job.configuration(registry)
    assert made["seed_everything"] == 3
    assert made["strategy"]["class_path"] == "fl_lightning.strategies.mixing.fedopt.FedOpt"
    init = made["model"]["init_args"]
    assert init["net"][0]["init_args"] == {"num_layers": 3}
    assert init["net"][1] == "fl_lightning.models.graph_sage.GraphSAGE"
    assert init["optimizer"] == {"class_path": "torch.optim.sgd.SGD", "init_args": {"lr": 0.1}}
    assert init["lr_scheduler"] == {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 5}}
    assert made["trainer"]["participation"]["init_args"] == {"num_clients": 2}


def test_settings_of_the_trainer_are_its_own() -> None:
    assert set(TRAINER_SETTINGS) <= set(settings_of(FederatedTrainer))
    assert {each.name for each in dataclasses.fields(Job)} >= {"name", "sites", "strategy"}


def test_two_functions_of_one_name_are_not_taken_for_each_other(monkeypatch) -> None:
    from fl_lightning import optimizers

    monkeypatch.setattr(optimizers, "GCN", optimizers.TouchedSGD, raising=False)
    config = {"strategy": "FedAvg", "model": {"class_path": "ClientModule", "init_args": {"optimizer": ""}}}
    for path, fits in {"fl_lightning.optimizers.TouchedSGD": True, "fl_lightning.optimizers.GCN": False}.items():
        config["model"]["init_args"]["optimizer"] = path
        if fits:
            job_of(config, name="wards", sites=["berlin"])
        else:
            with pytest.raises(ValueError, match="has the name of another class that jobs may name"):
                job_of(config, name="wards", sites=["berlin"])


@pytest.mark.parametrize("name", ["LambdaLR", "ReduceLROnPlateau", "SequentialLR", "CyclicLR"])
def test_schedulers_that_take_functions_or_metrics_are_not_for_jobs(registry, name) -> None:
    scheduler = {"class_path": f"torch.optim.lr_scheduler.{name}"}
    config = {"strategy": "FedAvg", "model": {"class_path": "ClientModule", "init_args": {"lr_scheduler": scheduler}}}
    job, _ = job_of(config, name="wards", sites=["berlin"])
    with pytest.raises(ValueError, match=name):
        job.check(registry)
