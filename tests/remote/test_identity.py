"""Secure sums among sites with certificates: what a server that invents keys, sites and survivors comes to."""

import contextlib
import dataclasses
import datetime
import json

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from sites import OPEN

from fl_lightning.remote import LoopbackChannel, Message, Site, federate
from fl_lightning.remote.identity import Identity, Unproven
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg

pytest.importorskip("Crypto.Protocol.SecretSharing", reason="needs the extra remote")
pytestmark = pytest.mark.filterwarnings("ignore:.*it is left out")


class Authority:
    """Issues certificates as FLARE's provisioning does."""

    def __init__(self, name: str = "federation") -> None:
        self.key, self.name = rsa.generate_private_key(65537, 2048), name
        self.certificate = self.issue(name, self.key)

    def issue(self, name: str, key: rsa.RSAPrivateKey, role: str = "", days: int = 30) -> x509.Certificate:
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        subject += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]),
            subject_name=x509.Name(subject),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(days=60),
            not_valid_after=now + datetime.timedelta(days=days),
        )
        return builder.sign(self.key, SHA256())

    def identity(self, name: str, role: str = "", days: int = 30) -> Identity:
        key = rsa.generate_private_key(65537, 2048)
        return Identity(key, self.issue(name, key, role, days), self.certificate, "server")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def signed(authority, graphs, make_model, make_trainer, tmp_path):
    sites = [
        Site(
            graph,
            make_model(),
            FedAvg(num_epochs=1),
            tmp_path / graph.name,
            policy=OPEN,
            identity=authority.identity(f"ward-{index}"),
        )
        for index, graph in enumerate(graphs[:4])
    ]
    trainer, strategy = make_trainer(num_rounds=2), FedAvg(num_epochs=1)

    def fit(channel=LoopbackChannel):
        way = channel(sites)
        with contextlib.suppress(TooFewUpdates):
            trainer.fit(make_model(), federate(trainer, way, strategy, secure=True), strategy)
        return trainer, way

    return fit


class Meddler(LoopbackChannel):
    """Changes messages on their way to the sites."""

    def __init__(self, sites, kind, change) -> None:
        super().__init__(sites)
        self.kind, self.change = kind, change

    def ask(self, messages):
        for client, message in messages.items():
            sent = message
            if message.kind == self.kind:
                sent = dataclasses.replace(message, about=self.change(client, json.loads(json.dumps(message.about))))
            response = Message.read(self.sites[client].respond(sent.wire))
            yield client, dataclasses.replace(response, about={**response.about, "to": message.name})


def test_a_federation_whose_sites_sign(signed) -> None:
    trainer, channel = signed()
    assert [row["failed_round"] for row in trainer.run.history] == [0, 0]
    assert trainer.run.history[-1]["num_failures"] == 0
    assert channel.sites[0].sum.state["names"] == {str(index): f"ward-{index}" for index in range(4)}


def keys_of(identity: Identity, facts: list, own: dict) -> dict:
    """A member's keys, signed by another."""
    signed = [*facts, own["sealing"], own["masking"]]
    return {**own, "certificate": identity.pem, "signature": identity.sign(signed)}


@pytest.mark.parametrize(
    ("name", "role", "days", "why"),
    [
        ("server", "", 30, "certificate of server is not that of a site"),
        ("lead", "lead", 30, "certificate of lead is not that of a site"),
        ("old", "", -1, "expired"),
        ("stranger", "", 30, "a signature is not valid"),
    ],
)
def test_members_that_are_no_sites(name, role, days, why, signed, authority) -> None:
    """A server puts a member of its own in place of client 3: it is in no sum."""
    issuer = Authority() if name == "stranger" else authority
    invented = issuer.identity(name, role, days)

    def change(client, about):
        if client != 3 and "3" in about["keys"]:
            run, index = sites[0].sum.run, sites[0].sum.state["place"]
            about["keys"]["3"] = keys_of(invented, ["keys", run, index, 3], about["keys"]["3"])
        return about

    sites: list[Site] = []

    def channel(own):
        sites[:] = own
        return Meddler(own, "sum_shares", change)

    with pytest.warns(UserWarning, match=why):
        trainer, _ = signed(channel)
    assert [row["failed_round"] for row in trainer.run.history] == [0, 0]
    assert set(trainer.run.num_failures) == {"client-03"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda own: {**own, "3": {**own["3"], "masking": own["2"]["masking"][::-1]}}, "a signature is not valid"),
        (lambda own: {**own, "3": {**own["3"], "certificate": "", "signature": ""}}, "a signature is not valid"),
    ],
    ids=["changed key", "unsigned"],
)
def test_keys_that_no_site_has_signed(change, why, signed) -> None:
    def channel(sites):
        def meddle(client, about):
            return {**about, "keys": change(about["keys"])} if "3" in about["keys"] else about

        return Meddler(sites, "sum_shares", meddle)

    with pytest.warns(UserWarning, match=why):
        trainer, _ = signed(channel)
    assert [row["failed_round"] for row in trainer.run.history] == [0, 0]
    assert set(trainer.run.num_failures) == {"client-03"}


def test_one_site_in_two_places(authority, graphs, make_model, make_trainer, tmp_path) -> None:
    """Two members with keys of their own and one certificate: the first is in the sums."""
    own = [authority.identity(f"ward-{index}") for index in range(3)]
    sites = [
        Site(graph, make_model(), FedAvg(num_epochs=1), tmp_path / graph.name, policy=OPEN, identity=identity)
        for graph, identity in zip(graphs[:4], [*own, own[0]], strict=True)
    ]
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    with pytest.warns(UserWarning, match="one site occurs twice"):
        trainer.fit(make_model(), federate(trainer, LoopbackChannel(sites), strategy, secure=True), strategy)
    assert trainer.run.history[0]["failed_round"] == 0
    assert set(trainer.run.num_failures) == {"client-03"}


@pytest.mark.parametrize("confirmed", ["none", "others"])
def test_survivors_must_be_confirmed_by_their_signatures(confirmed, signed) -> None:
    """The consistency check: who responds the last step has seen that as many agree on who survived."""

    def change(client, about):
        signed = about["confirmed"]
        first, *rest = signed.values()
        shifted = dict(zip(signed, [*rest, first], strict=True))
        return {**about, "confirmed": {} if confirmed == "none" else shifted}

    wrong = r"refuse the survivors of client 0 \(ward-0\): a signature is not valid"
    why = "0 survivors have signed, 3 are needed" if confirmed == "none" else wrong
    with pytest.warns(UserWarning, match=why):
        trainer, _ = signed(lambda sites: Meddler(sites, "sum_reveal", change))
    assert [row["failed_round"] for row in trainer.run.history] == [1, 1]


def test_a_sites_peers(authority) -> None:
    ours, theirs = authority.identity("ours"), authority.identity("theirs")
    signature = theirs.sign(["fact"])
    assert ours.verify(["fact"], signature, theirs.pem) == "theirs"
    with pytest.raises(Unproven, match="a signature is not valid"):
        ours.verify(["another fact"], signature, theirs.pem)
    picky = dataclasses.replace(ours, peers=["others"])
    with pytest.raises(Unproven, match=r"not in policy\.peers"):
        picky.verify(["fact"], signature, theirs.pem)


def test_the_certificates_of_a_kit(authority, tmp_path) -> None:
    made = authority.identity("ward")
    private = made.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "client.key").write_bytes(private)
    (tmp_path / "client.crt").write_text(made.pem)
    (tmp_path / "rootCA.pem").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (tmp_path / "fed_client.json").write_text(json.dumps({"servers": [{"identity": "localhost"}]}))
    actual = Identity.of_kit(tmp_path)
    assert (actual.name, actual.server) == ("ward", "localhost")
    assert actual.verify(["fact"], made.sign(["fact"]), made.pem) == "ward"
    (tmp_path / "client.crt").write_text("damaged")
    with pytest.raises(ValueError, match="restore the kit"):
        Identity.of_kit(tmp_path)
