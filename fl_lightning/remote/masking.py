"""The arithmetic of secure aggregation: integers modulo 2^64, masks drawn from keys, and shares of secrets.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, section 3. Keys are X25519, agreed secrets pass through HKDF (SHA-256),
masks are ChaCha20 streams, shares are Shamir's over GF(2^128) (pycryptodome) and are sent under AES-256-GCM.

A number x of weight w becomes round(x w 2^24). Each summand is off by at most 2^-25, so a weighted mean of n clients is
off by at most n 2^-25 / Σw. Summands must be below 2^62 / n in absolute value, so that their sum cannot wrap around:
x w below 2^38 / n.

Shape legend: D numbers.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

#: Binary digits after the point.
FRACTION_BITS = 24
#: Summands of n clients stay below 2^62 / n.
_SUM_BITS = 62
#: Bytes of a self-mask's seed, of a private key, and of what Shamir's scheme shares at once.
SEED_BYTES, KEY_BYTES, _BLOCK = 16, 32, 16


class WeakKey(ValueError):
    """A public key with which no secret can be shared."""


def to_whole(numbers_D: Tensor, weight: float, num_clients: int) -> NDArray[np.int64]:
    """The numbers times their weight, and the weight, as integers, (D + 1,).

    Args:
        numbers_D: In float64.
        weight: The client's weight in the sum.
        num_clients: How many such vectors may be summed.

    Raises:
        ValueError: A number is not finite, or so large that the sum could wrap around.
    """
    scaled_D = (torch.cat([numbers_D, numbers_D.new_ones(1)]) * weight * 2.0**FRACTION_BITS).round()
    if not scaled_D.abs().max() < 2.0**_SUM_BITS / num_clients:  # nan neither
        raise ValueError("secure aggregation: the response has numbers too large for it")
    return scaled_D.to(torch.int64).numpy()


def largest(weight: float, num_clients: int) -> float:
    """A number that :func:`to_whole` accepts, nearly the largest; the other arguments are as there."""
    return 0.999 * 2.0 ** (_SUM_BITS - FRACTION_BITS) / (weight * num_clients)


def from_whole(total_D: NDArray[np.int64]) -> Tensor:
    """Undo the scaling of a sum, float64 (D,)."""
    return torch.from_numpy(total_D.copy()).double() / 2.0**FRACTION_BITS


def mask(seed: bytes, label: str, count: int) -> NDArray[np.int64]:
    """Uniform 64-bit numbers, (count,); the same for the same seed and label."""
    stream = Cipher(ChaCha20(_derived(seed, ["mask", label]), bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype=np.int64)


def pairwise_mask(private: X25519PrivateKey, public: str, label: str, count: int, *, adds: bool) -> NDArray[np.int64]:
    """The mask that one of two clients adds and the other subtracts, (count,).

    Args:
        private: The masking key of one of them.
        public: The masking key of the other, in hexadecimal digits.
        label: Of the sum.
        count: How many numbers.
        adds: Whether the owner of the private key is the one that adds.
    """
    drawn = mask(agreed(private, public), label, count)
    return drawn if adds else -drawn  # modulo 2^64


def agreed(private: X25519PrivateKey, public: str) -> bytes:
    """The secret that two keys share.

    Raises:
        WeakKey: The public key is none, or is of small order, so that everybody knows the secret.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError as error:
        raise WeakKey(f"{public[: 2 * KEY_BYTES]!r} is no public key with which a secret can be shared") from error


def check_public(public: str) -> None:
    """Refuse a public key with which no secret can be shared: that does not depend on the other one's.

    Raises:
        WeakKey: It is one.
    """
    agreed(X25519PrivateKey.generate(), public)


def public_of(private: X25519PrivateKey) -> str:
    """The public key, in hexadecimal digits."""
    return private.public_key().public_bytes_raw().hex()


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret, any ``threshold`` of which reveal it and fewer of which reveal nothing.

    Args:
        secret: The secret, a multiple of 16 bytes long.
        threshold: Number of shares that are needed.
        count: Number of shares; the k-th belongs to point k + 1 of the scheme.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    blocks = [secret[index : index + _BLOCK] for index in range(0, len(secret), _BLOCK)]
    shared = [Shamir.split(threshold, count, block) for block in blocks]
    return [b"".join(shares[k][1] for shares in shared) for k in range(count)]


def join_secret(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Undo :func:`split_secret`.

    Args:
        shares: Shares by their index, from 0.
        threshold: Number of shares that are needed.

    Raises:
        ValueError: There are too few, or they have different lengths.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    chosen = sorted(shares.items())[:threshold]
    lengths = {len(share) for _, share in chosen}
    if len(chosen) < threshold or len(lengths) != 1 or (length := lengths.pop()) % _BLOCK:
        raise ValueError("the shares of a secret do not fit together")
    return b"".join(
        Shamir.combine([(index + 1, share[start : start + _BLOCK]) for index, share in chosen])
        for start in range(0, length, _BLOCK)
    )


def seal(private: X25519PrivateKey, public: str, about: Sequence[object], content: bytes) -> bytes:
    """Encrypt for the owner of a public key, once for each ``about``: sender, receiver and sum."""
    return AESGCM(_derived(agreed(private, public), ["shares", *about])).encrypt(bytes(12), content, None)


def unseal(private: X25519PrivateKey, public: str, about: Sequence[object], sealed: bytes) -> bytes:
    """Undo :func:`seal`.

    Returns:
        A share of a seed and one of a private key, which are as long as these.

    Raises:
        ValueError: It was encrypted by somebody else, for somebody else, or changed in transit; or it is no such pair.
    """
    try:
        content = AESGCM(_derived(agreed(private, public), ["shares", *about])).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise ValueError("an encrypted share was changed in transit") from error
    if len(content) != SEED_BYTES + KEY_BYTES:
        raise ValueError(f"{len(content)} bytes were encrypted, but a pair of shares has {SEED_BYTES + KEY_BYTES}")
    return content


def _derived(secret: bytes, about: Sequence[object]) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=json.dumps(list(about)).encode()).derive(secret)
