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
    wrong_responses,
)

from fl_lightning.remote import LoopbackChannel, Message, federate
from fl_lightning.remote.responses import Responses
from fl_lightning.remote.schema import WrongMessage
from fl_lightning.round.stage import Rows, Stage
from fl_lightning.strategies import FedAvg
from fl_lightning.strategies.trials import validation_score

HOSTILE = 1
NAME = "client-01"


@pytest.fixture
def train(graphs, given_clients, make_model, make_trainer, tmp_path):
    """Train with a site that responds one kind of question wrongly; the run, and what was warned."""

    def run(kind, wrong, num_rounds=2):
        clients = given_clients(graphs[:3]).clients
        sites = make_sites(clients, tmp_path / "sites", lambda: (make_model(), FedAvg(num_epochs=1)), OPEN)
        liar = Liar(sites[HOSTILE], kind, wrong, random.Random(0))
        channel, strategy = LoopbackChannel([*sites[:HOSTILE], liar, *sites[HOSTILE + 1 :]]), FedAvg(num_epochs=1)
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


def test_a_score_is_always_of_as_many_examples() -> None:
    responses = Responses("val/acc")
    responses._check_scores(0, "score", {"score": torch.tensor([[3.0, 8.0]])})
    with pytest.raises(WrongMessage, match="score was of 8 examples, and is of 9"):
        responses._check_scores(0, "score", {"score": torch.tensor([[3.0, 9.0]])})
