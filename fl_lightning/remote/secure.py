"""Secure aggregation: the server learns the weighted sum of the clients' answers and nothing of one client's.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, section 4.0.1: every two clients share a secret (X25519) from which both
draw the same numbers (HKDF, ChaCha20), which one adds to its answer and the other takes away. Numbers are whole, modulo
2^64, with 24 bits behind the point, so that masks cancel exactly.

There is no recovery of drop-outs (their section 4.0.2): where one client of a round does not answer, the sum cannot be
read and the round is void. The server hands on the clients' public keys; a server that lies about them is not defended
against, and neither are clients that conspire with it, all but one. What is summed are the answers; metrics of
evaluations leave as they are.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.round.stage import Stage
from fl_lightning.run.folder import secret_file
from fl_lightning.strategies.base import Strategy, SumWeighting

#: Binary digits behind the point.
FRACTION_BITS = 24
#: With two clients each would know the other's answer.
FEWEST_CLIENTS = 3
#: Names of what leaves a client: the masked numbers, the last of which is its weight.
MASKED = "masked"


def weighting_of(strategy: Strategy) -> SumWeighting:
    """How a strategy that needs nothing but the weighted sum weights the clients.

    Raises:
        ValueError: Its server needs each client's own answer.
    """
    owner = next(cls for cls in type(strategy).__mro__ if "sum_weighting" in vars(cls))
    below = type(strategy).__mro__[: type(strategy).__mro__.index(owner)]
    uses_rows = any(name in vars(cls) for cls in below for name in ("aggregate", "admit", "mixing_matrix"))
    weighting = None if uses_rows else strategy.sum_weighting()
    if weighting is None:
        raise ValueError(
            f"secure aggregation gives the server the weighted sum of all answers alone, but {type(strategy).__name__} "
            "needs the answer of each client: choose a strategy that averages (FedAvg, FedProx, FedPer, FedOpt, "
            "Ditto, ... without a robust aggregation), or run it without secure aggregation"
        )
    return weighting


def check_stage(stage: Stage) -> None:
    """Refuse a stage whose answers are more than parameters of one net.

    Raises:
        ValueError: They are.
    """
    if stage.signals or stage.flat:
        what = f"the signals {', '.join(stage.signals)}" if stage.signals else "models of several architectures"
        raise ValueError(f"secure aggregation is for parameters alone, but stage {stage.name!r} asks for {what}")


class PairwiseMasks:
    """A site's key and its peers'.

    Args:
        folder: The site's, where its key lies (readable by its owner alone).
    """

    def __init__(self, folder: Path) -> None:
        key = secret_file(folder / "masking_key", lambda: X25519PrivateKey.generate().private_bytes_raw(), num_bytes=32)
        self.key = X25519PrivateKey.from_private_bytes(key)
        self.peers: dict[int, X25519PublicKey] = {}

    @property
    def public(self) -> str:
        """The public key, in hexadecimal digits."""
        return self.key.public_key().public_bytes_raw().hex()

    def meet(self, keys: Mapping[int, str]) -> None:
        """Learn the public keys of all clients."""
        self.peers = {client: X25519PublicKey.from_public_bytes(bytes.fromhex(key)) for client, key in keys.items()}

    def mask(self, numbers_D: Tensor, weight: float, client: int, clients: Sequence[int], label: str) -> Tensor:
        """The client's numbers times its weight, and the weight, hidden from everyone, int64 (D + 1,).

        Args:
            numbers_D: What it answers, in float64.
            weight: Its weight in the sum.
            client: Its index.
            clients: All that answer; their masks cancel.
            label: Names the round; a mask is used for one alone.

        Raises:
            ValueError: They are too few, or a number is too large.
        """
        if len(clients) < FEWEST_CLIENTS:
            raise ValueError(
                f"secure aggregation needs {FEWEST_CLIENTS} clients in a round, this one has {len(clients)}"
            )
        whole_D = (torch.cat([numbers_D, numbers_D.new_ones(1)]) * weight * 2.0**FRACTION_BITS).round()
        if not whole_D.abs().max() < 2.0**62 / len(clients):
            raise ValueError("secure aggregation: the answer has numbers too large for it")
        total_D = whole_D.to(torch.int64).numpy()
        for peer in clients:
            if peer != client:
                drawn_D = self._draw(peer, clients, label, len(total_D))
                total_D = total_D + drawn_D if client < peer else total_D - drawn_D  # modulo 2^64
        return torch.from_numpy(total_D)

    def _draw(self, peer: int, clients: Sequence[int], label: str, count: int) -> NDArray[np.int64]:
        about = hashlib.sha256(json.dumps([label, list(clients)]).encode()).digest()
        shared = self.key.exchange(self.peers[peer])
        key = HKDF(algorithm=SHA256(), length=32, salt=None, info=about).derive(shared)
        stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
        return np.frombuffer(stream, dtype=np.int64)


def masked(
    masks: PairwiseMasks, answer: Payload, weighting: SumWeighting, clients: Sequence[int], label: str
) -> Payload:
    """One client's answer as it leaves it under secure aggregation."""
    assert answer.num_examples is not None
    (client,) = answer.clients
    weight = float(answer.num_examples[0]) if weighting == "examples" else 1.0
    rows = {name: tensor.double() for name, tensor in answer.parameters.items()}
    row_D = flatten(rows)[0] if rows else torch.zeros(0, dtype=torch.float64)  # a stage that sends nothing
    hidden = masks.mask(row_D, weight, client, clients, label)
    return Payload(clients=answer.clients, signals={MASKED: hidden[None]})


def unmasked(sent: Payload, stage: Stage, like: Mapping[str, Tensor]) -> Payload:
    """The weighted mean of all answers, as if each client had sent it, and as if all had one training example.

    Args:
        sent: What all clients of the round sent.
        stage: What they were asked for.
        like: A parameter of one client by name, for its shape and type.

    Raises:
        ValueError: No client has any weight.
    """
    total_D = torch.from_numpy(sent.signals[MASKED].cpu().numpy().sum(axis=0)).double() / 2.0**FRACTION_BITS
    if not total_D[-1] > 0:
        raise ValueError("secure aggregation: the clients of the round have no training examples")
    mean_1D = (total_D[:-1] / total_D[-1])[None]
    count = len(sent.clients)
    parts = unflatten(mean_1D, {name: like[name].shape for name in stage.upload})
    return Payload(
        clients=sent.clients,
        parameters={name: part.to(like[name]).expand(count, *part.shape[1:]) for name, part in parts.items()},
        num_examples=torch.ones(count, dtype=torch.int64, device=next(iter(like.values())).device),
    )
