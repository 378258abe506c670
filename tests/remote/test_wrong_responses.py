"""A hostile or broken site is a failed client: the run ends as it would without that client's responds."""

import random
import warnings

import pytest
import torch
from sites import OPEN, make_sites
from wrong_messages import (
    ANY,
    EVALUATE,
    NUMBERS,
    RUN,
    Liar,
    fails,
    fails_after_training,
    with_facts,
    with_tensor,
    wrong_responses,
)

from fl_lightning.remote import LoopbackChannel, Message, federate
from fl_lightning.remote.data import RemoteData
from fl_lightning.remote.responses import Responses
from fl_lightning.remote.schema import WrongMessage, real
from fl_lightning.round.stage import Rows, Stage
from fl_lightning.strategies import FedAvg
from fl_lightning.strategies.trials import validation_score

HOSTILE = 1
NAME = "client-01"


@pytest.fixture
def train(graphs, given_clients, make_model, make_trainer, tmp_path):
    """Train with a site that responds one kind of question wrongly; the run, and what was warned."""

    def run(kind, wrong, num_rounds=2, make=FedAvg):
        clients = given_clients(graphs[:3]).clients
        sites = make_sites(clients, tmp_path / "sites", lambda: (make_model(), make(num_epochs=1)), OPEN)
        liar = Liar(sites[HOSTILE], kind, wrong, random.Random(0))
        channel, strategy = LoopbackChannel([*sites[:HOSTILE], liar, *sites[HOSTILE + 1 :]]), make(num_epochs=1)
        trainer = make_trainer(num_rounds=num_rounds)
        data = federate(trainer, channel, strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(make_model(), data, strategy)
        assert liar.num_lies
        return trainer, [str(each.message) for each in caught if "left out" in str(each.message)]

    return run


def figures(trainer, *own):
    return figures_without(trainer.run.history, "seconds", *own)


def figures_without(rows, *prefixes):
    return [{name: value for name, value in row.items() if not name.startswith(prefixes)} for row in rows]


@pytest.fixture(scope="module")
def failed():
    """Metrics of the runs in which the site says that it cannot, by the kind of question."""
    return {}


def test_there_are_many_kinds() -> None:
    assert len(ANY) + len(RUN) + len(EVALUATE) >= 75


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        pytest.param(kind, wrong, id=f"{kind}: {name}", marks=[pytest.mark.full] if index % 8 else [])
        for index, (kind, name, wrong) in enumerate(wrong_responses("run", "evaluate"))
    ],
)
def test_a_wrong_answer_is_that_clients_failure(train, failed, assert_same, tmp_path, kind, wrong) -> None:
    like = fails_after_training if wrong in NUMBERS.values() else fails
    if (kind, like) not in failed:
        failed[kind, like] = figures(train(kind, like)[0])
    trainer, warned = train(kind, wrong)
    # numbers are looked at with all responses at hand: the client has taken part, and has a model
    # of its own; overflows are counted
    own = ("trained/", "num_overflows") if wrong in NUMBERS.values() else ()
    assert_same(figures(trainer, *own), figures_without(failed[kind, like], *own))
    assert trainer.run.num_failures == {NAME: 2 if kind == "run" else 4}  # of two rounds, or two models in each
    assert len(warned) == (1 if own else trainer.run.num_failures[NAME])  # overflows are told once
    assert all(line.isprintable() and len(line) < 1500 for line in warned)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [pytest.param(kind, wrong, id=f"{kind}: {name}") for kind, name, wrong in wrong_responses("enroll", "start")],
)
def test_a_wrong_beginning_is_refused_by_name(train, kind, wrong) -> None:
    with pytest.raises(ValueError, match=r"leave them out|use the same version of torch|must be the same") as caught:
        train(kind, wrong, num_rounds=1)
    assert NAME in str(caught.value) or f"site-{HOSTILE}" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


def test_another_clients_state_is_no_state(train, graphs, failed, assert_same) -> None:
    states = []

    def steal(message, draw):
        """The state of whoever has responded before."""
        return with_facts(state=states[-1])(message, draw)

    response = LoopbackChannel.ask

    def ask(self, messages):
        for client, message in response(self, messages):
            if client == 0 and isinstance(message, Message):
                states.append(message.about["state"])
            yield client, message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackChannel, "ask", ask)
        trainer, _ = train("run", steal)
    assert set(trainer.run.num_failures) == {NAME}
    assert "the state of another client" in trainer.run.failures[NAME]


def test_a_number_of_examples_holds_for_the_run(train) -> None:
    reported = []

    def grow(message, draw):
        reported.append(message)
        tensors = {**message.tensors, "num_examples": message.tensors["num_examples"] * len(reported)}
        return Message(kind=message.kind, about=message.about, tensors=tensors).wire

    _, warned = train("run", grow)
    assert len(warned) == 1
    assert "num_examples was of" in warned[0]
    assert "round 1" in warned[0]


@pytest.mark.parametrize(
    ("scores", "monitor", "fits"),
    [
        ({"validation_score": [[3.0, 8.0]]}, "val/acc", True),
        ({"validation_score": [[0.0, 0.0]]}, "val/acc", True),
        ({"validation_score": [[-3.5, 8.0]]}, "val/mse", True),
        ({"validation_score": [[1e9, 1.0]]}, "val/acc", False),
        ({"validation_score": [[-1.0, 8.0]]}, "val/acc", False),
        ({"validation_score": [[-1.0, -1.0]]}, "val/mse", False),
        ({"validation_score": [[float("nan"), 1.0]]}, "val/mse", False),
        ({"validation_score": [[1.0, 0.0]]}, "val/mse", False),
        ({"validation_score/right": [9.0], "validation_score/count": [8.0]}, "val/acc", False),
        ({"validation_score/right": [7.0], "validation_score/count": [8.0]}, "val/acc", True),
    ],
)
def test_scores_within_a_stage_are_of_examples(scores, monitor, fits) -> None:
    """Otherwise one site decides what a strategy chooses."""
    stage = Stage(
        name="try",
        client_outputs={"validation_score": validation_score},
        rows={"validation_score": Rows(of="score")},
    )
    tensors = {f"s/{name}": torch.tensor(value) for name, value in scores.items()}
    tensors |= {name: torch.tensor([8]) for name in ("num_examples", "num_steps")}
    response = Message(kind="response", tensors=tensors)
    responses = Responses(monitor)
    if fits:
        assert responses.upload(response, 0, stage, {"w": torch.zeros(1)}, 1).extras
        return
    with pytest.raises(WrongMessage, match="which is impossible"):
        responses.upload(response, 0, stage, {"w": torch.zeros(1)}, 1)


@pytest.mark.parametrize(
    ("tensors", "fits"),
    [
        ({"score/right": torch.tensor([3.0]), "score/count": torch.tensor([8])}, True),
        ({"score/right": torch.tensor([3.0]), "score/count": torch.tensor([[8.0, 8.0]])}, False),
        ({"score/right": torch.zeros(1, 0), "score/count": torch.tensor([8.0])}, False),
        ({"score/count": torch.tensor([8.0])}, False),
        ({"score": torch.tensor([[3.0, 8.0]]), "score/more": torch.tensor([1.0])}, False),
        ({"score": torch.tensor([[3.0, 8.0, 1.0]])}, False),
    ],
)
def test_scores_are_numerators_and_a_denominator_of_one_shape(tensors, fits) -> None:
    """One site's count of another shape ended the run of all."""
    responses = Responses("val/acc")
    if fits:
        responses._check_scores(0, "score", tensors)
        return
    with pytest.raises(WrongMessage, match="score is not a numerator and denominator"):
        responses._check_scores(0, "score", tensors)


ODD = [torch.complex64, torch.uint8, torch.int32, torch.uint16, torch.uint64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", ODD, ids=str)
@pytest.mark.parametrize("is_score", [False, True])
def test_client_outputs_of_odd_types_are_refused_before_anything_is_computed(dtype, is_score) -> None:
    """Torch compares and adds up few types."""
    rows = {"validation_score": Rows(of="score")} if is_score else {}
    stage = Stage(name="try", client_outputs={"validation_score": validation_score}, rows=rows)
    tensors = {name: torch.tensor([8]) for name in ("num_examples", "num_steps")}
    tensors["s/validation_score"] = torch.tensor([[3.0, 8.0]]).to(dtype)
    with pytest.raises(WrongMessage, match=r"validation_score is .*, but client outputs are one of \(float16, "):
        Responses("val/acc").upload(Message(kind="response", tensors=tensors), 0, stage, {"w": torch.zeros(1)}, 1)


class SendsItsNetTwice(FedAvg):
    """Its clients send a parameter as a client output, too, as FedAux's do."""

    def client_outputs(self):
        return {next(iter(self.shared)): first_parameter}


def first_parameter(client, parameters, batch, context):
    return next(iter(parameters.values()))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.float16, torch.complex64], ids=str)
def test_a_client_output_of_another_type_is_its_clients_failure(train, dtype) -> None:
    """It was compared with the parameter of that name, which raised, out of the run."""
    trainer, _ = train("run", with_tensor("s/", lambda tensor: tensor.to(dtype)), make=SendsItsNetTwice)
    assert trainer.run.num_failures == {NAME: 2}
    assert "its response is wrong: " in trainer.run.failures[NAME]


@pytest.mark.parametrize("where", ["upload", "scores"])
def test_whatever_reading_a_response_raises_is_its_clients_failure(train, monkeypatch, where) -> None:
    read = getattr(Responses, where)

    def fails_for_one(self, response, client, *rest):
        if client == HOSTILE:
            raise RuntimeError("not implemented for 'ComplexFloat'")
        return read(self, response, client, *rest)

    monkeypatch.setattr(Responses, where, fails_for_one)
    trainer, _ = train("run", lambda message, draw: message.wire)
    assert set(trainer.run.num_failures) == {NAME}
    assert trainer.run.failures[NAME].endswith("its response is wrong: it cannot be read (RuntimeError)")


@pytest.mark.parametrize("digits", [21, 400])
def test_an_integer_that_is_no_number_is_no_message(digits) -> None:
    """It passed as one, and a conversion to a floating-point number ended the start, or left a site by its kind."""
    for sign in (1, -1):
        with pytest.raises(ValueError, match="has an integer of more than 20 digits"):
            Message.read(Message(kind="run", about={"settings": [{"x": sign * 10**digits}]}).wire)
    assert Message.read(Message(kind="run", about={"x": -(2**63)}).wire).about["x"] == -(2**63)
    assert real(0, 1)(10**digits) == real(0, 1)(float("inf")) == "must be a number in [0, 1]"


def test_more_outputs_than_the_server_takes_are_refused_by_the_sites_name(graphs, make_model, tmp_path) -> None:
    sites = make_sites(graphs[:3], tmp_path, lambda: (make_model(), FedAvg()))
    liar = Liar(sites[HOSTILE], "enroll", with_facts(num_outputs=11), random.Random(0))
    data = RemoteData(LoopbackChannel([sites[0], liar, sites[2]]), FedAvg(), max_outputs=10)
    with pytest.raises(ValueError, match=r"part: site-1: its data have 11 outputs, but policy\.max_outputs is 10 at"):
        data.prepare_data()


def test_a_score_is_always_of_as_many_examples() -> None:
    responses = Responses("val/acc")
    responses._check_scores(0, "score", {"score": torch.tensor([[3.0, 8.0]])})
    with pytest.raises(WrongMessage, match="score was of 8 examples, and is of 9"):
        responses._check_scores(0, "score", {"score": torch.tensor([[3.0, 9.0]])})


@pytest.mark.parametrize(("sent", "how"), [((), "does not send val/acc"), (("val/acc", "val/f1"), "sends val/f1")])
def test_metrics_are_those_that_the_site_named_at_first(sent, how) -> None:
    """Of two sites, the one that kept to them was left out if the other's response came first."""
    tensors = {f"0/{name}": torch.tensor([[3.0, 8.0]]) for name in sent}
    response = Message(kind="response", about={"failures": {}}, tensors=tensors)
    with pytest.raises(WrongMessage, match=f"^it {how}, other than it said when the run started"):
        Responses().scores(response, 0, [""], ["val/acc"])
    assert list(Responses().scores(response, 0, [""], list(sent))[""].extras) == list(sent)
    assert list(Responses().scores(response, 0, [""], "RuntimeError")[""].extras) == list(sent)
