"""How secure sums open: a site with wrong keys, or that lies about whom it may be summed with, is in none of them."""

import contextlib
import dataclasses
import warnings

import pytest
from cryptography import x509
from remote.test_identity import Authority
from sites import OPEN

from fl_lightning.remote import LoopbackChannel, Message, Site, federate, masking
from fl_lightning.remote.identity import Unproven
from fl_lightning.remote.openings import agreed_members
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg

pytest.importorskip("Crypto.Protocol.SecretSharing", reason="needs the extra remote")

HOSTILE = 1
NAME = "client-01"
REFUSED = "4 sites refuse the keys of client 1 (client-01): a signature is not valid"
#: Public keys of small order: everybody knows the secrets that are agreed with them.
SMALL = ("00" * 32, "01" + "00" * 31)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def train(authority, graphs, make_model, make_trainer, tmp_path):
    """Train sites in secure sums, some of whose responses are changed; the run."""

    def run(change, *, kind="sum_keys", signed=False, count=5, hostile=(HOSTILE,)):
        identities = [authority.identity(f"ward-{index}") if signed else None for index in range(count)]
        sites = [
            Site(graph, make_model(), FedAvg(num_epochs=1), tmp_path / graph.name, policy=OPEN, identity=identity)
            for graph, identity in zip(graphs[:count], identities, strict=True)
        ]
        said: dict[int, Message] = {}

        class Changed(LoopbackChannel):
            def ask(self, messages):
                for client, message in messages.items():
                    response = Message.read(self.sites[client].respond(message.wire))
                    if message.kind == kind and client in hostile:
                        response = change(response, said)
                    elif message.kind == kind:
                        said[client] = response
                    yield client, Message.read(response.wire)

        trainer, strategy = make_trainer(num_rounds=2), FedAvg(num_epochs=1)
        with warnings.catch_warnings(), contextlib.suppress(TooFewUpdates):
            warnings.simplefilter("ignore")
            trainer.fit(make_model(), federate(trainer, Changed(sites), strategy, secure=True), strategy)
        return trainer

    return run


def with_facts(response: Message, **facts) -> Message:
    return dataclasses.replace(response, about={**response.about, **facts})


def only(trainer, name=NAME) -> str:
    """Why a client failed, in a run of which no round did, nor another client."""
    assert [row["failed_round"] for row in trainer.run.history] == [0, 0]
    assert set(trainer.run.num_failures) == {name}
    return trainer.run.failures[name]


@pytest.mark.parametrize(
    ("change", "signed", "why"),
    [
        (lambda response, said: with_facts(response, masking=SMALL[0]), False, "no public key"),
        (lambda response, said: with_facts(response, sealing=SMALL[1]), True, "no public key"),
        (lambda response, said: with_facts(response, masking=said[0].about["sealing"]), False, "occurs twice"),
        (lambda response, said: with_facts(response, masking=response.about["sealing"]), False, "occurs twice"),
        (lambda response, said: with_facts(response, name="client-00"), False, "calls itself 'client-00'"),
        (lambda response, said: with_facts(response, name="ward-0"), True, "calls itself 'ward-0'"),
        (lambda response, said: with_facts(response, signature="ab" * 256), True, REFUSED),
        (
            lambda response, said: with_facts(response, certificate="", signature="", name=NAME),
            True,
            REFUSED,
        ),
        (
            lambda response, said: with_facts(
                response, **{name: said[0].about[name] for name in ("certificate", "signature", "name")}
            ),
            True,
            REFUSED,
        ),
    ],
    ids=[
        "masking key of small order",
        "sealing key of small order",
        "another's key",
        "one key twice",
        "another's name",
        "another's name in a certificate",
        "a wrong signature",
        "no certificate",
        "another's certificate",
    ],
)
def test_wrong_keys_exclude_their_site_alone_and_in_the_same_round(train, change, signed, why) -> None:
    """Every sum of the run failed, and nobody was excluded."""
    trainer = train(change, signed=signed)
    assert why in only(trainer)
    assert set(trainer.run.executor.sums.barred) == {HOSTILE}


@pytest.mark.full
def test_two_sites_with_wrong_keys_are_excluded_one_after_the_other(train) -> None:
    trainer = train(
        lambda response, said: with_facts(response, signature="ab" * 256), signed=True, hostile=(HOSTILE, 3)
    )
    assert [row["failed_round"] for row in trainer.run.history] == [0, 0]
    assert set(trainer.run.num_failures) == {NAME, "client-03"}


@pytest.mark.parametrize("signature", ["", "ab" * 256], ids=["none", "wrong"])
def test_a_wrong_signature_of_who_survived_fails_no_sum(train, signature) -> None:
    """All others refused to open every sum of the run, and nobody was excluded."""
    trainer = train(lambda response, said: with_facts(response, signature=signature), kind="sum_confirm", signed=True)
    assert "4 sites refuse the survivors of client 1 (ward-1): a signature is not valid" in only(trainer)
    assert trainer.run.history[0]["val/acc"] == trainer.run.history[0]["val/acc"]  # it is not nan


def test_a_single_site_cannot_have_another_excluded_by_its_keys(train) -> None:
    def accuse(response, said):
        why = "the keys of client 3 (client-03): a signature is not valid"
        return Message(kind="failure", about={"to": response.about["to"], "why": why})

    trainer = train(accuse, kind="sum_shares")
    only(trainer)
    assert not trainer.run.executor.sums.barred


@pytest.mark.parametrize(
    ("count", "signed"), [(4, False), pytest.param(5, True, marks=pytest.mark.full)], ids=["four", "five, signed"]
)
def test_a_claim_about_earlier_sums_excludes_at_most_who_makes_it(train, count, signed) -> None:
    """Without a word of truth it excluded the last site from all sums."""
    names = [f"ward-{i}" if signed else f"client-{i:02}" for i in range(count - 1)]
    trainer = train(lambda response, said: with_facts(response, bound=names), signed=signed, count=count)
    assert only(trainer).startswith("it says that its state was already summed over other clients")


@pytest.mark.parametrize(
    ("bounds", "members"),
    [
        ([None] * 4, "0123"),
        (["0123"] * 4, "0123"),
        (["012", "012", "012", None], "012"),  # the last one was lost in the sum that they were in
        (["012", "012", "012", "0123"], "012"),  # and does not know
        ([None, None, None, "0123"], "0123"),  # it was idle since, and is summed with all again
        ([None, "012", None, None], "023"),
        ([None, "012", "013", None], "03"),
        ([None, "023", None, None], "023"),
        (["012", "012", None, None], "012"),
        (["01", "01", None, None], "23"),  # a tie
        (["0124", "0124", "0124", None], "3"),  # one of them is missing
        (["01", "0123", None, None], "23"),
    ],
)
def test_who_is_summed_with_whom(bounds, members) -> None:
    said = {i: (str(i), None if bound is None else frozenset(bound)) for i, bound in enumerate(bounds)}
    actual, reasons = agreed_members(said)
    assert actual == [int(each) for each in members]
    assert reasons.keys() == said.keys() - set(actual)
    for client, why in reasons.items():
        assert ("it says that its state" in why) == (bounds[client] is not None)


@pytest.mark.parametrize("weak", SMALL)
def test_a_secret_with_a_key_of_small_order_is_refused(weak) -> None:
    private = masking.X25519PrivateKey.generate()
    masking.check_public(masking.public_of(private))
    for use in (
        lambda: masking.check_public(weak),
        lambda: masking.agreed(private, weak),
        lambda: masking.pairwise_mask(private, weak, "sum", 3, adds=True),
        lambda: masking.seal(private, weak, ["sum"], b"share"),
    ):
        with pytest.raises(masking.WeakKey, match=f"'{weak}' is no public key with which a secret can be shared"):
            use()


@pytest.mark.parametrize("name", ["sealing", "masking"])
def test_a_site_names_the_client_whose_key_is_weak(name, graphs, make_model, make_trainer, tmp_path) -> None:
    """Whatever the server lets through."""
    refused = []

    class Weakens(LoopbackChannel):
        def ask(self, messages):
            for client, message in messages.items():
                sent = message
                if message.kind == "sum_shares" and client != 2 and "2" in message.about["keys"]:
                    keys = {**message.about["keys"], "2": {**message.about["keys"]["2"], name: SMALL[0]}}
                    sent = dataclasses.replace(message, about={"keys": keys})
                response = Message.read(self.sites[client].respond(sent.wire))
                if sent is not message:
                    refused.append(response.about["why"])
                yield client, dataclasses.replace(response, about={**response.about, "to": message.name})

    sites = [Site(g, make_model(), FedAvg(num_epochs=1), tmp_path / g.name, policy=OPEN) for g in graphs[:4]]
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    with warnings.catch_warnings(), contextlib.suppress(TooFewUpdates):
        warnings.simplefilter("ignore")
        trainer.fit(make_model(), federate(trainer, Weakens(sites), strategy, secure=True), strategy)
    assert len(refused) == 3
    assert all(why.startswith("the keys of client 2 (client-02): ") for why in refused)
    assert trainer.run.history[0]["failed_round"] == 0


def test_a_certificate_that_cannot_be_read_names_its_site(authority, monkeypatch) -> None:
    """Some errors of certificates are no ValueErrors: they left a site by their kind, without whose keys it was."""

    def load(pem):
        raise x509.InvalidVersion("4", 4)

    identity = authority.identity("ward")
    monkeypatch.setattr(x509, "load_pem_x509_certificate", load)
    with pytest.raises(Unproven, match="a signature is not valid"):
        identity.verify(["fact"], "", "")
