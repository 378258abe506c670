"""What may leave a site, and what a server may ask of it, is its policy's to say, not the job's."""

import dataclasses
from typing import Any

import pytest
import torch
from sites import OPEN, BadChannel, make_sites

from fl_lightning import ClientModule, Stage
from fl_lightning.models import GCN, MaskedGCN
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import Message, NoisyMetrics, SitePolicy, federate
from fl_lightning.remote.digests import settings_of
from fl_lightning.remote.guard import Guard, count_parameters, kind_of
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.policy import Refused
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Rows, tune
from fl_lightning.strategies import SCAFFOLD, FedAvg, FedPer, FedProto, FedPub
from fl_lightning.strategies.trials import validation_score


@pytest.fixture
def three(graphs, given_clients):
    return given_clients(graphs[:3])


@pytest.fixture
def run(three, make_model, make_trainer, tmp_path):
    """A remote run of three clients, and the channel, which has all messages and responses."""

    def fit(make: Any = lambda: FedAvg(num_epochs=1), num_rounds: int = 2, **policy: Any) -> BadChannel:
        rules = SitePolicy(**{"min_examples": 1, **policy})
        channel = BadChannel(make_sites(three.clients, tmp_path / "sites", lambda: (make_model(), make()), rules))
        trainer, strategy = make_trainer(num_rounds=num_rounds), make()
        data = federate(trainer, channel, strategy, relation_graph=Ring())
        fit.channel = channel
        trainer.fit(make_model(), data, strategy)
        return channel

    return fit


def answers(channel: BadChannel, kind: str) -> list[Message]:
    return [response for question, response in channel.responses if question.kind == kind]


@pytest.fixture
def started(three, make_model, tmp_path, make_trainer):
    """A site that takes part in a federation, as the server has left it after a round."""

    def start(**policy: Any) -> Any:
        rules = SitePolicy(**{"min_examples": 1, **policy})
        sites = make_sites(three.clients, tmp_path / "sites", lambda: (make_model(), FedAvg(num_epochs=1)), rules)
        channel, strategy = BadChannel(sites), FedAvg(num_epochs=1)
        trainer = make_trainer(num_rounds=1)
        trainer.fit(make_model(), federate(trainer, channel, strategy), strategy)
        asked = {question.kind: question for question, _ in channel.responses}
        return sites[0], asked

    return start


def why(site: Any, message: Message) -> str:
    response = Message.read(site.respond(message.wire))
    assert response.kind == "failure"
    return str(response.about["why"])


# -------------------------------------------------------------------- parameters


def test_a_submitter_cannot_widen_what_a_site_keeps(run) -> None:
    """FedPer with ``personal: []`` sends the head."""
    with pytest.raises(ValueError, match=r"head\.weight, head\.bias would leave, but policy\.local keeps it here"):
        run(lambda: FedPer(num_epochs=1, personal=[]), local=["head.*"])
    assert not answers(run.channel, "run")
    sent = answers(run(lambda: FedPer(num_epochs=1), local=["head.*"]), "run")
    assert sent
    assert not [name for response in sent for name in response.tensors if "head" in name]


def test_only_named_parameters_leave(run) -> None:
    with pytest.raises(
        ValueError, match=r"head\.weight, head\.bias would leave, but policy\.parameters does not allow"
    ):
        run(parameters=["convs.*"])
    assert run(lambda: FedPer(num_epochs=1), parameters=["convs.*"])


def test_what_is_called_as_a_parameter_that_stays_does_not_leave_as_a_output() -> None:
    policy = SitePolicy(min_examples=1, local=["head.*", "projection"])
    for name in ("gradients/head.weight", "head.weight", "projection"):
        with pytest.raises(Refused, match=r"policy\.local keeps"):
            policy.check_output(name, "client")
    policy.check_output("gradients/convs.0.weight", "client")


def test_control_variates_of_what_stays_are_refused(run) -> None:
    """SCAFFOLD sends gradients, by the names of parameters, beside all parameters."""
    with pytest.raises(ValueError, match=r"policy\.local keeps it here"):
        run(lambda: SCAFFOLD(num_epochs=1), local=["head.bias"])


# -------------------------------------------------------------------- outputs


def test_outputs_leave_by_name_and_by_kind(run) -> None:
    with pytest.raises(ValueError, match=r"class would leave, but policy\.outputs does not allow it"):
        run(lambda: FedProto(num_epochs=1), outputs=["embedding"])
    with pytest.raises(ValueError, match=r"class describes each class, but policy\.kinds allows only client"):
        run(lambda: FedProto(num_epochs=1), kinds=["client"])
    for allowed in (["class"], ["class/*"], ["cl*"]):
        SitePolicy(outputs=allowed).check_output("class", "class")
        SitePolicy(outputs=allowed).check_output("class/counts", "class")


def test_rows_of_single_examples_need_a_site_that_lets_one_example_speak() -> None:
    rows = {"hidden": Rows(of="example"), "shown": Rows(of="single")}
    stage = Stage(name="exchange", client_outputs={"hidden": None, "shown": None}, rows=rows)
    for name in ("hidden", "shown", "shown/features"):
        assert kind_of(stage, name) == "example"
        with pytest.raises(Refused, match="numbers that describe one example each"):
            SitePolicy(min_examples=2).check_output(name, kind_of(stage, name))
        SitePolicy(min_examples=1).check_output(name, kind_of(stage, name))


def test_a_mean_of_too_few_examples_is_withheld_for_its_class_alone(run) -> None:
    """FedProto at a site that asks for several examples sent a mean of one."""
    whole = answers(run(lambda: FedProto(num_epochs=1), num_rounds=1), "run")
    counts = torch.cat([response.tensors["s/class/counts"] for response in whole])
    least = int(counts[counts > 0].min()) + 1
    assert bool((counts >= least).any())

    for before, after in zip(whole, _again(run, least), strict=True):
        enough_1K = before.tensors["s/class/counts"] >= least
        assert torch.equal(after.tensors["s/class/counts"], before.tensors["s/class/counts"] * enough_1K)
        prototypes = before.tensors["s/class/prototypes"] * enough_1K[..., None]
        assert torch.equal(after.tensors["s/class/prototypes"], prototypes)


def _again(run: Any, least: int) -> list[Message]:
    for path in run.channel.sites[0].folder.parent.rglob("*"):
        if path.name == "account_key":  # the secret, without the records that it names
            path.write_bytes(path.read_bytes()[:32])
        elif path.is_file() and "key" not in path.name:
            path.unlink()
    return answers(run(lambda: FedProto(num_epochs=1), num_rounds=1, min_examples=least), "run")


def test_a_statistic_of_classes_without_counts_is_held_against_the_labels(three, tmp_path) -> None:
    holds = three.clients[0]
    counts_K = torch.bincount(holds.y_N[holds.train_mask_N], minlength=4)
    least = int(counts_K.max())
    stage = Stage(name="s", client_outputs={"r": None}, rows=dict.fromkeys(("r", "of/present"), Rows(of="class")))
    extras = {"r": torch.ones(1, 4), "of/present": torch.ones(1, 4, dtype=torch.bool), "mean": torch.ones(1, 2)}
    guard = Guard(SitePolicy(min_examples=least), holds, SumLedger(tmp_path))

    left = guard.leaving(Payload(clients=(0,), extras=extras), stage).extras

    assert torch.equal(left["r"][0], (counts_K >= least).float())
    assert torch.equal(left["of/present"][0], counts_K >= least)
    assert torch.equal(left["mean"], extras["mean"])


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_score_of_too_few_examples_says_nothing(three, as_mapping, tmp_path) -> None:
    guard = Guard(SitePolicy(min_examples=5), three.clients[0], SumLedger(tmp_path))
    stage = Stage(name="try", client_outputs={"score": None}, rows={"score": Rows(of="score")})
    for count in (4.0, 5.0):
        extras = {"score": torch.tensor([[3.0, count]])}
        if as_mapping:
            extras = {"score/right": torch.tensor([3.0]), "score/count": torch.tensor([count])}
        for guard.hides_scores in (False, True):  # where the metric is a mean over classes, one of which has too few
            left = guard.leaving(Payload(clients=(0,), extras=extras), stage).extras
            leaves = count >= 5 and not guard.hides_scores
            assert all(torch.equal(tensor, extras[name] * leaves) for name, tensor in left.items())


# -------------------------------------------------------------------- bounds


def test_outputs_by_the_million_are_refused_by_arithmetic(started, monkeypatch) -> None:
    site, asked = started(max_parameters=100_000)

    build = type(site.model).build

    def watched(model: Any, num_features: Any, num_outputs: int, *others: Any) -> None:
        assert num_outputs < 99, "the net was built"
        build(model, num_features, num_outputs, *others)  # of the federation that the site goes back to

    monkeypatch.setattr(type(site.model), "build", watched)
    start = asked["start"]

    def asking(num_outputs: Any) -> Message:
        return dataclasses.replace(start, about={**start.about, "num_outputs": num_outputs})

    assert "num_outputs must be an integer in [1, 100000]" in why(site, asking(10**8))
    assert "parameters, policy.max_parameters is 100000 here" in why(site, asking(10**5))
    site.policy = site.guard.policy = SitePolicy(max_outputs=99)
    assert why(site, asking(100)) == "100 outputs are asked for, policy.max_outputs is 99 here"
    for wrong in (0, -1, True, 1.5, "7", None):
        assert "num_outputs must be an integer in [1, 100000]" in why(site, asking(wrong))
    wide = dataclasses.replace(start, about={**start.about, "num_features": 10**6})
    assert "num_features cannot be this site's" in why(site, wide)


def test_the_strategys_own_net_is_counted_where_the_job_names_none(three, tmp_path) -> None:
    """FedPub brings a net with masks, which has about twice as many parameters as a GCN."""
    message = None
    for net in (None, MaskedGCN):
        (site,) = make_sites(three.clients[:1], tmp_path / str(net), lambda net=net: (ClientModule(net), FedPub()))
        site.policy = site.guard.policy = SitePolicy(min_examples=1, max_parameters=30_000)
        about = Message.read(site.respond(Message(kind="enroll", about={"strategy": "FedPub"}).wire)).about
        reported = why(site, a_start(site, about))
        assert "parameters, policy.max_parameters is 30000 here" in reported
        assert message in (None, reported)
        message = reported


def a_start(site: Any, card: Any) -> Message:
    about = {
        "strategy": type(site.strategy).__name__,
        "settings": settings_of(site.strategy, site.model),
        "index": 0,
        "secure": False,
        "federation": "f" * 64,
        "precision": "32-true",
        "num_features": card["num_features"],
        "own": card["own"],
        "names": ["a"],
        "task": card["task"],
        "num_outputs": 3,
        "layout": site.model.task.layout_for(card["density"]),
        "seed": 0,
        "training_clients": [0],
        "dtype": "float32",
        "secure_share": 2 / 3,
    }
    return Message(kind="start", about=about)


def test_parameters_are_counted_without_memory(make_model) -> None:
    model = make_model()
    real = sum(parameter.numel() for parameter in GCN(7, 3).parameters())
    model.net_factories = [GCN]
    assert count_parameters(model, 7, 3) == real
    assert count_parameters(model, 7, 10**12) > 10**12


def test_models_to_score_are_bounded_in_a_round_whatever_the_federation(started) -> None:
    """One message with 470 models gave a client's gradient."""
    site, asked = started(max_evaluations_per_round=3)
    question = asked["evaluate"]
    ways = question.about["evaluations"]
    assert len(ways) == 2

    def asking(model: int, round_idx: int, count: int = 2) -> Message:
        return Message(
            kind="evaluate",
            about={
                **question.about,
                "round_idx": round_idx,
                "state": site.current,
                "forget": [],
                "evaluations": (ways * 300)[:count],
            },
            tensors={name: tensor + model for name, tensor in question.tensors.items() if int(name[0]) < count},
        )

    assert "evaluations must be a list of 0 to 64 items" in why(site, asking(1, 7, 470))
    assert "an evaluation is requested twice" in why(site, asking(1, 7, 64))
    assert Message.read(site.respond(asking(1, 7).wire)).kind == "response"
    site.respond(asked["start"].wire)
    assert "2 models were evaluated in round 7 and 2 more are requested" in why(site, asking(2, 7))
    assert Message.read(site.respond(asking(2, 7, 1).wire)).kind == "response"
    site.policy = site.guard.policy = SitePolicy(min_examples=1, evaluations=["own"])
    assert "a model that is received is to be evaluated, but policy.evaluations allows only own" in why(
        site, asking(1, 8)
    )


def test_training_before_an_evaluation_ends(three, tmp_path) -> None:
    policy = SitePolicy(max_steps_per_round=100, max_evaluations_per_round=2)
    guard = Guard(policy, three.clients[0], SumLedger(tmp_path))
    guard.admit_evaluations([Evaluation(tuning=tune(40))], 0, 1, asked="a")
    guard.admit_evaluations([Evaluation(tuning=tune(20))], 0, 1, asked="a")  # again: no further model, but steps
    assert guard.evaluations[0] == 1
    with pytest.raises(
        Refused, match=r"60 steps of round 0 were taken and 60 more are requested, policy\.max_steps_per_rou"
    ):
        guard.admit_evaluations([Evaluation(tuning=tune(60))], 0, 1, asked="b")
    guard.admit_evaluations([Evaluation(tuning=tune(60))], 1, 1, asked="c")
    with pytest.raises(Refused, match="max_steps_per_round"):
        guard.admit_tuning(Evaluation(tuning=tune(10**9)), 2, 1)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"metrics": "off"}, "policy.metrics forbids it"),
        ({"metrics": "sums"}, "policy.metrics forbids it"),
        ({"metric_noise": NoisyMetrics(noise_multiplier=5.0)}, "policy.metric_noise is for evaluations alone"),
        ({"evaluations": ["own"]}, "policy.evaluations does not allow those that are received"),
    ],
)
def test_scores_within_a_stage_are_metrics_too(three, policy, why, tmp_path) -> None:
    """A strategy that chooses its settings by validation would be told the metric of any model, exactly."""
    guard = Guard(SitePolicy(min_examples=1, **policy), three.clients[0], SumLedger(tmp_path))
    trial = Stage(name="try", client_outputs={"s": validation_score}, rows={"s": Rows(of="score")})
    with pytest.raises(Refused, match=why):
        guard.admit_stage(trial, (), 0, 1.0, 1, asked="a")
    Guard(OPEN, three.clients[0], SumLedger(tmp_path)).admit_stage(trial, (), 0, 1.0, 1, asked="a")
    guard.summed = True
    if policy.get("metrics") == "sums":
        guard.check_stage(trial, ())


def test_steps_of_a_round_are_bounded(run) -> None:
    run(lambda: FedAvg(num_epochs=3), max_steps_per_round=3)
    with pytest.raises(Exception, match="max_steps_per_round is 2"):
        run(lambda: FedAvg(num_epochs=3), max_steps_per_round=2)


@pytest.mark.parametrize("work_fraction", [1e9, -1, float("nan"), "1", True, None])
def test_work_fraction_is_a_share(three, work_fraction, tmp_path) -> None:
    guard = Guard(OPEN, three.clients[0], SumLedger(tmp_path))
    with pytest.raises(Refused, match=r"the work fraction must be in \[0, 1\]"):
        guard.admit_stage(Stage(name="train", num_epochs=1), (), 0, work_fraction, 1, asked="a")


def test_rounds_that_the_job_has_not_are_refused(three, tmp_path) -> None:
    guard = Guard(OPEN, three.clients[0], SumLedger(tmp_path), num_rounds=5)
    guard.check_round(5)
    with pytest.raises(Refused, match="round 6 is requested, but the job has 5 rounds"):
        guard.check_round(6)
    for wrong in (-1, True, 1.0, None):
        with pytest.raises(Refused, match="a round is an integer"):
            guard.check_round(wrong)


def test_a_stage_has_no_longer_than_the_site_gives_it(started) -> None:
    site, _ = started(max_seconds=50.0)
    assert site.member.executor.time_limit == 50.0


def test_messages_are_counted_and_weighed_before_they_are_read(started) -> None:
    site, asked = started(max_message_mib=1)
    assert "policy.max_message_mib is 1" in Message.read(site.respond(bytes(2**20 + 1))).about["why"]
    site.guard.num_messages = site.policy.max_messages
    assert "policy.max_messages is 100000" in why(site, asked["enroll"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_outputs": 0},
        {"max_outputs": 100_001},
        {"max_parameters": 0},
        {"max_padding_mib": 0},
        {"max_steps_per_round": 0},
        {"max_messages": 0},
        {"max_message_mib": 0},
        {"max_evaluations_per_round": -1},
        {"max_seconds": 0.0},
        {"max_memory_gib": 0.0},
    ],
    ids=lambda each: "-".join(map(str, *each.items())),
)
def test_bounds_that_are_none(wrong) -> None:
    with pytest.raises(ValueError, match=rf"policy\.{next(iter(wrong))} must be"):
        SitePolicy(**wrong)
