"""Evaluations as a disclosure of their own, and one account of a site's noise over all runs and jobs."""

import contextlib
import copy
import json
import multiprocessing
import os

import pytest
import torch
from sites import OPEN, BadChannel, make_sites

from fl_lightning.remote import GaussianNoise, LoopbackChannel, Message, NoisyMetrics, Site, SitePolicy, federate
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedBABU, Local

pytest.importorskip("dp_accounting.gaussian_mechanism", reason="needs the extra privacy")
pytestmark = pytest.mark.filterwarnings("ignore:.*it is left out")


@pytest.fixture
def trained(graphs, make_model, make_trainer, tmp_path):
    """Three sites after a run of two rounds, and what its server did."""

    def build(policy=OPEN, secure=False, make=lambda: FedAvg(num_epochs=1), names="sites", num_rounds=2):
        sites = []
        for graph in graphs[:3]:  # a filter is of one site
            sites += make_sites([graph], tmp_path / names, lambda: (make_model(make()), make()), copy.deepcopy(policy))
        trainer, strategy, channel = make_trainer(num_rounds=num_rounds), make(), BadChannel(sites)
        trainer.fit(make_model(make()), federate(trainer, channel, strategy, secure=secure), strategy)
        return trainer, channel

    return build


def refusal(site, about, tensors) -> str:
    response = Message.read(site.respond(Message(kind="evaluate", about=about, tensors=tensors).wire))
    assert not response.tensors
    assert response.kind == "failure"
    return str(response.about["why"])


def last_evaluation(channel) -> Message:
    """Of client 0, whose first responses are lost and who is asked again."""
    return [question for question, _ in channel.responses if question.kind == "evaluate"][-1]


@pytest.mark.parametrize("secure", [False, True])
def test_a_server_has_no_oracle(secure, trained) -> None:
    """470 models in one message told a client's gradient, past noise and secure sums."""
    _, channel = trained(secure=secure)
    question, site = last_evaluation(channel), channel.sites[0]
    main = dict(question.about["evaluations"])[""]
    model = {name.partition("/")[2]: p for name, p in question.tensors.items() if name.startswith("0/")}
    for count, kinds, why in (
        (470, "", "must be a list of 0 to 64 items"),
        (60, "", "an evaluation is requested twice"),
        (60, "probe{}/", "FedAvg has no evaluation 'probe0/'"),
    ):
        forged = {**question.about, "evaluations": [[kinds.format(k), main] for k in range(count)], "round_idx": 7}
        tensors = {f"{k}/{name}": p + 1e-3 * k for k in range(count) for name, p in model.items()}
        assert why in refusal(site, forged, tensors)


def test_what_a_round_may_ask_adds_up(trained) -> None:
    _, channel = trained(SitePolicy(min_examples=1, max_evaluations_per_round=8))
    question, site = last_evaluation(channel), channel.sites[0]
    refused = []
    for step in range(1, 6):
        tensors = {name: p + 1e-3 * step for name, p in question.tensors.items()}
        response = Message.read(site.respond(Message(kind="evaluate", about=question.about, tensors=tensors).wire))
        refused.append(response.kind == "failure")
    assert refused == [False, False, False, True, True]  # two models each, and two of the run itself: 8 in all
    again = Message(kind="evaluate", about=question.about, tensors=question.tensors)
    assert Message.read(site.respond(again.wire)).kind == "response"  # what was told already is told again
    rules = {"policy": site.policy, "account": site.folder}
    restarted = Site(site.client_data, site.model, site.strategy, site.folder, **rules)
    assert Message.read(restarted.respond(again.wire)).kind == "response"
    more = Message(kind="evaluate", about=question.about, tensors={n: p + 1 for n, p in question.tensors.items()})
    why = Message.read(restarted.respond(more.wire)).about["why"]
    assert "policy.max_evaluations_per_round is 8" in why
    assert "before this site was restarted" in why


def test_models_and_ways_are_the_strategys_own(trained) -> None:
    _, channel = trained(make=lambda: FedBABU(num_epochs=1, num_finetune_epochs=1))
    question, site = last_evaluation(channel), channel.sites[0]
    ways = dict(question.about["evaluations"])
    main = {name: tensor for name, tensor in question.tensors.items() if name.startswith("0/")}
    about = {**question.about, "evaluations": [["", ways["global/"]]]}
    assert "in another way" in refusal(site, about, main)
    longer = json.loads(json.dumps(ways[""]).replace('"num_epochs": 1', '"num_epochs": 1000'))
    assert longer != ways[""]
    about = {**question.about, "evaluations": [["", longer]]}
    assert "in another way" in refusal(site, about, main)
    assert "sends other models, or none" in refusal(site, {**question.about, "evaluations": [["", ways[""]]]}, {})


def test_a_payload_only_where_the_evaluation_has_one(trained) -> None:
    _, channel = trained(make=lambda: Local(num_epochs=1))
    question, site = last_evaluation(channel), channel.sites[0]
    assert [kind for kind, _ in question.about["evaluations"]] == [""]  # the client's own model
    assert not question.tensors
    model = {f"0/p/{name}": tensor[None] for name, tensor in site.member.executor.initial.items()}
    assert "sends other models" in refusal(site, question.about, model)


def test_a_probe_before_the_run_tells_names_alone(trained) -> None:
    _, channel = trained()
    starts = [response for question, response in channel.responses if question.kind == "start"]
    names = sorted(f"{split}/{what}" for split in ("train", "val", "test") for what in ("acc", "loss"))
    assert all(response.about["scored"] == names and not response.tensors for response in starts)
    first = next(question.kind for question, _ in channel.responses if question.kind not in ("enroll", "start"))
    assert first == "run"


# ---------------------------------------------------------------- policies


def test_metrics_that_stay_at_one_site(trained, graphs, make_model, make_trainer, tmp_path) -> None:
    sites = [
        Site(graph, make_model(), FedAvg(num_epochs=1), tmp_path / graph.name, policy=policy)
        for graph, policy in zip(graphs[:3], (SitePolicy(min_examples=1, metrics="off"), OPEN, OPEN), strict=True)
    ]
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy), strategy)
    counts = trainer.run.scores[""].extras["val/acc"][:, 1]
    assert [bool(count) for count in counts] == [False, True, True]
    assert trainer.run.history[0]["num_failures"] == 0


def test_a_class_with_few_examples_hides_all_classes_of_its_split(graphs, make_model, make_trainer, tmp_path) -> None:
    """Their numbers and the metric of all examples together would give it away."""

    def by_class():
        model = make_model()
        model.metrics = ("recall_per_class", "balanced_accuracy")
        return model

    for least, hides in ((1, False), (4, True)):
        policy = SitePolicy(min_examples=least)
        sites = [
            Site(graph, by_class(), FedAvg(num_epochs=1), tmp_path / str(least) / graph.name, policy=policy)
            for graph in graphs[:3]
        ]
        trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
        trainer.fit(by_class(), federate(trainer, LoopbackChannel(sites), strategy), strategy)
        scores = trainer.run.scores[""].extras
        for row, graph in enumerate(graphs[:3]):
            for split in ("train", "val", "test"):
                there_K = graph.y_N[getattr(graph, f"{split}_mask_N")].bincount()
                told = [float(scores[f"{split}/recall_class_{k}"][row, 1]) for k in range(len(there_K))]
                few = bool(((there_K > 0) & (there_K < least)).any())
                assert told == [0.0 if few else float(count) for count in there_K]
                whole = float(scores[f"{split}/balanced_accuracy"][row, 1])  # the mean of these
                assert whole == (0.0 if few else float(there_K.sum()))
                assert float(scores[f"{split}/acc"][row, 1]) == float(there_K.sum())
        assert bool((scores["test/recall_class_0"][:, 1] == 0).any()) == hides


@pytest.mark.parametrize(
    ("policy", "secure"),
    [
        (SitePolicy(min_examples=1, metrics="off"), False),
        (SitePolicy(min_examples=1, metrics="off"), True),
        (SitePolicy(min_examples=1, metrics="sums"), False),
        (SitePolicy(min_examples=1, filters=[GaussianNoise(clip_norm=1, noise_multiplier=1)]), False),
    ],
    ids=["off", "off in sums", "sums without secure aggregation", "noise on responses alone"],
)
def test_a_run_of_which_nobody_tells_metrics_is_refused(policy, secure, trained) -> None:
    with pytest.raises(ValueError, match=r"no site sends its metrics.*policy\.metric_noise"):
        trained(policy, secure)


def test_sums_alone_under_secure_aggregation(trained) -> None:
    trainer, channel = trained(SitePolicy(min_examples=1, metrics="sums"), secure=True)
    assert 0 < trainer.run.history[-1]["val/acc"] <= 1
    responses = [response for question, response in channel.responses if question.kind == "evaluate"]
    assert {tuple(response.tensors) for response in responses} == {("s/masked",)}


def test_noisy_metrics_are_counted_and_of_the_stated_size(tmp_path) -> None:
    noise = NoisyMetrics(noise_multiplier=0.5, names=["val/acc", "test/acc"])
    noise.open(tmp_path)
    exact = {
        f"0/{split}/{what}": torch.tensor([[3.0, 4.0]])
        for split in ("train", "val", "test")
        for what in ("acc", "loss")
    }
    reported = [noise(exact) for _ in range(400)]
    values = torch.stack([each["0/val/acc"][0] for each in reported])
    assert values[:, 1].unique().tolist() == [1.0]  # not how many examples there are
    assert values[:, 0].mean().item() == pytest.approx(0.75, abs=5 * 0.7 / 20)
    assert values[:, 0].std().item() == pytest.approx(0.5 * 2**0.5, rel=0.15)
    assert all(not each[name].any() for each in reported for name in exact if name.partition("/")[2] not in noise.names)
    account = PrivacyAccountant(tmp_path, delta=1e-5)
    assert account.num_responses == 400
    assert account.epsilon() == pytest.approx(
        PrivacyAccountant(tmp_path / "other", delta=1e-5).epsilon(0.5 / 20), rel=1e-9
    )


def test_the_account_moves_with_each_evaluation_and_ends_it(trained) -> None:
    noise = NoisyMetrics(noise_multiplier=3.0, max_epsilon=2.5)
    policy = SitePolicy(min_examples=1, metric_noise=noise)
    trainer, channel = trained(policy, num_rounds=4)
    reported = [json.loads((site.folder / "privacy.json").read_text()) for site in channel.sites]
    assert all(0 < account["epsilon"] <= 2.5 for account in reported)
    spent = [account["num_answers"] for account in reported]
    assert max(spent) <= 3  # of 4 rounds; messages that come twice are responded alike and counted once
    assert trainer.run.scores[""].clients == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoisyMetrics(noise_multiplier=0), "NoisyMetrics.noise_multiplier"),
        (lambda: NoisyMetrics(noise_multiplier=1, bound=-1), "NoisyMetrics.bound"),
        (lambda: NoisyMetrics(noise_multiplier=1, delta=1), "NoisyMetrics.delta"),
        (lambda: SitePolicy(metrics="some"), "policy.metrics must be"),
        (lambda: SitePolicy(max_evaluations_per_round=-1), "policy.max_evaluations_per_round"),
    ],
)
def test_settings_out_of_range(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- the account


def test_three_runs_share_one_budget(graphs, make_model, make_trainer, tmp_path) -> None:
    """Every run name had an account of its own: three runs at max_epsilon 5 came to 9.6."""
    responded = []
    for run in range(3):
        sites = [
            Site(
                graph,
                make_model(),
                FedAvg(num_epochs=1),
                tmp_path / f"run-{run}" / graph.name,
                policy=SitePolicy(
                    min_examples=1,
                    filters=[GaussianNoise(clip_norm=1.0, noise_multiplier=2.0, max_epsilon=5)],
                    metrics="plain",
                ),
                account=tmp_path / "account" / graph.name,
            )
            for graph in graphs[:3]
        ]
        trainer, strategy = make_trainer(num_rounds=3), FedAvg(num_epochs=1)
        with contextlib.suppress(TooFewUpdates):
            trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy), strategy)
        responded += [row["failed_round"] == 0 for row in trainer.run.history]
    account = PrivacyAccountant(tmp_path / "account" / graphs[0].name, delta=1e-5)
    assert account.epsilon() <= 5 < account.epsilon(2.0)
    assert responded == [index < account.num_responses for index in range(9)]


def _spend(folder, barrier, outcomes) -> None:
    account = PrivacyAccountant(folder, delta=1e-5)
    barrier.wait()
    done = 0
    for _ in range(10):
        try:
            account.spend(3.0, max_epsilon=4.0)
        except BudgetSpent:
            break
        done += 1
    outcomes.put(done)


def test_two_jobs_at_once_share_one_budget(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, outcomes = context.Barrier(2), context.Queue()
    jobs = [context.Process(target=_spend, args=(tmp_path, barrier, outcomes)) for _ in range(2)]
    for job in jobs:
        job.start()
    done = [outcomes.get(timeout=60) for _ in jobs]
    for job in jobs:
        job.join()
    account = PrivacyAccountant(tmp_path, delta=1e-5)
    assert account.num_responses == sum(done)  # none was lost
    assert account.epsilon() <= 4.0 < account.epsilon(3.0)


def test_what_was_counted_before_a_crash_stays_counted(trained, monkeypatch, tmp_path) -> None:
    """The account is on the disk before the numbers exist: a process that dies then has told nothing uncounted."""
    from fl_lightning.remote import filters

    noise = GaussianNoise(clip_norm=1.0, noise_multiplier=2.0, max_epsilon=5)
    noise.open(tmp_path)
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor, real=os.fsync: synced.append(real(descriptor)))

    def killed(count: int) -> torch.Tensor:
        assert synced, "the account is not on the disk yet"
        raise KeyboardInterrupt

    monkeypatch.setattr(filters, "normal_numbers", killed)
    with pytest.raises(KeyboardInterrupt):
        noise.change(torch.ones(3), 1)
    assert PrivacyAccountant(tmp_path, delta=1e-5).num_responses == 1


def test_a_damaged_account_ends_the_updates(tmp_path) -> None:
    account = PrivacyAccountant(tmp_path, delta=1e-5)
    account.spend(1.0)
    whole = (tmp_path / "privacy.json").read_text()
    assert account.num_responses == 1
    less = whole.replace('"precision": 1.0', '"precision": 0.1')
    assert less != whole
    for text in (
        "",
        "{}",
        "[1]",
        "[" * 100_000,
        less,
        *(json.dumps({**json.loads(whole), "seal": s}) for s in (7, "é")),
    ):
        (tmp_path / "privacy.json").write_text(text)
        with pytest.raises(ValueError, match=r"privacy\.json is damaged: restore it"):
            account.spend(1.0)


def test_the_files_are_their_owners_alone(trained) -> None:
    _, channel = trained(SitePolicy(min_examples=1, metric_noise=NoisyMetrics(noise_multiplier=5.0)), secure=True)
    folder = channel.sites[0].folder
    names = {path.name for path in folder.iterdir()}
    assert {"privacy.json", "sums.sqlite", "account_key", "sum.json", "response", "scores", "start"} <= names
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_tables_and_report_of_a_run_of_which_only_sums_are_known(graphs, make_model, make_trainer, tmp_path) -> None:
    from fl_lightning.callbacks import PerClientMetrics, RoundProgressBar, RunReport
    from fl_lightning.report.folder import read

    sites = make_sites(graphs[:3], tmp_path / "sites", lambda: (make_model(), FedAvg(num_epochs=1)))
    callbacks = [PerClientMetrics(), RoundProgressBar(), RunReport()]
    trainer, strategy = make_trainer(num_rounds=2, callbacks=callbacks), FedAvg(num_epochs=1)
    result = trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy, secure=True), strategy)
    assert "test/acc" in trainer._repr_mimebundle_()["text/html"]
    assert not {"test/acc_std", "test/acc_worst"} & result.keys()
    page = (trainer.run.folder / "report.html").read_text()
    assert "weighted by " in page
    assert not read(trainer.run.folder).client_values("test/acc")
    assert not trainer.run.selection.best_of_clients
