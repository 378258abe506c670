"""A site's identity, given by the certificate of its kit: what it signs, and which signatures it accepts.

Every key of a secure sum is signed by its site, so that a server that invents keys is detected. A certificate is
accepted if the federation's authority has issued it, it is valid today, and it belongs to a site: people's
certificates contain a role, and the server's contains the server's name. Whoever holds the authority's own key can
invent sites, unless the site's policy names its ``peers``.
"""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

_PADDING = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.MAX_LENGTH)


class Unproven(ValueError):
    """A signature or certificate that is not valid."""


@dataclass(frozen=True)
class Identity:
    """A site's key and certificate, and the authority of its federation.

    Attributes:
        key: The site's private key.
        certificate: The site's certificate.
        authority: The authority whose certificates are accepted.
        server: Name of the server, whose certificate has the same authority.
        peers: Names of the sites that are accepted; None for every site with a certificate of the authority.
    """

    key: RSAPrivateKey
    certificate: x509.Certificate
    authority: x509.Certificate
    server: str
    peers: Sequence[str] | None = None

    @classmethod
    def of_kit(cls, startup: Path, peers: Sequence[str] | None = None) -> "Identity":
        """The identity in a kit's ``startup``: ``client.key``, ``client.crt``, ``rootCA.pem``, ``fed_client.json``.

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
            raise ValueError(f"{startup / 'client.key'} is not an RSA key: make the kit with fl-train provision")
        return cls(key, certificate, authority, server, peers)

    @property
    def pem(self) -> str:
        """The site's certificate as text."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def name(self) -> str:
        """The site's name in its certificate."""
        return common_name(self.certificate)

    def sign(self, facts: Sequence[object]) -> str:
        """The signature of some values, in hexadecimal digits."""
        return self.key.sign(_bytes(facts), _PADDING, SHA256()).hex()

    def verify(self, facts: Sequence[object], signature: str, pem: str) -> str:
        """The name of the site that signed some values.

        Raises:
            Unproven: The signature is not that of an accepted site.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pem.encode())
            certificate.verify_directly_issued_by(self.authority)
            key = certificate.public_key()
            assert isinstance(key, RSAPublicKey)
            key.verify(bytes.fromhex(signature), _bytes(facts), _PADDING, SHA256())
        except Exception as error:  # which of them depends on what is wrong with a certificate from elsewhere
            raise Unproven("a signature is not valid") from error
        now = datetime.datetime.now(datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise Unproven("a certificate has expired or is not valid yet")
        name = common_name(certificate)
        if name == self.server or certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            raise Unproven(f"the certificate of {name} is not that of a site")
        if self.peers is not None and name not in (*self.peers, self.name):
            raise Unproven(f"{name} is not in policy.peers")
        return name


def common_name(certificate: x509.Certificate) -> str:
    """The name in a certificate.

    Raises:
        LookupError: It has none.
    """
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _bytes(facts: Sequence[object]) -> bytes:
    return json.dumps(list(facts), sort_keys=True).encode()
