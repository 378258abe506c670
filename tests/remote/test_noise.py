"""Sites that add noise: nothing that leaves depends on whether something failed, and their metrics are usable."""

import copy
import dataclasses
import json
import logging
import types

import pytest
import torch
from sites import OPEN, BadChannel, make_sites

from fl_lightning import ClientModule
from fl_lightning.callbacks import FederatedCheckpoint, PerClientMetrics, RoundProgressBar, RunReport
from fl_lightning.remote import GaussianNoise, LoopbackChannel, Message, NoisyMetrics, SitePolicy, federate, masking
from fl_lightning.remote import executor as remote_executor
from fl_lightning.remote.metrics import wrong_summands
from fl_lightning.remote.release import _hidden
from fl_lightning.remote.responses import Responses
from fl_lightning.remote.schema import WrongMessage
from fl_lightning.run.checkpoint import SITES, differing
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedProto

pytest.importorskip("dp_accounting.gaussian_mechanism", reason="needs the extra privacy")

FAILED = "the stage failed: see the site's log"


def noisy(**settings) -> SitePolicy:
    return SitePolicy(min_examples=1, filters=[GaussianNoise(clip_norm=1.0, noise_multiplier=5.0, **settings)])


def scored(**settings) -> SitePolicy:
    return SitePolicy(min_examples=1, metric_noise=NoisyMetrics(noise_multiplier=2.0, **settings))


@pytest.fixture
def trained(graphs, make_model, make_trainer, tmp_path):
    """A run with sites of a policy each, and what its channel has seen."""

    def build(policy, *, kind=FedAvg, model=ClientModule, secure=False, clients=graphs[:3], **settings):
        sites = []
        for client in clients:
            made = lambda: (make_model(model), kind(num_epochs=1))  # noqa: E731
            sites += make_sites([client], tmp_path / "sites", made, copy.deepcopy(policy))
        trainer, strategy, channel = (
            make_trainer(**{"num_rounds": 1, **settings}),
            kind(num_epochs=1),
            BadChannel(sites),
        )
        trainer.fit(make_model(model), federate(trainer, channel, strategy, secure=secure), strategy)
        return trainer, channel

    return build


def overflowing(shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """A model of whose hidden layer only feature 0 is read, and whose outputs then overflow."""
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    first, second = (name for name in tensors if name.endswith("weight") and "convs" in name)
    tensors[first][0, 0, 0], tensors[second][0, 0, 0] = 1e20, 1e22
    return tensors


def with_and_without_feature_0(graphs) -> list:
    x_NF = graphs[0].x_NF.clone()
    x_NF[:, 0] = 0
    return [graphs[0], dataclasses.replace(graphs[0], x_NF=x_NF, name="without")]


def responses_to(site, start: Message, run: Message, rounds: int) -> list[Message]:
    """What a site responds to a model that overflows, in each of some rounds."""
    state = Message.read(site.respond(start.wire)).about["state"]
    tensors, result = overflowing({name: tensor.shape for name, tensor in run.tensors.items()}), []
    for round_idx in range(rounds):
        address = {**run.about["address"], "round_idx": round_idx}
        about = {**run.about, "state": state, "address": address}
        result.append(Message.read(site.respond(dataclasses.replace(run, about=about, tensors=tensors).wire)))
        state = result[-1].about.get("state") or state
    return result


def test_a_failure_is_not_told_by_a_site_with_noise(trained, graphs, caplog) -> None:
    """Whether training overflows was one exact bit of the data for each message, before and after the budget."""
    policy = dataclasses.replace(noisy(max_epsilon=1.5), metrics="plain")
    _, channel = trained(policy, clients=with_and_without_feature_0(graphs))
    starts = [question for question, _ in channel.responses if question.kind == "start"]
    run = next(question for question, _ in channel.responses if question.kind == "run")
    with caplog.at_level(logging.WARNING):
        told = [responses_to(site, start, run, 5) for site, start in zip(channel.sites, starts, strict=False)]
    assert caplog.text.count("a response without a change") == 2  # of the first site, until its budget is spent
    kinds = [[(each.kind, each.about.get("why"), sorted(each.tensors)) for each in responses] for responses in told]
    assert kinds[0] == kinds[1]
    assert [kind for kind, _, _ in kinds[0]] == ["response"] * 2 + ["failure"] * 3
    assert "the privacy budget is spent: ε would be" in kinds[0][-1][1]
    accounts = [json.loads((site.folder / "privacy.json").read_text()) for site in channel.sites]
    assert [account["num_answers"] for account in accounts] == [3, 3]  # one of the run itself
    for responses in told:
        assert len({response.about["state"] for response in responses[:2]}) == 2  # nor by a state that is as before
        assert [int(response.tensors["num_steps"]) for response in responses[:2]] == [1, 1]
        bias = [response.tensors["p/head.bias"] for response in responses[:2]]
        assert 1 < torch.cat(bias).std() < 100  # noise of deviation 10


@pytest.mark.filterwarnings("ignore:.*left out")
def test_an_output_of_a_stage_that_fails_has_its_shape(trained, make_model, caplog) -> None:
    class Careless(ClientModule):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("the patient's name is Ada")

    policy = dataclasses.replace(noisy(), metrics="plain")
    with caplog.at_level(logging.WARNING):
        trainer, channel = trained(policy, kind=FedProto, model=Careless)
    assert trainer.run.num_failures == {}
    responses = [response for question, response in channel.responses if question.kind == "run"]
    shapes = [{n: tuple(t.shape) for n, t in response.tensors.items() if n[:2] == "s/"} for response in responses]
    assert shapes == [{"s/class/prototypes": (1, 3, 8), "s/class/counts": (1, 3)}] * len(shapes)
    assert not any("Ada" in str(response.about) or "RuntimeError" in str(response.about) for response in responses)
    assert "Ada" in caplog.text


@pytest.mark.filterwarnings("ignore:.*left out|.*failed|.*no value in any round")
@pytest.mark.parametrize("policy", [OPEN, noisy(max_epsilon=30)], ids=["plain", "noise"])
def test_failures_in_a_secure_sum_are_told_alike(policy, trained, graphs, monkeypatch) -> None:
    real = remote_executor.work_request

    def forged(request, client, state, **facts):
        message = real(request, client, state, **facts)
        return dataclasses.replace(message, tensors=overflowing({n: t.shape for n, t in message.tensors.items()}))

    monkeypatch.setattr(remote_executor, "work_request", forged)
    policy = dataclasses.replace(policy, metrics="plain")
    clients = [*with_and_without_feature_0(graphs), *graphs[1:3]]
    if policy.filters:  # zero counts as any other response, and numbers that are too large are clamped
        trainer, _ = trained(policy, clients=clients, secure=True)
        assert trainer.run.history[0]["failed_round"] == 0
        return
    with pytest.raises(TooFewUpdates) as caught:
        trained(policy, clients=clients, secure=True)
    assert FAILED in str(caught.value)
    assert "Error" not in str(caught.value)


def test_numbers_with_noise_are_never_too_large_for_a_sum() -> None:
    """A refusal would tell of numbers that have only their share of the noise."""
    sums = types.SimpleNamespace(state={"members": [0, 1, 2]}, hide=lambda total_D: total_D)
    numbers_D = torch.tensor([torch.nan, torch.inf, -1e300, 1.0], dtype=torch.float64)
    hidden_D = masking.from_whole(_hidden(numbers_D, 1.0, sums, "run", clamp=True))
    most = masking.largest(1.0, 3)
    assert hidden_D.tolist() == pytest.approx([0.0, most, -most, 1.0, 1.0])


def test_numbers_that_are_not_finite_are_not_trained_from(trained) -> None:
    _, channel = trained(dataclasses.replace(noisy(), metrics="plain"))
    run = next(question for question, _ in channel.responses if question.kind == "run")
    start = next(question for question, _ in channel.responses if question.kind == "start")
    site = channel.sites[0]
    about = {**run.about, "state": Message.read(site.respond(start.wire)).about["state"]}
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in run.tensors.items()}
    response = Message.read(site.respond(dataclasses.replace(run, about=about, tensors=tensors).wire))
    assert response.about["why"] == "the server sends numbers that are not finite"
    assert json.loads((site.folder / "privacy.json").read_text())["num_answers"] == 1


# ---------------------------------------------------------------- evaluations


class Sick(ClientModule):
    """Cannot be scored once it is trained."""

    def score_table(self, parameters, batch, context, output=None):
        if getattr(self, "sick", False):
            raise RuntimeError("the patient's name is Ada")
        return super().score_table(parameters, batch, context, output)


@pytest.mark.parametrize("way", ["raises", "overflows"])
def test_an_evaluation_that_fails_counts_as_zero(way, trained) -> None:
    _, channel = trained(scored(max_epsilon=30), model=Sick)
    question = [question for question, _ in channel.responses if question.kind == "evaluate"][-1]
    site = channel.sites[-1]
    site.member.executor.client.sick = way == "raises"
    for module in site.member.executor.modules.values():
        module.sick = way == "raises"
    tensors = question.tensors
    if way == "overflows":
        tensors = {name: torch.full_like(tensor, 1e30) for name, tensor in tensors.items()}
    about = {**question.about, "round_idx": 1, "state": site.current}
    response = Message.read(site.respond(dataclasses.replace(question, about=about, tensors=tensors).wire))
    assert (response.kind, response.about.get("failures")) == ("response", {}), response.about
    for name, pair_12 in response.tensors.items():
        assert pair_12[0, 1] == name.endswith("/acc") * (not name.endswith("train/acc"))
        assert pair_12.isfinite().all()
    account = json.loads((site.folder / "privacy.json").read_text())
    assert account["num_answers"] == 2


@pytest.mark.parametrize("policy", [scored(), dataclasses.replace(noisy(), metrics="plain")], ids=["metrics", "noise"])
def test_a_site_that_cannot_be_scored_does_not_say_why(policy, trained) -> None:
    class Broken(ClientModule):
        def score_table(self, parameters, batch, context, output=None):
            raise RuntimeError("the patient's name is Ada")

    with pytest.raises(ValueError, match="see the site's log") as caught:
        trained(policy, model=Broken)
    assert "RuntimeError" not in str(caught.value)


def test_predictions_that_fail_are_not_told(trained, make_model, monkeypatch) -> None:
    from fl_lightning import SequentialExecutor

    trainer, channel = trained(scored(), callbacks=[FederatedCheckpoint()])

    def fails(*_args):
        raise RuntimeError("the patient's name is Ada")

    monkeypatch.setattr(SequentialExecutor, "_predict", fails)
    strategy = FedAvg(num_epochs=1)
    data = federate(trainer, channel, strategy)
    assert trainer.predict(make_model(), data, strategy, ckpt_path="last") == {}
    assert not (channel.sites[0].folder / "predictions.csv").exists()


@pytest.mark.parametrize("secure", [False, True])
def test_sites_with_noisy_metrics_select_a_round(secure, trained) -> None:
    """Noise takes shares out of [0, 1]: every site was blamed, and no round could be selected."""
    callbacks = [PerClientMetrics(), RoundProgressBar(), RunReport(), FederatedCheckpoint()]
    trainer, channel = trained(scored(), secure=secure, num_rounds=4, callbacks=callbacks)
    history = trainer.run.history
    assert trainer.run.num_failures == {}
    values = [row["val/acc"] for row in history]
    assert all(map(lambda value: value == value, values))
    assert not all(0 <= value <= 1 for value in values)
    assert trainer.run.selection.best_round == max(range(4), key=values.__getitem__)
    assert "report" in (trainer.run.folder / "report.html").read_text()
    starts = [response.about for question, response in channel.responses if question.kind == "start"]
    assert all(about["noisy"] is True for about in starts)


def test_one_noisy_site_among_others(graphs, make_model, make_trainer, tmp_path) -> None:
    sites = [
        *make_sites(graphs[:1], tmp_path / "noisy", lambda: (make_model(), FedAvg(num_epochs=1)), scored()),
        *make_sites(graphs[1:3], tmp_path / "sites", lambda: (make_model(), FedAvg(num_epochs=1))),
    ]
    trainer, strategy = make_trainer(num_rounds=2), FedAvg(num_epochs=1)
    trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy), strategy)
    assert trainer.run.executor.responses.noisy == {0}
    assert trainer.run.num_failures == {}


@pytest.mark.parametrize("pair", [[float("nan"), 1.0], [float("inf"), 1.0], [0.5, 2.0], [0.5, 0.0], [0.5, -1.0]])
def test_noisy_metrics_are_finite_numbers_of_one(pair) -> None:
    responses = Responses("val/acc")
    responses.noisy = {0}

    def response(values):
        return Message(kind="response", about={"failures": {}}, tensors={"0/val/acc": torch.tensor([values])})

    assert responses.scores(response([-3.5, 1.0]), 0, [""], ["val/acc"])
    with pytest.raises(WrongMessage, match=r"impossible|noise to a count of 1"):
        responses.scores(response(pair), 0, [""], ["val/acc"])
    with pytest.raises(WrongMessage, match="impossible"):
        responses.scores(response([-3.5, 1.0]), 1, [""], ["val/acc"])


def test_a_sum_with_noisy_metrics_is_not_checked_for_shares() -> None:
    total_D = torch.tensor([-2.5, 3.0, -2.5, 3.0], dtype=torch.float64)
    assert "impossible" in wrong_summands(total_D, ["0/val/acc"], 3)
    assert not wrong_summands(total_D, ["0/val/acc"], 3, noisy=True)
    assert "impossible" in wrong_summands(total_D, ["0/val/acc"], 2, noisy=True)


# ---------------------------------------------------------------- sites that change


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"rome": "1", "oslo": "2"}, ["lima left since: have it take part again"]),
        ({"rome": "1", "oslo": "2", "lima": "3", "bonn": "4"}, ["bonn joined since: leave it out"]),
        (
            {"rome": "9", "oslo": "2", "lima": "3"},
            ["rome's data or folder are others than before: restore them there"],
        ),
        (
            {"oslo": "2", "rome": "1", "lima": "3"},
            ["the sites were in another order: name them as rome, oslo, lima"],
        ),
    ],
)
def test_a_resume_names_the_site_that_differs(now, told) -> None:
    def identity(sites):
        return {SITES: json.dumps(list(sites.items())), "data (partition hash)": json.dumps(sites), "seed": "0"}

    then = identity({"rome": "1", "oslo": "2", "lima": "3"})
    assert differing(then, identity(now)) == told
    assert differing(then, then) == []
    old = {name: value for name, value in then.items() if name != SITES}  # of an earlier version
    assert [line.partition(":")[0] for line in differing(old, identity(now))] == ["data (partition hash)"]


@pytest.mark.parametrize("path", ["last", "file"])
def test_a_site_that_lost_its_folder_is_named(path, graphs, make_model, make_trainer, tmp_path) -> None:
    def sites_in(*folders):
        pairs = zip(graphs[:3], folders, strict=True)
        made = [make_sites([graph], tmp_path / f, lambda: (make_model(), FedAvg(num_epochs=1))) for graph, f in pairs]
        return LoopbackChannel([site for sites in made for site in sites])

    for channel, ckpt_path in ((sites_in("a", "a", "a"), None), (sites_in("a", "b", "a"), path)):
        trainer, strategy = make_trainer(num_rounds=1, callbacks=[FederatedCheckpoint()]), FedAvg(num_epochs=1)
        data = federate(trainer, channel, strategy)
        if ckpt_path is None:
            trainer.fit(make_model(), data, strategy)
            file = trainer.run.folder / "checkpoints" / "last.ckpt"
            continue
        with pytest.raises(ValueError, match="client-01's data or folder are others than before: restore them"):
            trainer.fit(make_model(), data, strategy, ckpt_path="last" if path == "last" else str(file))
