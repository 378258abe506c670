"""Who a site is, by the certificate of its kit: what it signs, and whose signatures it believes.

Every key of a secure sum is signed by its site, so that a server that invents keys is noticed. A certificate counts
where the federation's authority has issued it, it is valid today, and it is a site's: those of people have a role in
them, and the server's has the server's name. Who holds the authority's own key can invent sites, unless the site's
policy names its ``peers``.
"""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

_PADDING = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.MAX_LENGTH)


class Unproven(ValueError):
    """A signature or certificate that does not hold."""


@dataclass(frozen=True)
class Identity:
    """A site's key and certificate, and the authority of its federation.

    Attributes:
        key: The site's private key.
        certificate: The site's.
        authority: Whose certificates are believed.
        server: Name of the server, whose certificate is of the same authority.
        peers: Names of the sites that are believed; None for every site of the authority's.
    """

    key: RSAPrivateKey
    certificate: x509.Certificate
    authority: x509.Certificate
    server: str
    peers: Sequence[str] | None = None

    @classmethod
    def of_kit(cls, startup: Path, peers: Sequence[str] | None = None) -> "Identity":
        """That of a kit's folder ``startup``: ``client.key``, ``client.crt``, ``rootCA.pem``, ``fed_client.json``.

        Raises:
            ValueError: A file is missing or damaged.
        """
        try:
            key = load_pem_private_key((startup / "client.key").read_bytes(), password=None)
            certificate, authority = (
                x509.load_pem_x509_certificate((startup / name).read_bytes()) for name in ("client.crt", "rootCA.pem")
            )
            server = str(json.loads((startup / "fed_client.json").read_text())["servers"][0]["identity"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"the certificates in {startup} cannot be read: restore the kit") from error
        if not isinstance(key, RSAPrivateKey):
            raise ValueError(f"{startup / 'client.key'} is no RSA key: make the kit with fl-train provision")
        return cls(key, certificate, authority, server, peers)

    @property
    def pem(self) -> str:
        """The site's certificate as text."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def name(self) -> str:
        """The site's, as its certificate has it."""
        return _common_name(self.certificate)

    def sign(self, facts: Sequence[object]) -> str:
        """A signature of some facts, in hexadecimal digits."""
        return self.key.sign(_bytes(facts), _PADDING, SHA256()).hex()

    def verify(self, facts: Sequence[object], signature: str, pem: str) -> str:
        """The name of the site that has signed.

        Raises:
            Unproven: No site has.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pem.encode())
            certificate.verify_directly_issued_by(self.authority)
            key = certificate.public_key()
            assert isinstance(key, RSAPublicKey)
            key.verify(bytes.fromhex(signature), _bytes(facts), _PADDING, SHA256())
        except (ValueError, TypeError, AttributeError, AssertionError, InvalidSignature) as error:
            raise Unproven("a signature does not hold") from error
        now = datetime.datetime.now(datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise Unproven("a certificate is out of date")
        name = _common_name(certificate)
        if name == self.server or certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            raise Unproven(f"the certificate of {name} is no site's")
        if self.peers is not None and name not in (*self.peers, self.name):
            raise Unproven(f"{name} is none of policy.peers")
        return name


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _bytes(facts: Sequence[object]) -> bytes:
    return json.dumps(list(facts), sort_keys=True).encode()
