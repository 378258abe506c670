"""The server's part in a secure sum: it forwards what sites have sealed for each other, and opens only the sum.

A client that is missing at a step drops out of the sum. If more than ``share`` of the clients that started complete it,
the sum is over those whose numbers arrived; otherwise it fails. A site that sends something malformed fails.

A site is excluded from this sum, which starts again, and from later ones if its keys cannot be used or are another's,
or if at least two others refuse them and fewer accept them. It is excluded from later sums if its signature of who
survived is refused in this way, if its secret cannot be reconstructed although enough others have sent their shares, or
if two others cannot open its shares.

Wrong shares from others do no harm if more arrive than are needed. A site that sends wrong numbers within bounds is not
detected; one that sends random numbers makes the sum impossible, and it fails.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any, Protocol, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.remote import masking
from fl_lightning.remote.message import Message
from fl_lightning.remote.openings import Opening, agreed_members, wrong_openings
from fl_lightning.remote.requests import received_by_all
from fl_lightning.remote.responses import Responses
from fl_lightning.remote.secure import CANNOT_OPEN, FEWEST_CLIENTS, MASKED, WRONG_KEYS, WRONG_SURVIVORS, threshold_of

Value = TypeVar("Value")
#: Number of sites that may send wrong shares of a secret, if that many more arrive than are needed.
_MOST_LIARS = 2
#: Number of ways to reconstruct a secret that are tried, each of which takes milliseconds.
_MOST_TRIES = 200
#: Returns the message that asks a client for its summand, given the shares that the others have sealed for it.
WorkMessage = Callable[[int, Mapping[str, str]], Message]
#: Returns what is wrong with a sum (D,) over a number of clients; empty if nothing is.
Inspection = Callable[[Tensor, int], str]


class Ask(Protocol):
    """Asks the clients."""

    def __call__(
        self, messages: Mapping[int, Message], read: Callable[[int, Message], None] = ..., /
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """The responses, and why other clients did not respond; ``read`` may refuse a response."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The result of a secure sum.

    Attributes:
        total_D: The sum over the survivors in float64, ending with the sum of their weights; None if it failed.
        survivors: The clients whose numbers are in it.
        responses: The responses that contained their numbers.
        failures: Why other clients are not in it.
    """

    total_D: Tensor | None
    survivors: tuple[int, ...] = ()
    responses: Mapping[int, Message] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class FailedSum(ValueError):
    """A sum that cannot be opened.

    Args:
        message: Why.
        blamed: The client whose fault it is, if known.
    """

    def __init__(self, message: str, blamed: int | None = None) -> None:
        super().__init__(message)
        self.blamed = blamed


class WrongKeys(FailedSum):
    """A sum that ends before anybody has worked for it, since a client's keys are refused."""


class SumServer:
    """Runs secure sums.

    Args:
        ask: Asks the clients.
        names: Names of all clients, by index.
        share: More than this share of the clients that start a sum must complete it.
    """

    def __init__(self, ask: Ask, names: Sequence[str], share: float) -> None:
        self.ask, self.names, self.share = ask, names, share
        self.barred: dict[int, str] = {}

    def run(
        self,
        purpose: str,
        address: Sequence[Any],
        states: Callable[[int], str],
        clients: Sequence[int],
        work: WorkMessage,
        length: int,
        inspect: Inspection,
    ) -> Sum:
        """Run one sum.

        Args:
            purpose: ``run`` or ``evaluate``.
            address: Identifies the sum within the run.
            states: Returns the state from which a client is to work.
            clients: The clients that are asked.
            work: Returns the message that asks a client for its summand.
            length: How many numbers each client sends, including its weight.
            inspect: Returns why the sum cannot come from honest clients; if one of them sends random numbers, the sum
                is random, too.
        """
        while True:  # each time without one client more
            failures: dict[int, str] = {}
            try:
                keys = self._keys(purpose, address, states, clients, failures)
                return self._sum(keys, failures, work, length, inspect)
            except FailedSum as error:
                why = f"{error} (secure aggregation)"
                if error.blamed is not None:
                    self.barred[error.blamed] = why
                if isinstance(error, WrongKeys):
                    continue
                failures |= {client: self.barred[client] for client in clients if client in self.barred}
                return Sum(total_D=None, failures={client: failures.get(client, why) for client in clients})

    def _sum(
        self,
        keys: dict[int, dict[str, str]],
        failures: dict[int, str],
        work: WorkMessage,
        length: int,
        inspect: Inspection,
    ) -> Sum:
        threshold = threshold_of(len(keys), self.share)
        sent, lost = self.ask(
            {c: Message(kind="sum_shares", about={"keys": {str(k): key for k, key in keys.items()}}) for c in keys}
        )
        failures |= lost
        for client, why in _refused(WRONG_KEYS, keys, sent, lost):
            raise WrongKeys(f"the secure sum failed: {why}", client)
        sealed = _read(
            sent, failures, lambda client, about: {c: str(about["shares"][str(c)]) for c in keys if c != client}
        )
        digests = _read(sent, failures, lambda _, about: str(about["seed_digest"]))
        sent = {client: sent[client] for client in sealed if client in digests}
        self._enough(sent, threshold, "shared their secrets", failures)
        works = {c: work(c, {str(p): sealed[p][c] for p in sent if p != c}) for c in sent}
        received = {received_by_all(message) for message in works.values()}
        if len(received) > 1:
            raise FailedSum(
                "the secure sum failed: the strategy sends its clients different models or work fractions, so masks "
                "do not fit"
            )
        responses, lost = self.ask(works, lambda _, response: Responses.masked(response, length))
        failures |= lost
        reports = Counter(client for client in sent for why in lost.values() if why == CANNOT_OPEN.format(client))
        if reports and max(reports.values()) > 1:  # a single one may lie
            cheat = max(reports, key=lambda client: reports[client])
            raise FailedSum(
                f"the secure sum failed: {reports[cheat]} sites cannot open the shares from {self.names[cheat]}", cheat
            )
        responses = dict(sorted(responses.items()))
        self._enough(responses, threshold, "sent their numbers", failures)
        survivors = tuple(responses)
        confirmed: dict[str, str] = {}
        if keys[survivors[0]]["certificate"]:
            message = Message(kind="sum_confirm", about={"survivors": list(survivors)})
            signed, lost = self.ask(dict.fromkeys(survivors, message))
            result = _read(signed, lost, lambda _, about: str(about["signature"]))
            self._enough(result, threshold, "confirmed the survivors", lost)
            confirmed = {str(client): signature for client, signature in result.items()}
            asked: Sequence[int] = tuple(result)
        else:
            asked = survivors
        revealed, lost = self._reveal(survivors, confirmed, asked)
        dropped = set(sent) - set(survivors)
        opened = _read(revealed, lost, lambda _, about: _shares_of(about, survivors, dropped))
        self._enough(opened, threshold, "sent the shares that open it", lost)
        indices = {client: address for address, client in enumerate(sorted(keys))}
        shares = {indices[client]: given for client, (given, _) in opened.items()}
        labels = [label for _, label in opened.values()]
        label = max(set(labels), key=labels.count)
        label_of_pairs = label + received.pop()
        total_D = np.zeros(length, dtype=np.int64)
        for client in survivors:
            total_D += responses[client].tensors[f"s/{MASKED}"][0].numpy()
            total_D -= masking.mask(self._seed(client, shares, digests[client], threshold), label, length)
        for client in dropped:
            total_D += self._left_over(client, survivors, keys, shares, threshold, label_of_pairs, length)
        found_D = masking.from_whole(total_D)
        if why := inspect(found_D, len(survivors)):
            raise FailedSum(
                f"the secure sum failed: {why}, so a site sent numbers that are not its own; which one it was is "
                f"unknown"
            )
        return Sum(total_D=found_D, survivors=survivors, responses=responses, failures=dict(failures))

    # ---------------------------------------------------------------- the steps

    def _keys(
        self,
        purpose: str,
        address: Sequence[Any],
        states: Callable[[int], str],
        clients: Sequence[int],
        failures: dict[int, str],
    ) -> dict[int, dict[str, str]]:
        """The members' public keys; why other clients are no members is added to the failures."""
        nonce = os.urandom(16).hex()  # the same address may be requested again after a restart of the server
        responses, lost = self.ask(
            {
                client: Message(
                    kind="sum_keys",
                    about={"purpose": purpose, "place": list(address), "state": states(client), "nonce": nonce},
                )
                for client in clients
                if client not in self.barred
            }
        )
        failures |= lost
        public = _read(responses, failures, lambda _, about: Opening.read(about))
        for client, why in wrong_openings(public, self.names).items():
            self.barred[client] = f"{why} (secure aggregation)"
        failures |= {client: self.barred[client] for client in clients if client in self.barred}
        public = {client: each for client, each in sorted(public.items()) if client not in self.barred}
        members, reasons = agreed_members({client: (each.name, each.bound) for client, each in public.items()})
        failures |= reasons
        self._enough(members, FEWEST_CLIENTS, "are present", failures)
        return {client: public[client].keys for client in members}

    def _reveal(
        self, survivors: Sequence[int], confirmed: Mapping[str, str], asked: Sequence[int]
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """The shares that open the sum; without the signatures of clients that are refused, who are excluded later."""
        about = {"survivors": list(survivors), "confirmed": dict(confirmed)}
        revealed, lost = self.ask(dict.fromkeys(asked, Message(kind="sum_reveal", about=about)))
        for client, why in _refused(WRONG_SURVIVORS, map(int, confirmed), revealed, lost):
            self.barred[client] = f"{why} (secure aggregation)"
            left = {signer: signature for signer, signature in confirmed.items() if signer != str(client)}
            return self._reveal(survivors, left, [each for each in asked if each != client])
        return revealed, lost

    def _enough(self, those: Collection[int], needed: int, what: str, failures: Mapping[int, str]) -> None:
        needed = max(needed, FEWEST_CLIENTS)
        if len(those) < needed:
            missing = "; ".join(f"{self.names[client]}: {why}" for client, why in sorted(failures.items()))
            raise FailedSum(
                f"the secure sum failed: {len(those)} clients {what}, {needed} are needed"
                + (f" ({missing})" * bool(missing))
            )

    def _seed(
        self, client: int, shares: Mapping[int, Mapping[str, Mapping[str, bytes]]], digest: str, threshold: int
    ) -> bytes:
        """The seed of a survivor's self-mask."""
        return self._joined(client, "seeds", shares, threshold, lambda seed: hashlib.sha256(seed).hexdigest() == digest)

    def _joined(
        self,
        client: int,
        kind: str,
        shares: Mapping[int, Mapping[str, Mapping[str, bytes]]],
        threshold: int,
        fits: Callable[[bytes], bool],
    ) -> bytes:
        """A secret of a client, from the shares that the others sent, one or two of whom may have lied."""
        given = {address: each[kind][str(client)] for address, each in shares.items()}
        spare = min(_MOST_LIARS, len(given) - threshold)
        chosen = (left_out for count in range(spare + 1) for left_out in combinations(given, count))
        for left_out in islice(chosen, _MOST_TRIES):
            secret = masking.join_secret({p: s for p, s in given.items() if p not in left_out}, threshold)
            if fits(secret):
                return secret
        blamed = client if len(given) > threshold else None
        raise FailedSum(f"the secure sum failed: the shares of {self.names[client]} do not fit together", blamed)

    def _left_over(
        self,
        client: int,
        survivors: Sequence[int],
        keys: Mapping[int, Mapping[str, str]],
        shares: Mapping[int, Mapping[str, Mapping[str, bytes]]],
        threshold: int,
        label: str,
        length: int,
    ) -> NDArray[np.int64]:
        """The masks that the survivors share with a client that dropped out, as it would have added them."""

        def fits(secret: bytes) -> bool:
            return masking.public_of(X25519PrivateKey.from_private_bytes(secret)) == keys[client]["masking"]

        private = X25519PrivateKey.from_private_bytes(self._joined(client, "keys", shares, threshold, fits))
        total_D = np.zeros(length, dtype=np.int64)
        for peer in survivors:
            total_D += masking.pairwise_mask(private, keys[peer]["masking"], label, length, adds=client < peer)
        return total_D


def _read(
    responses: Mapping[int, Message], failures: dict[int, str], reader: Callable[[int, Mapping[str, Any]], Value]
) -> dict[int, Value]:
    """Parse the responses; a site whose response has another form has failed."""
    result = {}
    for client, response in responses.items():
        try:
            result[client] = reader(client, response.about)
        except (LookupError, TypeError, ValueError, AttributeError):
            failures[client] = "its response is malformed (secure aggregation)"
    return result


def _refused(
    what: str, clients: Iterable[int], sent: Collection[int], lost: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Clients whose keys or signatures more others refuse than accept, and how: a single one that refuses may lie."""
    for client in clients:
        others = [why for other, why in lost.items() if other != client]
        reports = [why for why in others if f"{why} ".startswith(f"{what.format(client)} ")]
        if len(reports) > max(1, len(set(sent) - {client})):
            yield client, f"{len(reports)} sites refuse {reports[0]}"


def _shares_of(
    about: Mapping[str, Any], survivors: Sequence[int], dropped: Collection[int]
) -> tuple[dict[str, dict[str, bytes]], str]:
    """The shares of others' secrets that a site sends, and the sum's label.

    Raises:
        LookupError: It does not send the shares that were requested.
    """
    shares = {
        kind: {str(client): bytes.fromhex(about[kind][str(client)]) for client in clients}
        for kind, clients in (("seeds", survivors), ("keys", dropped))
    }
    return shares, str(about["label"])
