"""Private training at sites: secret noise, and the account of each site's examples over all jobs."""

import dataclasses
import functools
import json
import math
import re

import pytest
import torch
import yaml
from private_examples import VectorData, vectors
from sites import BadChannel
from torch.optim import SGD

from fl_lightning import ClientModule
from fl_lightning.models import MLP
from fl_lightning.remote import GaussianNoise, LoopbackChannel, Site, SitePolicy, federate
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.remote.explain import explain
from fl_lightning.remote.job_schema import Job, NotAJob, job_of
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.registry import Registry
from fl_lightning.round.privacy import RecordPrivacy, epsilon_of
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedProto
from fl_lightning.tasks import Drawing, ExampleClassification

SIZES = (40, 24, 64)  # of which half train: 20, 12 and 32 in batches of 4


def make_client(noise: float | None = 1.0) -> ClientModule:
    privacy = None if noise is None else RecordPrivacy(max_grad_norm=1.0, noise_multiplier=noise)
    client = ClientModule(functools.partial(MLP, hidden_channels=5), functools.partial(SGD, lr=0.1), privacy=privacy)
    client.take_task(ExampleClassification())
    return client


def sites_of(
    folder,
    job: str = "job",
    *,
    noise: float | None = 1.0,
    steps: int | None = None,
    planned: int | None = None,
    seed: int = 0,
    **policy,
) -> list[Site]:
    """Sites of a job, of which the last tells its metrics, for a round to be chosen by."""
    last = {"client-2": {"metrics": "plain"}}
    return [
        Site(
            each,
            make_client(noise),
            FedAvg(num_epochs=1),
            folder / job / each.name,
            policy=SitePolicy(**{"min_examples": 1, **last.get(each.name, {}), **policy}),
            drawing=Drawing(batch_size=4, steps_per_epoch=steps),
            account=folder / "account" / each.name,
            job=Job(name=job, sites=list(SIZES), strategy={"class": "FedAvg"}, planned_rounds=planned, seed=seed),
        )
        for each in vectors(SIZES)
    ]


def federation(make_trainer, channel, **settings):
    trainer = make_trainer(**{"num_rounds": 3, **settings})
    strategy = FedAvg(num_epochs=1)
    data = federate(trainer, channel, strategy, num_outputs=3)
    trainer.fit(make_client(), data, strategy)
    return trainer


def account(folder, client: int) -> dict:
    return json.loads((folder / "account" / f"client-{client}" / "privacy.json").read_text())


def test_each_site_counts_its_own_steps_once(make_trainer, tmp_path) -> None:
    trainer = federation(make_trainer, BadChannel(sites_of(tmp_path)))  # which delivers each message twice

    for client, (num_examples, steps) in enumerate([(20, 5), (12, 3), (32, 8)]):
        kept = account(tmp_path, client)
        assert kept["steps"] == [[pytest.approx(4 / num_examples), 1.0, 3 * steps]]
        assert kept["record_epsilon"] == pytest.approx(epsilon_of({(4 / num_examples, 1.0): 3 * steps}, 1e-5))
    last = trainer.run.history[-1]
    assert not [name for name in last if name.startswith("epsilon")], "an account is its site's"
    reported = trainer.run.scores[""].extras["val/acc"]
    assert reported[:2].count_nonzero() == 0, "metrics have no noise, so they stay at the sites"
    assert reported[2, 1] == 16, "but at one that says otherwise"


def test_the_noise_is_no_draw_of_the_runs_seed(make_trainer, tmp_path) -> None:
    first, second = (
        federation(make_trainer, LoopbackChannel(sites_of(tmp_path / name, seed=5)), num_rounds=1, seed=5)
        for name in "ab"
    )
    here = make_trainer(num_rounds=1, seed=5)
    here.fit(make_client(), VectorData(vectors(SIZES), 4), FedAvg(num_epochs=1))

    models = [trainer.run.strategy.state_dict()["models"] for trainer in (first, second, here)]
    for name in models[0]:
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not torch.equal(models[one][name], models[other][name])


def test_the_bound_is_of_all_jobs(make_trainer, tmp_path) -> None:
    bound = epsilon_of({(4 / 12, 1.0): 6}, 1e-5) * 1.0001  # two rounds of the second client
    federation(make_trainer, LoopbackChannel(sites_of(tmp_path, "one", max_record_epsilon=bound)), num_rounds=1)

    with pytest.warns(UserWarning, match=r"client-1 failed in stage 'train' round 1.*budget of this site's examples"):
        federation(make_trainer, LoopbackChannel(sites_of(tmp_path, "two", max_record_epsilon=bound)), num_rounds=2)
    assert account(tmp_path, 1)["record_epsilon"] == pytest.approx(bound, rel=1e-3)


def test_a_search_that_the_account_cannot_pay_for_is_refused_before_its_first_round(make_trainer, tmp_path) -> None:
    bound = epsilon_of({(4 / 12, 1.0): 6}, 1e-5) * 1.0001  # two rounds of the second client
    with pytest.raises(ValueError, match=r"client-1: the privacy budget does not pay for the 3 rounds of this search"):
        federation(make_trainer, LoopbackChannel(sites_of(tmp_path, planned=3, max_record_epsilon=bound)))
    assert not list((tmp_path / "account").rglob("privacy.json"))
    sites = sites_of(tmp_path, "two", planned=2, max_record_epsilon=bound)
    federation(make_trainer, LoopbackChannel(sites), num_rounds=2)
    assert account(tmp_path, 1)["record_epsilon"] == pytest.approx(bound, rel=1e-3)


def test_noisy_responses_of_a_search_are_counted_beforehand(make_trainer, tmp_path) -> None:
    def sites(job: str, planned: int) -> list[Site]:
        noise = GaussianNoise(clip_norm=1.0, noise_multiplier=5.0, max_epsilon=3.0)
        return sites_of(tmp_path, job, steps=2, planned=planned, filters=[noise])

    with pytest.raises(ValueError, match=r"the 1000 rounds of this search: ε would be .*, max_epsilon is 3"):
        federation(make_trainer, LoopbackChannel(sites("one", 1000)), num_rounds=1)
    federation(make_trainer, LoopbackChannel(sites("two", 2)), num_rounds=1)


def test_noisy_responses_spend_the_budget_of_examples_too(make_trainer, tmp_path) -> None:
    """They hide an example as well as the client, so what they reveal adds to private training."""

    def sites(job: str, planned: int | None = None) -> list[Site]:
        noise = GaussianNoise(clip_norm=1.0, noise_multiplier=5.0)
        return sites_of(tmp_path, job, steps=1, planned=planned, max_record_epsilon=6.0, filters=[noise])

    with pytest.warns(UserWarning, match="failed"), pytest.raises(TooFewUpdates, match="budget"):
        federation(make_trainer, LoopbackChannel(sites("one")), num_rounds=100)
    spent = [account(tmp_path, client) for client in range(len(SIZES))]
    assert all(5 < each["record_epsilon"] <= 6 for each in spent)
    with pytest.raises(ValueError, match=r"the 2 rounds of this search: ε of this site's examples would be"):
        federation(make_trainer, LoopbackChannel(sites("two", 2)), num_rounds=2)


def test_where_nobody_may_train_the_run_ends(make_trainer, tmp_path) -> None:
    sites = sites_of(tmp_path, max_record_epsilon=0.1)
    with pytest.warns(UserWarning, match="failed"), pytest.raises(TooFewUpdates, match="max_record_epsilon is"):
        federation(make_trainer, LoopbackChannel(sites), num_rounds=1)
    assert not (tmp_path / "account" / "client-0" / "privacy.json").exists()


def test_a_site_with_a_bound_trains_for_no_job_without_privacy(tmp_path) -> None:
    with pytest.raises(Refused, match=r"trains only with model.privacy \(policy.max_record_epsilon\)"):
        sites_of(tmp_path, noise=None, max_record_epsilon=1.0)
    assert sites_of(tmp_path, noise=None)[0].policy.disclosed_metrics == "plain"
    assert sites_of(tmp_path)[0].policy.disclosed_metrics == "off"
    assert sites_of(tmp_path, metrics="plain")[0].policy.disclosed_metrics == "plain"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"max_record_epsilon": 0.0}, r"policy.max_record_epsilon must be positive, or null for no bound, got 0.0"),
        ({"record_delta": 1.0}, r"policy.record_delta must be in \(0, 1\), got 1.0"),
    ],
)
def test_policies_out_of_range(policy, message) -> None:
    with pytest.raises(ValueError, match=message):
        SitePolicy(**policy)


def test_other_strategies_are_refused_by_the_site_itself(make_trainer, monkeypatch, tmp_path) -> None:
    trainer, strategy = make_trainer(num_rounds=1), FedProto(num_epochs=1)
    sites = sites_of(tmp_path)
    for site in sites:
        site.strategy = FedProto(num_epochs=1)
    monkeypatch.setattr("fl_lightning.run.assembly.check_privacy", lambda *args: None)  # a server that does not mind
    data = federate(trainer, LoopbackChannel(sites), strategy, num_outputs=3)
    with pytest.raises(ValueError, match="does not cover FedProto, whose stage 'train' sends class"):
        trainer.fit(make_client(), data, strategy)


def test_an_account_of_updates_and_steps(tmp_path) -> None:
    accountant = PrivacyAccountant(tmp_path, delta=1e-5)
    accountant.spend(5.0)
    accountant.spend_steps(0.1, 1.0, 30)
    accountant.spend_steps(0.2, 2.0, 7)
    accountant.spend_steps(0.1, 1.0, 5)
    again = PrivacyAccountant(tmp_path, delta=1e-5)

    whole = epsilon_of({(0.1, 1.0): 35, (0.2, 2.0): 7}, 1e-5, precision=1 / 25)
    assert again.record_epsilon() == pytest.approx(whole)
    assert again.num_responses == 1, "steps are no responses, and say nothing of the client as a whole"
    assert again.epsilon() == pytest.approx(PrivacyAccountant(tmp_path / "other", delta=1e-5).epsilon(5.0))
    with pytest.raises(BudgetSpent, match="the privacy budget of this site's examples is spent"):
        again.spend_steps(0.1, 1.0, 1, whole)
    assert again.record_epsilon() == pytest.approx(whole), "what was refused is not counted"
    again.spend(5.0)
    assert again.record_epsilon() > whole
    kept = json.loads((tmp_path / "privacy.json").read_text())
    assert kept["record_epsilon"] == pytest.approx(again.record_epsilon()), "the file says it as well"


def test_noise_on_updates_counts_for_the_examples_too(make_trainer, tmp_path) -> None:
    sites = sites_of(tmp_path, steps=2)  # a number that does not tell how many examples there are
    for site in sites:
        noise = GaussianNoise(clip_norm=1.0, noise_multiplier=4.0)
        noise.open(tmp_path / "account" / site.client_data.name)
        site.policy = site.guard.policy = dataclasses.replace(site.policy, filters=[noise])
    federation(make_trainer, LoopbackChannel(sites))

    kept = account(tmp_path, 0)
    assert kept["num_answers"] == 3
    assert PrivacyAccountant(tmp_path / "account" / "client-0", delta=1e-5).record_epsilon() == pytest.approx(
        epsilon_of({(0.2, 1.0): 6}, 1e-5, precision=3 / 16)
    )


def test_a_job_may_name_it() -> None:
    def job(**settings) -> Job:
        privacy = {"class": "RecordPrivacy", "settings": settings}
        model = {"class": "ClientModule", "settings": {"privacy": privacy}}
        return Job(name="run", sites=["a", "b"], strategy={"class": "FedAvg", "settings": {}}, model=model)

    job(max_grad_norm=1.0, noise_multiplier=1.0, max_epsilon=8.0).check(Registry())
    with pytest.raises(NotAJob, match="RecordPrivacy has no setting 'numbers'"):
        job(numbers="none").check(Registry())


@pytest.mark.filterwarnings("default")  # jsonargparse's own
def test_a_site_explains_what_a_job_tells_of_each_example(tmp_path) -> None:
    privacy = {"class_path": "RecordPrivacy", "init_args": {"max_grad_norm": 1.0, "noise_multiplier": 2.0}}
    config = {
        "strategy": {"class_path": "FedAvg", "init_args": {"num_epochs": 1}},
        "model": {"class_path": "ClientModule", "init_args": {"privacy": privacy}},
        "trainer": {"num_rounds": 4},
    }
    data = {"source": {"class_path": "FL60"}, "cache_dir": str(tmp_path / "cache"), "batch_size": 20}
    site_file = tmp_path / "fl_site.yaml"
    site_file.write_text(yaml.safe_dump({"data": data}))

    lines, refused = explain(job_of(config, name="run", sites=["a", "b"])[0], site_file)

    assert refused == []
    reported = [line for line in lines if line.startswith("private training")]
    actual = re.fullmatch(
        r"private training: (\d+) steps in total, each example in a step with probability (\S+), .*", reported[0]
    )
    num_examples = 20 / float(actual[2])
    assert int(actual[1]) == 4 * math.ceil(num_examples / 20 - 1e-2)
    assert "noise multiplier 2: ε " in reported[0]
    assert any("their metrics stay here" in line for line in lines)
