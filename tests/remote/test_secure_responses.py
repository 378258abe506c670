"""In secure sums too a hostile or broken site is a failed client, and in no sum that is read."""

import itertools
import math
import random
import re
import warnings

import pytest
import torch
from sites import OPEN, make_sites
from wrong_messages import ANY, Liar, fails, with_facts

from fl_lightning.remote import LoopbackChannel, Message, federate, masking
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg

HOSTILE = 1
NAME = "client-01"
KINDS = ("sum_keys", "sum_shares", "run", "sum_reveal", "evaluate")


@pytest.fixture
def train(graphs, given_clients, make_model, make_trainer, tmp_path):
    """Train five clients in secure sums, one of whom responds one kind of question wrongly; the run and the channel."""

    numbers = itertools.count()  # of folders: sites remember with whom they were summed

    def run(kind, wrong, num_rounds=2):
        clients = given_clients(graphs[:5]).clients
        sites = make_sites(clients, tmp_path / str(next(numbers)), lambda: (make_model(), FedAvg(num_epochs=1)), OPEN)
        liar = Liar(sites[HOSTILE], kind, wrong, random.Random(0))
        channel, strategy = LoopbackChannel([*sites[:HOSTILE], liar, *sites[HOSTILE + 1 :]]), FedAvg(num_epochs=1)
        trainer = make_trainer(num_rounds=num_rounds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(make_model(), federate(trainer, channel, strategy, secure=True), strategy)
        assert liar.num_lies
        return trainer

    return run


def figures(trainer):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in trainer.run.history]


@pytest.fixture(scope="module")
def failed():
    """Metrics of the runs in which the site says that it cannot, by the kind of question."""
    return {}


def changed(name: str, change):
    """The response with one of its facts changed."""
    return lambda message, draw: with_facts(**{name: change(message.about[name])})(message, draw)


def doubled(message: Message, draw: random.Random) -> bytes:
    tensors = {name: torch.cat([tensor, tensor], 1) for name, tensor in message.tensors.items()}
    return Message(kind="response", about=message.about, tensors=tensors).wire


def real(message: Message, draw: random.Random) -> bytes:
    tensors = {name: tensor.double() for name, tensor in message.tensors.items()}
    return Message(kind="response", about=message.about, tensors=tensors).wire


#: Responses of their own form.
LIES = {
    "sum_keys": {
        "a key that is none": with_facts(masking="00"),
        "a key of zeros": with_facts(bound=7),
        "bound to strangers": with_facts(bound=["somebody", "else"]),
        "bound to itself": with_facts(bound=[NAME]),
        "bound to two": with_facts(bound=["client-00", NAME, "client-02"]),
        "a name with an escape": with_facts(name="\x1b[2J"),
    },
    "sum_shares": {
        "none": with_facts(shares={}),
        "too long": changed("shares", lambda shares: dict.fromkeys(shares, "ab" * 600)),
        "no digits": changed("shares", lambda shares: dict.fromkeys(shares, "xy")),
        "a digest that is none": with_facts(seed_digest="ab"),
    },
    "sum_reveal": {
        "none": with_facts(seeds={}),
        "too short": changed("seeds", lambda seeds: dict.fromkeys(seeds, "ab")),
        "another's": changed("seeds", lambda seeds: {"77": "ab" * 16}),
    },
    "run": {"too many numbers": doubled, "real numbers": real},
    "evaluate": {"too many numbers": doubled, "real numbers": real},
}
CASES = [
    (kind, name, wrong)
    for index, kind in enumerate(KINDS)
    for name, wrong in {**dict(list(ANY.items())[index :: len(KINDS)]), **LIES[kind]}.items()
    if kind in ("run", "evaluate") or not name.endswith(" state")  # of which the steps between tell nothing
]


@pytest.mark.parametrize(
    ("kind", "wrong"), [pytest.param(kind, wrong, id=f"{kind}: {name}") for kind, name, wrong in CASES]
)
def test_a_wrong_answer_is_that_clients_failure(train, failed, assert_same, kind, wrong) -> None:
    if kind not in failed:
        failed[kind] = figures(train(kind, fails))
        assert not any(row["failed_round"] for row in failed[kind])
    trainer = train(kind, wrong)
    assert_same(figures(trainer), failed[kind])
    assert set(trainer.run.num_failures) <= {NAME}


@pytest.mark.parametrize("kind", ["seeds", "keys", "label"])
def test_wrong_shares_and_labels_do_no_harm(train, assert_same, kind) -> None:
    honest = figures(train("sum_reveal", lambda message, draw: message.wire))
    lies = {
        "seeds": changed("seeds", lambda seeds: dict.fromkeys(seeds, "ab" * 16)),
        "keys": with_facts(keys={"0": "ab" * 32}),
        "label": with_facts(label="ab" * 32),
    }
    trainer = train("sum_reveal", lies[kind])
    assert_same(figures(trainer), honest)
    assert not trainer.run.num_failures


@pytest.mark.parametrize(
    "wrong",
    [
        with_facts(seed_digest="ab" * 32),
        changed("shares", lambda shares: {client: "ab" * 64 for client in shares}),
    ],
)
def test_who_spoils_a_sum_is_in_no_later_one(train, wrong) -> None:
    trainer = train("sum_shares", wrong, num_rounds=4)
    assert [row["failed_round"] for row in trainer.run.history] == [True, False, False, False]
    assert trainer.run.num_failures[NAME] >= 4
    assert re.search(rf"shares (of|from) {NAME}", trainer.run.failures[NAME])
    others = {name: count for name, count in trainer.run.num_failures.items() if name != NAME}
    assert max(others.values(), default=0) <= 2


@pytest.mark.parametrize("length", [0, 5, 47, 49, 490])
def test_who_seals_shares_of_another_length_is_in_no_later_sum(train, monkeypatch, length) -> None:
    """The others would send them on as they are, and be refused for it."""
    seal = masking.seal

    def sealed(private, public, about, content):
        return seal(private, public, about, (content * 11)[:length] if about[1] == HOSTILE else content)

    monkeypatch.setattr(masking, "seal", sealed)
    trainer = train("sum_shares", lambda message, draw: message.wire, num_rounds=3)
    assert [row["failed_round"] for row in trainer.run.history] == [True, False, False]
    assert f"4 sites cannot open the shares from {NAME}" in trainer.run.failures[NAME]


def random_numbers(message: Message, draw: random.Random) -> bytes:
    numbers = {
        name: torch.randint(-(2**63), 2**63 - 1, tensor.shape, generator=torch.Generator().manual_seed(1))
        for name, tensor in message.tensors.items()
    }
    return Message(kind="response", about=message.about, tensors=numbers).wire


def test_random_numbers_failed_the_sum_of_metrics(train) -> None:
    trainer = train("evaluate", random_numbers)
    assert all(math.isnan(row["val/acc"]) for row in trainer.run.history)
    assert "which is impossible, so a site sent numbers that are not its own" in trainer.run.failures[NAME]


def test_random_numbers_failed_the_sum_of_updates(train) -> None:
    with pytest.raises(TooFewUpdates, match="not a number of examples, so a site sent numbers that are not its own"):
        train("run", random_numbers)
